"""A broker with words, a consumer, and runs of backfills of its shards."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gazette.client.append.appender import AppendParams
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.local import LocalRunner
from gazette.history.backfill.report import Report
from gazette.history.backfill.run import BackfillRun
from gazette.history.backfill.settings import RunSettings
from gazette.history.backfill.verify import opened_files
from gazette.history.source import Access
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.playback.player import Player
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import BlockingPool, resolved
from gazette.stores.state_builder import OfflineShard
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from gazette.testing.stored import json_line

ALPHA, BETA, GAMMA = (bytes([1, 0, 0, 0, 0, number]) for number in (1, 2, 3))


def source(name: str) -> Any:
    return journal_spec(name, labels=LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES)))


def line(producer: bytes, clock: int, flags: int = OUTSIDE_TXN, word: str = "") -> bytes:
    return json_line({"word": word}, build_uuid(producer, clock << 4, flags))


class Line(Protocol):
    """Makes a line of a journal."""

    def __call__(
        self, producer: bytes, clock: int, flags: int = OUTSIDE_TXN, word: str = ""
    ) -> bytes: ...


def history(
    rng: random.Random, count: int, first_clock: int = 1000, line: Line = line
) -> list[bytes]:
    """Return lines of several producers: with duplicates, roll-backs, and transactions that stay open."""
    lines: list[bytes] = []
    acks: set[bytes] = set()
    clocks = dict.fromkeys((ALPHA, BETA, GAMMA), first_clock)
    pending: dict[bytes, list[bytes]] = {one: [] for one in clocks}
    acked = dict(clocks)
    while len(lines) < count:
        producer = rng.choice(list(clocks))
        clocks[producer] += rng.randrange(1, 5)
        clock, word = clocks[producer], f"w{rng.randrange(40)}"
        action = rng.random()
        if action < 0.5 or pending[producer]:
            if action < 0.6:
                pending[producer].append(line(producer, clock, CONTINUE_TXN, word))
                lines.append(pending[producer][-1])
            elif action < 0.9:
                lines.append(line(producer, clock, ACK_TXN))
                acks.add(lines[-1])
                acked[producer] = clock
                pending[producer].clear()
            else:
                lines.append(line(producer, acked[producer], ACK_TXN))  # Rolls back.
                acks.add(lines[-1])
                clocks[producer] = acked[producer]
                pending[producer].clear()
        else:
            lines.append(line(producer, clock, OUTSIDE_TXN, word))
            acked[producer] = clock
        if rng.random() < 0.2:
            again = rng.randrange(max(0, len(lines) - 6), len(lines))
            repeated = lines[again]
            if not any(repeated in one for one in pending.values()) and repeated not in acks:
                lines.append(repeated)
    return lines


def shard_settings(shard_id: str, *sources: str, **fields: Any) -> ShardSpec:
    return shard_spec(shard_id, *sources, **{"disable": True, **fields})


class Cluster:
    """What tests of runs need. ``staging`` and ``scratch`` are theirs to look into."""

    def __init__(self, broker: BrokerFixture, consumer: ConsumerFixture, tmp_path: Path) -> None:
        self.broker = broker
        self.consumer = consumer
        self.staging = tmp_path / "staging"
        self.staging_url = ""
        """Elsewhere, if set."""
        self.scratch = tmp_path / "builds"
        self.scratch.mkdir()

    @property
    def access(self) -> Access:
        return Access.of(self.broker.endpoint, file_root=self.broker.file_root)

    async def append(self, journal: str, lines: Sequence[bytes], batch: int = 7) -> None:
        for begin in range(0, len(lines), batch):
            content = b"".join(lines[begin : begin + batch])
            await self.broker.client.append(AppendParams(journal), content)

    async def create(self, *specs: ShardSpec) -> None:
        """Create shards that stay disabled, with their logs."""
        from gazette.client.shards import ShardChange

        await self.broker.create(*(log_spec(one.id) for one in specs if one.recovery_log))
        await self.consumer.shards.apply_shards([ShardChange(upsert=one) for one in specs])

    async def spec(self, shard_id: str) -> ShardSpec:
        selector = LabelSelector.of(id=shard_id)
        return (await self.consumer.shards.list_shards(selector)).shards[0].spec

    async def enable(self, shard_id: str) -> None:
        await self.consumer.update(replace(await self.spec(shard_id), disable=False))
        await self.consumer.await_primary(shard_id)

    async def disable(self, shard_id: str) -> None:
        await self.consumer.update(replace(await self.spec(shard_id), disable=True))
        await self.consumer.until(lambda: not self.consumer.assignments(shard_id))

    def job(
        self,
        backfill: Backfill,
        *,
        shards: str = "id",
        run_id: str = "run",
        runner: Any = None,
        name: str = "",
        **settings: Any,
    ) -> BackfillRun:
        return BackfillRun(
            backfill,
            name,
            RunSettings(
                LabelSelector.parse(shards),
                self.staging_url or str(self.staging),
                run_id,
                scratch=self.scratch,
                **settings,
            ),
            LocalRunner(1) if runner is None else runner,
            self.access,
            self.broker.client,
            self.consumer.shards,
            SystemClock(),
            random.Random(run_id),
        )

    async def backfill(self, backfill: Backfill, **settings: Any) -> Report:
        report = await self.job(backfill, **settings).run()
        assert not list(self.scratch.iterdir()), "something was left on the local disk"
        return report

    async def state(self, shard_id: str, backfill: Backfill) -> tuple[list[Any], Checkpoint]:
        """Return the content, and the checkpoint, of a shard that has read its sources to their heads.

        Both are read from its recovery log after the shard was disabled; it stays so.
        """
        await self.consumer.read_to_heads(shard_id)
        await self.disable(shard_id)
        return await self.played(shard_id, backfill)

    async def played(self, shard_id: str, backfill: Backfill) -> tuple[list[Any], Checkpoint]:
        """Return rows, and the checkpoint, in the recovery log of a shard that does not run."""
        spec = await self.spec(shard_id)
        hints = (await self.consumer.shards.get_hints(shard_id)).primary
        directory = self.scratch / f"look-{shard_id}"
        pool = BlockingPool("look", 2)
        try:
            hints = hints or FSMHints(log=spec.recovery_log)
            player = Player(hints, directory, self.broker.client, SystemClock(), pool)
            player.finish()
            fsm = (await player.play()).fsm

            def look() -> tuple[list[Any], Checkpoint]:
                with opened_files(backfill, spec, fsm, directory) as (store, checkpoint):
                    shard: Any = OfflineShard(spec, "", lambda: resolved(None))
                    content = backfill.content(shard, store)
                    return [row for row in content if row[0] != "sqlite_master"], checkpoint

            return await pool.run(look)
        finally:
            pool.close()
            shutil.rmtree(directory, ignore_errors=True)
