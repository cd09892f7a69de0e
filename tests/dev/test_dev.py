"""`gazette dev` and local clusters: real processes, started, stopped in any order, started again."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.errors import GazetteError
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.processes import ChildProcess, python_module
from gazette.run.dev.word_count import WordCountCluster, WordCountSettings
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.testing.broker import journal_spec

pytestmark = pytest.mark.timeout(120)

LEASE_S = 2.0
BOUND_S = 30.0


class Dev:
    """A running `gazette dev`."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.ready = directory / "ready.json"
        self.process = ChildProcess(
            "dev",
            python_module(
                "gazette.main",
                "dev",
                f"--dir={directory / 'state'}",
                "--port=0",
                "--etcd-port=0",
                f"--ready-file={self.ready}",
                *arguments,
            ),
            directory / "dev.log",
            {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
            SystemClock(),
        )

    async def start(self) -> dict[str, object]:
        await self.process.start()
        while not self.ready.exists():
            assert self.process.running, self.process.log_tail()
            await SystemClock().sleep(0.05)
        described: dict[str, object] = json.loads(self.ready.read_text())
        return described


async def test_a_restart_finds_its_data_again(tmp_path: Path) -> None:
    """What was appended to a cluster that was stopped is there when it is started again."""
    dev = Dev(tmp_path, "--brokers=2", "--zones=2")
    described = await dev.start()
    assert set(described) == {"etcd", "brokers"}
    brokers = described["brokers"]
    assert isinstance(brokers, list)
    assert len(brokers) == 2
    assert set(brokers[0]) == {"grpc", "http"}
    async with Client(brokers[0]["grpc"]) as client:
        spec = journal_spec("a/journal", replication=2, stores=("file:///",))
        await client.apply_journals([JournalChange(upsert=spec)])
        await client.append(AppendParams("a/journal"), b"kept")
    assert await dev.process.stop(BOUND_S), "it had to be killed"
    assert dev.process.exit_code == 0, dev.process.log_tail()
    assert not dev.ready.exists()

    described = await dev.start()
    brokers = described["brokers"]
    assert isinstance(brokers, list)
    async with Client(brokers[1]["grpc"]) as client:
        reader = client.retry_reader(ReadParams("a/journal", block=True))
        assert await reader.read(4) == b"kept"
        reader.close()
        result = await client.append(AppendParams("a/journal"), b"continued")
        assert result.commit.begin == 4
    assert await dev.process.stop(BOUND_S)


def other_addresses() -> list[str]:
    """Return the addresses of this machine, other than loopback and link-local ones."""
    found = [
        one.address
        for interface in psutil.net_if_addrs().values()
        for one in interface
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [one for one in found if not one.startswith(("127.", "fe80")) and one != "::1"]


def ports_of(described: dict[str, object]) -> list[int]:
    """Return every port of a cluster: etcd, and both of each broker."""
    brokers = described["brokers"]
    assert isinstance(brokers, list)
    urls = [described["etcd"], *(url for one in brokers for url in one.values())]
    return [int(urlsplit(str(url)).port or 0) for url in urls]


def sockets_of(pid: int) -> set[tuple[str, int]]:
    """Return the addresses and ports on which a process and its children listen."""
    process = psutil.Process(pid)
    return {
        (one.laddr.ip, one.laddr.port)
        for member in (process, *process.children(recursive=True))
        for one in member.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }


async def test_other_users_may_not_read_its_state(tmp_path: Path) -> None:
    """The modes of directories, logs, spools and data do not depend on the umask."""
    dev = Dev(tmp_path, "--ui")
    former = os.umask(0)
    try:
        described = await dev.start()
    finally:
        os.umask(former)
    brokers = described["brokers"]
    assert isinstance(brokers, list)
    async with Client(brokers[0]["grpc"]) as client:
        spec = journal_spec("a/journal", replication=1, stores=("file:///",))
        await client.apply_journals([JournalChange(upsert=spec)])
        await client.append(AppendParams("a/journal"), b"kept")
    state = tmp_path / "state"
    modes = {
        str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777
        for path in (state, *state.rglob("*"))
        # The directory of fragments is a store, as that of any broker. A socket has etcd's mode.
        if state / "fragments" not in path.parents and not path.is_socket()
    }
    assert {"state/logs/broker-1.log", "state/spools/broker-1", "state/fragments"} <= modes.keys()
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
    assert await dev.process.stop(BOUND_S)


async def test_a_cluster_listens_on_loopback_only(tmp_path: Path) -> None:
    """Other machines cannot reach it: at none of this machine's other addresses a port is open."""
    dev = Dev(tmp_path)
    described = await dev.start()
    listening = sockets_of(dev.process.pid)
    assert {port for _, port in listening} == set(ports_of(described))
    for host, port in listening:
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        assert (mapped or address).is_loopback, (host, port)
    for other in other_addresses():
        for port in ports_of(described):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port), timeout=5.0).close()
    assert await dev.process.stop(BOUND_S)


async def test_a_cluster_listens_on_the_host_that_is_given(tmp_path: Path) -> None:
    """Clients reach the brokers at another address; etcd stays on loopback, and the brokers warn."""
    addresses = other_addresses()
    if not addresses:
        pytest.skip("this machine has loopback addresses only")
    dev = Dev(tmp_path, f"--host={addresses[0]}")
    described = await dev.start()
    etcd, *brokers = ports_of(described)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((addresses[0], etcd), timeout=5.0).close()
    for port in brokers:
        socket.create_connection((addresses[0], port), timeout=5.0).close()
    endpoints = described["brokers"]
    assert isinstance(endpoints, list)
    async with Client(endpoints[0]["grpc"]) as client:
        assert (await client.list_journals()).journals == ()
    log = (tmp_path / "state" / "logs" / "broker-1.log").read_text()
    assert log.count("--broker.auth-keys") == 1
    assert await dev.process.stop(BOUND_S)


async def test_a_broker_that_dies_is_reported(tmp_path: Path) -> None:
    """`gazette dev` ends with the reason, rather than go on with half a cluster."""
    dev = Dev(tmp_path, "--brokers=1")
    await dev.start()
    children = subprocess.run(
        ["pgrep", "-P", str(dev.process.pid), "-f", "gazette.main serve"],
        capture_output=True,
        text=True,
        check=True,
    )
    subprocess.run(["kill", "-9", *children.stdout.split()], check=True)
    async with asyncio.timeout(BOUND_S):
        assert await dev.process.wait() == 1
    assert "broker-1 ended" in dev.process.log_tail()


async def test_a_cluster_whose_output_nobody_reads_stops_in_order(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    argv = python_module("gazette.main", "dev", f"--dir={tmp_path / 'state'}", "--port=0")
    argv += ["--etcd-port=0", "--ui=false", f"--ready-file={ready}"]
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=writing, stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        while b"Ctrl-C" not in await asyncio.to_thread(output.readline):
            assert process.returncode is None
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert process.stderr is not None
    assert b"Traceback" not in await process.stderr.read()
    await process.wait()
    assert not [child for child in children if child.is_running()]


async def test_a_cluster_stops_although_its_etcd_cannot_be_started_again(tmp_path: Path) -> None:
    """As on a full disk. No broker is left."""
    settings = ClusterSettings(tmp_path, brokers=1, zones=1, lease_ttl_s=LEASE_S)
    cluster = LocalCluster(settings, SystemClock())
    await cluster.start()
    cluster.etcd.kill()
    data = tmp_path / "etcd" / "data"
    shutil.rmtree(data)
    data.write_text("no directory")
    try:
        await cluster.stop(1.0)
        assert not cluster.brokers[0].process.running
    finally:
        await cluster.kill_brokers()


def test_mistakes_in_flags_say_what_to_do(tmp_path: Path) -> None:
    port = free_port()
    taken = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            probe = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    f"import socket; socket.create_connection(('127.0.0.1', {port}))",
                ],
                capture_output=True,
            )
            if probe.returncode == 0:
                break
        for arguments, words in (
            (["--brokerz=2"], "did you mean --brokers"),
            (["--brokers=0"], "expected 1 to 20"),
            (["--lease=soon"], "invalid value"),
            ([f"--port={port}", "--etcd-port=0", f"--dir={tmp_path}"], "is in use"),
            ([f"--dir={__file__}"], "etcd cannot write to"),
            (["--ready-file=/no/such/file"], "--ready-file: cannot write to /no/such/file"),
            ([f"--ready-file={tmp_path}"], "it is a directory"),
        ):
            result = subprocess.run(
                python_module("gazette.main", "dev", *arguments), capture_output=True, text=True
            )
            assert result.returncode == 2, result.stderr
            assert words in result.stderr
            assert "Traceback" not in result.stderr
    finally:
        taken.kill()
        taken.wait()


async def wait_all(processes: list[ChildProcess]) -> None:
    async with asyncio.timeout(BOUND_S):
        for process in processes:
            await process.wait()


@pytest.mark.long
async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    """As by Ctrl-C while etcd starts, which goes on in its thread."""
    clock = SystemClock()
    for attempt in range(5):
        cluster = LocalCluster(ClusterSettings(tmp_path, brokers=1, zones=1), clock)
        async with asyncio.TaskGroup() as group:
            start = group.create_task(cluster.start())
            while cluster.etcd.pid is None:
                await clock.sleep(0.001)
            await clock.sleep(attempt * 0.005)
            etcd = psutil.Process(cluster.etcd.pid)
            start.cancel()
        assert start.cancelled()
        assert not cluster.etcd.running
        assert not etcd.is_running()


ORDERS = random.Random("orders").sample(
    list(itertools.permutations(("etcd", "brokers", "members"))), 3
)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_sigterm_in_any_order_ends_everything(order: tuple[str, ...], tmp_path: Path) -> None:
    """Every process ends without a kill, in bounded time and without a traceback, in any order."""
    clock = SystemClock()
    cluster = LocalCluster(
        ClusterSettings(tmp_path, brokers=2, zones=2, lease_ttl_s=LEASE_S), clock
    )
    await cluster.start()
    words = WordCountCluster(cluster, WordCountSettings(partitions=2, lease_ttl_s=LEASE_S), clock)
    try:
        await words.apply_journals()
        async with asyncio.TaskGroup() as group:
            group.create_task(words.start_member())
            group.create_task(words.start_member())
        await words.apply_shards()
        await words.await_shards(standbys=True)
        brokers = [one.process for one in cluster.brokers]
        members = [one.process for one in words.members]
        for name in order:
            if name == "etcd":
                if name == order[-1]:
                    # Left in peace, they say good-bye properly.
                    await wait_all([*brokers, *members])
                    assert all(one.exit_code == 0 for one in [*brokers, *members])
                await asyncio.to_thread(cluster.etcd.stop)
            for process in {"brokers": brokers, "members": members}.get(name, []):
                process.signal(signal.SIGTERM)
        await wait_all([*brokers, *members])
        for process in [*brokers, *members]:
            log = process.log_path.read_text()
            assert "Traceback" not in log, f"{process.name}:\n{log}"
            assert process.exit_code in (0, 1), f"{process.name}: {process.exit_code}"
    finally:
        await words.stop()
        try:
            await cluster.stop()
        except GazetteError as error:
            pytest.fail(str(error))
