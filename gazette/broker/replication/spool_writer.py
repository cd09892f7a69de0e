"""Stage 5 of the byte path: takes content from `pipeline` (primary) or `broker/api/replicate` (replica),
gives it to `fragment/spool_file` in batches.

To write and hash a chunk takes as long as to receive the next one. So a thread writes one batch while the
next chunks arrive. A short append needs no thread: the event loop puts its content into memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Final, TypeAlias

from gazette.errors import GazetteError
from gazette.fragment.spool import Content, Proposal, SpoolResult
from gazette.fragment.spool_file import INLINE_BYTES, Spool
from gazette.protocol.content import ProposalEncoder
from gazette.protocol.fragment import Fragment
from gazette.protocol.label_set import LabelSet
from gazette.runtime.tasks import Pool, TaskScope, await_future, await_shared, submitted

BATCH_BYTES: Final = 1 << 20
"""Bytes of a batch. For each batch, its thread waits several times for the interpreter. With batches of half
the size, large appends are a fifth slower."""

Digest: TypeAlias = Callable[[bytes], None]
"""Gets the same content as the spool, in the same order. Called in threads, one call at a time."""


class SpoolWriter:
    """A spool as its holder writes to it. Loop-bound.

    At most two batches of somewhat more than ``BATCH_BYTES`` are in memory: one is being written, one is
    being gathered. Nothing else may use the spool before ``settle``.
    """

    def __init__(self, spool: Spool, scope: TaskScope, pool: Pool, *, primary: bool) -> None:
        self.spool = spool
        self._scope = scope
        self._pool = pool
        self._primary = primary
        self._digest: Digest | None = None  # None: no sum is needed.
        self._gathered: list[bytes] = []
        self._length = 0
        """Bytes in ``_gathered``."""
        self._end = spool.delta
        self._writing: asyncio.Task[None] | None = None  # None: no batch is being written.
        self._failure: GazetteError | None = None  # Error of a batch, not raised yet.
        self._encoder = ProposalEncoder()

    @property
    def delta(self) -> int:
        """Bytes that are pending: in the spool, being written, or gathered."""
        return self._end

    @property
    def room(self) -> int:
        """Bytes that can be committed without a wait; 0 while content is pending, or after a failure."""
        idle = self._writing is None and not self._gathered and self._failure is None
        return self.spool.room if idle else 0

    def content_now(self, content: bytes, delta: int) -> bool:
        """Take a chunk as ``content`` does. Return False, without effect, if it must wait or would fail."""
        if self._writing is not None or self._failure is not None or delta != self._end:
            return False
        if self._length + len(content) >= BATCH_BYTES:
            return False
        self._gathered.append(content)
        self._length += len(content)
        self._end += len(content)
        return True

    def encode(self, proposal: Fragment, registers: LabelSet) -> bytes:
        """Return the encoded request that proposes ``proposal`` and asks for an answer."""
        return self._encoder.encode(proposal, registers)

    def commit_now(self, encoded: bytes) -> Fragment | None:
        """Commit the gathered content if ``encoded`` proposes exactly this content. Return the fragment.

        Return None if ``encoded`` is another request, or the commit must wait. Then nothing is committed, and
        ``propose`` decides.
        """
        if self._writing is not None or self._failure is not None or self._digest is not None:
            return None
        spool = self.spool
        if not self._gathered or spool.is_busy or self._length > min(spool.room, INLINE_BYTES):
            return None
        batch, _ = self._take_batch()
        spool.extend_now(batch)
        if self.encode(spool.next(), spool.registers) != encoded:
            return None
        fragment = spool.commit_next(primary=self._primary)
        self._end = 0
        return fragment

    def begin(self, digest: Digest | None) -> None:
        """Begin an append, while nothing is pending. ``digest`` is called with all its content."""
        self._digest = digest
        self._end = self.spool.delta

    async def content(self, content: bytes, delta: int) -> None:
        """Take a chunk. Return when there is room for another chunk, perhaps before this one is written.

        Raise ``Invalid`` unless the chunk follows the content before it. Raise the error of an earlier chunk
        that could not be written. An error rolls all pending content back. Cancellation: the chunk may be
        written.
        """
        if delta != self._end:
            await self.flush()
            await self._apply(content, delta)  # The spool raises the error.
        self._gathered.append(content)
        self._length += len(content)
        self._end += len(content)
        if self._length >= BATCH_BYTES:
            await self._written()
            batch, begin = self._take_batch()
            self._writing = self._scope.spawn(self._write(batch, begin), name="write behind")

    async def flush(self) -> None:
        """Return when everything is written. Raise the error of content that could not be written.
        Cancellation: some content may not be written."""
        await self._written()
        if self._gathered:
            batch, begin = self._take_batch()
            await self._apply(batch, begin)

    async def propose(self, proposal: Proposal) -> SpoolResult:
        """Write the content that was taken so far, then apply a proposal to the spool.

        Raise the error of content that could not be written. Cancellation: the proposal may be applied.
        """
        await self.flush()
        result = await self.spool.apply(proposal, primary=self._primary)
        self._end = self.spool.delta
        return result

    async def settle(self) -> None:
        """Return when no write to the spool runs. Give up content that is not written yet.

        Cancellation: ``CancelledError`` is raised once no write runs. No other error is raised.
        """
        self._gathered, self._length = [], 0
        cancelled = False
        while self._writing is not None and not self._writing.done():
            try:
                await asyncio.wait({self._writing})
            except asyncio.CancelledError:
                cancelled = True
        self._writing = None
        if cancelled:
            raise asyncio.CancelledError

    def _take_batch(self) -> tuple[bytes, int]:
        """Remove the gathered content. Return it, and the number of pending bytes before it."""
        batch = self._gathered[0] if len(self._gathered) == 1 else b"".join(self._gathered)
        begin = self._end - self._length
        self._gathered, self._length = [], 0
        return batch, begin

    async def _written(self) -> None:
        """Return when the running write has ended. Raise the error of an earlier write."""
        if self._writing is not None:
            await await_shared(self._writing)
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    async def _write(self, batch: bytes, begin: int) -> None:
        try:
            await self._apply(batch, begin)
        except GazetteError as error:
            self._failure = error

    async def _apply(self, batch: bytes, begin: int) -> None:
        """Give a batch to the digest and to the spool. If the spool fails, drop the gathered content."""
        digest_future: concurrent.futures.Future[None] | None = None
        try:
            if self._digest is not None:
                if len(batch) > INLINE_BYTES:
                    digest_future = submitted(
                        self._pool, "content cannot be hashed: the broker ends", self._digest, batch
                    )
                else:
                    self._digest(batch)
            await self.spool.apply(Content(batch, begin), primary=self._primary)
        except GazetteError:
            self._gathered, self._length, self._end = [], 0, self.spool.delta
            raise
        finally:
            if digest_future is not None:  # The digest takes one batch at a time.
                await await_future(digest_future)
