"""gRPC and HTTP of a broker on the one port that it advertises: what docs/migrating.md describes.

A broker of the original names that port, in ``Location``, for a journal that ours lead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.etcd.client import Etcd
from gazette.net.server import HTTP2
from gazette.protocol.route import grpc_target
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec

ADVERTISED = "127.0.0.2"
HTTP2_PREFACE = b"PRI * HTTP/2.0"


@asynccontextmanager
async def proxy(port: int, http_port: int) -> AsyncIterator[None]:
    """Listen on the advertised address, and pass connections on by their first bytes."""
    async with TaskScope("proxy") as scope:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            begin = await reader.readexactly(len(HTTP2_PREFACE))
            target = port if begin == HTTP2_PREFACE else http_port
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", target)
            to_writer.write(begin)
            scope.spawn(forward(reader, to_writer), name="requests")
            scope.spawn(forward(to_reader, writer), name="responses")

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            scope.spawn(serve(reader, writer), name="connection")

        server = await asyncio.start_server(accept, ADVERTISED, port)
        try:
            yield
        finally:
            server.close()
            scope.cancel()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_a_proxy_makes_one_port_of_both(etcd: Etcd, tmp_path: Path) -> None:
    port, http_port = free_port(), free_port()
    server = {
        "host": ADVERTISED,
        "bind_host": "127.0.0.1",
        "port": str(port),
        "http_port": str(http_port),
    }
    async with proxy(port, http_port):
        async with await BrokerFixture.start(
            etcd, tmp_path, server=server, lease_ttl_s=60.0
        ) as broker:
            assert broker.endpoint == f"http://{ADVERTISED}:{port}"
            await broker.create(journal_spec("a/journal"))
            async with Client(broker.endpoint) as client, httpx.AsyncClient() as http:
                await client.append(AppendParams("a/journal"), b"content")
                # What the original makes of the endpoint of a primary.
                response = await http.get(f"{broker.endpoint}/a/journal")
                assert (response.status_code, response.content) == (206, b"content")
    assert grpc_target(broker.endpoint)[0].endswith(f"{ADVERTISED}:{port}")


async def test_our_own_transport_needs_no_proxy(etcd: Etcd, tmp_path: Path) -> None:
    server = {"transport": HTTP2}
    async with await BrokerFixture.start(etcd, tmp_path, server=server, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec("a/journal"))
        async with Client(broker.endpoint) as client, httpx.AsyncClient() as http:
            await client.append(AppendParams("a/journal"), b"content")
            response = await http.get(f"{broker.endpoint}/a/journal")
            assert (response.status_code, response.content) == (206, b"content")
            ready = await http.get(f"{broker.endpoint}/debug/ready")
            assert ready.status_code == 200
