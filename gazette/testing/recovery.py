"""Recovery logs without brokers: record a store, cut its log anywhere, and play back the rest."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gazette.blobs.blob_store import BlobStore
from gazette.client.append.appender import AppendParams, AppendResult
from gazette.errors import Bug, Corrupt
from gazette.gazctl.shards.prune_plan import Needs
from gazette.protocol.fragment import Fragment
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header
from gazette.recoverylog.log.fsm import Outcome, RecoveryFSM
from gazette.recoverylog.log.ops import HEADER_LENGTH, decode_op
from gazette.recoverylog.log.recorder import Recorder, no_op
from gazette.recoverylog.playback.playback import Handoff, Playback
from gazette.recoverylog.playback.staged_files import PlayedFiles, StagedFiles
from gazette.runtime.tasks import OpFuture

LOG: Final = "recovery/test"
_HEADER: Final = Header(ProcessId("local", "test-member"), EMPTY_ROUTE, EtcdHeader(1, 1, 1, 1))


class MemoryLog:
    """A recovery log in memory, with the append methods that recorders use.

    ``data`` is the log. ``ends`` has the offset at which each append with content ended. A real log is cut
    only there, since appends are atomic. Appends take effect at once. If ``held`` is set, they take effect
    with ``release_held``, in order. Once ``failure`` is set, every append fails with it. ``dependencies``
    has, by future, the offsets of the appends that had to wait for it.
    """

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.ends: list[int] = [len(data)]
        self.held = False
        self.failure: Exception | None = None
        self.dependencies: dict[OpFuture[Any], list[int]] = {}
        self._waiting: list[tuple[bytes, OpFuture[AppendResult]]] = []

    @property
    def end(self) -> int:
        """Write head of the log."""
        return len(self.data)

    @property
    def fragments(self) -> Sequence[Fragment]:
        """Fragments that were stored."""
        return ()

    def __getitem__(self, span: slice) -> bytes:
        """Return a range of bytes, as of now."""
        return bytes(self.data[span])

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> MemoryTxn:
        for dependency in dependencies:
            if not dependency.done():
                raise Bug("an append to a log in memory cannot wait for dependencies")
            dependency.result()
            self.dependencies.setdefault(dependency, []).append(self.end)
        return MemoryTxn(self)

    def release_held(self) -> None:
        """Let held appends take effect."""
        while self._waiting:
            content, future = self._waiting.pop(0)
            self._commit(content, future)

    def hand_off(self, content: bytes, author: int) -> OpFuture[AppendResult]:
        """Append the operation that makes ``author`` the owner."""
        return self.enqueue(content)

    def enqueue(self, content: bytes) -> OpFuture[AppendResult]:
        """Append at once, or at `release_held` if ``held``. Fail if ``failure`` is set."""
        future: OpFuture[AppendResult] = OpFuture()
        if self.failure is not None:
            future.set_exception(self.failure)
        elif self.held:
            self._waiting.append((content, future))
        else:
            self._commit(content, future)
        return future

    def _commit(self, content: bytes, future: OpFuture[AppendResult]) -> None:
        begin = len(self.data)
        self.data += content
        if content:
            self.ends.append(len(self.data))
        future.set_result(AppendResult(Fragment(LOG, begin, len(self.data)), EMPTY_LABELS, _HEADER))


class FragmentLog(MemoryLog):
    """A recovery log whose bytes are fragments in a blob store, and can be pruned. Memory holds
    the open fragment, and the fragment that was read last.

    ``log[begin:end]`` reads the log; ``data`` and ``ends`` stay empty. A fragment is closed once it has
    ``fragment_bytes`` bytes.
    """

    def __init__(self, store: BlobStore, *, fragment_bytes: int = 4 << 20) -> None:
        super().__init__()
        self.store = store
        self._fragments: list[Fragment] = []
        self.pruned_bytes = 0
        self._fragment_bytes = fragment_bytes
        self._spool = bytearray()
        self._begin = 0
        self._cached: tuple[Fragment, bytes] | None = None

    @property
    def end(self) -> int:
        """Write head of the log."""
        return self._begin + len(self._spool)

    @property
    def fragments(self) -> Sequence[Fragment]:
        return self._fragments

    def _commit(self, content: bytes, future: OpFuture[AppendResult]) -> None:
        begin = self.end
        self._spool += content
        end = self.end
        if len(self._spool) >= self._fragment_bytes:
            self.flush()
        future.set_result(AppendResult(Fragment(LOG, begin, end), EMPTY_LABELS, _HEADER))

    def flush(self) -> None:
        """Store the bytes that were appended since the last fragment."""
        if not self._spool:
            return
        digest = hashlib.sha1(self._spool, usedforsecurity=False).digest()
        fragment = Fragment(LOG, self._begin, self.end, digest)
        self.store.put(fragment.content_path(), io.BytesIO(self._spool))
        self._fragments.append(fragment)
        self._begin = self.end
        self._spool.clear()

    def prune(self, keep: Collection[FSMHints]) -> int:
        """Remove the fragments that no hints of ``keep`` need, as ``gazctl shards prune`` does.

        Return the number of removed bytes.
        """
        needs = Needs()
        for hints in keep:
            needs.add_hints(hints)
        removed = 0
        spooled = [Fragment(LOG, self._begin, self.end)] if self._spool else []
        for fragment in needs.unneeded(LOG, [*self.fragments, *spooled]):
            if fragment in spooled:  # Memory has it: it is not stored yet.
                continue
            self.store.remove(fragment.content_path())
            self._fragments.remove(fragment)
            removed += fragment.length
        self.pruned_bytes += removed
        return removed

    def __getitem__(self, span: slice) -> bytes:
        """Return bytes from ``span.start`` on, up to ``span.stop`` or the end of a fragment.

        Raise ``Corrupt`` if the bytes were pruned.
        """
        start, stop = int(span.start), int(span.stop)
        if start >= self._begin:
            return bytes(self._spool[start - self._begin : stop - self._begin])
        for fragment in self.fragments:
            if fragment.begin <= start < fragment.end:
                if self._cached is None or self._cached[0] != fragment:
                    with self.store.open(fragment.content_path()) as file:
                        self._cached = fragment, file.read()
                return self._cached[1][start - fragment.begin : stop - fragment.begin]
        raise Corrupt("the log was pruned here", offset=start)


class MemoryLogs:
    """`LogSource` of one `MemoryLog`. Bytes before ``begin`` are missing."""

    def __init__(self, log: MemoryLog, *, begin: int = 0, piece_bytes: int = 1 << 16) -> None:
        self.knows_heads = True
        self._log = log
        self._begin = begin
        self._piece_bytes = piece_bytes

    def bounds(self, log: str) -> tuple[int, int]:
        first = min((fragment.begin for fragment in self._log.fragments), default=self._begin)
        return max(first, self._begin), self._log.end

    def read(self, log: str, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        offset = max(begin, self.bounds(log)[0])
        while offset < end:
            data = self._log[offset : min(end, offset + self._piece_bytes)]
            yield offset, data
            offset += len(data)


class LogClock:
    """Clock that counts the bytes of a log: a millisecond for each byte, after a fixed moment."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def now(self) -> float:
        return 1_700_000_000 + self._log.end / 1000

    def monotonic(self) -> float:
        return self._log.end / 1000

    async def sleep(self, seconds: float) -> None:
        raise Bug("the time of a log passes only by appends")


class MemoryTxn:
    """An open append."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._content = bytearray()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        self._content += content

    def release(self) -> OpFuture[AppendResult]:
        return self._log.enqueue(bytes(self._content))

    def roll_back(self) -> None:
        self._content.clear()


class Replayer:
    """Plays a log back step by step: a test gets its states after many cuts from one play-back.

    It wipes ``directory``, and keeps staged files there. ``copy_live`` copies them to their paths.
    """

    def __init__(self, directory: Path, *, hints: FSMHints | None = None) -> None:
        self._playback = Playback(hints or FSMHints(log=LOG))
        self._files = StagedFiles(directory)
        self._files.prepare()

    @property
    def fsm(self) -> RecoveryFSM:
        return self._playback.fsm

    def advance(
        self,
        data: bytes | memoryview | MemoryLog,
        end: int,
        *,
        chunk_bytes: Callable[[], int] = lambda: 1 << 16,
    ) -> None:
        """Play ``data``, the log from its first byte, up to ``end``, in pieces of
        ``chunk_bytes()``.

        An operation that is cut off at the end takes effect as far as its bytes exist, as on a
        disk. Raise ``Corrupt`` as a `Player` does.
        """
        playback = self._playback
        while True:
            if (next_place := playback.wanted()) is not None:
                playback.seek(*next_place)
            begin = playback.read_offset
            if begin >= end:
                return
            piece = bytes(data[begin : min(end, begin + chunk_bytes())])
            self._files.perform(playback.feed(piece))

    def hand_off(self, log: MemoryLog, author: int) -> int:
        """Play a log to its end and make ``author`` its owner, as a `Player` does.

        Return the offset after the hand-off. If another owner appends before the hand-off, play its
        bytes, and append the hand-off again after them. Raise ``Corrupt`` as a `Player` does.
        """
        playback, fsm = self._playback, self.fsm
        while True:
            self.advance(log, log.end, chunk_bytes=lambda: 1 << 20)
            if fsm.has_hints:
                raise playback.ended_too_early()
            played, frame = log.end, no_op(fsm, author)
            commit = log.hand_off(frame, author).result().commit
            if commit.begin == played:
                payload = frame[HEADER_LENGTH:]
                op = decode_op(payload, log=LOG, first_offset=played, frame_end=commit.end)
                assert fsm.apply(op, payload) is Outcome.APPLIED
                return commit.end
            playback.expect_handoff(author)
            self.advance(log, commit.end, chunk_bytes=lambda: 1 << 20)
            if playback.handoff is Handoff.APPLIED:
                return commit.end

    def view(self, call: Callable[[PlayedFiles], Any]) -> Any:
        """Call ``call`` with the files as they are now, and return its result."""
        return self._files.view(self.fsm, call)

    def copy_live(self, target: Path) -> None:
        """Copy the files as they are now to their paths below ``target``, which is wiped."""
        self._files.copy_live(self.fsm, target)

    def finish(self) -> RecoveryFSM:
        """Put the files in place. Raise ``Corrupt`` if the log ended before its hints."""
        if self._playback.fsm.has_hints:
            raise self._playback.ended_too_early()
        self._files.make_live(self._playback.fsm)
        return self._playback.fsm

    def abandon(self) -> None:
        """Close and remove all staged files."""
        self._files.abandon()


def replay(
    data: bytes | memoryview,
    directory: Path,
    *,
    hints: FSMHints | None = None,
    chunk_bytes: int = 1 << 16,
) -> RecoveryFSM:
    """Play a log's bytes back into ``directory``, which is wiped. Return the FSM at their end.

    Raise ``Corrupt`` for a log that a player would refuse.
    """
    replayer = Replayer(directory, hints=hints)
    try:
        replayer.advance(data, len(data), chunk_bytes=lambda: chunk_bytes)
        return replayer.finish()
    except BaseException:
        replayer.abandon()
        raise


def take_over(
    log: MemoryLog, directory: Path, rng: random.Random, *, hints: FSMHints | None = None
) -> Recorder:
    """Recover a log as its next owner: play it back, hand it off to a new author, and continue."""
    replayer = Replayer(directory, hints=hints)
    try:
        author = rng.randrange(1, 1 << 32)
        end = replayer.hand_off(log, author)
        fsm = replayer.finish()
    except BaseException:
        replayer.abandon()
        raise
    return Recorder(fsm, author, directory, log, LOG, end, clock=LogClock(log))


def pruned(log: bytes | bytearray, hints: FSMHints) -> bytes:
    """Return a log with zeros in place of all bytes before the bytes that hints need."""
    begin = min(node.segments[0].first_offset for node in hints.live_nodes)
    return bytes(begin) + bytes(log[begin:])
