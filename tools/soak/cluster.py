"""stream-sum on the cluster of `gazette chaos`: etcd, brokers and members, with links that can be cut."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, JournalChange
from gazette.client.shards import ListedShard, ShardChange, ShardClient
from gazette.errors import GazetteError, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ReplicaCode, ShardSource, ShardSpec
from gazette.protocol.text import duration
from gazette.run.dev.processes import ChildProcess, await_ready, python_module
from gazette.run.dev.word_count import examples_path
from gazette.runtime.clock import Clock
from gazette.runtime.ports import free_port
from tools.chaos.cluster import _ADVERTISED as ADVERTISED
from tools.chaos.cluster import _LISTEN as LISTEN
from tools.chaos.cluster import ETCD, STORE, ChaosCluster, ChaosSettings
from tools.chaos.cluster import ROOT as BROKERS
from tools.soak.database import Database

CHUNKS: Final = "stream-sum/chunks/part-{:03d}"
SUMS: Final = ("stream-sum/sums/part-000", "stream-sum/sums/part-001")
RECEIPTS: Final = "stream-sum/receipts/part-000"
LOGS: Final = "recovery/stream-sum"
ROOT: Final = "/gazette/consumers/stream-sum"
HINTS: Final = "/gazette/hints/stream-sum"
STORE_LABEL: Final = "store"
READY_S: Final = 90.0
POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """Times in seconds. There is a shard for each store named, in this order."""

    stores: tuple[str, ...] = ("sqlite", "rocksdb", "json", "sql")
    members: int = 3
    replication: int = 2
    hot_standbys: int = 1
    max_txn_s: float = 0.5
    hints_interval_s: float = 15.0
    drain_timeout_s: float = 15.0


@dataclass(slots=True)
class Member:
    """A process of the application."""

    name: str
    zone: str
    grpc_port: int
    http_port: int
    process: ChildProcess
    paused: bool = False

    @property
    def url(self) -> str:
        """URL of its gRPC server, not through the gateway."""
        return f"http://{LISTEN}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{LISTEN}:{self.http_port}"

    @property
    def serves(self) -> bool:
        return self.process.running and not self.paused


class SoakCluster(ChaosCluster):
    """``start`` starts etcd and brokers; ``start_members`` makes journals, members and shards."""

    def __init__(
        self, settings: SoakSettings, chaos: ChaosSettings, database: Database, clock: Clock
    ) -> None:
        super().__init__(chaos, clock)
        self.soak = settings
        self.database = database
        self.members: list[Member] = []

    def pids(self) -> dict[str, int]:
        """Return the present processes, by name."""
        pids = super().pids()
        return pids | {one.name: one.process.pid for one in self.members if one.process.running}

    @property
    def shard_ids(self) -> list[str]:
        return [f"shard-{index:03d}-{store}" for index, store in enumerate(self.soak.stores)]

    @property
    def chunk_journals(self) -> list[str]:
        return [CHUNKS.format(index) for index in range(len(self.soak.stores))]

    # -- specifications

    def journal_specs(self) -> list[JournalSpec]:
        fragment = FragmentSpec(
            length=256 << 10,
            codec=Codec.ZSTANDARD,
            stores=(f"file:///{STORE}/",),
            refresh_interval_ns=5 * duration.SECOND,
            flush_interval_ns=duration.MINUTE,
        )

        def spec(name: str, *labels: tuple[str, str]) -> JournalSpec:
            return JournalSpec(name, self.soak.replication, LabelSet.of(*labels), fragment)

        json = (CONTENT_TYPE, CONTENT_JSON_LINES)
        log = (CONTENT_TYPE, CONTENT_RECOVERY_LOG)
        named = zip(self.shard_ids, self.soak.stores, strict=True)
        return [
            *(spec(one, (MESSAGE_TYPE, "stream_sum.Chunk"), json) for one in self.chunk_journals),
            *(spec(one, (MESSAGE_TYPE, "stream_sum.Sum"), json) for one in SUMS),
            spec(RECEIPTS, (MESSAGE_TYPE, "stream_sum.Receipt"), json),
            *(spec(f"{LOGS}/{shard_id}", log) for shard_id, store in named if store != "sql"),
        ]

    def shard_specs(self) -> list[ShardSpec]:
        specs = []
        for shard_id, store, journal in zip(
            self.shard_ids, self.soak.stores, self.chunk_journals, strict=True
        ):
            has_log = store != "sql"
            specs.append(
                ShardSpec(
                    id=shard_id,
                    sources=(ShardSource(journal),),
                    recovery_log_prefix=LOGS if has_log else "",
                    hint_prefix=HINTS if has_log else "",
                    hint_backups=2,
                    max_txn_duration_ns=int(self.soak.max_txn_s * 1e9),
                    hot_standbys=self.soak.hot_standbys,
                    labels=LabelSet.of((STORE_LABEL, store)),
                )
            )
        return specs

    # -- members

    async def start_members(self) -> None:
        """Return when every shard has a primary and its standbys."""
        async with self.client() as client:
            await client.apply_journals([JournalChange(upsert=one) for one in self.journal_specs()])
        await self.until("replication of the journals", self.has_replicas, READY_S)
        for index in range(self.soak.members):
            await self._add_member(index)
        for member in self.members:
            await member.process.start()
        for member in self.members:
            await self.await_member(member)
        async with self.shard_client() as shards:
            await shards.apply_shards([ShardChange(upsert=one) for one in self.shard_specs()])
        await self.await_shards(READY_S)

    async def _add_member(self, index: int) -> None:
        name = f"member-{index + 1}"
        zone = f"zone-{'ab'[index % 2]}"
        grpc_port, http_port = free_port(), free_port()
        host, _, port = self.etcd.endpoint.rpartition("//")[2].rpartition(":")
        etcd = await self.network.gateway(ETCD, (host, int(port)), LISTEN, 0, of=name)
        await self.network.gateway(name, (LISTEN, grpc_port), ADVERTISED, grpc_port)
        scratch = self.directory / "scratch" / name
        scratch.mkdir(parents=True, exist_ok=True)
        argv = python_module(
            "stream_sum",
            "serve",
            f"--consumer.id={name}",
            f"--consumer.zone={zone}",
            f"--consumer.host={ADVERTISED}",
            f"--consumer.bind-host={LISTEN}",
            f"--consumer.port={grpc_port}",
            f"--consumer.http-port={http_port}",
            f"--consumer.scratch-dir={scratch}",
            f"--consumer.hints-interval={self.soak.hints_interval_s}s",
            f"--consumer.drain-timeout={self.soak.drain_timeout_s}s",
            f"--broker.address={self.addresses}",
            f"--broker.file-root={self.file_root}",
            f"--etcd.address=http://{LISTEN}:{etcd.port}",
            f"--etcd.prefix={ROOT}",
            f"--etcd.lease={self.settings.lease_ttl_s}s",
            f"--streamsum.database={self.database.url}",
            f"--log.level={self.settings.log_level}",
        )
        path = os.pathsep.join(
            filter(None, [str(examples_path()), self._environ.get("PYTHONPATH", "")])
        )
        environ = {**self._environ, "PYTHONPATH": path}
        log_path = self.directory / "logs" / f"{name}.log"
        process = ChildProcess(name, argv, log_path, environ, self.clock)
        self.members.append(Member(name, zone, grpc_port, http_port, process))

    async def await_member(self, member: Member) -> None:
        await await_ready(member.process, member.http_port, self.clock, READY_S)

    def pause(self, member: Member) -> None:
        member.process.signal(signal.SIGSTOP)
        member.paused = True

    def resume(self, member: Member) -> None:
        member.process.signal(signal.SIGCONT)
        member.paused = False

    # -- how the shards are

    def shard_client(self) -> ShardClient:
        """Return a client of some member that serves. Raise ``Unavailable`` if no member serves."""
        urls = [one.url for one in self.members if one.serves]
        if not urls:
            raise Unavailable("no member runs")
        return ShardClient(",".join(urls), route_cache_size=0, clock=self.clock)

    async def listed_shards(self) -> tuple[ListedShard, ...]:
        async with asyncio.timeout(10.0), self.shard_client() as shards:
            listed: tuple[ListedShard, ...] = (await shards.list_shards()).shards
            return listed

    async def missing_members(self) -> str:
        """Return the processes that are no member in etcd, as text; empty if there are none.

        A process whose lease has run out may not know it yet, and is going to end.
        """
        assert self._client is not None
        present: set[str] = set()
        try:
            for root in (BROKERS, ROOT):
                listed = await self._client.range(f"{root}/members/", keys_only=True)
                present |= {kv.key.decode().rpartition("#")[2] for kv in listed.kvs}
        except GazetteError as error:
            return f"members cannot be listed: {error!r}"
        names = {one.name for one in self.brokers} | {one.name for one in self.members}
        return f"not in etcd: {', '.join(sorted(names - present))}" if names - present else ""

    async def touch_etcd(self, key: str) -> None:
        """Write a value that no process watches."""
        assert self._client is not None
        await self._client.put(key, b"")

    async def compact_etcd(self) -> None:
        """Let etcd compact all revisions before the present one."""
        assert self._client is not None
        listed = await self._client.range(f"{ROOT}/members/", keys_only=True)
        await self._client.compact(listed.header.revision)

    async def missing_shards(self) -> str:
        """Return what is missing until every shard has a primary and ready standbys; else an empty text."""
        try:
            shards = await self.listed_shards()
        except (GazetteError, TimeoutError) as error:
            return f"shards cannot be listed: {error!r}"
        if len(shards) != len(self.shard_ids):
            return f"{len(shards)} of {len(self.shard_ids)} shards"
        wanted = 1 + min(self.soak.hot_standbys, self.soak.members - 1)
        for shard in shards:
            codes = [status.code for status in shard.status]
            names = ", ".join(code.name for code in codes)
            if ReplicaCode.PRIMARY not in codes or len(codes) < wanted:
                return f"{shard.spec.id} has {names or 'no replica'}"
            if not all(ReplicaCode.STANDBY <= code < ReplicaCode.FAILED for code in codes):
                return f"{shard.spec.id} has {names}"
        return ""

    async def await_shards(self, timeout_s: float) -> None:
        deadline = self.clock.monotonic() + timeout_s
        while missing := await self.missing_shards():
            if self.clock.monotonic() > deadline:
                raise Unavailable(f"shards are not up after {timeout_s:.0f} s: {missing}")
            await self.clock.sleep(POLL_S)

    async def failed_shards(self) -> dict[str, str]:
        """Return the error of each replica that is FAILED, by shard and member."""
        try:
            shards = await self.listed_shards()
        except (GazetteError, TimeoutError):
            return {}
        return {
            f"{shard.spec.id} on {member.suffix}": "; ".join(status.errors)
            for shard in shards
            for member, status in zip(shard.route.members, shard.status, strict=True)
            if status.code is ReplicaCode.FAILED
        }

    async def unassign_failed(self) -> Sequence[str]:
        """Unassign failed shards as an operator does: ``gazctl shards unassign --failed``."""
        async with asyncio.timeout(10.0), self.shard_client() as shards:
            unassigned: Sequence[str] = await shards.unassign(self.shard_ids, only_failed=True)
            return unassigned

    async def unstored(self, client: Client, journal: str) -> str:
        """Return how many fragments of a journal are not stored, as text; empty if only the open one is not.

        Until fragments are stored, no other broker may be lost: only one former replica may have them.
        """
        try:
            async with asyncio.timeout(10.0):
                listed = await client.list_fragments(FragmentsParams(journal))
        except (GazetteError, TimeoutError) as error:
            return f"fragments of {journal} cannot be listed: {error!r}"
        local = sum(not one.fragment.mod_time for one in listed)
        return f"{local} fragments of {journal} are not stored" if local > 1 else ""

    async def stop_all(self, timeout_s: float = 60.0) -> list[str]:
        """Stop members, brokers and etcd by SIGTERM, in this order. Return those that had to be killed."""
        for member in self.members:
            if member.paused:
                self.resume(member)
        running = [one.process for one in self.members if one.process.running]
        ended = await asyncio.gather(*(process.stop(timeout_s) for process in running))
        killed = [process.name for process, ok in zip(running, ended, strict=True) if not ok]
        killed += await self.stop_brokers(timeout_s)
        await self.stop()
        return killed
