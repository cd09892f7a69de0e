"""The last act of the demonstration: the state of a shard is wiped, and rebuilt from history."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.markup import escape

from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.values import Compare, Op
from gazette.errors import Broken, Unavailable, not_installed
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.shard import ShardSpec
from gazette.run.dev.processes import ChildProcess, python_module
from gazette.run.dev.word_count import LOGS, WordCountCluster, examples_path
from gazette.runtime.clock import Clock
from gazette.runtime.private_paths import make_private_directory

APP: Final = "word_count.backfill:WordCountBackfill"
SPARK_MASTER: Final = "local[*]"
NEW_LOGS: Final = f"{LOGS}-new"
_SPARK_PACKAGES: Final = ("pyspark", "pyarrow", "pandas")
_WAIT_S: Final = 60.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Runner:
    """The runner that builds the state: Spark, or the processes of the local runner."""

    spark: bool
    reason: str = ""
    """Why the runner is not Spark; empty if a flag chose the runner."""

    @property
    def name(self) -> str:
        """Name of the runner in reports."""
        return "spark" if self.spark else "local"

    @property
    def flag(self) -> str:
        """Flag of ``gazctl shards backfill``."""
        return f"--master={SPARK_MASTER}" if self.spark else "--local"

    @property
    def by(self) -> str:
        return " by Spark" if self.spark else " without Spark"

    @property
    def description(self) -> str:
        if self.spark:
            return f"on Spark ({SPARK_MASTER})"
        # Rich takes text in brackets for markup.
        about = f": {escape(self.reason)}" if self.reason else ""
        return f"with processes of this machine, without Spark{about}"


def choose_runner(forced: bool | None, environ: Mapping[str, str]) -> Runner:
    """Return the runner that ``forced`` asks for: Spark for True. None chooses Spark if Spark can run.

    The search for Java starts ``java -version`` at most. Raise ``Invalid`` if Spark is forced and not
    installed, ``Unavailable`` if it is forced and has no Java.
    """
    if forced is False:
        return Runner(spark=False)
    missing = [name for name in _SPARK_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        if forced:
            raise not_installed(
                "Spark", missing[0], "spark", path="--spark", hint="Or leave the flag out."
            )
        return Runner(spark=False, reason="pygazette[spark] is not installed")
    from gazette.history.spark.java import ensure_java

    try:
        ensure_java(environ)
    except Unavailable as error:
        if forced:
            raise
        return Runner(spark=False, reason=error.message)
    return Runner(spark=True)


class BackfillAct:
    """Wipes the first shard as an operator would, and backfills it with ``gazctl``."""

    def __init__(
        self,
        words: WordCountCluster,
        clock: Clock,
        say: Callable[[str], None],
        runner: Runner,
    ) -> None:
        self.shard = words.shard_ids[0]
        self._runner = runner
        self.seconds = 0.0
        self.messages = 0
        self._words = words
        self._clock = clock
        self._say = say

    async def run(self) -> None:
        """Wipe, backfill, and return when the shard serves again. Raise ``GazetteError`` if a step fails."""
        self._say(
            f"\n[yellow]✗ wiping the state of {self.shard}[/]: its recovery log and its hints"
        )
        await self._wipe()
        self._say(
            f"  rebuilding it from the history of its partition, {self._runner.description} …"
        )
        began = self._clock.monotonic()
        report = await self._backfill(self._runner.flag)
        self.seconds = self._clock.monotonic() - began
        self.messages = report["history_messages"]
        await self._words.await_shards(standbys=False)
        self._say(
            f"[green]✓ {self.shard} serves again[/]: {self.messages:,} messages folded in"
            f" {self.seconds:.1f} s{self._runner.by}, and it goes on at the offset where they end"
        )

    async def _wipe(self) -> None:
        """Disable the shard, delete its hints and its log, and give it an empty log of another name."""
        words = self._words
        spec = await self._disabled()
        settings = EtcdSettings(endpoints=(words.cluster.etcd.endpoint,))
        async with await Etcd.connect(settings, self._clock) as etcd:
            keys = (spec.hint_primary_key, *spec.hint_backup_keys)
            compares: tuple[Compare, ...] = ()
            await etcd.txn(compares, tuple(Op.delete(key) for key in keys))
        async with self._client() as client:
            old_log = next(log for log in words.journal_specs() if log.name == spec.recovery_log)
            new_log = replace(old_log, name=f"{NEW_LOGS}/{spec.id}")
            await client.apply_journals(
                [
                    JournalChange(delete=old_log.name, expect_mod_revision=-1),
                    JournalChange(upsert=new_log),
                ]
            )
        changed_spec = replace(spec, recovery_log_prefix=NEW_LOGS)
        async with words.shard_client() as shards:
            await shards.apply_shards([ShardChange(upsert=changed_spec, expect_mod_revision=-1)])

    async def _disabled(self) -> ShardSpec:
        """Disable the shard. Return its specification once no member serves the shard. Raise ``Unavailable``
        on timeout."""
        deadline = self._clock.monotonic() + _WAIT_S
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
        brokers = [broker for broker in self._words.cluster.brokers if broker.process.running]
        return Client(",".join(broker.grpc_url for broker in brokers), clock=self._clock)

    async def _backfill(self, runner: str) -> dict[str, Any]:
        """Run ``gazctl shards backfill``, and return its report. Raise ``Broken`` if it fails."""
        cluster = self._words.cluster
        brokers = ",".join(broker.grpc_url for broker in cluster.brokers if broker.process.running)
        member = next(member for member in self._words.members if member.process.running)
        python_path = [str(examples_path()), cluster.environ.get("PYTHONPATH", "")]
        scratch = cluster.directory / "scratch" / "backfill"
        make_private_directory(scratch)
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
            {**cluster.environ, "PYTHONPATH": os.pathsep.join(filter(None, python_path))},
            self._clock,
        )
        await process.start()
        try:
            if await process.wait():
                raise Broken(
                    f"the backfill failed:\n{process.log_tail()}",
                    hint="Run `gazette demo --no-spark`, which needs no Spark."
                    if self._runner.spark
                    else None,
                )
        finally:
            await process.stop(5.0)
        # The report is one line of the log. Other lines are progress, and logs of Spark, maybe in JSON.
        lines = process.log_path.read_text("utf-8").splitlines()
        report: dict[str, Any] = json.loads(
            next(line for line in lines if line.startswith('{"run_id"'))
        )
        return report
