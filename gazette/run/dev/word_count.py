"""The word count on a local cluster, for the demonstration and for fault tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gazette
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.shards import ListedShard, ShardChange, ShardClient
from gazette.errors import GazetteError, NotFound, Unavailable
from gazette.labels import CONTENT_PROTO_FIXED, CONTENT_RECOVERY_LOG, CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ReplicaCode, ShardSource, ShardSpec
from gazette.protocol.text import duration
from gazette.run.dev.cluster import LocalCluster
from gazette.run.dev.processes import ChildProcess, await_ready, python_module
from gazette.runtime.clock import Clock
from gazette.runtime.ports import bracketed, free_port
from gazette.runtime.private_paths import make_private_directory
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout

STORE: Final = "file:///"
WORDS: Final = "words/part-{:03d}"
LOGS: Final = "recovery/words"
PREFIX: Final = "/gazette/consumers/word-count"
HINTS: Final = "/gazette/hints/word-count"
NGRAM_TYPE: Final = "word_count.NGramCount"


def examples_path() -> Path:
    """Return the directory of the example applications: beside the package in a checkout, within the package
    in a wheel. Raise ``NotFound`` if they are not installed."""
    package = Path(gazette.__file__).resolve().parent
    for path in (package.parent / "examples", package / "_examples"):
        if (path / "word_count" / "app.py").exists():
            return path
    raise NotFound(
        "the example applications are not installed",
        hint="Install from a checkout (`pip install -e .`), or from a wheel.",
    )


def import_examples() -> None:
    """Make ``import word_count`` work in this process."""
    path = str(examples_path())
    if path not in sys.path:
        sys.path.insert(0, path)


@dataclass(slots=True)
class Member:
    """A process of the application and its addresses."""

    process: ChildProcess
    zone: str
    host: str
    grpc_port: int
    http_port: int

    @property
    def id(self) -> str:
        return self.process.name

    @property
    def grpc_url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.http_port}"


@dataclass(frozen=True, slots=True)
class WordCountSettings:
    """Settings of the word count. Sizes in bytes, times in seconds."""

    partitions: int = 4
    replication: int = 2
    hot_standbys: int = 1
    fragment_bytes: int = 16 << 20
    max_txn_s: float = 1.0
    lease_ttl_s: float = 5.0
    hints_interval_s: float = 300.0


class WordCountCluster:
    """Journals, shards and members of the word count, on a started `LocalCluster`."""

    def __init__(self, cluster: LocalCluster, settings: WordCountSettings, clock: Clock) -> None:
        self.cluster = cluster
        self.settings = settings
        self.members: list[Member] = []
        self.client = Client(",".join(broker.grpc_url for broker in cluster.brokers), clock=clock)
        self._clock = clock
        self._started = 0

    @property
    def partitions(self) -> list[str]:
        return [WORDS.format(index) for index in range(self.settings.partitions)]

    @property
    def shard_ids(self) -> list[str]:
        return [f"shard-{index:03d}" for index in range(self.settings.partitions)]

    # -- specifications

    def journal_specs(self) -> list[JournalSpec]:
        settings = self.settings
        fragment = FragmentSpec(
            length=settings.fragment_bytes,
            codec=Codec.ZSTANDARD,
            stores=(STORE,),
            refresh_interval_ns=5 * duration.MINUTE,
            flush_interval_ns=10 * duration.MINUTE,
        )
        words = LabelSet.of((MESSAGE_TYPE, NGRAM_TYPE), (CONTENT_TYPE, CONTENT_PROTO_FIXED))
        logs = LabelSet.of((CONTENT_TYPE, CONTENT_RECOVERY_LOG))
        return [
            *(JournalSpec(name, settings.replication, words, fragment) for name in self.partitions),
            *(
                JournalSpec(f"{LOGS}/{name}", settings.replication, logs, fragment)
                for name in self.shard_ids
            ),
        ]

    def shard_specs(self) -> list[ShardSpec]:
        return [
            ShardSpec(
                id=shard_id,
                sources=(ShardSource(journal),),
                recovery_log_prefix=LOGS,
                hint_prefix=HINTS,
                hint_backups=2,
                max_txn_duration_ns=int(self.settings.max_txn_s * 1e9),
                hot_standbys=self.settings.hot_standbys,
                labels=LabelSet.of(("app.gazette.dev/managed-by", "gazette-demo")),
            )
            for shard_id, journal in zip(self.shard_ids, self.partitions, strict=True)
        ]

    async def apply_journals(self) -> None:
        """Create the journals that are missing. Journals of an earlier run stay."""
        listed = {journal.spec.name for journal in (await self.client.list_journals()).journals}
        changes = [
            JournalChange(upsert=spec) for spec in self.journal_specs() if spec.name not in listed
        ]
        if changes:
            await self.client.apply_journals(changes)

    async def apply_shards(self) -> None:
        async with self.shard_client() as shards:
            listed = {shard.spec.id for shard in (await shards.list_shards()).shards}
            changes = [
                ShardChange(upsert=spec) for spec in self.shard_specs() if spec.id not in listed
            ]
            if changes:
                await shards.apply_shards(changes)

    # -- members

    def shard_client(self, member: Member | None = None) -> ShardClient:
        """Return a client of one member, by default of the first that runs."""
        target = member or next(other for other in self.members if other.process.running)
        return ShardClient(target.grpc_url, route_cache_size=0, clock=self._clock)

    async def start_member(self, *, arguments: tuple[str, ...] = ()) -> Member:
        """Start one more member, and return when it is ready."""
        self._started += 1
        name = f"member-{self._started}"
        zone = f"zone-{'ab'[(self._started - 1) % 2]}"
        cluster, settings = self.cluster, self.settings
        grpc_port, http_port = free_port(), free_port()
        scratch = cluster.directory / "scratch" / name
        make_private_directory(scratch)
        brokers = ",".join(broker.grpc_url for broker in cluster.brokers)
        argv = python_module(
            "word_count",
            "serve",
            f"--consumer.id={name}",
            f"--consumer.zone={zone}",
            f"--consumer.host={cluster.settings.advertised_host}",
            f"--consumer.bind-host={cluster.settings.host}",
            f"--consumer.port={grpc_port}",
            f"--consumer.http-port={http_port}",
            f"--consumer.scratch-dir={scratch}",
            f"--consumer.hints-interval={settings.hints_interval_s}s",
            "--consumer.drain-timeout=0s",
            f"--broker.address={brokers}",
            f"--broker.file-root={cluster.directory / 'fragments'}",
            f"--etcd.address={cluster.etcd.endpoint}",
            f"--etcd.prefix={PREFIX}",
            f"--etcd.lease={settings.lease_ttl_s}s",
            f"--log.level={cluster.settings.log_level}",
            *arguments,
        )
        environ: Mapping[str, str] = {
            **cluster.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(examples_path()), cluster.environ.get("PYTHONPATH", "")])
            ),
        }
        log_path = cluster.directory / "logs" / f"{name}.log"
        process = ChildProcess(
            name, argv, log_path, environ, self._clock, pass_fds=(cluster.etcd.lifeline,)
        )
        await process.start()
        host = cluster.settings.advertised_host
        member = Member(process, zone, host, grpc_port, http_port)
        self.members.append(member)
        await await_ready(
            process, http_port, self._clock, cluster.settings.ready_timeout_s, host=host
        )
        return member

    async def listed_shards(self, member: Member | None = None) -> tuple[ListedShard, ...]:
        async with self.shard_client(member) as shards:
            listed: tuple[ListedShard, ...] = (await shards.list_shards()).shards
            return listed

    async def await_shards(self, *, standbys: bool, timeout_s: float = 60.0) -> None:
        """Return when all shards have a primary and ready replicas; with ``standbys``, also hot standbys.

        Raise ``Unavailable`` with the statuses after ``timeout_s``, ``GazetteError`` if a shard fails.
        """
        deadline = self._clock.monotonic() + timeout_s
        while True:
            shards = await self.listed_shards()
            for shard in shards:
                for status in shard.status:
                    if status.code is ReplicaCode.FAILED:
                        raise GazetteError(f"shard {shard.spec.id} failed: {status.errors[0]}")
            if len(shards) == self.settings.partitions and all(
                self._is_up(shard, standbys=standbys) for shard in shards
            ):
                return
            if self._clock.monotonic() > deadline:
                states = {
                    shard.spec.id: [status.code.name for status in shard.status] for shard in shards
                }
                raise Unavailable(f"shards are not up after {timeout_s:.0f} s: {states}")
            await self._clock.sleep(0.1)

    def _is_up(self, shard: ListedShard, *, standbys: bool) -> bool:
        codes = [status.code for status in shard.status]
        replicas = 1 + (self.settings.hot_standbys if standbys else 0)
        return (
            ReplicaCode.PRIMARY in codes
            and len(codes) >= replicas
            and all(code >= ReplicaCode.STANDBY for code in codes)
        )

    async def primaries(self) -> dict[str, list[str]]:
        """Return the shards that each member is primary for, by the id of the member."""
        shards_of: dict[str, list[str]] = {}
        for shard in await self.listed_shards():
            if (primary := shard.route.primary_id) is not None:
                shards_of.setdefault(primary.suffix, []).append(shard.spec.id)
        return shards_of

    async def await_read_through(self, offsets: Mapping[str, int], timeout_s: float) -> None:
        """Return when the shards have consumed all partitions up to these offsets."""
        async with timeout(timeout_s), TaskScope("read through") as scope:
            for shard_id, journal in zip(self.shard_ids, self.partitions, strict=True):
                scope.spawn(self._await_one(shard_id, journal, offsets[journal]), name=shard_id)

    async def _await_one(self, shard_id: str, journal: str, offset: int) -> None:
        """Return when a shard has consumed a journal up to ``offset``. Try again after each error."""
        while True:
            try:
                async with self.shard_client() as shards:
                    await shards.stat(shard_id, {journal: offset})
                    return
            except GazetteError:
                await self._clock.sleep(0.2)

    async def stop(self, timeout_s: float = 30.0) -> list[str]:
        """Stop all members. Return the names of members that had to be killed."""
        running = [member.process for member in self.members if member.process.running]
        in_time: list[Any] = await asyncio.gather(*(process.stop(timeout_s) for process in running))
        await self.client.close()
        return [process.name for process, ok in zip(running, in_time, strict=True) if not ok]
