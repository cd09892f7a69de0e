"""``python -m tools.h2spec PROGRAM``: run h2spec, a test of HTTP/2 for servers, against our gRPC server.

PROGRAM is the binary (``go install github.com/summerwind/h2spec/cmd/h2spec@latest``). The exit code is its.
"""

from __future__ import annotations

import asyncio
import sys

import grpc

from gazette.net.http2.grpc_server import GrpcServer
from gazette.net.http_server import bind_tcp
from gazette.runtime.clock import SystemClock

_CONNECTIONS = 100
_MESSAGE_BYTES = 4 << 20


async def main(program: str, *arguments: str) -> int:
    """Serve, run the program to its end, and return its exit code."""
    server = GrpcServer(SystemClock(), max_recv_bytes=_MESSAGE_BYTES, limit=_CONNECTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("none", {}),))
    listener = bind_tcp("127.0.0.1", 0)
    port = str(listener.getsockname()[1])
    server.listen(listener, None)
    await server.start()
    try:
        spec = await asyncio.create_subprocess_exec(
            program, "-h", "127.0.0.1", "-p", port, *arguments
        )
        return await spec.wait()
    finally:
        await server.stop(0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
