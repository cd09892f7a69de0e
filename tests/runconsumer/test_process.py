"""``runconsumer``: its command line, and processes that start, break and stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gazette import Application
from gazette.client.shards import ShardChange, ShardClient
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.process.bootstrap import EXIT_FAILED
from gazette.config.schema import setting
from gazette.consumer.member import ConsumerMember
from gazette.errors import Bug
from gazette.net.http_server import bind_tcp
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.process import ConsumerSpec
from gazette.protocol.shard import ReplicaCode
from gazette.runconsumer import process
from gazette.runconsumer.flags import ConsumerFlags
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.process_exit import threads_left
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import log_spec, shard_spec
from gazette.testing.etcd import EtcdServer

CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Extra:
    number: int = setting(3, "a number")
    text: str = setting("", "a text", secret=True)
    database: str = setting("", "an address of a database")
    api_keys: tuple[str, ...] = setting((), "keys of an interface, comma separated")
    token_limit: int = setting(7, "number of tokens")


class Nothing(Application[Any]):
    config_groups: ClassVar[Mapping[str, type]] = {"extra": Extra}
    message_type = dict

    def new_store(self, shard: Any, recorder: Any) -> Any:
        raise NotImplementedError

    def consume_message(self, *args: Any) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change into an empty directory, without a gazette.ini. Be called as the program of a shell is."""
    monkeypatch.chdir(tmp_path)
    arguments, sys.argv[:] = list(sys.argv), ["counter"]
    yield
    sys.argv[:] = arguments


def run(*argv: str, environ: dict[str, str] | None = None) -> int:
    return process.run(Nothing(), argv, {"HOME": "/nonexistent", **(environ or {})})


# --- Configuration


def test_print_config_names_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("print-config") == 0
    out = capsys.readouterr().out
    for group in ("Consumer", "Broker", "Etcd", "Logging", "Debug", "Extra"):
        assert f"[{group}]" in out
    assert "; Number = 3" in out


def test_flags_come_before_the_environment_before_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gazette.ini").write_text("[extra]\nnumber = 5\n[consumer]\nlimit = 7\n")
    run("print-config")
    out = capsys.readouterr().out
    assert "Number = 5" in out
    assert "Limit = 7" in out
    run("print-config", environ={"EXTRA_NUMBER": "6"})
    assert "Number = 6" in capsys.readouterr().out
    run("print-config", "--extra.number=8", environ={"EXTRA_NUMBER": "6"})
    assert "Number = 8" in capsys.readouterr().out


def test_secrets_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run("print-config", "--extra.text=hush", "--consumer.auth-keys=c2VjcmV0")
    out = capsys.readouterr().out
    assert "hush" not in out
    assert "c2VjcmV0" not in out


def test_secrets_of_options_that_do_not_say_so_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of addresses and of an application's own options; what is read back is not another value."""
    argv = [
        "--etcd.address=http://root:hunter2@etcd:2379",
        "--extra.database=postgresql://app:pass/w@rd@host:5432/db?sslpassword=hunter3&x=1",
        "--extra.api-keys=key-one,key-two",
        "--extra.token-limit=8",
    ]
    run("print-config", *argv)
    out = capsys.readouterr().out
    for secret in ("hunter", "root", "pass/w", "rd@", "key-one", "key-two"):
        assert secret not in out
    assert "; address is set; not shown" in out
    assert "; database is set; not shown" in out
    assert "; api-keys is set; not shown" in out
    assert "TokenLimit = 8" in out
    (tmp_path / "gazette.ini").write_text(out)
    run("print-config")
    assert "Address = http://localhost:2379" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["destroy"], "unknown command destroy"),
        (["--extra.number=many"], "extra.number"),
        (["--workers=0"], "workers"),
        (["--consumer.limit=-1"], "limit"),
        (["--consumer.port=http"], "port"),
        (["--consumer.scratch-dir=/no/such"], "mkdir -p /no/such"),
        (["--consumer.auth-keys=%"], "base64"),
        (["--consumer.server-cert-file=x"], "or neither"),
        (["--broker.address=localhost"], "--broker"),
        (["--debug.port=x"], "port"),
        (["--consumer.id=#"], "--consumer.id: invalid length"),
        (["--consumer.zone=a b"], "--consumer.zone: not a valid token"),
    ],
)
def test_what_is_wrong_is_named(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, with exit code 2, and without a traceback."""
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert text.lower() in err.lower()
    assert "Traceback" not in err


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run("serve", "--help")
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 0
    out = capsys.readouterr().out
    for flag in ("--consumer.id", "--extra.number", "--workers", "--etcd.address"):
        assert flag in out


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with bind_tcp("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        code = run(f"--consumer.port={port}", "--consumer.bind-host=127.0.0.1")
    assert code == EXIT_FAILED
    assert str(port) in capsys.readouterr().err


def test_the_prefix_is_the_applications_own_unless_it_is_given() -> None:
    application = Nothing()
    schema = process.schema(application, "counter")
    loaded = schema.load([], {})
    assert process.root_of(application, loaded).startswith("/gazette/consumers/")
    assert process.root_of(application, loaded).endswith("Nothing")
    loaded = schema.load(["--etcd.prefix=/my/app"], {})
    assert process.root_of(application, loaded) == "/my/app"


async def test_an_application_gets_its_settings() -> None:
    application = Nothing()
    loaded = process.schema(application, "counter").load(
        ["--extra.number=4", "--consumer.bind-host=127.0.0.1"], {}
    )
    member = process.build(application, loaded, CLOCK)
    assert member.service.config(Extra).number == 4
    with pytest.raises(Bug):
        member.service.config(dict)
    await member.crash()


def test_threads_that_do_not_end_are_named() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="stuck query")
    thread.start()
    try:
        names = [one.name for one in threads_left(0.05)]
        assert "stuck query" in names
        assert threading.main_thread().name not in names
    finally:
        release.set()
        thread.join()
    assert "stuck query" not in [one.name for one in threads_left(0.05)]


# --- Stopping, in this process


async def test_a_stop_while_etcd_is_away_ends_at_once() -> None:
    loaded = process.schema(Nothing(), "counter").load(
        [f"--etcd.address=http://127.0.0.1:{free_port()}", "--consumer.bind-host=127.0.0.1"], {}
    )
    service: ConsumerMember = process.build(Nothing(), loaded, CLOCK)
    async with asyncio.timeout(60), TaskScope("test") as scope:
        starting = scope.spawn(service.start(), name="start")
        while service.not_ready() != "connecting to etcd":
            await CLOCK.sleep(0.01)
        starting.cancel()
        await asyncio.wait({starting})
        await service.stop()


# --- Real processes

APPLICATION = """
import time
from gazette import Application, Message, runconsumer
from gazette.consumer.query.query import rpc_errors
from gazette.stores.sqlite.store import SQLiteStore

class Word(Message):
    word: str = ""

class Counter(Application):
    message_type = Word

    async def initialize(self, service):
        self.service = service

    def new_store(self, shard, recorder):
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS counts (word PRIMARY KEY, n)")

    def consume_message(self, shard, store, envelope, publisher):
        if envelope.message.word == "sleep":
            print("sleeps", flush=True)
            time.sleep(60)

if __name__ == "__main__":
    runconsumer.main(Counter())
"""

Launch = Callable[..., Any]


@pytest.fixture
async def launch(
    etcd: Etcd, etcd_server: EtcdServer, tmp_path: Path
) -> AsyncIterator[tuple[BrokerFixture, Launch]]:
    """Yield a broker, and a function that starts processes of the application."""
    program = tmp_path / "counter.py"
    program.write_text(APPLICATION)
    children: list[asyncio.subprocess.Process] = []
    root = Path(__file__).resolve().parents[2]
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:

        async def start(*argv: str) -> asyncio.subprocess.Process:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                str(program),
                f"--etcd.address={etcd_server.endpoint}",
                "--etcd.prefix=/gazette/consumers/counter",
                "--etcd.lease=5s",
                f"--broker.address={broker.endpoint}",
                "--consumer.host=127.0.0.1",
                "--consumer.bind-host=127.0.0.1",
                "--consumer.drain-timeout=0s",
                *argv,
                env={**os.environ, "PYTHONPATH": str(root), "HOME": str(tmp_path)},
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            children.append(child)
            return child

        yield broker, start
        for child in children:
            if child.returncode is None:
                child.kill()
            await child.communicate()


async def endpoint(etcd: Etcd) -> str:
    """Return what the only member advertises, once a member has joined."""
    await members(etcd, 1)
    (kv,) = (await etcd.range("/gazette/consumers/counter/members/")).kvs
    return ConsumerSpec.from_pb(consumer_pb2.ConsumerSpec.FromString(kv.value)).endpoint


async def members(etcd: Etcd, count: int) -> list[str]:
    prefix = "/gazette/consumers/counter/members/"
    while True:
        found = await etcd.range(prefix)
        if len(found.kvs) == count:
            return [kv.key.decode().removeprefix(prefix) for kv in found.kvs]
        await CLOCK.sleep(0.05)


async def test_a_process_stops_within_its_bound_though_a_callback_does_not_return(
    etcd: Etcd, launch: tuple[BrokerFixture, Launch]
) -> None:
    from tests.consumer.apps import SHARD, SOURCE, append, frame, source_spec

    broker, start = launch
    await broker.create(source_spec(), log_spec(SHARD))
    child = await start("--consumer.graceful-stop=1s")
    async with asyncio.timeout(90), ShardClient(await endpoint(etcd)) as shards:
        await shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
        await append(broker, frame("sleep"))
        assert await child.stdout.readline() == b"sleeps\n"
        while True:
            (listed,) = (await shards.list_shards()).shards
            if listed.status[0].code is ReplicaCode.PRIMARY:
                break
        child.send_signal(signal.SIGTERM)
        await child.wait()
    assert await members(etcd, 0) == []


async def test_workers_are_members_of_their_own_and_stop_together(
    etcd: Etcd, launch: tuple[BrokerFixture, Launch]
) -> None:
    _, start = launch
    child = await start("--workers=2", "--consumer.id=many")
    async with asyncio.timeout(90):
        assert await members(etcd, 2) == ["local#many-0", "local#many-1"]
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
        assert await members(etcd, 0) == []


@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0])
async def test_a_signal_at_any_moment_ends_a_process(
    launch: tuple[BrokerFixture, Launch], after_s: float
) -> None:
    _, start = launch
    child = await start()
    await CLOCK.sleep(after_s)
    child.send_signal(signal.SIGTERM)
    async with asyncio.timeout(90):
        # Before it listens to signals, it ends of the signal.
        assert await child.wait() in (0, -signal.SIGTERM)


async def test_another_application_on_the_same_prefix_ends_with_what_to_do(
    etcd: Etcd, etcd_server: EtcdServer, launch: tuple[BrokerFixture, Launch], tmp_path: Path
) -> None:
    """It says so on its standard error, and does not become a member."""
    broker, start = launch
    await start()
    assert await members(etcd, 1)
    other = tmp_path / "other.py"
    other.write_text(APPLICATION)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(other),
        f"--etcd.address={etcd_server.endpoint}",
        "--etcd.prefix=/gazette/consumers/counter",
        f"--broker.address={broker.endpoint}",
        "--consumer.bind-host=127.0.0.1",
        env={**os.environ, "HOME": str(tmp_path)},
        cwd=tmp_path,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(90):
        _, said = await child.communicate()
    assert child.returncode == 2
    text = said.decode()
    assert "belongs to application counter.Counter, and this is application other.Counter" in text
    assert "--consumer.adopt-from=counter.Counter" in text
    assert len(await members(etcd, 1)) == 1


def test_examples_listen_on_loopback_unless_they_are_asked() -> None:
    options = process.schema(Nothing(), "example", "127.0.0.1")
    for argv, expected in (([], "127.0.0.1"), (["--consumer.bind-host=0.0.0.0"], "0.0.0.0")):
        flags = options.load(argv, {}, directory=Path("/nonexistent")).group(ConsumerFlags)
        assert flags.bind_host == expected
        assert flags.server_settings("machine").host == ("127.0.0.1" if not argv else "machine")
    examples = Path(__file__).parents[2] / "examples"
    mains = [one for one in examples.rglob("*.py") if "runconsumer.main(" in one.read_text()]
    assert len(mains) >= 5
    for one in mains:
        assert 'bind_host="127.0.0.1"' in one.read_text(), one
