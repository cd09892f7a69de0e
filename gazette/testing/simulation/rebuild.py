"""The fault that rebuilds a shard's state from its history by a backfill, as an operator does.

The shard is disabled. `BackfillRun` builds its state, appends it to the recovery log, and enables the shard.
The journals that it reads are copies, since its tasks block. All else is shipped code.
"""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gazette.client.client import Client
from gazette.client.shards import ListedShard, ShardChange, ShardClient
from gazette.errors import Conflict, Fenced, GazetteError, NotAllowed, NotYet, Unavailable
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.local import LocalRunner
from gazette.history.backfill.publish import why_live
from gazette.history.backfill.run import BackfillRun
from gazette.history.backfill.settings import HistoryEnd, RunSettings
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.label_set import LabelSelector
from gazette.recoverylog.time_travel import open_at
from gazette.runtime.timeouts import timeout
from gazette.runtime.user_code import place_of_error
from gazette.testing.simulation.copied_history import CopiedAccess, CopiedBrokers
from gazette.testing.simulation.fold import committed_spans, source_framing
from gazette.testing.simulation.loop import NodeClock, SimNode
from gazette.testing.simulation.shard_history import Rebuilt
from gazette.testing.simulation.travel import Logs

_WITHIN_S: Final = 90.0
"""Virtual seconds after which a rebuild is given up."""
_POLL_S: Final = 0.5
_REFUSALS: Final = (NotAllowed, Conflict, Fenced, Unavailable, NotYet, TimeoutError)
"""Errors of a backfill that faults explain: for example a zombie has written, or brokers were too slow."""


class _HerePool:
    """A `Pool` that performs calls at once: no virtual time passes."""

    async def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def submit(self, call: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(call(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller that waits
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Do nothing: there are no threads."""


@dataclass(frozen=True, slots=True)
class _Former:
    """The state that a rebuild replaces, and the content of the shard's sources."""

    checkpoint: Checkpoint
    content: dict[str, bytes]


class Rebuild:
    """One rebuild of one shard."""

    def __init__(self, run: Any, backfill: Backfill, shard_id: str, number: int) -> None:
        self._run = run
        self._backfill = backfill
        self._shard_id = shard_id
        self._name = f"rebuild-{number}"
        cluster = run.cluster
        self._node = SimNode(cluster.loop, self._name)
        self._clock = NodeClock(cluster.loop)
        self._rng = random.Random(f"{self._name} {shard_id} {run.story.seed}")
        self._client: Client = cluster.client(self._node, *cluster.broker_hosts)
        self._shards: ShardClient = run.faults.shard_client(self._node)
        self._root: Path = cluster.scratch / self._name

    async def perform(self) -> str:
        """Rebuild the state. Return its result as text; empty if there was no state.

        Errors of the user's code reach the caller.
        """
        try:
            async with timeout(_WITHIN_S):
                await self._disable()
                former = await self._former()
                if not former.checkpoint.sources:
                    return ""
                await self._rebuild(former)
                return "done"
        except _REFUSALS as error:
            self._run.cluster.say(self._name, f"refused: {type(error).__name__}", error)
            return "refused"
        finally:
            await self._enable()

    async def _listed(self) -> ListedShard:
        (listed,) = (await self._shards.list_shards(LabelSelector.of(id=self._shard_id))).shards
        return listed

    async def _disable(self) -> None:
        """Disable the shard, and wait until no member has it."""
        listed = await self._listed()
        disabled = replace(listed.spec, disable=True)
        change = ShardChange(upsert=disabled, expect_mod_revision=listed.mod_revision)
        await self._shards.apply_shards([change])
        while why_live(await self._listed()):
            await self._clock.sleep(_POLL_S)

    async def _enable(self) -> None:
        """Write that the shard is enabled. Repeat the call until a member answers.

        Write the specification even if it is enabled: a call to disable it may still be on its way.
        """
        while True:
            try:
                listed = await self._listed()
                enabled = replace(listed.spec, disable=False)
                change = ShardChange(upsert=enabled, expect_mod_revision=listed.mod_revision)
                await self._shards.apply_shards([change])
                return
            except GazetteError:
                await self._clock.sleep(_POLL_S)

    async def _former(self) -> _Former:
        """Read the state at the end of the recovery log, and the sources."""
        spec, content = (await self._listed()).spec, {}
        for source in spec.sources:
            content[source.journal] = await self._run.content_of(self._client, source.journal)
        log = spec.recovery_log
        logs = Logs({log: await self._run.content_of(self._client, log)})
        if not logs.content[log]:
            return _Former(Checkpoint(), content)
        hints = await self._shards.get_hints(self._shard_id)
        stored = [each for each in (hints.primary, *hints.backups) if each is not None]
        with open_at(logs, [*stored, FSMHints(log=log)], self._root / "former") as state:
            return _Former(state.checkpoint, content)

    async def _rebuild(self, former: _Former) -> None:
        run, spec = self._run, (await self._listed()).spec
        sources = former.checkpoint.sources
        ends = {
            name: sources[name].read_through if name in sources else 0 for name in former.content
        }
        publishes = self._backfill.discard_publications or former.checkpoint.ack_intents
        if not publishes and self._rng.random() < 0.5:
            ends = {name: len(data) for name, data in former.content.items()}
        journals = [await self._client.get_journal(name) for name in sorted(former.content)]
        (self._root / "staging").mkdir(parents=True, exist_ok=True)
        brokers = CopiedBrokers(journals, former.content, self._root)
        application = run.setup.new_application()
        spans = {
            listed.spec.name: list(
                committed_spans(
                    listed.spec.name,
                    source_framing(application, listed.spec),
                    former.content[listed.spec.name][: ends[listed.spec.name]],
                )
            )
            for listed in journals
        }
        run.history.note_rebuilt(Rebuilt(spec.id, former.checkpoint, ends, spans, run.wall_clock()))
        backfill = BackfillRun(
            self._backfill,
            "",
            RunSettings(
                LabelSelector.of(id=spec.id),
                str(self._root / "staging"),
                self._name,
                HistoryEnd(ends),
                enable=True,
                overwrite=True,
                scratch=self._root,
            ),
            LocalRunner(1),
            CopiedAccess(None, self._root, True, copied=brokers),
            self._client,
            self._shards,
            self._clock,
            self._rng,
        )
        backfill._records.pool = _HerePool()  # type: ignore[assignment]
        await backfill.run()


async def rebuild(run: Any, shard_id: str, number: int) -> str:
    """Rebuild a shard's state by the user's backfill. Return the result as text.

    Note an error of the backfill as a finding of the run.
    """
    backfill = run.setup.backfill
    try:
        return await Rebuild(run, backfill(), shard_id, number).perform()
    except Exception as error:  # noqa: BLE001 - of the user's backfill
        run.note_finding(
            f"the backfill of {shard_id} fails: {type(error).__name__}: {error}",
            place_of_error(error),
            "backfill",
        )
        return "failed"
