"""The console as a process: its address, its exit codes, and the one beside a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gazette.run.dev.console_process import KEY_ENV, console_beside
from gazette.run.dev.processes import ChildProcess, python_module
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture
from tests.run.console.conftest import enter

CLOCK = SystemClock()
ROOT = Path(__file__).parents[3]


async def entered(address: str) -> httpx.Response:
    """Open the printed address once the process listens, and ask for the session."""
    async with httpx.AsyncClient() as http:
        while True:
            try:
                await enter(http, address)
            except httpx.TransportError:
                await CLOCK.sleep(0.05)
            else:
                return await http.get(httpx.URL(address).join("/api/session"))


async def test_the_console_beside_a_cluster_is_reached_by_the_address_that_is_said(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    said: list[str] = []
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    async with console_beside(tmp_path, environ, CLOCK, said.append, brokers=broker.endpoint):
        address = said[0].removeprefix("console  ")
        session = await entered(address)
        assert session.json()["addresses"] == {"broker": broker.endpoint}
    with pytest.raises(httpx.TransportError):
        httpx.get(address)


async def test_settings_for_another_cluster_do_not_reach_the_console_beside_one(
    broker: BrokerFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / ".config" / "gazette"
    config.mkdir(parents=True)
    prod = {"broker": "http://127.0.0.1:1", "consumer": "http://127.0.0.1:1"}
    (config / "contexts.yaml").write_text(
        json.dumps({"current": "prod", "contexts": {"prod": prod}})
    )
    (tmp_path / "gazctl.ini").write_text("[consumer]\nAddress = http://127.0.0.1:1\n")
    monkeypatch.chdir(tmp_path)
    settings = {"HOME": str(tmp_path), "GAZCTL_CONTEXT": "prod", "PYTHONPATH": str(ROOT)}
    said: list[str] = []
    environ = {**os.environ, **settings}
    async with console_beside(tmp_path, environ, CLOCK, said.append, brokers=broker.endpoint):
        session = (await entered(said[0].removeprefix("console  "))).json()
    assert (session["addresses"], session["context"]) == ({"broker": broker.endpoint}, "")


async def test_a_console_that_cannot_start_beside_a_cluster_is_said(tmp_path: Path) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    environ = {"PYTHONHOME": str(tmp_path)}  # Python ends at once.
    where = (tmp_path, environ, CLOCK, said.put_nowait)
    async with asyncio.timeout(60), console_beside(*where, brokers="http://127.0.0.1:1"):
        assert "?key=" in await said.get()
        assert f"see {tmp_path / 'logs' / 'console.log'}" in await said.get()


async def test_a_signal_ends_the_console_and_the_key_may_be_given(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), KEY_ENV: "mine"}
    flags = ("--port=0", f"--broker.address={broker.endpoint}")
    log = tmp_path / "ui.log"
    process = ChildProcess("ui", python_module("gazette.main", "ui", *flags), log, environ, CLOCK)
    await process.start()
    while "?key=$" not in (text := log.read_text()):
        assert process.running, text
        await CLOCK.sleep(0.05)
    assert "mine" not in text
    assert (await entered(text.split()[1].replace(f"${KEY_ENV}", "mine"))).status_code == 200
    process.signal(signal.SIGTERM)
    assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flag", "text"), [("--context=none", "there is no context none"), ("--port=x", "--port")]
)
def test_a_wrong_flag_is_a_sentence(tmp_path: Path, flag: str, text: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "gazette.main", "ui", flag]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, text in ended.stderr) == (2, True)
