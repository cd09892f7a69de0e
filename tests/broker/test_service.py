"""A broker as a whole: starting, being ready, leaving in stages, and breaking."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import grpc.aio
import httpx
import pytest

from gazette.auth import Capability, Claims
from gazette.blobs.file import FileStore
from gazette.broker.main import serve
from gazette.broker.service import BrokerService
from gazette.broker.settings import BrokerSettings
from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.cluster.allocator.model import item_key, member_key
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.startup import connect_with_retry
from gazette.cluster.process.membership import MemberEnvironment
from gazette.errors import Broken, GazetteError, Unavailable
from gazette.net.http_server import bind_tcp
from gazette.net.server import Server, ServerSettings
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.pb import broker_pb2
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.random_names import two_words
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec, leases_of
from gazette.testing.etcd import EtcdServer, etcd_for_tests
from tests.facts import call_refused, logged, raises
from tests.support.replicas import replica_of

JOURNAL = "a/journal"
KEY = "A" * 43 + "="


async def ready(url: str) -> tuple[int, str]:
    async with httpx.AsyncClient() as http:
        response = await http.get(f"{url}/debug/ready")
    return response.status_code, response.text.strip()


async def append(broker: BrokerFixture, content: bytes) -> int:
    result = await broker.client.append(AppendParams(JOURNAL), content)
    return result.commit.end


async def content(client: Client, size: int) -> bytes:
    reader = client.retry_reader(ReadParams(JOURNAL, end_offset=size, block=True))
    return b"".join([chunk async for chunk in reader.chunks()])


# --- Starting


async def test_http_answers_not_ready_until_the_broker_is_a_member(etcd: Etcd) -> None:
    """What waits for etcd is alive, and says that it is not ready."""
    server = Server(SystemClock(), ServerSettings("127.0.0.1", bind_host="127.0.0.1"))
    server.bind()
    etcd_settings = EtcdSettings(endpoints=(f"http://127.0.0.1:{free_port()}",))
    environment = MemberEnvironment(SystemClock(), random.Random(1), server, etcd_settings)
    service = BrokerService(environment, BrokerSettings())
    async with TaskScope("test") as scope:
        starting = scope.spawn(service.start(), name="start")
        await SystemClock().sleep(0)
        assert await ready(server.http_endpoint) == (503, "connecting to etcd")
        async with httpx.AsyncClient(base_url=server.http_endpoint) as http:
            for response in (
                await http.get(f"/{JOURNAL}"),
                await http.post("/v1/journals/list", json={}),
            ):
                assert response.status_code == 503
                assert "not serving now: connecting to etcd" in response.text
        starting.cancel()
    await service.stop()


async def test_waiting_for_etcd_names_its_endpoints_and_goes_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Clock(SystemClock):
        """Pauses between attempts pass at once."""

        async def sleep(self, seconds: float) -> None:
            await super().sleep(min(seconds, 0.01))

    endpoint = f"http://127.0.0.1:{free_port()}"
    settings = EtcdSettings((endpoint,), request_timeout_s=0.2, dial_timeout_s=0.2)
    late = etcd_for_tests(tmp_path / "etcd", listen=endpoint)
    pool = BlockingPool("etcd", 1)
    async with TaskScope("test") as scope:
        waiting = scope.spawn(connect_with_retry(settings, Clock()), name="connect")
        while sum("trying again" in record.msg for record in caplog.records) < 2:
            assert not waiting.done()
            await SystemClock().sleep(0.01)
        logged(caplog, "error", endpoint=endpoint)
        try:
            await pool.run(late.start)
            async with await waiting as client:
                assert (await client.status()).version
        finally:
            late.stop()
            pool.close()


async def test_a_ready_broker_says_so_until_its_key_is_gone(etcd: Etcd, tmp_path: Path) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0)
    assert await ready(broker.http) == (200, "ready")
    await etcd.delete(member_key("/gazette/cluster", "local", "broker-one"))
    # Deleted by another process, or at the end of the lease: nothing must be served any more.
    await broker.service.wait()
    assert isinstance(broker.service.failure, Broken)
    code, text = await ready(broker.http)
    assert code == 503
    assert text.startswith("failed: member key not found in etcd")
    with raises(Broken, "key", "revision"):
        await broker.stop()


def test_random_names_are_two_words() -> None:
    names = {two_words(random.Random(seed)) for seed in range(200)}
    assert len(names) > 150
    assert all(len(name.split("-")) == 2 and name.isascii() for name in names)


# --- Leaving


async def test_a_broker_that_leaves_hands_over_and_everything_stays_readable(
    etcd: Etcd, tmp_path: Path
) -> None:
    one = await BrokerFixture.start(
        etcd, tmp_path, id="broker-one", drain_timeout_s=30.0, lease_ttl_s=60.0
    )
    await one.create(journal_spec(JOURNAL))
    end = await append(one, b"before ")
    async with await BrokerFixture.start(etcd, tmp_path, id="broker-two", lease_ttl_s=60.0) as two:
        async with TaskScope("test") as scope:
            stopping = scope.spawn(one.stop(), name="stop")
            # Appends go on while the journal is handed over.
            while not stopping.done():
                end = await append(two, b"x")
        await two.settled(JOURNAL)
        assert two.service.context.resolver.journals == (JOURNAL,)
        end = await append(two, b"after")
        assert await content(two.client, end) == b"before " + b"x" * (end - 12) + b"after"
        members = [kv.decoded.suffix for kv in two.service.context.state.members]
        assert members == ["broker-two"]


async def test_a_broker_that_a_journal_needs_hands_over_the_rest_and_leaves_in_bounded_time(
    etcd: Etcd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three brokers, and a journal that wants three: no broker could take it over from one that leaves."""
    other = "b/journal"
    async with (
        await BrokerFixture.start(
            etcd, tmp_path, zone="b", id="broker-two", lease_ttl_s=60.0
        ) as two,
        await BrokerFixture.start(etcd, tmp_path, zone="b", id="broker-three", lease_ttl_s=60.0),
    ):
        one = await BrokerFixture.start(
            etcd, tmp_path, zone="a", id="broker-one", drain_timeout_s=3.0, lease_ttl_s=60.0
        )
        await two.create(journal_spec(JOURNAL, replication=3))
        await one.create(*(journal_spec(f"{other}-{n}") for n in range(6)))
        for n in range(6):
            await one.client.append(AppendParams(f"{other}-{n}"), b"there")
        end = await append(one, b"before ")
        local = one.service.context.resolver.journals
        assert len(local) > 1

        one.service.stop_soon()
        async with TaskScope("test") as scope:
            stopping = scope.spawn(one.stop(), name="stop")
            while one.service.context.resolver.journals != (JOURNAL,):
                assert not stopping.done()
                await one.service.context.key_space.next_change()
            # What others can serve, they serve already; the rest is served on, and appended to.
            text = ""
            while not text.startswith("draining: 1 journal left; "):
                code, text = await ready(one.http)
                assert code == 503
                assert not stopping.done()
            assert (
                "1 journal waits for another broker to start, as a replication of 3 needs 3 other "
                "brokers, and 2 stay (b#broker-three, b#broker-two): a/journal; leaves in"
            ) in text
            end = await append(two, b"and while draining")
            await stopping
        line = logged(caplog, "reason", member="a#broker-one")
        assert "no other broker" in line["reason"]
        for n in range(6):
            await two.settled(f"{other}-{n}")
            await two.client.append(AppendParams(f"{other}-{n}"), b", and after")

        # No operator needs to confirm a head: the next broker is all that was waited for.
        async with await BrokerFixture.start(
            etcd, tmp_path, zone="a", id="broker-four", lease_ttl_s=60.0
        ):
            await two.settled(JOURNAL)
            assert await append(two, b".") == end + 1
            assert await content(two.client, end) == b"before and while draining"


async def test_a_broker_leaves_although_journals_are_created_all_the_time(
    etcd: Etcd, tmp_path: Path
) -> None:
    """It waits ``drain_timeout_s`` with the journal that needs it, and gets none of the new ones."""
    async with (
        await BrokerFixture.start(etcd, tmp_path, id="broker-two", lease_ttl_s=60.0) as two,
        await BrokerFixture.start(etcd, tmp_path, id="broker-three", lease_ttl_s=60.0),
    ):
        one = await BrokerFixture.start(
            etcd, tmp_path, id="broker-one", drain_timeout_s=2.0, lease_ttl_s=60.0
        )
        await one.create(journal_spec(JOURNAL, replication=3))
        end = await append(one, b"before ")
        one.service.stop_soon()
        async with TaskScope("test") as scope:
            stopping = scope.spawn(one.stop(), name="stop")
            while not (await ready(one.http))[1].startswith("draining: 1 journal left; "):
                assert not stopping.done()
            begun, created = SystemClock().monotonic(), 0
            while not stopping.done():
                spec = journal_spec(f"new/journal-{created}", replication=2 + created % 2)
                await two.client.apply_journals([JournalChange(upsert=spec)])
                created += 1
                assert one.service.context.resolver.journals in ((JOURNAL,), ())
                assert SystemClock().monotonic() - begun < 20.0
        assert created > 2
        # What the others can hold is served, and the rest as soon as there is another broker.
        await two.settled("new/journal-0")
        await two.client.append(AppendParams("new/journal-0"), b"new")
        async with await BrokerFixture.start(etcd, tmp_path, id="broker-four", lease_ttl_s=60.0):
            for journal in (JOURNAL, "new/journal-1"):
                await two.settled(journal)
            await two.client.append(AppendParams("new/journal-1"), b"new")
            assert await append(two, b".") == end + 1


async def test_the_last_broker_leaves_in_bounded_time_and_persists_everything(
    etcd: Etcd, tmp_path: Path
) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path, drain_timeout_s=0.2, lease_ttl_s=60.0)
    await broker.create(journal_spec(JOURNAL))
    parts = [os.urandom(1000) for _ in range(5)]
    for part in parts:
        await append(broker, part)
    await broker.stop()
    files = sorted((broker.file_root / "fragments" / "a" / "journal").iterdir())
    assert b"".join(path.read_bytes() for path in files) == b"".join(parts)
    # Its lease is released: the next one of the same id need not wait for it.
    assert (await etcd.range("/gazette/cluster/members/")).kvs == ()
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as again:
        await again.settled(JOURNAL)
        assert await content(again.client, 5000) == b"".join(parts)


async def test_asking_again_ends_the_wait_for_others(etcd: Etcd, tmp_path: Path) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path, drain_timeout_s=3600.0, lease_ttl_s=60.0)
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"content")
    broker.service.stop_soon()
    async with TaskScope("test") as scope:
        stopping = scope.spawn(broker.service.stop(), name="stop")
        while not (await ready(broker.http))[1].startswith("draining: 1 journal left"):
            assert not stopping.done()
        # While it drains it still serves.
        assert await append(broker, b", more") == 13
        broker.service.stop_soon()
        await stopping
    await broker.crash()
    files = (broker.file_root / "fragments" / "a" / "journal").iterdir()
    assert b"".join(path.read_bytes() for path in sorted(files)) == b"content, more"


async def test_calls_that_hang_are_cut_off_after_the_grace(etcd: Etcd, tmp_path: Path) -> None:
    """An append whose client stalls must not keep its broker from leaving."""
    broker = await BrokerFixture.start(etcd, tmp_path, graceful_stop_s=0.2, lease_ttl_s=60.0)
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"committed")
    stub = broker.client.channels.journal(broker.endpoint)
    stalled: Any = stub.Append()
    await stalled.write(broker_pb2.AppendRequest(journal=JOURNAL))
    await stalled.write(broker_pb2.AppendRequest(content=b"never committed"))
    async with httpx.AsyncClient(base_url=broker.http) as http:
        async with http.stream("GET", f"/{JOURNAL}?block=true") as response:
            assert await anext(response.aiter_raw()) == b"committed"
            await broker.service.stop()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await stalled
    files = (broker.file_root / "fragments" / "a" / "journal").iterdir()
    assert b"".join(path.read_bytes() for path in files) == b"committed"
    await broker.crash()


class RefusingStore(FileStore):
    """A store that accepts no fragment of the journal."""

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        if path.startswith(JOURNAL):
            raise Unavailable("the store is full", hint="Delete something.")
        super().put(path, source, content_encoding=content_encoding)


async def test_spools_that_cannot_be_persisted_are_named(etcd: Etcd, tmp_path: Path) -> None:
    def construct(url: FragmentStoreUrl) -> FileStore:
        return RefusingStore(tmp_path / "root", url)

    broker = await BrokerFixture.start(
        etcd, tmp_path, persist_timeout_s=0.3, constructors={"file": construct}, lease_ttl_s=60.0
    )
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"content")
    with raises(Unavailable, "deadline_s", says=f"{JOURNAL} [0, 7)"):
        await broker.stop()
    assert (await etcd.range("/gazette/cluster/members/")).kvs == ()


async def test_a_broker_whose_lease_is_lost_breaks_but_persists(etcd: Etcd, tmp_path: Path) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0)
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"content")
    (lease,) = await leases_of(etcd, "/gazette/cluster", "broker-one")
    await lease.revoke()
    await broker.service.wait()
    with pytest.raises(GazetteError):
        await broker.stop()
    (path,) = (broker.file_root / "fragments" / "a" / "journal").iterdir()
    assert path.read_bytes() == b"content"


class GatedStore(FileStore):
    """A store whose uploads wait."""

    asked = threading.Event()
    go_on = threading.Event()

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        if path.startswith(JOURNAL):
            self.asked.set()
            assert self.go_on.wait(30)
        super().put(path, source, content_encoding=content_encoding)


async def test_the_lease_is_held_until_everything_is_persisted(etcd: Etcd, tmp_path: Path) -> None:
    """Without it, others take the journals for abandoned before their content can be read."""

    def construct(url: FragmentStoreUrl) -> FileStore:
        return GatedStore(tmp_path / "root", url)

    broker = await BrokerFixture.start(
        etcd, tmp_path, constructors={"file": construct}, lease_ttl_s=60.0
    )
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"content")
    async with TaskScope("test") as scope:
        stopping = scope.spawn(broker.stop(), name="stop")
        try:
            while not GatedStore.asked.is_set() or "persisting" not in broker.service.not_ready():
                assert not stopping.done()
                await SystemClock().sleep(0.001)
            assert len((await etcd.range("/gazette/cluster/members/")).kvs) == 1
        finally:
            GatedStore.go_on.set()
        await stopping
    assert (await etcd.range("/gazette/cluster/members/")).kvs == ()


async def test_a_broker_that_leaves_waits_for_spools_that_are_still_held(
    etcd: Etcd, tmp_path: Path
) -> None:
    """As by a primary's stream that is just ending: its content is persisted like all other."""
    broker = await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0)
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"content")
    context = broker.service.context
    replica = replica_of(context.resolver, JOURNAL)
    pipeline = await replica.pipeline.take()
    async with TaskScope("test") as scope:
        stopping = scope.spawn(broker.stop(), name="stop")
        try:
            while not context.resolver._torn_down:
                await SystemClock().sleep(0.001)
            await broker.service.server.grpc.wait_for_termination()
            for _ in range(1000):
                await SystemClock().sleep(0)  # It could go on, if it did not wait.
            assert not context.persister._closed
        finally:
            replica.pipeline.give(pipeline)
        await stopping
    (path,) = (broker.file_root / "fragments" / "a" / "journal").iterdir()
    assert path.read_bytes() == b"content"


class PausedClock(SystemClock):
    """The machine's clock; ``pause`` is a stop of the process that lasted for so long."""

    def __init__(self) -> None:
        self.paused_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.paused_s

    def pause(self, seconds: float) -> None:
        self.paused_s += seconds


async def test_a_broker_that_wakes_up_after_its_lease_acknowledges_nothing(
    etcd: Etcd, tmp_path: Path
) -> None:
    """With one replica no other broker is asked, and the append was already under way."""
    clock = PausedClock()
    broker = await BrokerFixture.start(
        etcd, tmp_path, clock=clock, lease_ttl_s=60.0, min_append_rate=0
    )
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"before")
    await append(broker, b"")
    # The first fragment is complete, and no pulse is under way. A pulse would meet the end of the
    # lease first, and break the pipeline.
    replica_of(broker.service.context.resolver, JOURNAL).stop_daemons()
    stub = broker.client.channels.journal(broker.endpoint)
    call: Any = stub.Append()
    await call.write(broker_pb2.AppendRequest(journal=JOURNAL))
    await call.write(broker_pb2.AppendRequest(content=b"across"))
    await call.write(broker_pb2.AppendRequest())
    clock.pause(61.0)
    await call.done_writing()
    with call_refused(grpc.StatusCode.UNKNOWN, "late_s="):
        await call
    await broker.crash()


async def test_a_crashed_broker_leaves_its_key_until_the_lease_ends(
    etcd: Etcd, tmp_path: Path
) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0)
    await broker.create(journal_spec(JOURNAL))
    assert await append(broker, b"lost with its only replica") == 26
    await broker.crash()
    (lease,) = await leases_of(etcd, "/gazette/cluster", "broker-one")
    # The next one of the same name comes once the lease is over.
    await lease.revoke()
    assert (await etcd.range("/gazette/cluster/members/")).kvs == ()
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as again:
        await again.settled(JOURNAL)
        # Its offsets are not given out again, whether or not its only fragment was stored.
        with raises(GazetteError, status="INDEX_HAS_GREATER_OFFSET", journal="a/journal"):
            await append(again, b"refused")
        await again.client.append(AppendParams(JOURNAL, offset=26))
        assert await append(again, b"next") == 30


async def test_replicas_of_a_crashed_broker_are_taken_over(etcd: Etcd, tmp_path: Path) -> None:
    one = await BrokerFixture.start(etcd, tmp_path, id="broker-one", zone="a", lease_ttl_s=60.0)
    two = await BrokerFixture.start(etcd, tmp_path, id="broker-two", zone="b", lease_ttl_s=60.0)
    async with await BrokerFixture.start(
        etcd, tmp_path, id="broker-six", zone="b", lease_ttl_s=60.0
    ) as three:
        await three.create(journal_spec(JOURNAL, replication=2))
        end = await append(three, b"before")
        (primary,) = [
            broker
            for broker in (one, two, three)
            for at in [await at_broker(broker)]
            if at.is_local
        ]
        victim = primary if primary is not three else one
        await victim.die()
        await three.settled_without(victim, JOURNAL)
        end = await append(three, b" and after")
        assert await content(three.client, end) == b"before and after"
        for broker in (one, two):
            await broker.stop()


async def at_broker(broker: BrokerFixture) -> Any:
    await broker.settled(JOURNAL)
    return await broker.service.context.resolver.resolve(
        JOURNAL, claims=Claims(Capability.APPEND), may_proxy=True, require_primary=True
    )


# --- The process


@pytest.fixture
async def process(etcd_server: EtcdServer, tmp_path: Path) -> AsyncIterator[Any]:
    """Start ``gazette serve`` on free ports, below a directory of the test; kill what is left."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str, etcd: str = etcd_server.endpoint) -> subprocess.Popen[bytes]:
        argv = [
            *(sys.executable, "-m", "gazette.main", "serve"),
            f"--etcd.address={etcd}",
            f"--etcd.prefix=/process/{tmp_path.name}",
            f"--broker.file-root={tmp_path}",
            "--broker.host=127.0.0.1",
            "--broker.bind-host=127.0.0.1",
            "--broker.drain-timeout=0.1s",
            "--log.level=info",
            "--log.format=json",
            *flags,
        ]
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            argv, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}, cwd=tmp_path
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def line_of(process: subprocess.Popen[bytes], text: str) -> dict[str, Any]:
    """Read the log until there is a line with that text."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line.decode():
            found: dict[str, Any] = json.loads(line)
            return found
    raise AssertionError(f"{text!r} was not logged")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serve_runs_until_a_signal_and_exits_with_zero(
    process: Any, number: signal.Signals
) -> None:
    running = process("--broker.id=some-broker", "--broker.zone=zone-a")
    line = line_of(running, "serves at")
    assert line["level"] == "info"
    assert "broker zone-a#some-broker serves at http://127.0.0.1:" in line["msg"]
    running.send_signal(number)
    assert running.wait(20) == 0


async def test_serve_waits_for_etcd_aloud_and_ends_cleanly_on_sigterm(process: Any) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    running = process("--log.level=warn", etcd=endpoint)
    line = line_of(running, "cannot be reached")
    assert endpoint in line["msg"]
    assert line["level"] == "warning"
    running.terminate()
    assert running.wait(20) == 0


async def test_a_port_in_use_is_one_line_and_exit_code_one(process: Any) -> None:
    with bind_tcp("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        running = process(f"--broker.port={port}")
        assert running.wait(20) == 1
    (line,) = [json.loads(one) for one in running.stderr.read().splitlines()]
    assert line["level"] == "fatal"
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line["msg"]
    assert "Choose another port" in line["hint"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--broker.limit=x"], '--broker.limit: invalid value "x"'),
        (["--broker.file-only"], "--broker.file-only requires --broker.file-root"),
        (["--broker.file-root=/no/such"], "--broker.file-root: /no/such does not exist"),
        (["--broker.spool-dir=/etc/passwd"], "--broker.spool-dir: /etc/passwd is not a directory"),
        (["--broker.id=x"], "--broker.id: invalid length (1; expected 4 <= length <= 128)"),
        (["--broker.zone=zone a"], "--broker.zone: not a valid token (zone a)"),
        (["--broker.drain-timeout=30"], "Write 30s for seconds."),
        (["--broker.max-replication=0"], "invalid max-replication"),
        (
            ["--broker.server-cert-file=x"],
            "--broker.server-cert-file: give both server-cert-file and ",
        ),
        (
            ["--broker.server-cert-file=/etc/passwd", "--broker.server-cert-key-file=/etc/passwd"],
            "--broker.server-cert-file: cannot serve TLS with /etc/passwd, /etc/passwd: ",
        ),
        (["--broker.auth-keys=%"], "--broker.auth-keys: key at index 0 is not valid base64"),
        (["--broker.oidc-issuer=https://x.example"], "--broker.oidc-issuer: it needs auth-keys"),
        (
            [f"--broker.auth-keys={KEY}", "--broker.oidc-issuer=https://x.example"],
            "--broker.oidc-issuer: it needs oidc-audience",
        ),
        (
            [
                f"--broker.auth-keys={KEY}",
                "--broker.oidc-issuer=http://x.example",
                "--broker.oidc-audience=a",
                "--broker.oidc-roles=absent",
            ],
            "--broker.oidc-issuer: not a URL of https",
        ),
        (["--broker.port=80800"], '--broker.port: invalid port "80800"'),
        (["--broker.auth-keys=AA=="], "at least one key must be provided"),
        (["--etcd.address=nonsense"], "--etcd.address: not an etcd endpoint"),
        (["--workers=0"], "invalid workers"),
        (["--broker.port=http"], 'invalid port "http"'),
        (["--broker.max-streams=-1"], "--broker.max-streams: the number must "),
        (["--log.level=loud"], "expected one of"),
        (["--debug.private"], "--debug.private requires --debug.port"),
    ],
)
def test_a_wrong_configuration_is_said_and_exit_code_two(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        assert serve(argv, {}) == 2
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert text in capsys.readouterr().err


async def test_workers_are_members_of_their_own(process: Any, etcd: Etcd, tmp_path: Path) -> None:
    running = process("--workers=2", "--broker.id=host", "--log.level=info")
    prefix = f"/process/{tmp_path.name}/members/"
    clock = SystemClock()
    while len(found := (await etcd.range(prefix)).kvs) < 2:
        assert running.poll() is None
        await clock.sleep(0.05)
    names = [kv.key.decode().removeprefix(prefix) for kv in found]
    assert names == ["local#host-0", "local#host-1"]
    endpoints = {broker_pb2.BrokerSpec.FromString(kv.value).process_spec.endpoint for kv in found}
    assert len(endpoints) == 2
    async with httpx.AsyncClient() as http:  # The advertised port serves HTTP, too.
        for endpoint in endpoints:
            assert (await http.get(f"{endpoint}/debug/metrics")).status_code == 200
    running.terminate()
    assert running.wait(20) == 0
    assert (await etcd.range(prefix)).kvs == ()


async def test_an_appended_journal_survives_the_process(
    process: Any, etcd: Etcd, tmp_path: Path
) -> None:
    (tmp_path / "fragments").mkdir()
    running = process("--broker.id=some-broker")
    endpoint = line_of(running, "serves at")["msg"].rpartition(" ")[2]
    async with Client(endpoint) as client:
        await client.apply_journals([JournalChange(upsert=journal_spec(JOURNAL))])
        result = await client.append(AppendParams(JOURNAL), b"content")
        assert result.commit.end == 7
    running.terminate()
    assert running.wait(20) == 0
    (path,) = (tmp_path / "fragments" / "a" / "journal").iterdir()
    assert path.read_bytes() == b"content"


HANGING_FILES = """
import pathlib, threading
from fsspec.implementations.memory import MemoryFileSystem

class HangingFiles(MemoryFileSystem):
    protocol = "hanging"

    def _open(self, path, mode="rb", **options):
        if "w" in mode and pathlib.Path("hang").exists():
            threading.Event().wait()
        return super()._open(path, mode, **options)
"""


async def test_a_process_whose_store_hangs_ends_and_names_what_it_could_not_persist(
    process: Any, tmp_path: Path
) -> None:
    """In a thread that never returns, for which the interpreter would wait at its end."""
    # A file system that is installed where the process looks for modules.
    (tmp_path / "hanging_files.py").write_text(HANGING_FILES)
    installed = tmp_path / "hanging_files-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hanging-files\nVersion: 1.0\n"
    )
    (installed / "entry_points.txt").write_text(
        "[fsspec.specs]\nhanging = hanging_files.HangingFiles\n"
    )
    running = process(
        "--broker.id=some-broker",
        "--broker.persist-timeout=0.5s",
        "--broker.fsspec-protocols=hanging",
    )
    endpoint = line_of(running, "serves at")["msg"].rpartition(" ")[2]
    async with Client(endpoint) as client:
        spec = journal_spec(JOURNAL, stores=("fsspec+hanging://host/fragments/",))
        await client.apply_journals([JournalChange(upsert=spec)])
        await client.append(AppendParams(JOURNAL))  # Its store is listed, and healthy.
        (tmp_path / "hang").touch()
        assert (await client.append(AppendParams(JOURNAL), b"content")).commit.end == 7
    running.terminate()
    assert running.wait(20) == 1
    lines = [json.loads(line) for line in running.stderr.read().splitlines()]
    (lost,) = [line for line in lines if "was not persisted" in line["msg"]]
    assert (lost["level"], lost["journal"]) == ("error", JOURNAL)
    assert lost["fragment"].startswith("0000000000000000-0000000000000007-")
    (left,) = [line for line in lines if "threads do not end" in line["msg"]]
    # One of the threads of the store, or two: a health check may hang beside the upload.
    assert "store fsspec+hanging://host/fragments/_" in left["threads"]
    assert any(line["level"] == "fatal" for line in lines)


def test_settings_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(GazetteError):
        BrokerSettings(journal_limit=1 << 18)
    with pytest.raises(GazetteError):
        BrokerSettings(min_append_rate=-1)
    assert replace(BrokerSettings(), zone="b").zone == "b"


async def test_a_broker_with_changes_in_hand_does_not_say_that_a_journal_is_missing(
    etcd: Etcd, tmp_path: Path
) -> None:
    """Another broker has applied it, and its caller comes here at once."""
    async with await BrokerFixture.start(etcd, tmp_path, watch_delay_s=0.3) as broker:
        context = broker.service.context
        spec = journal_spec(JOURNAL).to_pb().SerializeToString()
        await etcd.put(item_key(context.settings.root, JOURNAL), spec)
        while context.state.item(JOURNAL) is None and not context.key_space.has_pending:
            await SystemClock().sleep(0)
        outcome = await broker.client.append(AppendParams(JOURNAL), b"content")
        assert outcome.commit.end == 7
        # Case: one that does not exist is missing, also while other changes are in hand.
        await etcd.put(item_key(context.settings.root, "b/journal"), b"no specification")
        with raises(GazetteError, status="JOURNAL_NOT_FOUND"):
            await broker.client.append(AppendParams("c/journal"), b"content")
