"""Each alert of ``deploy/monitoring`` fires by its fault at a real Prometheus, and ends with the fault.

A minute of the rules is a second here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gazette import PoisonPolicy
from gazette.auth import KeyedAuth
from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.errors import GazetteError, NotAllowed
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.runtime.file_limit import ConnectionLimits
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from gazette.testing.etcd import etcd_for_tests
from tests.blobs.test_health import SickStore
from tests.broker.test_hung_store import Hanging
from tests.broker.test_read_api import StallingDisk
from tests.broker.test_replica import name_of
from tests.consumer.apps import Gate, Tally, append, frame, source_spec
from tests.support.prometheus import DOCS, Prometheus
from tools.dashboards import files

ROOT = Path(__file__).parents[1]
PROGRAMS = ("prometheus", "prometheus-blackbox-exporter", "prometheus-node-exporter")
QUIET = {
    "Stores that hang or are unhealthy: {{store}} failed checks",
    "Items of members that leave: {{instance}} {{waits_for}}",
    "Free space of spools: {{instance}} {{mountpoint}}",
    "HTTP connections refused: {{instance}} {{reason}}",
    "Dead letters and misplaced messages: {{shard}} misplaced",
    "Timers that fired: {{shard}}",
    "Replicas that started again: {{shard}}",
    "Standbys: bytes behind their log: {{shard}} {{instance}}",
    "Calls that failed: {{grpc_method}} {{grpc_code}}",
    "Calls of brokers that failed: {{grpc_method}} {{grpc_code}}",
}
"""Queries of dashboards that show nothing of a cluster without faults."""
SHOWN_S = 30.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in PROGRAMS),
        reason="needs Debian's packages prometheus, prometheus-blackbox-exporter and -node-exporter",
    ),
]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus")) as prometheus:
        yield prometheus


@contextlib.asynccontextmanager
async def repeated(work: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Repeat some work five times a second, until the block ends."""

    async def repeat() -> None:
        while True:
            await work()
            await SystemClock().sleep(0.2)

    async with TaskScope("repeated") as scope:
        scope.spawn(repeat(), name="repeat")
        yield
        scope.cancel()


def spec(name: str, store: str) -> JournalSpec:
    return journal_spec(name, stores=(store,), length=1024)


async def test_stores_that_hang_refuse_or_fail_uploads(
    etcd: Etcd, tmp_path: Path, prometheus: Prometheus
) -> None:
    """The store ``later`` refuses uploads alone: its last health check was fine."""
    stores: dict[str, Any] = {"hung": Hanging(), "away": SickStore("put"), "later": SickStore()}
    broker = await BrokerFixture.start(
        etcd,
        tmp_path,
        constructors={"s3": lambda url: stores[url.host]},
        store_hung_after_s=0.5,
        store_check_timeout_s=0.2,
        persist_timeout_s=1.0,
        lease_ttl_s=60.0,
    )
    prometheus.scrape([broker.http])

    async def try_to_append() -> None:
        with contextlib.suppress(GazetteError):
            await broker.client.append(AppendParams("away/one"), b"x")

    async def fill() -> None:
        await broker.client.append(AppendParams("later/one"), b"x" * 2000)

    try:
        await prometheus.scraped(broker.http)
        await broker.create(spec("later/one", "s3://later/"))
        await fill()
        stores["later"].sick = "put"
        await broker.create(spec("hung/one", "s3://hung/"), spec("away/one", "s3://away/"))
        async with repeated(try_to_append), repeated(fill):
            texts = await prometheus.fires("GazetteStoreCallsHang", store="s3://hung/")
            assert "calls of s3://hung/ hang at 127.0.0.1:" in texts["summary"]
            assert texts["runbook_url"] == f"{DOCS}/stores.md#when-a-store-is-down"
            await prometheus.fires("GazetteStoreUnhealthy", store="s3://away/")
            await prometheus.fires("GazetteUploadsFail")
            await prometheus.fires("GazetteUploadsFallBehind")
            await prometheus.fires("GazetteAppendsRefused", status="FRAGMENT_STORE_UNHEALTHY")
            assert await prometheus.is_silent("GazetteStoreUnhealthy", store="s3://later/")
        stores["hung"].gate.set()
        stores["away"].sick = stores["later"].sick = ""
        for name in ("StoreCallsHang", "AppendsRefused", "UploadsFallBehind", "StoreUnhealthy"):
            await prometheus.ends(f"Gazette{name}")
        await prometheus.ends("GazetteUploadsFail")
    finally:
        stores["hung"].gate.set()
        await broker.stop()


async def test_fragments_in_conflict(etcd: Etcd, tmp_path: Path, prometheus: Prometheus) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        prometheus.scrape([broker.http])
        journal = "a/journal"
        await broker.create(journal_spec(journal))
        directory = broker.file_root / "fragments" / journal
        await broker.client.append(AppendParams(journal), b"content")
        await prometheus.scraped(broker.http)
        assert await prometheus.is_silent("GazetteFragmentsInConflict")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name_of(0, b"CONTENT")).write_bytes(b"CONTENT")
        await prometheus.fires("GazetteFragmentsInConflict")


async def test_a_spool_disk_that_stalls(etcd: Etcd, tmp_path: Path, prometheus: Prometheus) -> None:
    disk = StallingDisk(tmp_path)
    async with await BrokerFixture.start(
        etcd, tmp_path, disk=disk, spool_memory_bytes=1000, lease_ttl_s=60.0
    ) as broker:
        prometheus.scrape([broker.http])
        await broker.create(journal_spec("a/journal"))
        await prometheus.scraped(broker.http)
        assert await prometheus.is_silent("GazetteSpoolDiskBehind")
        disk.gate.clear()
        async with TaskScope("test") as scope:
            try:
                for _ in range(3):
                    content = b"x" * 600
                    scope.spawn(
                        broker.client.append(AppendParams("a/journal"), content), name="append"
                    )
                await prometheus.fires("GazetteSpoolDiskBehind")
            finally:
                disk.gate.set()
        await prometheus.ends("GazetteSpoolDiskBehind")


@pytest.fixture
def spools(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of a megabyte for spools."""
    directory = tmp_path / "spools"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "gazette-test", str(directory)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


async def test_a_spool_disk_that_fills(
    etcd: Etcd, tmp_path: Path, spools: Path, prometheus: Prometheus
) -> None:
    async with await BrokerFixture.start(
        etcd, tmp_path, spool_dir=spools, spool_memory_bytes=1000, lease_ttl_s=60.0
    ) as broker:
        prometheus.scrape([broker.http])
        await broker.create(journal_spec("a/journal"))
        labels = {"mountpoint": str(spools)}
        while not await prometheus.query(f'node_filesystem_avail_bytes{{mountpoint="{spools}"}}'):
            await SystemClock().sleep(0.2)
        assert await prometheus.is_silent("GazetteSpoolDiskFills", **labels)
        for _ in range(11):
            await broker.client.append(AppendParams("a/journal"), b"x" * 85_000)
        texts = await prometheus.fires("GazetteSpoolDiskFills", **labels)
        assert str(spools) in texts["summary"]
    prometheus.scrape()
    await prometheus.ends("GazetteSpoolDiskFills", **labels)  # It was uploaded.


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """Start a broker whose etcd is away. Yield its process, its HTTP URL and that of its etcd."""
    etcd, http = f"http://127.0.0.1:{free_port()}", free_port()
    flags = (
        f"--etcd.address={etcd}",
        f"--broker.http-port={http}",
        f"--broker.file-root={tmp_path}",
        "--broker.host=127.0.0.1",
        "--broker.bind-host=127.0.0.1",
        "--broker.drain-timeout=0.1s",
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gazette.main", "serve", *flags],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=log,
        )
    yield process, f"http://127.0.0.1:{http}", etcd
    process.kill()
    process.wait()


async def test_a_process_without_etcd_or_without_files(
    serving: tuple[subprocess.Popen[bytes], str, str], tmp_path: Path, prometheus: Prometheus
) -> None:
    process, url, etcd = serving
    prometheus.scrape([url])
    texts = await prometheus.fires("GazetteNotReady", instance=url.removeprefix("http://"))
    assert f"{url}/debug/ready" in texts["description"]
    (tmp_path / "etcd").mkdir()
    with etcd_for_tests(tmp_path / "etcd", listen=etcd):
        await prometheus.ends("GazetteNotReady")
        assert await prometheus.is_silent("GazetteFilesRunOut")
        opened = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (opened + 5, before[1]))
        await prometheus.fires("GazetteFilesRunOut", instance=url.removeprefix("http://"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        await prometheus.ends("GazetteFilesRunOut")
        process.terminate()
        await asyncio.to_thread(process.wait, 60)


async def test_callers_that_are_too_many_or_have_a_wrong_key(
    etcd: Etcd, tmp_path: Path, prometheus: Prometheus
) -> None:
    auth, wrong = (KeyedAuth(SystemClock(), (key * 32,)) for key in (b"k", b"w"))
    limits = ConnectionLimits(grpc=64, http=6, debug=4)
    broker = await BrokerFixture.start(
        etcd, tmp_path, auth=auth, lease_ttl_s=60.0, server={"limits": limits}
    )
    stranger = Client(broker.endpoint, signer=wrong)
    connections: list[socket.socket] = []
    address = broker.http.removeprefix("http://").split(":")

    async def connect() -> None:
        connections.append(socket.create_connection((address[0], int(address[1]))))
        with pytest.raises(NotAllowed):
            await stranger.list_journals()

    try:
        prometheus.scrape([broker.http])
        await prometheus.scraped(broker.http)
        for name in ("TokensRefused", "ConnectionsRefused"):
            assert await prometheus.is_silent(f"Gazette{name}")
        async with repeated(connect):
            await prometheus.fires("GazetteTokensRefused", grpc_method="List")
            await prometheus.fires("GazetteConnectionsRefused")
        for connection in connections:
            connection.close()
        for name in ("TokensRefused", "ConnectionsRefused"):
            await prometheus.ends(f"Gazette{name}")
    finally:
        await stranger.close()
        await broker.stop()


async def test_brokers_that_are_too_few(etcd: Etcd, tmp_path: Path, prometheus: Prometheus) -> None:
    """Two slots of the only broker are not enough for three journals, and no other one takes over."""
    start: dict[str, Any] = {"journal_limit": 2, "assignment_wait_s": 0.1, "lease_ttl_s": 60.0}
    first = await BrokerFixture.start(etcd, tmp_path, drain_timeout_s=600.0, **start)
    prometheus.scrape([first.http])
    await first.create(journal_spec("a/one"), journal_spec("a/two"))
    await prometheus.scraped(first.http)
    assert await prometheus.is_silent("GazetteSlotsRunOut", job="gazette-brokers")
    third = journal_spec("a/three")
    await first.client.apply_journals([JournalChange(upsert=third)])

    async def try_to_append() -> None:
        with contextlib.suppress(TimeoutError):  # The client tries again, ever more seldom.
            async with asyncio.timeout(0.5):
                await first.client.append(AppendParams("a/three"), b"x")

    async with repeated(try_to_append):
        texts = await prometheus.fires("GazetteSlotsRunOut", job="gazette-brokers")
        assert texts["summary"].startswith("Journals need 3 replicas")
        await prometheus.fires("GazetteAppendsRefused", status="NO_JOURNAL_PRIMARY_BROKER")
    await first.client.apply_journals([JournalChange(delete="a/three", expect_mod_revision=-1)])
    await prometheus.ends("GazetteSlotsRunOut", job="gazette-brokers")
    async with TaskScope("test") as scope:
        stopping = scope.spawn(first.stop(), name="stop")
        await prometheus.fires("GazetteDrainWaits", waits_for="members")
        second = await BrokerFixture.start(etcd, tmp_path, id="broker-two", **start)
        await stopping
    prometheus.scrape([second.http])
    await prometheus.ends("GazetteDrainWaits")
    await second.stop()


class Shards(Tally):
    """Skips what does not decode, fails at the word ``fail``, and waits at the word ``wait``."""

    def __init__(self) -> None:
        super().__init__(on_word=self.act)
        self.gate = Gate()

    def act(self, word: str) -> None:
        if word == "wait":
            self.gate()
        if word == "fail":
            raise RuntimeError("asked to fail")

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return PoisonPolicy("dead/letters", malformed_only=True)


async def test_shards_that_fail_fall_behind_or_skip(
    etcd: Etcd, tmp_path: Path, prometheus: Prometheus
) -> None:
    names = ("fails", "waits", "skips")
    dead = journal_spec("dead/letters", labels=LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES)))
    application = Shards()
    async with (
        await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker,
        await ConsumerFixture.start(
            etcd, broker, application, tmp_path, lease_ttl_s=60.0
        ) as member,
    ):
        prometheus.scrape([broker.http], [member.http])
        await broker.create(
            dead,
            *(source_spec(f"source/{name}") for name in names),
            *(log_spec(name) for name in names),
        )
        await member.create(*(shard_spec(name, f"source/{name}") for name in names))
        for name in names:
            end = await append(broker, frame("a", 1), journal=f"source/{name}")
            await member.read_through(name, {f"source/{name}": end})
        await prometheus.scraped(member.http, times=25)
        for alert in ("ShardFailed", "DeadLetters", "ShardFallsBehind"):
            assert await prometheus.is_silent(f"Gazette{alert}")
        clock = 1

        async def more() -> None:
            nonlocal clock
            clock += 1
            await append(broker, frame("b", clock), journal="source/waits")

        try:
            await append(broker, frame("fail", 2), journal="source/fails")
            await append(broker, b"junk\n", journal="source/skips")
            texts = await prometheus.fires("GazetteShardFailed", shard="fails")
            assert "Shard fails has failed at 127.0.0.1:" in texts["summary"]
            await prometheus.fires("GazetteDeadLetters", journal="source/skips", reason="malformed")
            assert await prometheus.is_silent("GazetteShardFailed", shard="skips")
            await prometheus.fires("GazetteRecoveriesSlow")
            async with repeated(more):
                await dashboards_show(prometheus)
                assert await prometheus.is_silent("GazetteShardFallsBehind")
                clock += 1
                await append(broker, frame("wait", clock), journal="source/waits")
                texts = await prometheus.fires("GazetteShardFallsBehind", journal="source/waits")
                assert texts["runbook_url"] == f"{DOCS}/monitoring.md#shards-that-fall-behind"
        finally:
            application.gate.open()
        await prometheus.ends("GazetteShardFallsBehind")
        await prometheus.ends("GazetteDeadLetters")
        await member.shards.apply_shards([ShardChange(delete="fails", expect_mod_revision=-1)])
        await prometheus.ends("GazetteShardFailed")
    prometheus.scrape()
    await prometheus.ends("GazetteRecoveriesSlow")


async def dashboards_show(prometheus: Prometheus) -> None:
    """Require that Prometheus accepts each query of the dashboards, and knows all but those in ``QUIET``.

    A scrape that fails, as on a busy machine, empties some of them for a moment.
    """
    empty = {
        (f"{panel['title']}: {target.get('legendFormat', '')}", target["expr"])
        for name, text in files().items()
        if name != "spark.json"  # tests/spark/test_dashboard.py
        for panel in json.loads(text)["panels"]
        for target in panel.get("targets", ())
    }
    clock = SystemClock()
    ends_at = clock.monotonic() + SHOWN_S
    while {title for title, _ in empty} - QUIET and clock.monotonic() < ends_at:
        for title, expression in list(empty):
            asked = expression.replace("$__rate_interval", "5s").replace("$instance", ".*")
            if await prometheus.query(asked):
                empty.remove((title, expression))
        await clock.sleep(0.2)
    assert {title for title, _ in empty} <= QUIET
