"""Stage 16 of the byte path: takes log bytes from `client/read/retry_reader`, gives actions on files.

Pure: bytes in, file actions out. `player` reads, waits, performs the actions, and appends the hand-off.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from gazette.errors import Corrupt
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.fsm import Outcome, RecoveryFSM
from gazette.recoverylog.log.ops import (
    HEADER_LENGTH,
    MAGIC,
    Create,
    RecordedOp,
    Unlink,
    Write,
    decode_op,
    frame_length,
)


@dataclass(frozen=True, slots=True)
class OpenNode:
    """Create the staged file of a node. The file must not exist."""

    fnode: int


@dataclass(frozen=True, slots=True)
class DropNode:
    """Close and remove the staged file of a node without a path."""

    fnode: int


@dataclass(frozen=True, slots=True)
class WriteNode:
    """Write bytes at an offset of a node's staged file."""

    fnode: int
    offset: int
    data: bytes | memoryview


FileAction = OpenNode | DropNode | WriteNode


def local_path(path: str) -> str:
    """Return a path of the log relative to the directory. Raise ``Corrupt`` if it leaves the directory.

    In a log, ``/`` is the directory. A log is data: it must not be able to write elsewhere.
    """
    relative = path.lstrip("/")
    if (
        not relative
        or "\0" in relative
        or posixpath.normpath(relative) != relative
        or relative.split("/", 1)[0] in ("..", ".", ".fnodes")
    ):
        raise Corrupt("the recovery log names a path outside of its directory", path=path)
    return relative


class Handoff(Enum):
    """Outcome of a hand-off operation."""

    NONE = "none"
    """No hand-off was appended."""
    UNREAD = "unread"
    """The hand-off is in the log, and was not read yet."""
    APPLIED = "applied"
    """The hand-off was read, and its author owns the log."""
    LOST = "lost"
    """The hand-off was read, but another author's operation has its sequence number: append it again."""


@dataclass(slots=True)
class _RawBytes:
    """The bytes of a write that are not read yet. Without a ``fnode`` these bytes are dropped."""

    fnode: int | None
    offset: int
    remaining: int


_CONTRADICTIONS: Final = frozenset(
    {
        Outcome.EXPECTED_HINTED_FNODE,
        Outcome.LINK_EXISTS,
        Outcome.PROPERTY_EXISTS,
        Outcome.NO_SUCH_LINK,
    }
)
"""Outcomes of operations with the next sequence number and checksum, but a wrong action."""

JUNK_MAX: Final = 64 << 20
"""Greatest number of bytes in a row without a frame: a journal with more is not a recovery log."""


class PrunedLog(Corrupt):
    """The log has lost operations that the hints need. Older hints may not need them."""

    default_hint = (
        "Fragments were removed too early. Recover from another backup of the hints, or restore the"
        " removed fragments."
    )


class BeyondTheEnd(Corrupt):
    """Hints name operations after the end of the log."""

    default_hint = "Recover from an older backup of the hints, or restore the log's fragments."


class Playback:
    """Decoder of a log from some offset on, which drives the recovery FSM.

    Invariants: ``offset`` is the offset of the first byte that is not decoded. Bytes that were fed but not
    decoded are an incomplete frame, junk shorter than a header, or bytes after an applied hand-off.
    """

    def __init__(
        self, hints: FSMHints, *, observer: Callable[[RecordedOp, Outcome], None] | None = None
    ) -> None:
        """Begin with hints. Call ``observer`` with each operation and its outcome, before `feed` returns."""
        self.fsm = RecoveryFSM(hints)
        self.log = hints.log
        self._observer = observer
        self.offset = 0
        self.op_count = 0
        self.junk_bytes = 0
        self.last_author: int | None = None
        """Author of the last operation that applied: the log's owner in these bytes. None: no operation."""
        self.handoff = Handoff.NONE
        self._handoff_author: int | None = None
        """Author of the last hand-off."""
        self._buffer = b""
        self._raw: _RawBytes | None = None
        self._junk_run = 0
        self._jumped = False
        """True if bytes were missing since the last operation that applied."""
        self._lost: tuple[int, int] | None = None
        """Range of the first missing bytes. None: no bytes were missing so far."""

    @property
    def read_offset(self) -> int:
        """Offset in ``log`` of the next byte to feed."""
        return self.offset + len(self._buffer)

    def wanted(self) -> tuple[str, int] | None:
        """Return the (log, offset) to read next: in another log, or after a gap. None for the next byte."""
        if not self.fsm.hinted_segments:
            return None
        if self._raw is not None and self._raw.fnode is not None:
            return None  # First read the raw bytes of a write.
        segment = self.fsm.hinted_segments[0]
        if segment.log != self.log or self.read_offset < segment.first_offset:
            return segment.log, segment.first_offset
        return None

    @property
    def logs(self) -> set[str]:
        """Names of the logs from which bytes remain to be read."""
        return {self.log, *(segment.log for segment in self.fsm.hinted_segments)}

    def require_heads(self, heads: Mapping[str, int]) -> None:
        """Raise ``BeyondTheEnd`` if the hints reach beyond the end of a log. ``heads`` has all `logs`."""
        for segment in self.fsm.hinted_segments:
            head = heads[segment.log]
            if segment.first_offset >= head or segment.last_offset > head:
                raise BeyondTheEnd(
                    "the hints name operations beyond the end of the recovery log: data was lost",
                    log=segment.log,
                    write_head=head,
                    segment=segment,
                )

    def seek(self, log: str, offset: int) -> None:
        """Continue at another log and offset. Drop undecoded bytes, and the rest of a write."""
        self.log = log
        self.offset = offset
        self._buffer = b""
        self._raw = None

    @property
    def incomplete(self) -> bool:
        """True if the fed bytes end within an operation, and so not at the end of an append."""
        return self._raw is not None or len(self._buffer) >= HEADER_LENGTH

    def jump(self, offset: int) -> None:
        """Skip bytes up to ``offset``, which were deleted. Raise ``PrunedLog`` if the next hinted segment is
        known to end among these bytes, if a write has its bytes there, or if play-back has no hints and no
        operation yet."""
        if self._lost is None:
            self._lost = self.read_offset, offset
        if not self.fsm.has_hints and self.fsm.next_seq_no == 1:
            # Without the first operations, the state is lost. Do not begin with an empty state in silence.
            raise PrunedLog(
                "the shard has no hints, and its recovery log was pruned",
                log=self.log,
                offset=self.offset,
                jumped_to=offset,
                hint="Restore the shard's hints. To begin without its state, give it another log.",
            )
        segment = self.fsm.hinted_segments[0] if self.fsm.hinted_segments else None
        if (
            segment is not None
            and segment.log == self.log
            and segment.last_offset
            and offset > segment.last_offset
        ):
            raise PrunedLog(
                "the recovery log no longer holds operations that the hints name",
                log=self.log,
                offset=self.offset,
                jumped_to=offset,
                segment_end=segment.last_offset,
            )
        if self._raw is not None and self._raw.fnode is not None:
            raise PrunedLog(
                "the recovery log no longer holds the bytes of a write",
                log=self.log,
                offset=self.read_offset,
                jumped_to=offset,
            )
        self.seek(self.log, offset)
        self._jumped = True

    def expect_handoff(self, author: int) -> None:
        """Watch for the hand-off operation of ``author``: `handoff` is its outcome."""
        self._handoff_author = author
        self.handoff = Handoff.UNREAD

    def feed(self, data: bytes) -> list[FileAction]:
        """Decode more bytes. Return the actions on files, in order. Stop after an applied hand-off.

        Raise ``Corrupt`` if an operation of the log's owner cannot apply, or after `JUNK_MAX` bytes without a
        frame. Raise ``PrunedLog`` if the operation cannot apply because bytes were skipped.
        """
        actions: list[FileAction] = []
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        view = memoryview(data)
        begin, pos = self.offset, 0
        while True:
            if self._raw is not None:
                pos += self._take_raw(view[pos:], actions)
            next_pos = pos if self._raw is not None else self._take_frame(data, pos, actions)
            self.offset = begin + next_pos
            if next_pos == pos or self.handoff is Handoff.APPLIED:
                break  # No complete frame is left, or the hand-off applied: stop there.
            pos = next_pos
        self._buffer = data[next_pos:]
        return actions

    def _take_raw(self, view: memoryview, actions: list[FileAction]) -> int:
        """Take the bytes at the begin of ``view`` that belong to the running write. Return their number."""
        raw = self._raw
        assert raw is not None
        chunk = view[: raw.remaining]
        if raw.fnode is not None and len(chunk):
            actions.append(WriteNode(raw.fnode, raw.offset, chunk))
        raw.offset += len(chunk)
        raw.remaining -= len(chunk)
        self.offset += len(chunk)
        if raw.remaining == 0:
            self._raw = None
        return len(chunk)

    def _take_frame(self, data: bytes, at: int, actions: list[FileAction]) -> int:
        """Apply the frame at ``at``, or skip junk. Return the next position; ``at`` if bytes are missing."""
        if len(data) - at < HEADER_LENGTH:
            return at
        length = frame_length(data, at)
        if length is None:
            return self._skip_junk(data, at)
        end = at + HEADER_LENGTH + length
        if len(data) < end:
            return at
        payload = data[at + HEADER_LENGTH : end]
        first_offset = self.offset
        try:
            op = decode_op(
                payload,
                log=self.log,
                first_offset=first_offset,
                frame_end=first_offset + end - at,
            )
        except Corrupt:
            return self._skip_junk(data, at)
        self._junk_run = 0
        self._apply(op, payload, actions)
        return end

    def _skip_junk(self, data: bytes, at: int) -> int:
        """Return the first position after ``at`` at which a frame may begin. Raise ``Corrupt`` after
        `JUNK_MAX` bytes without a frame."""
        magic_begin = data.find(MAGIC, at + 1)
        # Without a magic word, keep the last three bytes: a magic word may begin there.
        next_position = magic_begin if magic_begin >= 0 else max(at + 1, len(data) - len(MAGIC) + 1)
        self.junk_bytes += next_position - at
        self._junk_run += next_position - at
        if self._junk_run > JUNK_MAX:
            raise Corrupt(
                "the journal does not hold a recovery log", log=self.log, offset=self.offset
            )
        return next_position

    def _apply(self, op: RecordedOp, payload: bytes, actions: list[FileAction]) -> None:
        """Give an operation to the FSM, and add its actions on files to ``actions``. For the errors see
        `feed`."""
        self.op_count += 1
        existed = op.action.fnode in self.fsm.nodes if isinstance(op.action, Unlink) else False
        had_hints = self.fsm.has_hints
        outcome = self.fsm.apply(op, payload)
        applied = outcome is Outcome.APPLIED
        if self._observer is not None:
            self._observer(op, outcome)
        if outcome.advances:
            self.last_author = op.author
            self._jumped = False
        elif self._must_have_applied(op, outcome, had_hints):
            error_type = PrunedLog if self._jumped else Corrupt
            raise error_type(
                f"the recovery log cannot be played further: {outcome.value}",
                outcome=outcome.name,
                log=op.log,
                offset=op.first_offset,
                seq_no=op.seq_no,
                expected_seq_no=self.fsm.next_seq_no,
                author=op.author,
                hint="Recover from other hints, or restore the log's fragments. To continue here would"
                " drop everything behind this operation.",
            )
        if op.author == self._handoff_author and self.handoff is Handoff.UNREAD:
            self.handoff = Handoff.APPLIED if applied else Handoff.LOST
        match op.action:
            case Create() if applied:
                actions.append(OpenNode(op.seq_no))
            # An unlink drops a node only with the node's last path.
            case Unlink(fnode=fnode) if applied and existed and fnode not in self.fsm.nodes:
                actions.append(DropNode(fnode))
            case Write(fnode=fnode, offset=offset, length=length) if length:
                self._raw = _RawBytes(fnode if applied else None, offset, length)
            case _:  # Links, properties, and operations that did not apply change no staged file.
                pass

    def _must_have_applied(self, op: RecordedOp, outcome: Outcome, had_hints: bool) -> bool:
        """Return True if an operation that did not apply should have applied.

        Operations of other authors are ignored. Past sequence numbers are repetitions. But the next operation
        of the log's owner must apply. Otherwise all its later operations would be dropped in silence.
        """
        if outcome in _CONTRADICTIONS:
            return (
                True  # Its sequence number and checksum make it the next operation, of any author.
            )
        if had_hints or op.seq_no < self.fsm.next_seq_no:
            return False
        if op.author == self.last_author:
            return True
        # The operations before this one are missing: they were pruned or lost.
        return op.seq_no > self.fsm.next_seq_no and (self._jumped or self.last_author is None)

    def ended_too_early(self) -> Corrupt:
        """Return the error of a log that ended before all hinted operations were read."""
        segment = self.fsm.hinted_segments[0]
        if self._lost is not None:
            return PrunedLog(
                "the recovery log no longer holds operations that the hints name",
                log=self.log,
                offset=self._lost[0],
                jumped_to=self._lost[1],
                segment=segment,
            )
        return Corrupt(
            "the recovery log ends before operations that its hints name: data was lost, or the"
            " hints belong to another log",
            log=self.log,
            offset=self.offset,
            segment=segment,
            hint="Recover from an older backup of the hints (gazctl shards recover), or restore"
            " the log's fragments.",
        )
