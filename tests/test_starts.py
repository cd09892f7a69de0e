"""Starts of processes: how many modules they import until they serve, and which ones they do without.

Times of starts depend on the machine. Most of each is imports, and modules can be counted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.run.dev.processes import ChildProcess, await_ready
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.etcd import EtcdServer

ROOT = Path(__file__).parents[1]
CLOCK = SystemClock()
READY_S = 120.0
GAZCTL = "gazette.gazctl.main"
MEMBER = """
import sys
from gazette.runconsumer import main
from gazette.stores.json_file import JSONFileStore
from gazette import Application

class Idle(Application):
    def new_store(self, shard, recorder):
        return JSONFileStore(recorder, {})

    def consume_message(self, shard, store, envelope, publisher):
        pass

main(Idle())
"""

ALWAYS_LATER = {"numpy", "opentelemetry", "rich", "yaml"}
"""Packages that a process imports at the first use of what needs them."""
OF_CLIENTS = {"asyncio", "google", "grpc", "prometheus_client"}
SERVERS = {"msgspec", "starlette", "gazette.broker", "gazette.consumer", "gazette.cluster"}


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        yield broker


class Start:
    """A process that writes each module that it imports."""

    def __init__(self, directory: Path, *words: str) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
        command = [sys.executable, *words]
        self.process = ChildProcess("start", command, directory / "start.log", environ, CLOCK)

    def modules(self) -> set[str]:
        """Return the modules imported so far."""
        text = self.process.log_path.read_text(errors="replace")
        return set(re.findall(r"^import time: +\d+ \| +\d+ \| *([\w.]+)$", text, re.MULTILINE))


def imported_of(modules: set[str], packages: set[str]) -> set[str]:
    """Return those of ``packages`` of which a module is imported."""
    return {
        package
        for package in packages
        if any(module == package or module.startswith(f"{package}.") for module in modules)
    }


@pytest.mark.parametrize(
    ("words", "most", "without"),
    [
        (["--help"], 90, ALWAYS_LATER | OF_CLIENTS | SERVERS | {"argparse", "dataclasses"}),
        (["journals", "--help"], 90, ALWAYS_LATER | OF_CLIENTS | SERVERS | {"argparse"}),
        (["journals", "list", "--help"], 210, ALWAYS_LATER | OF_CLIENTS - {"asyncio"} | SERVERS),
    ],
    ids=["gazctl", "group", "command"],
)
async def test_a_text_of_help_needs_few_modules(
    tmp_path: Path, words: Sequence[str], most: int, without: set[str]
) -> None:
    start = Start(tmp_path, "-m", GAZCTL, *words)
    await start.process.start()
    assert await start.process.wait() == 0
    modules = start.modules()
    assert imported_of(modules, without) == set()
    assert len(modules) <= most, sorted(modules)


async def test_a_list_of_journals_needs_a_client_and_no_server(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    await broker.create(journal_spec("a/journal"))
    words = ["journals", "list", f"--broker.address={broker.endpoint}"]
    start = Start(tmp_path, "-m", GAZCTL, *words)
    await start.process.start()
    assert await start.process.wait() == 0
    assert "a/journal" in start.process.log_tail()
    modules = start.modules()
    assert imported_of(modules, ALWAYS_LATER | SERVERS) == set()
    assert len(modules) <= 430, sorted(modules)


async def test_a_broker_is_ready_with_few_modules(etcd_server: EtcdServer, tmp_path: Path) -> None:
    port, http_port = free_port(), free_port()
    start = Start(
        tmp_path,
        *("-m", "gazette.main", "serve", "--broker.bind-host=127.0.0.1"),
        *(f"--broker.port={port}", f"--broker.http-port={http_port}"),
        *(f"--etcd.address={etcd_server.endpoint}", "--etcd.prefix=/test/starts/broker"),
    )
    await start.process.start()
    try:
        await await_ready(start.process, http_port, CLOCK, READY_S)
        modules = start.modules()
    finally:
        await start.process.stop(READY_S)
    others = {"gazette.consumer", "gazette.message", "gazette.blobs.s3", "boto3"}
    assert imported_of(modules, ALWAYS_LATER | others) == set()
    assert len(modules) <= 640, sorted(modules)


async def test_an_idle_member_is_ready_with_few_modules(
    broker: BrokerFixture, etcd_server: EtcdServer, tmp_path: Path
) -> None:
    program = tmp_path / "idle.py"
    program.write_text(MEMBER)
    port, http_port = free_port(), free_port()
    start = Start(
        tmp_path,
        *(str(program), "serve", "--consumer.bind-host=127.0.0.1"),
        *(f"--consumer.port={port}", f"--consumer.http-port={http_port}"),
        f"--broker.address={broker.endpoint}",
        *(f"--etcd.address={etcd_server.endpoint}", "--etcd.prefix=/test/starts/member"),
    )
    await start.process.start()
    try:
        await await_ready(start.process, http_port, CLOCK, READY_S)
        modules = start.modules()
    finally:
        await start.process.stop(READY_S)
    assert imported_of(modules, ALWAYS_LATER | {"gazette.broker", "gazette.history"}) == set()
    assert len(modules) <= 690, sorted(modules)
