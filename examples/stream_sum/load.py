"""Streams for the summers: publishes them, reads what comes of them, and has both verified."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.errors import NotFound, NotYet
from gazette.message.envelope_reader import CommittedReader
from gazette.message.key_hash import fnv32a
from gazette.message.mapping import Partition, PartitionWatch, fixed_mapping
from gazette.message.publisher import Publisher
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope, await_future
from stream_sum.app import CHUNKS, RECEIPTS, SUMS
from stream_sum.messages import ID_BYTES, Chunk, Receipt, Sum, crc64
from stream_sum.verifier import Verifier

HEAD: Final = -1


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The amount to publish. Each worker has one stream at a time, in one journal: there are as many
    workers for each journal as for others."""

    workers: int = 8
    chunks: int = 10
    """Greatest number of chunks with data in a stream; the number of each is random."""
    chunk_bytes: int = 64
    pause_s: float = 0.05
    """Seconds between two chunks of a stream."""
    streams: int = -1
    """Number of streams to publish in all; -1: until asked to stop."""
    offset: int = HEAD
    """The offset at which reading begins in every journal of sums and receipts."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A stream whose sum was read, and was right. Times by the clock, in seconds."""

    key: bytes
    journal: str
    """The journal of its chunks."""
    began_at: float
    ended_at: float
    summed_at: float

    @property
    def latency_s(self) -> float:
        return self.summed_at - self.ended_at


@dataclass(slots=True)
class _Stream:
    key: bytes
    journal: str
    began_at: float
    ended_at: float = 0.0
    summed: asyncio.Event = field(default_factory=asyncio.Event)


class Load:
    """``run`` publishes until ``stop``, or all streams are through. Loop-bound."""

    def __init__(
        self,
        client: Client,
        verifier: Verifier,
        clock: Clock,
        rng: random.Random,
        settings: LoadSettings,
        on_finished: Callable[[Finished], None] = lambda finished: None,
    ) -> None:
        self.verifier = verifier
        self.published = 0
        """Streams that were published whole."""
        self._client = client
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._on_finished = on_finished
        self._streams: dict[bytes, _Stream] = {}
        self._left = settings.streams
        self._stopped = False

    def stop(self) -> None:
        """Begin no more streams; those that are open are ended, and waited for."""
        self._stopped = True

    async def run(self) -> None:
        """Return when what was published is verified, but for ``Verifier.finish``.

        Raise ``NotFound`` (there are no journals), and what publishing and reading do for good.
        Cancellation: streams are left open.
        """
        chunks = await self._journals(CHUNKS)
        async with TaskScope("load") as scope:
            for sums in await self._journals(SUMS):
                reading = self._read_sums(sums.journal, await self._begin(sums.journal))
                scope.daemon(reading, name=sums.journal)
            for receipts in await self._journals(RECEIPTS):
                reading = self._read_receipts(receipts.journal, await self._begin(receipts.journal))
                scope.daemon(reading, name=receipts.journal)
            appends = AppendService(self._client)
            scope.daemon(appends.run(), name="appends")
            publisher = Publisher.standalone(appends, self._clock, random.SystemRandom())
            async with TaskScope("workers") as workers:
                for index in range(max(self._settings.workers, len(chunks))):
                    worker = self._work(publisher, chunks, index % len(chunks))
                    workers.spawn(worker, name=f"worker {index}")
            while self.verifier.open_transactions:
                await self._clock.sleep(0.1)
            await appends.close()
            scope.cancel()

    async def _journals(self, selector: LabelSelector) -> tuple[Partition, ...]:
        watch = PartitionWatch(self._client.watch_journals(selector))
        async with TaskScope("journals") as scope:
            scope.daemon(watch.run(), name=str(selector))
            await watch.ready()
            scope.cancel()
        if not watch().all:
            raise NotFound(
                f"there are no journals with {selector}",
                hint="Create them: `gazctl journals apply`.",
            )
        return watch().all

    # -- publishing

    async def _work(
        self, publisher: Publisher, chunks: tuple[Partition, ...], partition: int
    ) -> None:
        while not self._stopped and self._left != 0:
            self._left -= 1
            await self._publish(publisher, chunks, partition)

    async def _publish(
        self, publisher: Publisher, chunks: tuple[Partition, ...], partition: int
    ) -> None:
        """Publish one stream, and return when its sum was read."""
        settings, rng = self._settings, self._rng
        key = rng.randbytes(ID_BYTES)
        while fnv32a(key) % len(chunks) != partition:
            key = rng.randbytes(ID_BYTES)
        stream = _Stream(key, chunks[partition].journal, self._clock.monotonic())
        self._streams[key] = stream
        mapping = fixed_mapping(*chunks[partition])
        count, value = rng.randint(1, settings.chunks), 0
        futures: dict[str, Any] = {}
        for seq_no in range(1, count + 2):
            data = rng.randbytes(rng.randint(1, settings.chunk_bytes)) if seq_no <= count else b""
            value = crc64(data, value)
            if not data:
                self.verifier.expect(key, seq_no, value)
            chunk = Chunk(id=tuple(key), seq_no=seq_no, data=data)
            futures = await publisher.publish_from_loop(mapping, [chunk])
            await self._clock.sleep(settings.pause_s * rng.random() * 2)
        for future in futures.values():
            await await_future(future)
        # Its sum may have come before this.
        stream.ended_at = self._clock.monotonic()
        self.verifier.ended(key, stream.ended_at)
        self.published += 1
        await stream.summed.wait()
        del self._streams[key]

    # -- reading

    async def _begin(self, journal: str) -> int:
        """Note where to begin to read, before anything is published."""
        if self._settings.offset != HEAD:
            return self._settings.offset
        reader = self._client.retry_reader(ReadParams(journal, HEAD, metadata_only=True))
        async with reader:
            with contextlib.suppress(NotYet):  # There is nothing behind the head, of course.
                await reader.read(1)
        return reader.write_head

    async def _read_sums(self, journal: str, offset: int) -> None:
        params = ReadParams(journal, offset, block=True)
        async for batch in CommittedReader(self._client, params, Sum).batches():
            for envelope in batch:
                self._on_sum(journal, envelope.message)

    async def _read_receipts(self, journal: str, offset: int) -> None:
        params = ReadParams(journal, offset, block=True)
        async for batch in CommittedReader(self._client, params, Receipt).batches():
            for envelope in batch:
                self.verifier.on_receipt(envelope.message)

    def _on_sum(self, journal: str, one: Sum) -> None:
        right = self.verifier.on_sum(journal, one) is not None
        stream = self._streams.get(one.key)
        if stream is None:
            return
        if right and not stream.summed.is_set():
            now = self._clock.monotonic()
            ended_at = stream.ended_at or now
            self._on_finished(Finished(one.key, stream.journal, stream.began_at, ended_at, now))
        stream.summed.set()
