"""The launcher of a real etcd."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.server import EtcdServer, find_etcd
from gazette.errors import Broken, Conflict, Invalid, NotFound, Unavailable
from gazette.runtime.clock import SystemClock
from gazette.testing.etcd import etcd_for_tests
from tests.facts import is_advised, raises


async def value_of(server: EtcdServer, key: str) -> bytes | None:
    settings = EtcdSettings(endpoints=(server.endpoint,))
    async with await Etcd.connect(settings, SystemClock()) as etcd:
        kv = await etcd.get(key)
        return None if kv is None else kv.value


async def test_keeps_its_address_and_its_data_over_a_kill(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, durable=True) as server:
        endpoint, pid = server.endpoint, server.pid
        async with await Etcd.connect(EtcdSettings(endpoints=(endpoint,)), SystemClock()) as etcd:
            await etcd.put("a", b"1")
        server.kill()
        assert not server.running
        server.start()
        assert (server.endpoint, server.running) == (endpoint, True)
        assert server.pid != pid
        assert await value_of(server, "a") == b"1"
    assert not server.running


async def test_listens_on_a_unix_socket(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, listen="unix") as server:
        assert await value_of(server, "a") is None


def test_starting_what_runs_does_nothing(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        pid = server.pid
        server.start()
        assert server.pid == pid
        # Case: it has died without a signal of ours.
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not server.running
        server.start()
        assert server.running


def test_stopping_ends_a_paused_process_too(tmp_path: Path) -> None:
    server = etcd_for_tests(tmp_path)
    server.start()
    server.pause()
    assert server.running
    server.stop()
    assert not server.running
    assert server.exit_code == -signal.SIGTERM
    # Case: once more does nothing.
    server.stop()
    with raises(Broken, "endpoint", "log"):
        server.pause()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process of another")
def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from gazette.testing.etcd import etcd_for_tests\n"
        f"server = etcd_for_tests({str(tmp_path)!r})\n"
        "server.start()\n"
        "server.pause()\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    assert run.returncode == -9
    try:
        ended = os.pidfd_open(int(run.stdout))
    except ProcessLookupError:
        return
    assert select.select([ended], [], [], 10)[0]
    os.close(ended)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process of another")
def test_it_outlives_processes_that_need_it_to_end(tmp_path: Path) -> None:
    script = (
        "import os, subprocess\n"
        "from gazette.testing.etcd import etcd_for_tests\n"
        f"server = etcd_for_tests({str(tmp_path)!r})\n"
        "server.start()\n"
        "subprocess.Popen(['sh', '-c', 'read x'], stdout=2, pass_fds=[server.lifeline])\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    reading, writing = os.pipe()
    argv = [sys.executable, "-c", script]
    run = subprocess.run(argv, stdin=reading, stdout=subprocess.PIPE, check=False)
    os.close(reading)
    assert run.returncode == -9
    ended = os.pidfd_open(int(run.stdout))
    assert not select.select([ended], [], [], 1)[0]
    os.close(writing)
    assert select.select([ended], [], [], 10)[0]
    os.close(ended)


def test_the_binary_on_path_wins_over_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "etcd"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_etcd() == str(binary)


def test_a_missing_binary_says_how_to_get_one(tmp_path: Path) -> None:
    with raises(NotFound, "binary", reason="No such file or directory") as caught:
        etcd_for_tests(tmp_path, binary=str(tmp_path / "nowhere"), durable=True).start()
    assert is_advised(caught.value)


@pytest.mark.parametrize("name", ["", "etcd.log", "etcd.lock"])
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "etcd"
    if name:
        (directory / name).mkdir(parents=True)
    else:
        directory.write_text("a file")
    with raises(Invalid, path="directory", says=f"etcd cannot write to {directory}"):
        EtcdServer(directory).start()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = EtcdServer(tmp_path, listen=f"http://127.0.0.1:{port}")
        with raises(Unavailable, "reason", says=str(port)):
            server.start()


def test_death_at_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    server = etcd_for_tests(tmp_path, arguments=["--election-timeout=1"])
    with raises(Broken, "log_path", exit_code=1) as caught:
        server.start()
    assert "election-timeout" in caught.value.facts["log"]
    assert not server.running


def test_not_getting_ready_in_time_leaves_no_process(tmp_path: Path) -> None:
    binary = tmp_path / "sleepy"
    binary.write_text("#!/bin/sh\nexec sleep 60\n")
    binary.chmod(0o755)
    server = EtcdServer(tmp_path, binary=str(binary))
    with raises(Unavailable, timeout_s=0.05):
        server.start(timeout_s=0.05)
    assert not server.running


def test_one_directory_is_served_once(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path):
        with raises(Conflict, "directory"):
            etcd_for_tests(tmp_path).start()
    # Case: the lock ends with the process that held it.
    with etcd_for_tests(tmp_path):
        pass


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "ftp://x:1", "http://x", "unix:///x"])
def test_addresses_that_are_none(tmp_path: Path, listen: str) -> None:
    with raises(Invalid, "listen", path="listen"):
        EtcdServer(tmp_path, listen=listen)


def test_a_unix_path_that_is_too_long(tmp_path: Path) -> None:
    with raises(Invalid, "socket", "bytes_max", path="directory"):
        EtcdServer(tmp_path / ("x" * 120), listen="unix").start()
