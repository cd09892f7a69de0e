"""Real processes that run `fold_app`, with a load, and the check of what they did.

The check knows the input and nothing else: the state of every shard must equal its fold, and a
read-committed reader of each output journal must find what the fold of each message was, each once, in
the order of the input.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.client.journals import JournalChange
from gazette.client.shards import ListedShard, ShardChange, ShardClient
from gazette.consumer.shard.restarts import ANNOUNCED
from gazette.errors import Broken, GazetteError, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.message.publisher import Publisher
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ReplicaCode, ShardSource, ShardSpec
from gazette.protocol.text import duration
from gazette.run.dev.processes import ChildProcess, await_ready, python_module
from gazette.run.dev.word_count import Member
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import OpFuture, TaskScope, await_future
from tests.faults.backbone import Backbone, python_path
from tests.faults.fold_app import KIND, Input, outputs_of
from tests.faults.fold_forge import ForgedProcess
from tests.faults.fold_input import KEYS, CommittedReader, Pace, Source, assert_same, source_of

PREFIX: Final = "/gazette/consumers/{fleet}"
LOGS: Final = "recovery/fold"
LOGGED: Final = ("sqlite", "rocksdb", "json")
"""Kinds of stores with a recovery log; the others are in a database."""
UP_S: Final = 60.0


def shard_of(kind: str, fleet: str = "shard") -> str:
    return f"{fleet}-{kind}"


class FoldCluster:
    """Members of `fold_app`, and a shard for each kind of store, called ``{fleet}-{kind}``.

    ``base``: what they stand on, shared with others of other names; or the directory of one of its own.
    """

    def __init__(
        self,
        base: Path | Backbone,
        kinds: Sequence[str],
        *,
        fleet: str = "shard",
        environ: Mapping[str, str] | None = None,
        lease_s: float = 3.0,
        max_txn_s: float = 0.5,
        pace: Pace | None = None,
        seed: int = 1,
    ) -> None:
        self._owns_base = isinstance(base, Path)
        self.base = Backbone(base) if isinstance(base, Path) else base
        self.clock = self.base.clock
        self.cluster = self.base.cluster
        self.fleet = fleet
        self.root = PREFIX.format(fleet=fleet)
        self.kinds = tuple(kinds)
        self.shard_ids = [shard_of(kind, fleet) for kind in kinds]
        self.pace = Pace() if pace is None else pace
        self.lease_s = lease_s
        self.max_txn_s = max_txn_s
        self.rng = random.Random(seed)
        self.members: list[Member] = []
        self.frozen: list[Member] = []
        """Those that SIGSTOP has stopped."""
        self.sources = {shard_id: Source(shard_id) for shard_id in self.shard_ids}
        self.readers = [
            CommittedReader(journal) for one in self.shard_ids for journal in outputs_of(one)
        ]
        self._environ = dict(environ or {})
        self._started = 0
        self._numbers = 0
        self._paused = False
        self._idle = asyncio.Event()

    async def start(self, *, standbys: bool = True) -> None:
        if self._owns_base:
            await self.base.start()
        self.client, self.http = self.base.client, self.base.http
        self.appends = AppendService(self.client)
        self.publisher = Publisher.standalone(self.appends, self.clock, random.SystemRandom())
        await self.client.apply_journals([JournalChange(upsert=one) for one in self._journals()])
        async with TaskScope("members") as scope:
            for _ in range(2 if standbys else 1):
                scope.spawn(self.start_member(), name="member")
        async with self.shards() as shards:
            await shards.apply_shards([ShardChange(upsert=one) for one in self._specs()])
        await self.await_up(standbys=standbys)

    async def stop(self) -> None:
        """Kill the members. On a base of others, nothing of ours remains but fragments."""
        try:
            for member in self.members:
                await member.process.kill()
            if hasattr(self, "appends"):
                await self.appends.close()
                if not self._owns_base:
                    await self.expel(self.members)
                    await self.client.apply_journals(
                        [
                            JournalChange(delete=one.name, expect_mod_revision=-1)
                            for one in self._journals()
                        ]
                    )
        finally:
            if self._owns_base:
                await self.base.stop()

    def _journals(self) -> list[JournalSpec]:
        fragment = FragmentSpec(
            length=1 << 24,
            codec=Codec.NONE,
            stores=("file:///",),
            refresh_interval_ns=30 * duration.SECOND,
        )
        names: dict[str, str] = {}
        for shard_id in self.shard_ids:
            for name in (source_of(shard_id), *outputs_of(shard_id)):
                names[name] = CONTENT_JSON_LINES
        for kind in self.kinds:
            if kind in LOGGED:
                names[f"{LOGS}/{shard_of(kind, self.fleet)}"] = CONTENT_RECOVERY_LOG
        return [
            JournalSpec(name, 1, LabelSet.of((CONTENT_TYPE, content_type)), fragment)
            for name, content_type in names.items()
        ]

    def _specs(self) -> list[ShardSpec]:
        specs = []
        for kind in self.kinds:
            shard_id = shard_of(kind, self.fleet)
            logged = kind in LOGGED
            specs.append(
                ShardSpec(
                    id=shard_id,
                    sources=(ShardSource(source_of(shard_id)),),
                    recovery_log_prefix=LOGS if logged else "",
                    hint_prefix="/gazette/hints/fold" if logged else "",
                    hint_backups=2 if logged else 0,
                    max_txn_duration_ns=int(self.max_txn_s * 1e9),
                    hot_standbys=1,
                    labels=LabelSet.of((KIND, kind)),
                )
            )
        return specs

    # -- members

    @property
    def running(self) -> list[Member]:
        """Processes that live, and are not frozen."""
        frozen = self.frozen
        return [one for one in self.members if one.process.running and one not in frozen]

    def shards(self, member: Member | None = None) -> ShardClient:
        if member is None:
            running = self.running
            if not running:
                raise Unavailable("no member runs", fleet=self.fleet)
            member = running[-1]
        return ShardClient(member.grpc_url, route_cache_size=0, clock=self.clock)

    async def start_member(
        self, *, failpoints: str = "", ready: bool = True, etcd: str | None = None
    ) -> Member:
        """Start a process. ``etcd``: the endpoint that it connects to, instead of the server's own."""
        self._started += 1
        name = f"{self.fleet}-member-{self._started:03d}"
        grpc_port, http_port = free_port(), free_port()
        scratch = self.cluster.directory / "scratch" / name
        scratch.mkdir(parents=True)
        argv = [
            "serve",
            f"--consumer.id={name}",
            "--consumer.bind-host=127.0.0.1",
            f"--consumer.port={grpc_port}",
            f"--consumer.http-port={http_port}",
            f"--consumer.scratch-dir={scratch}",
            # Often, so that recoveries begin from many kinds of hints.
            "--consumer.hints-interval=1s",
            "--consumer.drain-timeout=0s",
            f"--broker.address={self.cluster.brokers[0].grpc_url}",
            f"--broker.file-root={self.cluster.directory / 'fragments'}",
            f"--etcd.address={etcd or self.cluster.etcd.endpoint}",
            f"--etcd.prefix={self.root}",
            f"--etcd.lease={self.lease_s}s",
            "--log.level=info",
        ]
        environ = {
            **self.cluster.environ,
            **self._environ,
            "PYTHONPATH": python_path(),
            "GAZETTE_FAILPOINTS": failpoints,
        }
        log_path = self.cluster.directory / "logs" / f"{name}.log"
        process: ChildProcess
        if (forge := self.base.forge) is not None:
            process = ForgedProcess(forge, name, argv, log_path, environ, self.clock)
        else:
            argv = python_module("tests.faults.fold_app", *argv)
            process = ChildProcess(name, argv, log_path, environ, self.clock)
        await process.start()
        member = Member(process, "local", "127.0.0.1", grpc_port, http_port)
        self.members.append(member)
        if ready:
            await await_ready(process, http_port, self.clock, UP_S)
        return member

    async def arm(self, member: Member, spec: str) -> None:
        try:
            answer = await self.http.post(f"{member.http_url}/arm", content=spec)
        except httpx.TransportError:
            # What was armed may kill the member before its answer is complete.
            if "=kill" not in spec:
                raise
            await self.await_death(member)
        else:
            answer.raise_for_status()

    async def await_death(self, member: Member, timeout_s: float = 30.0) -> int:
        """Return its exit code. Raise ``Unavailable`` with the end of its log if it lives on."""
        try:
            async with asyncio.timeout(timeout_s):
                return await member.process.wait()
        except TimeoutError:
            raise Unavailable(
                f"{member.id} lives on after {timeout_s} s:\n{member.process.log_tail()}"
            ) from None

    async def expel(self, members: Iterable[Member]) -> None:
        """End the leases of these, so that others need not wait for it. Only of those that are dead."""
        names = {one.id for one in members}
        assert not any(one.process.running for one in self.members if one.id in names)
        await self.base.expel(self.root, names)

    async def lease_of(self, member: Member) -> tuple[int, int]:
        """Return the lease that it announced itself with, and at which revision of etcd."""
        return await self.base.lease_of(self.root, member.id)

    async def listed(self) -> tuple[ListedShard, ...]:
        async with self.shards() as shards:
            return (await shards.list_shards()).shards

    async def standby_of(self, shard_id: str) -> Member:
        """Return the member that is a shard's ready standby, and lives."""
        for shard in await self.listed():
            if shard.spec.id != shard_id:
                continue
            for member, status in zip(shard.route.members, shard.status, strict=True):
                if member != shard.route.primary_id and status.code is ReplicaCode.STANDBY:
                    for one in self.running:
                        if one.id == member.suffix:
                            return one
        raise Unavailable("no standby", shard=shard_id)

    async def primary_of(self, shard_id: str) -> Member:
        """Return the member that serves a shard as its primary, and lives."""
        for shard in await self.listed():
            if shard.spec.id == shard_id and shard.route.primary_id is not None:
                suffix = shard.route.primary_id.suffix
                for one in self.running:
                    if one.id == suffix:
                        return one
        raise Unavailable("no primary", shard=shard_id)

    async def await_frozen(self, member: Member, timeout_s: float = 30.0) -> None:
        """Return when SIGSTOP has stopped a member. It does not count as running until `thaw`."""
        process = psutil.Process(member.process.pid)
        async with asyncio.timeout(timeout_s):
            while process.status() != psutil.STATUS_STOPPED:
                await self.clock.sleep(0.02)
        self.frozen.append(member)

    def thaw(self, member: Member) -> None:
        """Let a member go on."""
        self.frozen.remove(member)
        member.process.signal(signal.SIGCONT)

    async def await_up(self, *, standbys: bool, timeout_s: float = UP_S) -> None:
        """Return when every shard has a primary that lives and serves, and its standby if asked for.

        Raise the error of a shard that failed.
        """
        deadline = self.clock.monotonic() + timeout_s
        states: Any = None
        while self.clock.monotonic() < deadline:
            alive = {one.id for one in self.running}
            try:
                shards = await self.listed()
            except GazetteError:
                shards = ()
            self._raise_failure(shards)
            states = {s.spec.id: (s.route, [one.code.name for one in s.status]) for s in shards}
            if len(shards) == len(self.shard_ids) and all(
                self._is_up(one, alive, standbys=standbys) for one in shards
            ):
                return
            await self.clock.sleep(0.15)
        raise Unavailable(f"shards are not up after {timeout_s:.0f} s: {states}")

    def _raise_failure(self, shards: Iterable[ListedShard]) -> None:
        """Raise the error of a shard that failed on a live member, and is not restarted automatically."""
        alive = {one.id for one in self.running}
        for shard in shards:
            for member, status in zip(shard.route.members, shard.status, strict=True):
                announced = any(ANNOUNCED in one for one in status.errors)
                if status.code is ReplicaCode.FAILED and member.suffix in alive and not announced:
                    raise Broken(f"{shard.spec.id} failed on {member.suffix}: {status.errors[0]}")

    def _is_up(self, shard: ListedShard, alive: set[str], *, standbys: bool) -> bool:
        primary = shard.route.primary_id
        codes = [status.code for status in shard.status]
        return (
            primary is not None
            and primary.suffix in alive
            and ReplicaCode.PRIMARY in codes
            and all(one.suffix in alive for one in shard.route.members)
            and (not standbys or (len(codes) == 2 and min(codes) >= ReplicaCode.STANDBY))
        )

    async def is_failed(self, shard_id: str) -> bool:
        return any(
            status.code is ReplicaCode.FAILED
            for shard in await self.listed()
            if shard.spec.id == shard_id
            for status in shard.status
        )

    async def repair(self) -> None:
        """Retry failed shards as an operator does, once each."""
        async with self.shards() as shards:
            await shards.unassign(self.shard_ids, only_failed=True)

    # -- load

    async def publish_forever(self) -> None:
        """Publish to all shards, but while `paused`."""
        while True:
            if self._paused:
                self._idle.set()
            else:
                self._idle.clear()
                for source in self.sources.values():
                    await self.publish(source, self.rng.randint(1, self.pace.group_max))
            await self.clock.sleep(self.pace.pause_s)

    async def publish(self, source: Source, count: int, **fields: Any) -> OpFuture[Any]:
        """Publish some messages, each on its own or as one transaction.
        Return once they are in the journal.
        """
        journal = source_of(source.shard_id)
        mapping = fixed_mapping(journal, CONTENT_JSON_LINES)
        messages = []
        for _ in range(count):
            self._numbers += 1
            key = self.rng.choice(KEYS)
            source.published.append((key, self._numbers))
            messages.append(Input(key=key, n=self._numbers, **fields))
        if self.rng.random() < 0.5:
            futures = await self.publisher.publish_from_loop(mapping, messages)
            source.futures.append(futures[journal])
            return futures[journal]
        for message in messages:
            self.publisher.publish_uncommitted(mapping, message)
        for name, intent in self.publisher.build_ack_intents().items():
            source.futures.append(self.appends.append(AppendParams(name), intent))
        last: OpFuture[Any] = source.futures[-1]
        return last

    async def pause(self) -> None:
        """Pause the load: no message is on its way any more."""
        self._paused = True
        self._idle.clear()
        await self._idle.wait()
        for source in self.sources.values():
            futures, source.futures = source.futures, []
            for future in futures:
                await await_future(future)

    def resume(self) -> None:
        self._paused = False

    # -- the check

    async def read_through(self, timeout_s: float = 3 * UP_S) -> None:
        """Return when every shard has consumed, committed and acknowledged all of its source."""
        async with asyncio.timeout(timeout_s), TaskScope("read through") as scope:
            for shard_id in self.shard_ids:
                scope.spawn(self.read_through_one(shard_id), name=shard_id)

    async def read_through_one(self, shard_id: str) -> None:
        """Wait as `read_through` does, for one shard. Raise the error of a failed one."""
        source = source_of(shard_id)
        head = (await self.client.append(AppendParams(source), b"")).commit.end
        while True:
            try:
                async with self.shards() as shards:
                    await shards.stat(shard_id, {source: head})
                    return
            except GazetteError:
                await self.clock.sleep(0.1)
            try:
                shards_now = await self.listed()
            except GazetteError:
                continue
            self._raise_failure(shards_now)

    async def check(self) -> None:
        """Check that all that was published took effect once, in every shard
        and every output. Pause the load.
        """
        await self.pause()
        await self.read_through()
        for shard_id, source in self.sources.items():
            member = await self.primary_of(shard_id)
            answer = await self.http.get(f"{member.http_url}/state/{shard_id}")
            answer.raise_for_status()
            state = {key: tuple(value) for key, value in answer.json().items()}
            assert state == source.state(), f"{shard_id}: state is not the fold of the input"
        for reader in self.readers:
            shard_id = reader.journal.split("/")[1]
            expected = self.sources[shard_id].outputs()
            await reader.read(self.client)
            # Timers publish later than their messages are read through.
            deadline = self.clock.monotonic() + UP_S
            while len(reader.outputs) < len(expected) and self.clock.monotonic() < deadline:
                await self.clock.sleep(0.05)
                await reader.read(self.client)
            assert_same(reader.outputs, expected, reader.journal)
        self.resume()


def report(text: str) -> None:
    """Print a line for a run with ``-s``."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
