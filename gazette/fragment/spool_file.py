"""Stage 6 of the byte path: takes content and proposals, keeps the bytes in a local file, gives commits to
`index` and completed spools to `persister`.

`spool` makes the decisions. This module performs them: digest, file, compression and metrics.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
from typing import Any, Final, Protocol, assert_never

from gazette.blobs.thread_call import ended
from gazette.errors import Bug, Unavailable
from gazette.fragment import metrics
from gazette.fragment.completed_spool import CompletedSpool, SpoolCompression
from gazette.fragment.local_file import Disk, LocalDisk, LocalFragment, SpoolContent
from gazette.fragment.spool import (
    Committed,
    Completed,
    Content,
    Mismatched,
    Proposal,
    Restarted,
    RolledBack,
    SpoolEffect,
    SpoolResult,
    SpoolState,
)
from gazette.fragment.spool_bytes import SpoolBytes, SpoolMemory
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import JournalName
from gazette.protocol.label_set import LabelSet
from gazette.protocol.status import Status
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import Pool, await_future, submitted

INLINE_BYTES: Final = 1 << 19
"""Upper bound in bytes of content that the event loop hashes, and puts into memory.

To hash so much takes about 0.5 ms. Longer content justifies the cost of a thread.
"""
_TRIM_BYTES: Final = 1 << 26
"""A roll-back of fewer bytes leaves them in the file, where the next content replaces them."""


class SpoolObserver(Protocol):
    """Receives the events of a spool. The event loop calls it: it must not wait."""

    def spool_commit(self, local: LocalFragment) -> None:
        """Handle an extended fragment; its bytes can be read."""
        ...

    def spool_complete(self, spool: CompletedSpool, *, primary: bool) -> None:
        """Handle a fragment that will not change any more, and is to be persisted."""
        ...


class Spool:
    """The fragment that one replica of a journal writes. Held by one owner at a time (a `Mutex`).

    Files are made on ``disk`` (default: the directory of temporary files) once there is something to write.
    Compression runs in ``pool``. The spools of a disk share ``memory``. If ``memory`` has no room, or the
    content is long, callers wait until a thread has hashed and written the content.
    """

    def __init__(
        self,
        journal: JournalName,
        observer: SpoolObserver,
        *,
        clock: Clock,
        pool: Pool,
        disk: Disk | None = None,
        memory: SpoolMemory | None = None,
    ) -> None:
        self._state = SpoolState.new(journal)
        self._observer = observer
        self._clock = clock
        self._pool = pool
        self._disk = disk if disk is not None else LocalDisk()
        self._memory = memory if memory is not None else SpoolMemory(pool)
        self._bytes: SpoolBytes | None = None  # None: nothing was written yet.
        self._compression: SpoolCompression | None = None  # None: not begun.
        self._sum = hashlib.sha1(usedforsecurity=False)
        """Digest of the committed bytes."""
        self._pending_sum = self._sum
        """Digest of committed and pending bytes; the same object as ``_sum`` while nothing is pending."""
        self._writing: concurrent.futures.Future[Any] | None = None
        """The thread that writes or trims, until `_settle` or its caller has seen its end; None: there is no
        such thread."""

    @property
    def fragment(self) -> Fragment:
        """The committed fragment."""
        return self._state.fragment

    @property
    def registers(self) -> LabelSet:
        return self._state.registers

    @property
    def delta(self) -> int:
        """Bytes that are pending."""
        return self._state.delta

    @property
    def first_append_time(self) -> float | None:
        """Unix seconds of the fragment's first commit; None while the fragment is empty."""
        return self._state.first_append_time

    def next(self) -> Fragment:
        """Return the fragment that a commit of the pending bytes would make."""
        return self._state.next(self._pending_digest)

    async def apply(self, request: Content | Proposal, *, primary: bool) -> SpoolResult:
        """Extend the spool by content, or apply a proposal.

        With ``primary``, this broker leads the journal, and compresses after each commit. Raise
        ``Invalid`` for content that does not follow the pending bytes. Raise ``Unavailable`` for content that
        cannot be written, as when the disk is full. Then all pending bytes are rolled back, committed bytes
        are untouched, and the spool remains usable.

        Cancellation: a proposal is applied or not, never in part. With content, all pending bytes are rolled
        back.
        """
        if self._writing is not None:
            await self._settle(self._writing)
        if isinstance(request, Content):
            await self._extend(request)
            return SpoolResult(Status.OK, self._state.fragment, self._state.registers)
        return self.propose_now(request, primary=primary)

    @property
    def is_busy(self) -> bool:
        """Whether a thread may still be writing for an earlier call."""
        return self._writing is not None

    @property
    def room(self) -> int:
        """Bytes that ``extend_now`` takes without a wait; 0 while something is pending."""
        return 0 if self.is_busy or self._state.delta else self._memory.room

    def extend_now(self, content: bytes) -> None:
        """Extend the spool by content of at most ``room`` bytes."""
        self._put(content, self._state.fragment.length)
        self._state.extend(len(content))

    def commit_now(self, content: bytes, registers: LabelSet) -> Fragment:
        """Commit content of at most ``room`` bytes, as the primary. Return the committed fragment."""
        spool_bytes, length = self._held(), len(content)
        spool_bytes.put(content, self._state.fragment.length)
        self._sum.update(content)
        self._pending_sum = self._sum
        fragment = self._state.grow(length, self._sum.digest(), registers, self._clock.now())
        self._on_committed(Committed(fragment, length), primary=True)
        return fragment

    def commit_next(self, *, primary: bool) -> Fragment:
        """Commit the pending content, after ``next``. Return the committed fragment."""
        committed = self._state.commit_next(self._clock.now())
        self._on_committed(committed, primary=primary)
        return committed.fragment

    def propose_now(self, proposal: Proposal, *, primary: bool) -> SpoolResult:
        """Apply a proposal as ``apply`` does, unless the spool ``is_busy``."""
        effects = self._state.propose(proposal, self._pending_digest, self._clock.now())
        for effect in effects:
            self._perform(effect, primary=primary)
        status = Status.PROPOSAL_MISMATCH if isinstance(effects[-1], Mismatched) else Status.OK
        return SpoolResult(status, self._state.fragment, self._state.registers)

    def committed(self) -> LocalFragment:
        """Return the committed bytes, to be read. Raise ``Bug`` if nothing is committed."""
        if self._bytes is None:
            raise Bug("nothing is committed to the spool", journal=self.fragment.journal)
        return LocalFragment.of(self.fragment, self._bytes)

    async def close(self) -> None:
        """Release the file, and all bytes that were not completed by a roll."""
        if self._writing is not None:
            await self._settle(self._writing)
        self._begin_file()

    async def _extend(self, request: Content) -> None:
        """Add pending content. An error or a cancellation rolls all pending content back."""
        position = self._state.check_content(request)
        content = request.content
        try:
            if len(content) <= INLINE_BYTES and self._memory.takes(len(content)):
                self._put(content, position)
            else:
                await self._extend_in_thread(content, position)
        except asyncio.CancelledError:
            self._perform(self._state.roll_back(), primary=False)
            raise
        except Unavailable:
            self._perform(self._state.roll_back(), primary=False)
            self._trim()
            raise
        self._state.extend(len(content))

    def _held(self) -> SpoolBytes:
        if self._bytes is None:
            self._bytes = SpoolBytes(self._disk, self._memory)
        return self._bytes

    def _put(self, content: bytes, position: int) -> None:
        self._begin_sum()
        self._held().put(content, position)
        self._pending_sum.update(content)

    def _begin_sum(self) -> None:
        """Let pending bytes change a copy of the digest: a roll-back returns to the digest itself."""
        if self._pending_sum is self._sum:
            self._pending_sum = self._sum.copy()

    async def _extend_in_thread(self, content: bytes, position: int) -> None:
        """Write and hash content in a thread: it is long, or the memory for unwritten bytes is full."""
        self._begin_sum()
        spool_bytes, pending_sum = self._held(), self._pending_sum

        def extend() -> None:
            spool_bytes.write(content, position)
            pending_sum.update(content)

        if len(content) <= INLINE_BYTES:
            metrics.DISK_WAITS.inc()
        # Keep the call: its thread goes on when the caller is cancelled. Until it has ended, nothing else
        # may be written at this position.
        writing = self._writing = submitted(
            self._memory.pool, "content cannot be written: the broker ends", extend
        )
        await await_future(writing)
        self._writing = None

    def _trim(self) -> None:
        """Free the disk space of the bytes that were rolled back, in a thread. Without a thread, do nothing:
        the next content uses the space."""
        if self._bytes is not None and (self._writing is None or self._writing.done()):
            with contextlib.suppress(RuntimeError, Unavailable):
                self._writing = self._memory.pool.submit(
                    self._bytes.truncate, self._state.fragment.length
                )

    async def _settle(self, writing: concurrent.futures.Future[Any]) -> None:
        """Wait for a thread for which no other task waits.

        The thread runs a cancelled call, whose bytes were rolled back, or a trim. A failed trim only keeps
        space that the next content uses.
        """
        await ended(writing)
        self._writing = None

    def _perform(self, effect: SpoolEffect, *, primary: bool) -> None:
        """Apply a decision of the state to the file, its sums and the metrics."""
        match effect:
            case Committed():
                self._on_committed(effect, primary=primary)
            case RolledBack():
                self._pending_sum = self._sum
                if effect.length:
                    metrics.ROLLBACKS.inc()
                    metrics.ROLLBACK_BYTES.inc(effect.length)
                if effect.length >= _TRIM_BYTES:
                    self._trim()
            case Completed():
                self._on_completed(effect, primary=primary)
            case Restarted():
                self._begin_file()
            case Mismatched():
                pass
            case _:
                assert_never(effect)

    def _on_committed(self, effect: Committed, *, primary: bool) -> None:
        assert self._bytes is not None
        self._sum = self._pending_sum
        metrics.COMMITS.count += 1
        metrics.COMMIT_BYTES.count += effect.length
        if primary and effect.fragment.codec is not Codec.NONE:
            self._compressed(self._bytes, effect.fragment.codec).advance(effect.fragment.length)
        fragment = effect.fragment
        local = LocalFragment(fragment, self._bytes, fragment.begin, fragment.end)
        self._observer.spool_commit(local)

    def _on_completed(self, effect: Completed, *, primary: bool) -> None:
        assert self._bytes is not None
        codec = effect.fragment.codec
        compression = None if codec is Codec.NONE else self._compressed(self._bytes, codec)
        spool = CompletedSpool(
            fragment=effect.fragment,
            registers=effect.registers,
            first_append_time=effect.first_append_time,
            file=self._bytes,
            compression=compression,
        )
        self._begin_file()
        metrics.COMPLETED.inc()
        self._observer.spool_complete(spool, primary=primary)

    def _compressed(self, file: SpoolContent, codec: Codec) -> SpoolCompression:
        if self._compression is None:
            self._compression = SpoolCompression(file, codec, self._pool)
        return self._compression

    def _begin_file(self) -> None:
        """Begin a new file with the next content."""
        self._bytes = None
        self._compression = None
        self._sum = hashlib.sha1(usedforsecurity=False)
        self._pending_sum = self._sum

    def _pending_digest(self) -> bytes:
        return self._pending_sum.digest()
