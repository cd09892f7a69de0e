"""One run of a backfill, from the choice of its shards to the publication of their states.

    PLAN ── first pass ── build, stage ── MANIFEST ── append ── (verify) ── publish ── PUBLISHED
      │          nothing of this takes effect, and all of it can be repeated           │
      └── a resumed run continues after the last step that is done ───────────────────┘

A run is loop-bound. Calls that block run on a pool of threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from gazette.client.client import Client
from gazette.client.shards import ListedShard, ShardClient
from gazette.consumer.application_name import name_of
from gazette.errors import Bug, NotAllowed, NotFound
from gazette.history.backfill.build import Attempt, ShardTask, differs_from_replay
from gazette.history.backfill.claims import (
    claims_of,
    look,
    require_claimable,
    require_comparable,
    require_in_force,
)
from gazette.history.backfill.content import Difference
from gazette.history.backfill.cutover import Cutover
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.plan import Plan, list_partitions, plan_snapshot, tasks_of
from gazette.history.backfill.publish import is_published, require_idle, require_unchanged
from gazette.history.backfill.records import RunRecords, time_text
from gazette.history.backfill.report import Progress, Report, shard_report
from gazette.history.backfill.runner import Runner
from gazette.history.backfill.settings import RunSettings
from gazette.history.backfill.verify import verify
from gazette.history.merge import FoldedSnapshot
from gazette.history.snapshot import Snapshot
from gazette.history.source import Access
from gazette.message.mapping import Partition
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.log.broker_logs import write_head
from gazette.recoverylog.scratch import BUILDS, scratch_directory
from gazette.runtime.clock import Clock
from gazette.stores.claims import HeldState


class BackfillRun:
    """One run of a backfill. Other processes load ``backfill`` by ``name``, or by pickle without a name."""

    def __init__(
        self,
        backfill: Backfill,
        name: str,
        settings: RunSettings,
        runner: Runner,
        access: Access,
        client: Client,
        shards: ShardClient,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """Create a run. Raise ``Invalid`` for invalid settings."""
        self.progress = Progress()
        self._backfill = backfill
        self._name = name
        self._title = name or f"{type(backfill).__module__}:{type(backfill).__qualname__}"
        self._settings = settings
        self._runner = runner
        self._access = access
        self._client = client
        self._shards = shards
        self._clock = clock
        self._rng = rng
        self._application = settings.application or name_of(backfill.new_application())
        self._records = RunRecords(settings.staging, settings.run_id)
        self._cutover = Cutover(
            backfill,
            self._application,
            settings,
            self._records,
            self.progress,
            self._require_unchanged,
            client,
            shards,
            clock,
            rng,
        )
        self._resumed = False

    async def run(
        self, *, dry_run: bool = False, on_begin: Callable[[], None] = lambda: None
    ) -> Report:
        """Run all steps. With ``dry_run``, make only the plan and the first pass, and write nothing.

        Call ``on_begin`` once the plan is stored: from then on the run can be resumed.
        Raise ``NotAllowed`` for live shards, and for states that must not be overwritten. Raise ``Conflict``
        or ``Fenced`` when a shard was changed meanwhile, ``Corrupt`` when a state differs from a replay.
        After an error or a cancellation the shards are unchanged (see `Publication.publish`): call again.
        """
        try:
            return await self._run(on_begin, dry_run=dry_run)
        finally:
            self._runner.stop()
            self._records.close()

    async def _run(self, on_begin: Callable[[], None], *, dry_run: bool) -> Report:
        """Do the steps of `run`, in order: first all checks, since a refused run must store nothing."""
        begin_s = self._clock.monotonic()
        listed = await self._list()
        held: dict[str, HeldState] = {}
        refusals: list[str] = []
        published: set[str] = set()
        if dry_run:
            refusals = await self._refusals(listed)
        else:
            published = await self._published_shards(listed)
            if report_before := await self._published_before(listed, published):
                return report_before
            # An interrupted driver may have published, and enabled, some of many shards.
            unpublished = [shard for shard in listed if shard.spec.id not in published]
            require_idle(unpublished)
            await self._require_stateless(listed)
            held = await self._look(unpublished)
        if self._settings.overwrite and await self._records.manifest() is None:
            await self._cutover.look(listed, held)
        folded, tasks = await self._plan(listed, held, on_begin, dry_run=dry_run)
        attempts: list[Attempt] = []
        verified: tuple[str, ...] = ()
        if not dry_run:
            attempts = await self._build(tasks)
            with scratch_directory(BUILDS, self._settings.scratch) as files:
                verified = await self._verify(tasks, attempts, files)
                await self._cutover.run(listed, attempts, files, published)
        return Report(
            self._settings.run_id,
            not dry_run,
            self._resumed,
            folded.snapshot.length,
            folded.rows,
            tuple(shard_report(task, attempts) for task in tasks),
            verified,
            self._clock.monotonic() - begin_s,
            self._cutover.acknowledged,
            tuple(refusals),
        )

    async def _list(self) -> list[ListedShard]:
        """Return the selected shards, sorted by id. Raise ``NotFound`` if no shard matches."""
        shards = (await self._shards.list_shards(self._settings.selector)).shards
        if not shards:
            raise NotFound(
                "no shard matches",
                selector=str(self._settings.selector),
                hint="`gazctl shards list` shows the existing ones.",
            )
        return sorted(shards, key=lambda shard: shard.spec.id)

    async def _require_stateless(self, listed: Sequence[ListedShard]) -> None:
        """Raise ``NotAllowed`` for shards with a state, unless the user has permitted to replace states."""
        if self._settings.overwrite:
            return
        if await self._records.manifest() is not None:
            return  # This run has passed the check before, and may have written the states.
        for shard in listed:
            if shard.spec.recovery_log and await self._has_state(shard.spec):
                raise NotAllowed(
                    "the shard has a state already, or its recovery log holds something",
                    shard=shard.spec.id,
                    hint="--overwrite replaces it, once the new state is complete. To continue an "
                    "interrupted run, give its --run-id.",
                )

    async def _refusals(self, listed: Sequence[ListedShard]) -> list[str]:
        """Return the reasons to refuse a real run now. The run may find more reasons in databases."""
        refusals = []
        try:
            require_idle(listed)
        except NotAllowed as error:
            refusals.append(str(error))
        try:
            await self._require_stateless(listed)
        except NotAllowed as error:
            refusals.append(str(error))
        return refusals

    async def _look(self, listed: Sequence[ListedShard]) -> dict[str, HeldState]:
        """Return the states in databases, as of one moment at which all shards were idle.

        Check the shards again after the look. A shard that opens its state after the look increments the
        fence, so this run cannot write to the state. Raise ``Conflict`` for a shard that was changed.
        """
        specs = [shard.spec for shard in listed if not shard.spec.recovery_log]
        if not specs:
            return {}
        held = await self._records.blocking(look, self._backfill, specs, self._settings.fqn)
        await self._require_unchanged(listed)
        return held

    async def _require_unchanged(self, listed: Sequence[ListedShard]) -> None:
        """Raise ``Conflict`` if shards are not idle, or were changed since they were listed."""
        listed_now = await self._shards.list_shards(self._settings.selector)
        require_unchanged(listed, listed_now.shards)

    async def _has_state(self, spec: ShardSpec) -> bool:
        """Return True if the shard has hints, or its log was written to. Ignore a state in a database."""
        stored = await self._shards.get_hints(spec.id)
        if any(hints is not None for hints in (stored.primary, *stored.backups)):
            return True
        await self._cutover.publication.check_log(spec.recovery_log)
        return await write_head(self._client, spec.recovery_log) > 0

    async def _published_before(
        self, listed: Sequence[ListedShard], published: Collection[str]
    ) -> Report | None:
        """Return the report of this run if its states were published already; else None. Raise ``Conflict``
        if the run was of other shards."""
        if not await self._records.is_published():
            manifest = await self._records.manifest()
            if manifest is None or {shard for shard, _ in manifest} != published:
                return None
            await self._records.mark_published(self._clock.now())
        plan = await self._records.plan()
        if plan is not None:
            plan.require_same(self._title, [shard.spec.id for shard in listed])
        return Report(self._settings.run_id, published=True, resumed=True)

    async def _published_shards(self, listed: Sequence[ListedShard]) -> set[str]:
        """Return the listed shards whose hints name the states of the run's manifest. No hints name a state
        in a database."""
        ids = {listed_shard.spec.id for listed_shard in listed}
        published: set[str] = set()
        if await self._records.is_published():
            return published
        for shard, attempt in await self._records.manifest() or ():
            built = (await self._records.staged(shard, attempt)).built
            if not built.log or shard not in ids:
                continue
            if is_published(built, await self._shards.get_hints(shard)):
                published.add(shard)
        return published

    async def _plan(
        self,
        listed: Sequence[ListedShard],
        held: dict[str, HeldState],
        on_begin: Callable[[], None],
        *,
        dry_run: bool,
    ) -> tuple[FoldedSnapshot, list[ShardTask]]:
        """Return the folded history, and a task for each shard.

        A new run stores its plan, and can be resumed from then on. A resumed run takes begins, ends,
        token, verified shards and partitions from the stored plan. So it reads the same bytes. A dry run
        stores nothing, and keeps no rows for a second pass.
        """
        # Make all checks that need no first pass before the plan is stored. So a refused run stores nothing.
        ids = [shard.spec.id for shard in listed]
        specs = [shard.spec for shard in listed]
        plan = await self._records.plan()
        self._resumed = plan is not None
        if plan is not None:
            plan.require_same(self._title, ids)
        token = f"{self._rng.getrandbits(64):016x}" if plan is None else plan.token
        verified = self._verified(listed) if plan is None else plan.verified
        require_comparable(self._backfill, verified)
        require_claimable(held, token, overwrite=self._settings.overwrite)
        if await self._records.manifest() is not None:
            require_in_force(held, token)

        def taking() -> tuple[Snapshot, tuple[Partition, ...]]:
            with self._access.open() as opened:
                planned = None if plan is None else plan.partitions
                partitions = list_partitions(opened, self._backfill, planned)
                snapshot = plan_snapshot(
                    opened, self._backfill, specs, self._settings.end, plan=plan
                )
                return snapshot, partitions

        snapshot, partitions = await self._records.blocking(taking)
        if plan is not None and await self._records.manifest() is None:
            plan.require_stored(snapshot)
        self._cutover.require_published(listed, {j.journal: j.end for j in snapshot.journals})
        if plan is None and not dry_run:
            created = time_text(self._clock.now())
            await self._records.make_plan(
                Plan.of(self._title, ids, snapshot, created, token, verified, partitions)
            )
        if not dry_run:
            on_begin()
        self.progress.begin("first pass", snapshot.length)
        backfill = None if dry_run else self._name or self._backfill
        folded = await self._records.blocking(
            self._runner.fold, self._access, snapshot, self.progress.add, backfill
        )

        def making() -> list[ShardTask]:
            return tasks_of(
                self._backfill,
                self._name,
                specs,
                folded,
                self._access,
                self._settings,
                partitions=partitions,
                claims=claims_of(held, token),
                verified=verified,
            )

        tasks = await self._records.blocking(making)
        self._cutover.require_whole({task.spec.id: task.checkpoint for task in tasks})
        return folded, tasks

    async def _build(self, tasks: Sequence[ShardTask]) -> list[Attempt]:
        """Return the attempt of each task that counts: of the manifest, or else a new attempt."""
        manifest = await self._records.manifest()
        if manifest is None:
            checkpoints = {task.spec.id: task.checkpoint for task in tasks}
            staged = await self._records.staged_before(checkpoints)
            missing = [task for task in tasks if task.spec.id not in staged]
            total = sum(run.run.length for task in missing for run in task.runs)
            self.progress.begin("building", total)
            for attempt in await self._records.blocking(
                self._runner.build, missing, self.progress.add
            ):
                staged[attempt.shard] = attempt
            _require_complete(tasks, staged)
            attempts = {shard: attempt.attempt for shard, attempt in staged.items()}
            if await self._records.make_manifest(attempts):
                return [staged[task.spec.id] for task in tasks]
            # Another driver was faster: the attempts of its manifest count.
            manifest = await self._records.manifest()
            assert manifest is not None
        built = {shard: await self._records.staged(shard, attempt) for shard, attempt in manifest}
        _require_complete(tasks, built)
        return [built[task.spec.id] for task in tasks]

    async def _verify(
        self, tasks: Sequence[ShardTask], attempts: Sequence[Attempt], directory: Path
    ) -> tuple[str, ...]:
        """Compare some states with a replay. Return the verified shards, even those verified while they were
        built. Raise ``Corrupt`` for a difference."""
        chosen = set(_spread(self._settings.verify, [task.spec.id for task in tasks]))
        with_tasks = list(zip(tasks, attempts, strict=True))
        # States in a database were verified before their commit.
        verified = [attempt.shard for attempt in attempts if attempt.built.facts.get("verified")]
        pairs = [(task, one) for task, one in with_tasks if one.built.log and one.shard in chosen]
        self.progress.begin(
            "verifying", sum(run.run.length for task, _ in pairs for run in task.runs)
        )
        for task, attempt in pairs:
            path = await self._records.fetch(attempt, directory)
            difference: Difference | None = await self._records.blocking(
                verify, task, attempt.built, path, self.progress.add
            )
            if difference is not None:
                raise differs_from_replay(task.spec.id, str(difference))
            verified.append(attempt.shard)
        return tuple(sorted(verified))

    def _verified(self, listed: Sequence[ListedShard]) -> list[str]:
        """Return the shards whose states in a database are verified before their commit."""
        chosen = _spread(self._settings.verify, [entry.spec.id for entry in listed])
        in_databases = {entry.spec.id for entry in listed if not entry.spec.recovery_log}
        return [shard for shard in chosen if shard in in_databases]


def _require_complete(tasks: Sequence[ShardTask], attempts: Iterable[str]) -> None:
    """Raise `Bug` unless ``attempts``, which are ids of shards, are the ids of the tasks' shards."""
    expected, built = {task.spec.id for task in tasks}, set(attempts)
    if expected != built:
        raise Bug(
            "the built states are not those of the run's shards",
            missing=sorted(expected - built)[:5],
            unexpected=sorted(built - expected)[:5],
        )


def _spread(count: int, shards: Sequence[str]) -> list[str]:
    """Return at most ``count`` shards at even distances: the first one, and the last one, too, of several."""
    last = len(shards) - 1
    positions = {round(n * last / max(1, count - 1)) for n in range(min(count, len(shards)))}
    return [shards[position] for position in sorted(positions)]
