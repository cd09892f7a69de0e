"""The end of a run: shards take over the built states.

    note ──► fence ──► play the former state ──► acknowledge what it owes ──► append ──► note
                                                                                 all shards: publish

If the driver dies before it publishes, the former state stays in force, with its hints. The acknowledgements
that the former state owes may be appended already: then the shard's next owner appends them again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gazette.client.client import Client
from gazette.client.shards import ListedShard, ShardClient
from gazette.errors import Fenced, NotAllowed, NotFound, Retryable
from gazette.history.backfill.build import Attempt
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.previous_state import (
    PreviousState,
    acknowledge,
    read_previous_state,
    require_own,
    require_published,
    require_whole,
)
from gazette.history.backfill.publish import Publication, Target, is_published
from gazette.history.backfill.records import RunRecords
from gazette.history.backfill.report import Progress
from gazette.history.backfill.settings import RunSettings
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.shard import ShardSpec
from gazette.runtime.clock import Clock
from gazette.runtime.failpoints import reach
from gazette.runtime.tasks import TaskScope
from gazette.stores.claims import HeldState

log = logging.getLogger(__name__)

_READS_MAX: Final = 4
"""Greatest number of recovery logs that are played back at once. Each log needs local disk for its state."""


class Cutover:
    """Hand-over of the shards of one run to their new states. Loop-bound.

    ``require_idle`` raises an error for shards that are not idle, or were changed.
    """

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
        """Number of appended acknowledgements that former states owed."""
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
        self._previous: dict[str, PreviousState] = {}
        self._forgotten: set[str] = set()
        """Shards whose former state is unreadable: the user has accepted to lose its acknowledgements."""
        self._ends: Mapping[JournalName, Offset] = {}
        """By journal: the end of the history."""

    async def look(self, listed: Sequence[ListedShard], held: Mapping[str, HeldState]) -> None:
        """Read the former states of shards. The states in databases are in ``held``.

        Play several recovery logs back at once, each to the local disk. `run` reads a state again only if
        its log has grown meanwhile. Raise ``NotAllowed`` for a state of another application. Raise it for an
        unreadable state, too, unless the user has accepted its loss. Cancellation leaves no file.
        """
        self._previous |= {id: PreviousState(state.checkpoint) for id, state in held.items()}
        specs = [one.spec for one in listed if one.spec.recovery_log and one.spec.id not in held]
        self._progress.begin("reading former states", len(specs), "shards")
        limit = asyncio.Semaphore(_READS_MAX)

        async def read(spec: ShardSpec) -> None:
            async with limit:
                await self.publication.check_log(spec.recovery_log)
                if (previous := await self._read(spec)) is not None:
                    self._previous[spec.id] = previous
            self._progress.add(1)

        async with TaskScope("former states") as scope:
            for spec in specs:
                scope.spawn(read(spec), name=spec.id)
        require_own(self._previous, self._application)

    def require_published(
        self, listed: Sequence[ListedShard], ends: Mapping[JournalName, Offset]
    ) -> None:
        """Raise ``NotAllowed`` if a history with these ends would lose or repeat publications. Do not raise
        if the user has accepted such losses."""
        self._ends = ends
        self._require_published({shard.spec.id: shard.spec for shard in listed}, self._previous)

    def require_whole(self, checkpoints: Mapping[str, Checkpoint]) -> None:
        """Raise ``NotAllowed`` if states that continue at these checkpoints split a published transaction."""
        publishes = self._backfill.discard_publications
        with self._forgiving():
            require_whole(self._previous, checkpoints, publishes=publishes)

    def _require_published(
        self, specs: Mapping[str, ShardSpec], previous: Mapping[str, PreviousState]
    ) -> None:
        publishes = self._backfill.discard_publications
        with self._forgiving():
            require_published(previous, specs, self._ends, publishes=publishes)

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Log a ``NotAllowed`` of the block, and go on, if the user has accepted to lose publications."""
        try:
            yield
        except NotAllowed as error:
            if not self._settings.forget_publications:
                raise
            log.warning("a backfill goes on: %(error)s", {"error": error.message})

    async def run(
        self,
        listed: Sequence[ListedShard],
        attempts: Sequence[Attempt],
        directory: Path,
        published: Collection[str] = (),
    ) -> None:
        """Append the attempts of these shards, in their order, and publish all of them. Leave the shards in
        ``published`` alone, which an interrupted driver of the run has published: they may be live.

        Raise ``Conflict`` or ``Fenced`` when a shard was changed meanwhile. Raise ``NotAllowed`` when a shard
        is live or its former state cannot be read. After an error or a cancellation, nothing was published
        (see `Publication.publish`), and a resumed run continues with this step.
        """
        self._progress.begin("appending", sum(attempt.built.size for attempt in attempts))
        targets: list[Target] = []
        for shard, attempt in zip(listed, attempts, strict=True):
            if shard.spec.id in published:
                self._progress.add(attempt.built.size)
                continue
            base = await self._append(shard, attempt, directory) if attempt.built.log else 0
            targets.append(Target(shard, attempt.built, base))
        self._progress.begin("publishing", 0)
        pending = await self._unpublished(targets)
        await self.publication.publish(pending, enable=self._settings.enable)
        await self._records.mark_published(self._clock.now())
        for attempt in attempts:
            await self._records.remove(attempt)

    async def _unpublished(self, targets: list[Target]) -> list[Target]:
        """Return the targets that were not published yet: an interrupted driver may have published some."""
        pending = []
        for target in targets:
            stored = None
            if target.built.log:
                with suppress(NotFound):  # The publication handles a missing shard.
                    stored = await self._shards.get_hints(target.id)
            if stored is None or not is_published(target.built, stored):
                pending.append(target)
        return pending

    async def _append(self, shard: ListedShard, attempt: Attempt, directory: Path) -> int:
        """Append a state to its log, once. Return its first offset. Raise ``Conflict`` for a live shard."""
        built, records = attempt.built, self._records
        if (base := await records.appended(attempt)) is not None:
            try:
                await self.publication.require_ours(built)
            except Fenced:
                pass  # The state is in the log, but another author has fenced the log since: append again.
            else:
                # The owed acknowledgements of the former state were appended before.
                self._progress.add(built.size)
                return base
        await self._require_idle([shard])
        path = await records.fetch(attempt, directory)
        bytes_before = self.publication.appended_bytes

        async def note(head: int) -> None:
            """Note that the log gets the state. If the driver dies now, only the note shows that branch."""
            await self._require_idle([shard])
            await records.note_appending(attempt, head, f"{self._rng.getrandbits(32):08x}")

        async def settle(end: Offset) -> None:
            await self._settle(shard.spec, end)

        base = await self.publication.append(built, path, records.pool, note, settle)
        self._progress.add(self.publication.appended_bytes - bytes_before)
        await records.note_appended(attempt, base)
        path.unlink()
        return base

    async def _settle(self, spec: ShardSpec, end: Offset) -> None:
        """Append the acknowledgements that a log's state at ``end`` owes. A fence has made it final."""
        if spec.id in self._forgotten:
            return
        previous = self._previous.get(spec.id)
        if previous is None or previous.head != end:
            previous = await self._read(spec)
            if previous is None:
                return
            self._require_published({spec.id: spec}, {spec.id: previous})
        for journal, intent in sorted(previous.checkpoint.ack_intents.items()):
            await reach("backfill.acknowledging", spec.id, self._clock)
            self.acknowledged += await acknowledge(self._client, journal, intent)
        await reach("backfill.acknowledged", spec.id, self._clock)

    async def _read(self, spec: ShardSpec) -> PreviousState | None:
        """Return the former state; None if it is unreadable and the user has accepted its loss."""
        settings = self._settings
        try:
            stored = await self._shards.get_hints(spec.id)
            return await read_previous_state(
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
