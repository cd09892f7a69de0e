"""Prunes as operators of a cluster do: recovery logs by hints, and sources that their shards have read.

The pruner reads a part of a source before it removes it. So the end of the run is judged by the whole source.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardClient
from gazette.errors import GazetteError
from gazette.gazctl.shards.prune_plan import Needs, unpersisted
from gazette.message.envelope_reader import CommittedReader
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.fragment import Fragment
from gazette.protocol.shard import ShardSpec
from gazette.testing.simulation.loop import NodeClock
from gazette.testing.simulation.storage import Bucket

_CALL_S: Final = 30.0
_REMOVAL_S: Final = 0.5
"""Mean time between two removals of a round."""


@dataclass(slots=True)
class Archive:
    """The committed messages of a journal up to some offset, and the offset at which reading goes on."""

    message_type: type[Any]
    messages: list[Any] = field(default_factory=list)
    checkpoint: SourceCheckpoint | None = None
    offset: int = 0
    skipped: int = 0
    """Bytes before this offset were pruned before anything had read them."""

    async def read_to(self, client: Client, journal: str, end: int) -> None:
        """Read on to an offset. The caller limits the time, and may call again after an error."""
        if end <= max(self.offset, self.skipped):
            return
        self.offset = max(self.offset, self.skipped)
        params = ReadParams(journal, self.offset, block=True, end_offset=end)
        reader: CommittedReader[Any] = CommittedReader(
            client, params, self.message_type, source=self.checkpoint
        )
        messages: list[Any] = []
        async with aclosing(reader.batches()) as read:
            async for batch in read:
                messages += [envelope.message for envelope in batch]
        self.messages += messages
        self.checkpoint, self.offset = reader.checkpoint(), end


class Pruner:
    """Removes fragments in rounds: it plans a round, pauses, and removes."""

    def __init__(
        self,
        client: Client,
        consumers: ShardClient,
        clock: NodeClock,
        rng: random.Random,
        shards: list[ShardSpec],
        bucket_of: Callable[[str], Bucket],
        settled_ends: Callable[[str], list[int]],
        archives: dict[str, Archive],
        say: Callable[..., None],
    ) -> None:
        """Create a pruner. ``archives`` are those of the sources.

        ``settled_ends`` gives offsets of a source: each message before them has committed, or never will.
        """
        self._client = client
        self._consumers = consumers
        self._clock = clock
        self._rng = rng
        self._shards = shards
        self._bucket_of = bucket_of
        self._settled_ends = settled_ends
        self._archives = archives
        self._say = say
        self._mean_s = rng.choice((4.0, 15.0, 40.0))
        self.removed = 0

    async def run(self) -> None:
        """Prune, until cancelled."""
        while True:
            await self._clock.sleep(self._rng.expovariate(1 / self._mean_s))
            spec = self._rng.choice(self._shards)
            try:
                async with asyncio.timeout(_CALL_S):
                    if spec.recovery_log and self._rng.random() < 0.6:
                        doomed = await self._unneeded(spec)
                    else:
                        doomed = await self._read(spec)
            except (GazetteError, TimeoutError) as error:
                self._say("pruner", f"plans nothing: {type(error).__name__}", error)
                continue
            for fragment in doomed:
                await self._clock.sleep(self._rng.expovariate(1 / _REMOVAL_S))
                self._remove(fragment)

    async def _unneeded(self, spec: ShardSpec) -> list[Fragment]:
        """Return fragments of a recovery log that no hints need, by the rules of ``gazctl shards prune``."""
        needs = Needs()
        for one in self._shards:
            if one.recovery_log:
                needs.add_shard(one, await self._consumers.get_hints(one.id))
        if spec.recovery_log in needs.blocked:
            return []
        await self._pause()
        fragments = await self._fragments(spec.recovery_log)
        unneeded = needs.unneeded(spec.recovery_log, fragments)
        return [] if unpersisted(unneeded) else unneeded

    async def _read(self, spec: ShardSpec) -> list[Fragment]:
        """Return fragments of a source whose bytes the shard has all read, committed and acknowledged."""
        journal = self._rng.choice(spec.sources).journal
        stat = await self._consumers.stat(spec.id)
        read = stat.read_through.get(journal, 0)
        end = max((one for one in self._settled_ends(journal) if one <= read), default=0)
        await self._archives[journal].read_to(self._client, journal, end)
        await self._pause()
        return [
            one
            for one in await self._fragments(journal)
            if one.end <= end and not unpersisted([one])
        ]

    async def _fragments(self, journal: str) -> list[Fragment]:
        found = await self._client.list_fragments(FragmentsParams(journal))
        return [one.fragment for one in found]

    async def _pause(self) -> None:
        await self._clock.sleep(self._rng.choice((0.0, 0.0, 1.0, 8.0)) * self._rng.random())

    def _remove(self, fragment: Fragment) -> None:
        """Remove a fragment, and those that it covers: otherwise brokers would serve these instead."""
        objects = self._bucket_of(fragment.journal).objects
        for path in list(objects):
            journal, _, name = path.rpartition("/")
            if journal != fragment.journal:
                continue
            one = Fragment.parse(journal, name)
            if fragment.begin <= one.begin and one.end <= fragment.end:
                del objects[path]
                self.removed += 1
                self._say("pruner", f"removes {path}")
