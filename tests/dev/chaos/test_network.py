"""Links between processes, and what becomes of connections when they are cut."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import pytest

from gazette.runtime.ports import free_port
from tests.raw_server import raw_server
from tools.chaos.network import CLIENT, LinkState, Network

CALLER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as caller:
    caller.sendall(b"from a process")
    print(caller.recv(100).decode())
"""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with what comes."""
    while data := await reader.read(100):
        writer.write(data)


class Fixture:
    def __init__(self) -> None:
        self.pids: dict[str, int] = {"service": os.getpid()}
        self.network = Network(lambda: self.pids)
        self.port = free_port("127.0.0.2")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.2", self.port)

    async def never_answered(self) -> None:
        reader, writer = await self.connect()
        try:
            await reader.readexactly(1)
        finally:
            writer.transport.abort()

    async def ask(self) -> bytes:
        reader, writer = await self.connect()
        try:
            writer.write(b"hello")
            return await reader.read(100)
        finally:
            writer.transport.abort()


@pytest.fixture
async def fixture() -> AsyncIterator[Fixture]:
    fixture = Fixture()
    async with raw_server(echo) as server:
        service = ("127.0.0.1", server.port)
        await fixture.network.gateway("service", service, "127.0.0.2", fixture.port)
        # We are no process of the cluster: `pids` has other names for the processes it has.
        fixture.pids = {"service": 1}
        yield fixture
        await fixture.network.stop()


async def test_an_open_link_carries(fixture: Fixture) -> None:
    assert await fixture.ask() == b"hello"


async def test_a_refused_link_resets_what_there_is_and_what_comes(fixture: Fixture) -> None:
    link = fixture.network.link(CLIENT, "service")
    reader, writer = await fixture.connect()
    writer.write(b"hello")
    assert await reader.read(100) == b"hello"
    link.set(LinkState.REFUSED)
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await fixture.never_answered()
    writer.transport.abort()
    link.set(LinkState.OPEN)
    assert await fixture.ask() == b"hello"


async def test_a_held_link_delivers_when_it_is_opened(fixture: Fixture) -> None:
    reader, writer = await fixture.connect()
    writer.write(b"one")
    assert await reader.read(100) == b"one"
    fixture.network.link("service", CLIENT).set(LinkState.HELD)
    writer.write(b"two")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reader.read(100)
    fixture.network.heal()
    assert await reader.read(100) == b"two"
    writer.transport.abort()


async def test_who_connects_is_known(fixture: Fixture) -> None:
    """A cut between two processes does not concern others."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"input()\n{CALLER}",
        "127.0.0.2",
        str(fixture.port),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    fixture.pids = {"service": 1, "caller": process.pid}
    fixture.network.link("caller", "service").set(LinkState.HELD)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    assert await fixture.ask() == b"hello"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.wait()
    fixture.network.heal()
    out, _ = await process.communicate()
    assert out == b"from a process\n"


async def test_what_is_down_is_down(fixture: Fixture) -> None:
    fixture.pids = {}
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await fixture.never_answered()
