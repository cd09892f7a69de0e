"""Shards that change hands between an application of others and the same application of ours.

The others are the Go original, or another version of ours. ``original/tally.go`` and `tally` count words, and
publish each count. The two applications run the same shards in turns, and each is killed while it works. For
each word they must publish the counts 1, 2, 3 ….
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardChange, ShardClient
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.errors import Broken, NotYet, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.envelope_reader import CommittedReader
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    Clock,
    UuidMint,
    new_producer_id,
)
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ReplicaCode, ShardSpec
from gazette.recoverylog.store_files import PAGE_DB
from gazette.run.dev.processes import ChildProcess
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec, leases_of
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from gazette.testing.etcd import etcd_for_tests
from tools.conformance.programs import Programs
from tools.conformance.tally import Count, Tally

ROOT: Final = "/gazette/consumers/handover"
WORDS: Final = 40
_CLOCK: Final = SystemClock()
_WAIT_S: Final = 60.0


@dataclass
class Lane:
    """A shard, what was published to its source, and what its owners have published."""

    name: str
    store: str
    attached: str = ""
    """Name of a second database of SQLite."""
    journal: str = ""
    """SQLite's journal mode in the original's store; empty for its default, WAL."""
    mode: str = ""
    """Mode of our SQLite store; empty for its default, redo."""
    expected: Counter[str] = field(default_factory=Counter)
    """Committed messages by word."""
    totals: dict[str, list[int]] = field(default_factory=dict)
    """Counts that the owners have published, by word."""

    def __post_init__(self) -> None:
        rng = random.Random(self.name)
        self._mint = UuidMint(new_producer_id(rng), Clock())
        self._open = UuidMint(new_producer_id(rng), Clock())
        """A producer whose transactions begin before a hand-over, and end after it."""
        for one in (self._mint, self._open):
            one.observe(_CLOCK.now())  # Producers with an old clock are forgotten.
        self._pending: list[str] = []

    @property
    def source(self) -> str:
        return f"handover/{self.name}/source"

    @property
    def output(self) -> str:
        return f"handover/{self.name}/output"

    @property
    def spec(self) -> ShardSpec:
        labels = {
            "attached": self.attached,
            "journal": self.journal,
            "mode": self.mode,
            "output": self.output,
            "store": self.store,
        }
        return shard_spec(
            self.name,
            self.source,
            labels=LabelSet.of(*((name, value) for name, value in labels.items() if value)),
            max_txn_duration_ns=50_000_000,
        )

    def messages(self, words: Iterable[str]) -> bytes:
        """Return committed messages, and count them as expected."""
        listed = list(words)
        self.expected.update(listed)
        return b"".join(_line(self._mint.text(OUTSIDE_TXN), word) for word in listed)

    def begin(self, words: Iterable[str]) -> bytes:
        """Return messages of a transaction that `commit` commits."""
        self._pending = list(words)
        return b"".join(_line(self._open.text(CONTINUE_TXN), word) for word in self._pending)

    def commit(self) -> bytes:
        self.expected.update(self._pending)
        self._pending = []
        return _line(self._open.text(ACK_TXN), "")

    @property
    def is_done(self) -> bool:
        return self.expected == Counter({word: len(one) for word, one in self.totals.items()})

    def verify(self) -> None:
        """Raise ``Broken`` if a message was lost, or counted twice."""
        for word, totals in self.totals.items():
            if totals != list(range(1, len(totals) + 1)):
                raise Broken(f"{self.name}: the counts of {word!r} are {totals}")
        if not self.is_done:
            counted = Counter({word: len(one) for word, one in self.totals.items()})
            missing, extra = self.expected - counted, counted - self.expected
            raise Broken(f"{self.name}: not counted {missing}, counted too often {extra}")


def _line(uuid: str, word: str) -> bytes:
    return msgspec.json.encode(Count(uuid=uuid, word=word)) + b"\n"


class Handover:
    """The cluster and its lanes."""

    def __init__(
        self, etcd: Etcd, broker: BrokerFixture, others: Programs, directory: Path, *lanes: Lane
    ) -> None:
        self.etcd = etcd
        self.broker = broker
        self.lanes = lanes
        self._others = others
        self._directory = directory
        self._rng = random.Random(7)
        self._members = 0

    async def create(self) -> None:
        labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
        for lane in self.lanes:
            await self.broker.create(
                journal_spec(lane.source, labels=labels),
                journal_spec(lane.output, labels=labels),
                log_spec(lane.name),
            )

    def words(self, count: int) -> list[str]:
        return [f"word {self._rng.randrange(WORDS):02d}" for _ in range(count)]

    async def append(self, journal: str, content: bytes) -> None:
        async with asyncio.timeout(_WAIT_S):
            await self.broker.client.append(AppendParams(journal), content)

    async def publish(self, count: int) -> None:
        """Publish ``count`` messages to each source, in several transactions of the shards."""
        for _ in range(5):
            for lane in self.lanes:
                await self.append(lane.source, lane.messages(self.words(count // 5)))
            await _CLOCK.sleep(0.1)

    async def read(self, lane: Lane) -> None:
        """Read what the owners of a shard publish. Never return."""
        reader = CommittedReader(self.broker.client, ReadParams(lane.output, block=True), Count)
        async for batch in reader.batches():
            for envelope in batch:
                one = envelope.message
                lane.totals.setdefault(one.word, []).append(one.total)

    async def done(self, *lanes: Lane) -> None:
        """Wait until each committed message is counted. Raise ``Broken`` if one is not, or is twice."""
        try:
            async with asyncio.timeout(_WAIT_S):
                while not all(lane.is_done for lane in lanes):
                    await _CLOCK.sleep(0.05)
        except TimeoutError:
            pass
        for lane in lanes:
            lane.verify()

    @asynccontextmanager
    async def theirs(self) -> AsyncIterator[ShardClient]:
        """Run the application of the others. It is killed at the end, and its lease ends."""
        self._members += 1
        name, port = f"theirs-{self._members}", free_port()
        command = (
            *self._others.tally,
            "serve",
            f"--consumer.id={name}",
            "--consumer.host=127.0.0.1",
            f"--consumer.port={port}",
            f"--broker.address={self.broker.endpoint}",
            f"--etcd.address={self.etcd.settings.endpoints[0]}",
            f"--etcd.prefix={ROOT}",
            "--log.level=warn",
        )
        log = self._directory / f"{name}.log"
        environ = {**os.environ, "TMPDIR": str(self._directory), **self._others.environ}
        process = ChildProcess(name, command, log, environ, _CLOCK)
        await process.start()
        try:
            async with ShardClient(f"http://127.0.0.1:{port}", clock=_CLOCK) as shards:
                yield shards
        finally:
            await process.kill()
            for lease in await leases_of(self.etcd, ROOT, name):
                await lease.revoke()

    @asynccontextmanager
    async def ours(self) -> AsyncIterator[ShardClient]:
        """Run our application. It is killed at the end, and its lease ends."""
        self._members += 1
        member = await ConsumerFixture.start(
            self.etcd,
            self.broker,
            Tally(),
            self._directory,
            id=f"ours-{self._members}",
            root=ROOT,
            lease_ttl_s=20.0,
        )
        try:
            yield member.shards
        finally:
            await member.die()

    async def serve(self, shards: ShardClient, *lanes: Lane) -> None:
        """Wait until the shards of ``lanes`` have a primary. Raise ``Broken`` with its error if one fails."""
        async with asyncio.timeout(_WAIT_S):
            while not all([await self._is_served(shards, lane) for lane in lanes]):
                await _CLOCK.sleep(0.05)

    async def _is_served(self, shards: ShardClient, lane: Lane) -> bool:
        code, errors = await self._status(shards, lane)
        if code is ReplicaCode.FAILED:
            raise Broken(f"{lane.name}: {errors}")
        return code is ReplicaCode.PRIMARY

    async def failure(self, shards: ShardClient, lane: Lane) -> str:
        """Wait until a shard has failed. Return the error."""
        async with asyncio.timeout(_WAIT_S):
            while True:
                code, errors = await self._status(shards, lane)
                if code is ReplicaCode.FAILED:
                    return errors
                await _CLOCK.sleep(0.05)

    async def _status(self, shards: ShardClient, lane: Lane) -> tuple[ReplicaCode, str]:
        try:
            listed = await shards.list_shards()
        except Unavailable:
            return ReplicaCode.IDLE, ""  # It is still starting.
        statuses = [
            one for shard in listed.shards if shard.spec.id == lane.name for one in shard.status
        ]
        if not statuses:
            return ReplicaCode.IDLE, ""
        return statuses[0].code, "; ".join(statuses[0].errors)

    async def work(self, shards: ShardClient, *lanes: Lane, tail: int = 200) -> None:
        """Publish while the owner counts. Return in the middle of its work.

        Then a transaction of a producer is open, and the last ``tail`` messages may not be counted yet.
        """
        await self.serve(shards, *lanes)
        await self.publish(100)
        await self.done(*lanes)
        for lane in self.lanes:
            await self.append(lane.source, lane.commit())
            await self.append(lane.source, lane.begin(self.words(5)))
        await self.done(*lanes)
        for lane in self.lanes:
            await self.append(lane.source, lane.messages(self.words(tail)))
        await _CLOCK.sleep(0.1 * self._rng.random())


async def read_all(client: Client, journal: str) -> bytes:
    """Return all bytes of a journal."""
    content = b""
    async with client.retry_reader(ReadParams(journal)) as reader:
        while True:
            try:
                content += await reader.read()
            except NotYet:
                return content


@asynccontextmanager
async def opened(others: Programs, directory: Path, *lanes: Lane) -> AsyncIterator[Handover]:
    """Run a broker of ours, and read what the owners of the lanes publish."""
    with etcd_for_tests(directory / "etcd") as server:
        settings = EtcdSettings(endpoints=(server.endpoint,))
        async with (
            await Etcd.connect(settings, _CLOCK) as etcd,
            await BrokerFixture.start(etcd, directory, lease_ttl_s=20.0) as broker,
            TaskScope("handover") as scope,
        ):
            run = Handover(etcd, broker, others, directory, *lanes)
            await run.create()
            for lane in lanes:
                scope.daemon(run.read(lane), name=lane.name)
            yield run
            scope.cancel()


async def handover(others: Programs, directory: Path) -> None:
    """Let shards of each store change hands, and print each step. Raise ``Broken`` if one goes wrong."""
    sqlite = (
        Lane("sqlite", "sqlite"),
        Lane("attached", "sqlite", attached="archive"),
        Lane("by-vfs", "sqlite", mode="vfs"),
        Lane("journal", "sqlite", attached="archive", journal="TRUNCATE"),
    )
    lanes = (*sqlite, Lane("rocksdb", "rocksdb"), Lane("json", "json"))
    refused = () if others.takes_pages else sqlite
    taken = tuple(lane for lane in lanes if lane not in refused)
    async with opened(others, directory, *lanes) as run:
        async with run.theirs() as shards:
            await apply(shards, lanes)
            await run.work(shards, *lanes)
        print(f"  {others.name} has counted, and was killed")
        for _ in range(2):
            async with run.ours() as shards:
                await run.work(shards, *lanes)
            print("  ours has gone on with SQLite, RocksDB and JSON, and was killed")
            async with run.theirs() as shards:
                await run.work(shards, *taken)
                for lane in refused:
                    if PAGE_DB not in (error := await run.failure(shards, lane)):
                        raise Broken(f"{lane.name}: {others.name} failed otherwise: {error}")
            print(
                f"  {others.name} has gone on with {', '.join(lane.name for lane in taken)}, "
                f"refused {', '.join(lane.name for lane in refused) or 'nothing'}, and was killed"
            )
        async with run.ours() as shards:
            await run.serve(shards, *lanes)
            await run.done(*lanes)
    counted = sum(lane.expected.total() for lane in lanes)
    print(f"hand-over with {others.name}: passed, {counted} messages counted once", flush=True)


async def apply(shards: ShardClient, lanes: Iterable[Lane]) -> None:
    changes = [ShardChange(upsert=lane.spec) for lane in lanes]
    async with asyncio.timeout(_WAIT_S):
        while True:
            try:
                await shards.apply_shards(changes)
                return
            except Unavailable:
                await _CLOCK.sleep(0.1)  # The application is still starting.
