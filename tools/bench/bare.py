"""Baselines of `gazette bench`: the transport, the decompressor and SQLite, with nothing around.

The bare service is the package grpcio, or our own HTTP/2, without serializers. It runs in its own
process, as brokers do: ``python -m tools.bench.bare PORT TRANSPORT``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

import apsw
import grpc
import grpc.aio
import msgspec
import zstandard

from gazette.client.rpc.channel import ChannelSettings
from gazette.client.rpc.errors import END_OF_STREAM
from gazette.errors import Unavailable
from gazette.net.grpc.grpc_server import GrpcServer
from gazette.net.http_server import bind_tcp
from gazette.protocol.content import CHUNK_BYTES
from gazette.run.dev.processes import ChildProcess, python_module
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.supervisor import die_with_parent
from gazette.runtime.timeouts import timeout
from tools.bench.app import SCHEMA, UPSERT, BenchMessage

GRPCIO: Final = "grpcio"
"""The transport of the package `grpcio`."""
HTTP2: Final = "http2"
"""Our own transport: `gazette.net.grpc`."""
SERVICE: Final = "bench.Bare"
READ_BYTES: Final = 1 << 18
START_TIMEOUT_S: Final = 30.0
TXN_MESSAGES: Final = 50_000
FILE_BYTES: Final = 1 << 30
_MESSAGE_BYTES: Final = 16 << 20
_OPTIONS: Final = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    # A fixed window, like ours: it does not grow with the speed of the connection.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 22),
]


async def _append(requests: AsyncIterator[bytes], _context: Any) -> bytes:
    digest = hashlib.sha1(usedforsecurity=False)
    async for chunk in requests:
        digest.update(chunk)
    return digest.digest()


class _FileService:
    """Also writes to a file without a name. Once the file is as long as a spool, a new file follows."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    async def append(self, requests: AsyncIterator[bytes], _context: Any) -> bytes:
        if self._file is None or self._end > FILE_BYTES:
            self._file, self._end = tempfile.TemporaryFile(), 0  # noqa: SIM115 - kept
        digest = hashlib.sha1(usedforsecurity=False)
        async for chunk in requests:
            digest.update(chunk)
            self._end += os.pwrite(self._file.fileno(), chunk, self._end)
        return digest.digest()


async def _read(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    chunk = bytes(CHUNK_BYTES)
    for _ in range(int(request)):
        yield chunk


async def _unary(request: bytes, _context: Any) -> bytes:
    return request


async def _serve(port: int, transport: str) -> None:
    server: Any
    if transport == HTTP2:
        server = GrpcServer(SystemClock(), max_recv_bytes=_MESSAGE_BYTES, limit=1024)
        server.listen(bind_tcp("127.0.0.1", port), None)
    else:
        server = grpc.aio.server(options=_OPTIONS)
        server.add_insecure_port(f"127.0.0.1:{port}")
    handlers = {
        "Append": grpc.stream_unary_rpc_method_handler(_append),
        "File": grpc.stream_unary_rpc_method_handler(_FileService().append),
        "Read": grpc.unary_stream_rpc_method_handler(_read),
        "Unary": grpc.unary_unary_rpc_method_handler(_unary),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    await server.start()
    await server.wait_for_termination()


class BareService:
    """The bare service in its process, and calls of it. Use as ``async with``."""

    def __init__(
        self, directory: Path, environ: Mapping[str, str], clock: Clock, transport: str = GRPCIO
    ) -> None:
        self._port = free_port()
        self._process = ChildProcess(
            f"bare {transport}",
            python_module("tools.bench.bare", str(self._port), transport),
            directory / "logs" / f"bare-{transport}.log",
            {**environ, "TMPDIR": str(directory)},
            clock,
        )
        self._channel: Any = None

    async def __aenter__(self) -> Self:
        await self._process.start()
        options = ChannelSettings().options()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options=options)
        try:
            async with timeout(START_TIMEOUT_S):
                await channel.channel_ready()
        except TimeoutError as error:
            await channel.close(None)
            await self._process.stop(1.0)
            raise Unavailable("the bare service did not start", log=self._process.log_tail()) from (
                error
            )
        self._channel = channel
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            await self._channel.close(None)
        await self._process.stop(2.0)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    async def append(self, chunk: bytes, count: int, *, file: bool = False) -> None:
        """Send one stream of ``count`` chunks, which the service hashes.

        With ``file`` the service also writes them to a file.
        """
        call = self._channel.stream_unary(f"/{SERVICE}/{'File' if file else 'Append'}")()
        for _ in range(count):
            await call.write(chunk)
        await call.done_writing()
        await call

    async def read(self, count: int) -> int:
        """Read one stream of ``count`` chunks from the service. Return the number of bytes."""
        call = self._channel.unary_stream(f"/{SERVICE}/Read")(str(count).encode())
        length = 0
        while (chunk := await call.read()) is not END_OF_STREAM:
            length += len(chunk)
        return length

    async def unary(self, request: bytes) -> bytes:
        response: bytes = await self._channel.unary_unary(f"/{SERVICE}/Unary")(request)
        return response


def decompress(paths: Sequence[Path], *, verify: bool = False) -> int:
    """Decompress zstandard files, and drop their content (``verify``: hash it first).

    Return the number of bytes.
    """
    length = 0
    digest = hashlib.sha1(usedforsecurity=False)
    for path in paths:
        with (
            path.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file, read_size=READ_BYTES) as reader,
        ):
            while block := reader.read(READ_BYTES):
                length += len(block)
                if verify:
                    digest.update(block)
    return length


class BareSQLite:
    """The loop of a consumer without any guarantees: decode, fold or upsert, commit."""

    def __init__(self, path: Path) -> None:
        self._connection = apsw.Connection(str(path))
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=OFF", SCHEMA):
            self._connection.execute(statement).fetchall()
        self._decode = msgspec.json.Decoder(BenchMessage).decode_lines

    def fold(self, lines: Sequence[bytes]) -> int:
        """Count words of each piece in memory, then write the counts in a transaction."""
        count = 0
        for piece in lines:
            messages = self._decode(piece)
            gathered: Counter[str] = Counter()
            for message in messages:
                gathered[message.word] += message.count
            with self._connection:
                self._connection.executemany(UPSERT, sorted(gathered.items()))
            count += len(messages)
        return count

    def upsert(self, lines: Sequence[bytes]) -> int:
        """Execute a statement per message, in a transaction per piece."""
        count = 0
        execute = self._connection.execute
        for piece in lines:
            messages = self._decode(piece)
            with self._connection:
                for message in messages:
                    execute(UPSERT, (message.word, message.count))
            count += len(messages)
        return count

    def close(self) -> None:
        self._connection.close()


def main() -> None:
    die_with_parent(os.environ)
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))


if __name__ == "__main__":
    main()
