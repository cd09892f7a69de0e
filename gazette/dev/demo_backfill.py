"""The last act of the demonstration: the state of a shard is wiped, and made again from history."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange
from gazette.clock import Clock
from gazette.dev.processes import ChildProcess, python_module
from gazette.dev.word_count import LOGS, WordCountCluster, examples_path
from gazette.errors import Broken, Unavailable
from gazette.etcd import Etcd, EtcdSettings
from gazette.etcd_values import Compare, Op
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.shard import ShardSpec

APP: Final = "word_count.backfill:WordCountBackfill"
SPARK_MASTER: Final = "local[*]"
NEW_LOGS: Final = f"{LOGS}-anew"
_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.05


class BackfillAct:
    """Wipes the first shard as an operator would, and backfills it with ``gazctl``."""

    def __init__(
        self,
        words: WordCountCluster,
        clock: Clock,
        say: Callable[[str], None],
        *,
        spark: bool = False,
    ) -> None:
        """On Spark, or (default) with the processes of the local runner."""
        self.shard = words.shard_ids[0]
        self.runner = "spark" if spark else "local"
        self.seconds = 0.0
        self.messages = 0
        self._words = words
        self._clock = clock
        self._say = say

    async def run(self) -> None:
        """Wipe, backfill, and return when the shard serves again. Raises ``GazetteError``."""
        self._say(
            f"\n[yellow]✗ wiping the state of {self.shard}[/]: its recovery log and its hints"
        )
        await self._wipe()
        how = (
            f"on Spark ({SPARK_MASTER})"
            if self.runner == "spark"
            else "with the local runner (processes of this machine, without Spark)"
        )
        self._say(f"  making it again from the history of its partition, {how} …")
        began = self._clock.monotonic()
        report = await self._backfill(
            f"--master={SPARK_MASTER}" if self.runner == "spark" else "--local"
        )
        self.seconds = self._clock.monotonic() - began
        self.messages = report["history_messages"]
        await self._words.await_shards(standbys=False)
        self._say(
            f"[green]✓ {self.shard} serves again[/]: {self.messages:,} messages folded in"
            f" {self.seconds:.1f} s, and it goes on at the offset where they end"
        )

    async def _wipe(self) -> None:
        words = self._words
        spec = await self._disabled()
        settings = EtcdSettings(endpoints=(words.cluster.etcd.endpoint,))
        async with await Etcd.connect(settings, self._clock) as etcd:
            keys = (spec.hint_primary_key, *spec.hint_backup_keys)
            compares: tuple[Compare, ...] = ()
            await etcd.txn(compares, tuple(Op.delete(key) for key in keys))
        async with self._client() as client:
            old = next(one for one in words.journal_specs() if one.name == spec.recovery_log)
            anew = replace(old, name=f"{NEW_LOGS}/{spec.id}")
            await client.apply_journals(
                [
                    JournalChange(delete=old.name, expect_mod_revision=-1),
                    JournalChange(upsert=anew),
                ]
            )
        changed = replace(spec, recovery_log_prefix=NEW_LOGS)
        async with words.shard_client() as shards:
            await shards.apply_shards([ShardChange(upsert=changed, expect_mod_revision=-1)])

    async def _disabled(self) -> ShardSpec:
        """Disable the shard, and return when nobody holds it."""
        deadline = self._clock.monotonic() + _PATIENCE_S
        selector = LabelSelector.of(id=self.shard)
        async with self._words.shard_client() as shards:
            (listed,) = (await shards.list_shards(selector)).shards
            spec = replace(listed.spec, disable=True)
            await shards.apply_shards([ShardChange(upsert=spec, expect_mod_revision=-1)])
            while True:
                (listed,) = (await shards.list_shards(selector)).shards
                if not listed.route.members:
                    return spec
                if self._clock.monotonic() > deadline:
                    raise Unavailable("the members do not let go of the shard", shard=self.shard)
                await self._clock.sleep(_POLL_S)

    def _client(self) -> Client:
        running = [one for one in self._words.cluster.brokers if one.process.running]
        return Client(",".join(one.grpc_url for one in running), clock=self._clock)

    async def _backfill(self, runner: str) -> dict[str, Any]:
        """Run ``gazctl shards backfill``; its report."""
        cluster = self._words.cluster
        brokers = ",".join(one.grpc_url for one in cluster.brokers if one.process.running)
        member = next(one for one in self._words.members if one.process.running)
        path = [str(examples_path()), cluster.environ.get("PYTHONPATH", "")]
        scratch = cluster.directory / "scratch" / "backfill"
        scratch.mkdir(parents=True, exist_ok=True)
        process = ChildProcess(
            "backfill",
            python_module(
                "gazette.gazctl.main",
                "shards",
                "backfill",
                APP,
                f"--shards=id={self.shard}",
                f"--staging={cluster.directory / 'staging'}",
                f"--scratch-dir={scratch}",
                "--enable",
                "--format=json",
                runner,
                f"--broker.address={brokers}",
                f"--broker.file-root={cluster.directory / 'fragments'}",
                f"--consumer.address={member.grpc_url}",
            ),
            cluster.directory / "logs" / "backfill.log",
            {**cluster.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            self._clock,
        )
        await process.start()
        try:
            if await process.wait():
                raise Broken(f"the backfill failed:\n{process.log_tail()}")
        finally:
            await process.stop(5.0)
        # What it says of its progress is in the same file, and what Spark logs, which may be JSON as well.
        lines = process.log_path.read_text("utf-8").splitlines()
        report: dict[str, Any] = json.loads(
            next(one for one in lines if one.startswith('{"run_id"'))
        )
        return report
