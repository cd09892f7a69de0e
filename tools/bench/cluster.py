"""The base of the suites of `gazette bench`: a local cluster, journals on it, and rounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, JournalChange, ListedJournal
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.read.reader import ReadParams
from gazette.errors import GazetteError, NotYet, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.mapping import Partition
from gazette.message.publisher import Publisher
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.text import duration
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import BlockingPool, TaskScope
from tools.bench.app import message_of
from tools.bench.bare import BareService

STORE: Final = "file:///"
BROKERS: Final = 3
FILL_BATCH: Final = 2_000
COPY_BYTES: Final = 1 << 20
FILL_BACKLOG_BYTES: Final = 16 << 20
_READY_TIMEOUT_S: Final = 60.0
_STORED_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """``seconds``: approximate length of each measurement of a round.

    ``scale``: fraction of the usual initial data (messages, bytes) that is prepared.
    """

    directory: Path
    seconds: float = 0.6
    rounds: int = 3
    scale: float = 1.0
    hand_offs: int = 3
    kills: int = 2
    lease_ttl_s: float = 3.0
    brokers: int = BROKERS


class Bench:
    """The running processes, and ways to measure with them. `running` creates it."""

    def __init__(
        self,
        settings: BenchSettings,
        clock: Clock,
        cluster: LocalCluster,
        bare: BareService,
        client: Client,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.cluster = cluster
        self.bare = bare
        self.client = client
        """A client that reads through brokers only."""

    @property
    def file_root(self) -> Path:
        return self.cluster.directory / "fragments"

    @property
    def addresses(self) -> str:
        return ",".join(one.grpc_url for one in self.cluster.brokers)

    def direct_client(self) -> Client:
        """Return a client that opens stored fragments itself."""
        access = FragmentAccess(file_root=self.file_root)
        return Client(self.addresses, fragments=access, clock=self.clock)

    def scaled(self, count: int) -> int:
        return max(1, int(count * self.settings.scale))

    async def timed(self, work: Awaitable[object]) -> float:
        """Return the seconds that the work takes."""
        began = self.clock.monotonic()
        await work
        return self.clock.monotonic() - began

    async def repeated(self, work: Callable[[], Awaitable[int]]) -> float:
        """Repeat the work for about ``seconds``, at least once. Return the sum of its results per second."""
        began = self.clock.monotonic()
        done = 0
        while True:
            done += await work()
            spent = self.clock.monotonic() - began
            if spent >= self.settings.seconds:
                return done / spent

    async def rounds(
        self, *measurements: Callable[[], Awaitable[float]]
    ) -> tuple[tuple[float, ...], ...]:
        """Take all measurements one after the other, round by round. Return their values by measurement."""
        taken: list[list[float]] = [[] for _ in measurements]
        for _ in range(self.settings.rounds):
            for values, measure in zip(taken, measurements, strict=True):
                values.append(await measure())
        return tuple(tuple(values) for values in taken)

    @asynccontextmanager
    async def journals(self, *specs: JournalSpec) -> AsyncIterator[None]:
        """Create journals, and delete them in the end: brokers then release what they hold."""
        await self.client.apply_journals([JournalChange(upsert=spec) for spec in specs])
        try:
            for spec in specs:
                await self._await_replicas(spec)
            yield
        finally:
            changes = [JournalChange(delete=spec.name, expect_mod_revision=-1) for spec in specs]
            await asyncio.shield(self.client.apply_journals(changes))  # noqa: TID251 - a task of its own

    async def _await_replicas(self, spec: JournalSpec) -> None:
        deadline = self.clock.monotonic() + _READY_TIMEOUT_S
        while True:
            listed: Sequence[ListedJournal] = (
                await self.client.list_journals(LabelSelector.of(name=spec.name))
            ).journals
            route = listed[0].route if listed else None
            if (
                route is not None
                and route.primary is not None
                and len(route.members) == spec.replication
            ):
                return
            if self.clock.monotonic() > deadline:
                raise Unavailable("a journal did not get its replicas", journal=spec.name)
            await self.clock.sleep(0.05)

    async def write_head(self, journal: str) -> int:
        reader = self.client.retry_reader(ReadParams(journal, -1, metadata_only=True))
        try:
            await reader.read(1)
        except NotYet:
            pass
        finally:
            reader.close()
        return reader.write_head

    async def stored_fragments(self, journal: str) -> list[Fragment]:
        """Return the journal's fragments, once all but the one that is being written are stored.

        Append nothing: enough must be in the journal for at least one complete fragment.
        """
        deadline = self.clock.monotonic() + _STORED_TIMEOUT_S
        while True:
            listed = await self.client.list_fragments(FragmentsParams(journal))
            fragments = [one.fragment for one in listed]
            stored = [one for one in fragments if one.mod_time]
            if stored and len(fragments) - len(stored) <= 1:
                return stored
            if self.clock.monotonic() > deadline:
                raise Unavailable("fragments were not stored in time", journal=journal)
            await self.clock.sleep(0.2)

    async def copy(self, source: str, target: str) -> None:
        """Copy the bytes of a journal to an empty one."""
        head = await self.write_head(source)
        async with self.client.retry_reader(ReadParams(source, end_offset=head)) as reader:
            while chunk := await reader.read(COPY_BYTES):
                await self.client.append(AppendParams(target), chunk)

    @asynccontextmanager
    async def publisher(
        self, addresses: str = ""
    ) -> AsyncIterator[tuple[AppendService, Publisher]]:
        """Yield a publisher with its own producer, client and append service, to these brokers or to ours."""
        async with (
            Client(addresses or self.addresses, clock=self.clock) as client,
            TaskScope("publishing") as scope,
        ):
            appends = AppendService(client)
            scope.daemon(appends.run(), name="appends")
            try:
                yield appends, Publisher.standalone(appends, self.clock, random.SystemRandom())
            finally:
                await appends.close()
                scope.cancel()

    async def fill(self, journal: str, count: int) -> int:
        """Publish ``count`` messages of a hundred bytes. Return the journal's write head."""
        partition = Partition(journal, CONTENT_JSON_LINES)
        pool = BlockingPool("bench-fill", 1)
        async with self.publisher() as (appends, publisher):

            def publish(begin: int) -> None:
                messages = [
                    message_of(index) for index in range(begin, min(count, begin + FILL_BATCH))
                ]
                publisher.publish_committed_batch(lambda _: partition, messages)

            try:
                for begin in range(0, count, FILL_BATCH):
                    await pool.run(publish, begin)
                    while appends.backlog_bytes > FILL_BACKLOG_BYTES:
                        await self.clock.sleep(0.005)
                await appends.flush()
            finally:
                pool.close()
        return await self.write_head(journal)


def journal_spec(
    name: str,
    *,
    replication: int = 1,
    codec: Codec = Codec.NONE,
    length: int = 1 << 30,
    content_type: str = CONTENT_JSON_LINES,
    refresh_s: int = 300,
) -> JournalSpec:
    """Return a specification; by default fragments are so long that none is stored meanwhile."""
    fragment = FragmentSpec(
        length=length,
        codec=codec,
        stores=(STORE,),
        refresh_interval_ns=refresh_s * duration.SECOND,
    )
    labels = LabelSet.of((CONTENT_TYPE, content_type))
    return JournalSpec(name, replication, labels, fragment)


@asynccontextmanager
async def running(settings: BenchSettings, clock: Clock) -> AsyncIterator[Bench]:
    """Run etcd, brokers in as many zones and the bare service, each as a process.

    Raise what their start raises. The end of the block stops everything.
    """
    cluster = LocalCluster(
        ClusterSettings(settings.directory, settings.brokers, settings.brokers), clock
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_stop, cluster)
        await cluster.start()
        bare = await stack.enter_async_context(
            BareService(cluster.directory, cluster.environ, clock)
        )
        addresses = ",".join(one.grpc_url for one in cluster.brokers)
        client = await stack.enter_async_context(Client(addresses, clock=clock))
        yield Bench(settings, clock, cluster, bare, client)


async def _stop(cluster: LocalCluster) -> None:
    try:
        await asyncio.shield(cluster.stop())  # noqa: TID251 - a task of its own
    except GazetteError as error:
        # The measurements are valid all the same.
        print(f"gazette bench: the cluster did not stop in good order: {error}")
