"""The end of a run: built states are handed to their shards.

::

    note ──► fence ──► play the former state ──► acknowledge what it owes ──► append ──► note
                                                                                 all shards: publish

Whoever dies at an arrow leaves the former state in force, with its hints, up to the last one; what it owes
may be there already, and is appended again by whoever comes next.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gazette.backfill.build import Attempt
from gazette.backfill.definition import Backfill
from gazette.backfill.previous_state import (
    FormerState,
    acknowledge,
    read_former,
    require_own,
    require_published,
    require_whole,
)
from gazette.backfill.publish import Publication, Target, is_published
from gazette.backfill.records import RunRecords
from gazette.backfill.report import Progress
from gazette.backfill.settings import RunSettings
from gazette.client.client import Client
from gazette.client.shards import ListedShard, ShardClient
from gazette.errors import Fenced, NotAllowed, NotFound, Retryable
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.shard import ShardSpec
from gazette.runtime.clock import Clock
from gazette.runtime.failpoints import reach
from gazette.stores.claims import Held

log = logging.getLogger(__name__)


class Handover:
    """Of one run. Loop-bound. ``require_idle`` requires that shards are idle, and as they were listed."""

    def __init__(
        self,
        backfill: Backfill,
        application: str,
        settings: RunSettings,
        records: RunRecords,
        progress: Progress,
        require_idle: Callable[[Sequence[ListedShard]], Awaitable[None]],
        client: Client,
        shards: ShardClient,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.publication = Publication(client, shards, clock, rng)
        self.acknowledged = 0
        """Acknowledgements that former states owed, and that were appended."""
        self._backfill = backfill
        self._application = application
        self._settings = settings
        self._records = records
        self._progress = progress
        self._require_idle = require_idle
        self._client = client
        self._shards = shards
        self._clock = clock
        self._rng = rng
        self._former: dict[str, FormerState] = {}
        self._forgotten: set[str] = set()
        """Shards whose former states cannot be read, which is not to matter."""
        self._ends: Mapping[JournalName, Offset] = {}

    async def look(self, listed: Sequence[ListedShard], held: Mapping[str, Held]) -> None:
        """Read the states that shards have, of databases those that are ``held``: `require_published` judges
        them, and `run` need not read those again that are not written to until then.

        Raises ``NotAllowed`` for a state that cannot be read, unless that is not to matter, and for one
        that belongs to another application.
        """
        self._progress.begin("reading former states", 0)
        for shard in listed:
            spec = shard.spec
            if (one := held.get(spec.id)) is not None:
                self._former[spec.id] = FormerState(one.checkpoint)
            elif spec.recovery_log:
                await self.publication.check_log(spec.recovery_log)
                if (former := await self._read(spec)) is not None:
                    self._former[spec.id] = former
        require_own(self._former, self._application)

    def require_published(
        self, listed: Sequence[ListedShard], ends: Mapping[JournalName, Offset]
    ) -> None:
        """Require that a history that ends there loses nothing of what shards publish.

        Raises ``NotAllowed``, unless that is not to matter.
        """
        self._ends = ends
        self._require_published({one.spec.id: one.spec for one in listed}, self._former)

    def require_whole(self, checkpoints: Mapping[str, Checkpoint]) -> None:
        """Require of new states, which go on at these checkpoints, the same within transactions."""
        publishes = self._backfill.discard_publications
        with self._forgiving():
            require_whole(self._former, checkpoints, publishes=publishes)

    def _require_published(
        self, specs: Mapping[str, ShardSpec], former: Mapping[str, FormerState]
    ) -> None:
        publishes = self._backfill.discard_publications
        with self._forgiving():
            require_published(former, specs, self._ends, publishes=publishes)

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except NotAllowed as error:
            if not self._settings.forget_publications:
                raise
            log.warning("a backfill goes on: %(error)s", {"error": error.message})

    async def run(
        self, listed: Sequence[ListedShard], attempts: Sequence[Attempt], directory: Path
    ) -> None:
        """Append the attempts of these shards, in their order, and publish all of them.

        Raises ``Conflict`` or ``Fenced`` when somebody touched a shard meanwhile, ``NotAllowed`` when one
        is live or its former state cannot be read; nothing was published then (see
        `Publication.publish`). Cancellation: the same, and a run that is resumed goes on from here.
        """
        self._progress.begin("appending", sum(one.built.size for one in attempts))
        targets: list[tuple[Target, int]] = []
        for shard, attempt in zip(listed, attempts, strict=True):
            base = await self._append(shard, attempt, directory) if attempt.built.log else 0
            targets.append((Target(shard, attempt.built), base))
        self._progress.begin("publishing", 0)
        pending = await self._unpublished(targets)
        await self.publication.publish(pending, enable=self._settings.enable)
        await self._records.mark_published(self._clock.now())
        for attempt in attempts:
            await self._records.remove(attempt)

    async def _unpublished(self, targets: list[tuple[Target, int]]) -> list[tuple[Target, int]]:
        """Without those that an interrupted driver has published: of many shards, it may be some."""
        pending = []
        for target, base in targets:
            stored = None
            if target.built.log:
                with suppress(NotFound):  # What that means is for the publication to say.
                    stored = await self._shards.get_hints(target.id)
            if stored is None or not is_published(target.built, stored):
                pending.append((target, base))
        return pending

    async def _append(self, shard: ListedShard, attempt: Attempt, directory: Path) -> int:
        """Have a state in its log, once. Where it begins there. Raises ``Conflict`` for a live shard."""
        built, records = attempt.built, self._records
        if (base := await records.appended(attempt)) is not None:
            try:
                await self.publication.require_ours(built)
            except Fenced:
                pass  # It is there, but behind somebody else's fence: append it anew.
            else:
                # What the former state owed was in place before.
                self._progress.add(built.size)
                return base
        await self._require_idle([shard])
        path = await records.fetch(attempt, directory)
        before = self.publication.appended_bytes

        async def note(head: int) -> None:
            """For `runs`: if the driver dies now, nobody else knows of what is in the log."""
            await self._require_idle([shard])
            await records.note_appending(attempt, head, f"{self._rng.getrandbits(32):08x}")

        async def settle(end: Offset) -> None:
            await self._settle(shard.spec, end)

        base = await self.publication.append(built, path, records.pool, note, settle)
        self._progress.add(self.publication.appended_bytes - before)
        await records.note_appended(attempt, base)
        path.unlink()
        return base

    async def _settle(self, spec: ShardSpec, end: Offset) -> None:
        """Append what the state owes that a log holds up to ``end``: nobody can commit to it any more."""
        if spec.id in self._forgotten:
            return
        former = self._former.get(spec.id)
        if former is None or former.head != end:
            former = await self._read(spec)
            if former is None:
                return
            self._require_published({spec.id: spec}, {spec.id: former})
        for journal, intent in sorted(former.checkpoint.ack_intents.items()):
            await reach("backfill.acknowledging", spec.id, self._clock)
            self.acknowledged += await acknowledge(self._client, journal, intent)
        await reach("backfill.acknowledged", spec.id, self._clock)

    async def _read(self, spec: ShardSpec) -> FormerState | None:
        """None: it cannot be read, which is not to matter."""
        settings = self._settings
        try:
            stored = await self._shards.get_hints(spec.id)
            return await read_former(
                spec,
                stored,
                self._backfill,
                fqn=settings.fqn(spec.id),
                client=self._client,
                clock=self._clock,
                pool=self._records.pool,
                scratch=settings.scratch,
            )
        except (NotAllowed, Retryable) as error:
            if not settings.forget_publications:
                raise
            log.warning(
                "the former state of shard %(shard)s is replaced, whatever it owes: %(error)s",
                {"shard": spec.id, "error": error.message},
            )
            self._forgotten.add(spec.id)
            return None
