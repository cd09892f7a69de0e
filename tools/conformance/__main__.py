"""``python -m tools.conformance``: test our HTTP/2 by programs of others, which its flags name.

h2spec tests a broker. The interop client of grpc-go tests its own service on the server that brokers
have, and our client calls that service on grpc-go's server. All do so without and with TLS. Brokers and
gazctl of the original, or of another version, work beside ours in one cluster, and shards change hands
between its applications and ours. The `Makefile` says how to build the programs.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette

from gazette.client.rpc.channel import TlsSettings
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.http2.grpc_client import Http2Channel
from gazette.net.http_server import TlsFiles
from gazette.net.server import Server, ServerSettings
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture
from gazette.testing.etcd import etcd_for_tests
from tools.conformance.handover import handover
from tools.conformance.interop import CASES, TestService
from tools.conformance.interop_calls import InteropCalls, run_case
from tools.conformance.mixed import mixed
from tools.conformance.programs import Programs, original, version

_CASE_S = 60.0
_BACKOFF = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))
_HTTP1 = "note that the frame header looked like an HTTP/1.1 header"
"""A part of h2spec's output for an invalid preface without TLS: our port answers 400 by HTTP/1.1, and closes.

The case is for servers that know before the first byte that a client speaks HTTP/2 (RFC 9113, 3.3).
"""
_CLOCK = SystemClock()


async def _run(*command: str) -> tuple[int, str]:
    """Run a program to its end. Return its exit code and what it printed; kill it after `_CASE_S`."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(_CASE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return -1, f"no end after {_CASE_S:.0f} seconds"
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


def _certificate(directory: Path) -> TlsFiles:
    """Make a certificate for localhost that is its own authority."""
    files = TlsFiles(str(directory / "cert.pem"), str(directory / "key.pem"))
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        " -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    )
    paths = ("-keyout", files.key_file, "-out", files.cert_file)
    subprocess.run([*command.split(), *paths], check=True, capture_output=True)
    return files


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


async def _h2spec(program: str, directory: Path, tls: TlsFiles | None) -> bool:
    """Run all cases, the strict ones as well, against a broker. Return True if all pass."""
    with etcd_for_tests(directory / "etcd") as server:
        settings = EtcdSettings(endpoints=(server.endpoint,))
        async with (
            await Etcd.connect(settings, _CLOCK) as etcd,
            await BrokerFixture.start(etcd, directory, server={"tls": tls}) as broker,
        ):
            options = () if tls is None else ("--tls", "--insecure")
            port = _port(broker.endpoint)
            code, output = await _run(
                program, "--strict", "--host", "127.0.0.1", "--port", port, *options
            )
    *_, last = output.strip().splitlines() or [""]
    print(f"h2spec{'' if tls is None else ' (TLS)'}: {last}", flush=True)
    if code and tls is None and ", 1 failed" in last and _HTTP1 in output:
        print("  the one that failed: without TLS, other first bytes are a request of HTTP/1.1")
        return True
    if code:
        print(output)
    return code == 0


@asynccontextmanager
async def _interop_server(tls: TlsFiles | None) -> AsyncIterator[Server]:
    server = Server(
        _CLOCK,
        ServerSettings("127.0.0.1", bind_host="127.0.0.1", tls=tls),
    )
    server.bind()
    scope = TaskScope("interop")
    try:
        server.grpc.add_generic_rpc_handlers((TestService(_CLOCK).handler(),))
        server.start_http(scope, Starlette())
        await server.start_grpc()
        yield server
    finally:
        await server.stop(0.0)
        await scope.stop()


async def _interop(program: str, tls: TlsFiles | None) -> bool:
    """Run the cases of the interop client one by one. Return True if all pass."""
    failed = []
    async with _interop_server(tls) as server:
        at: tuple[str, ...] = ("--server_host=127.0.0.1", f"--server_port={_port(server.endpoint)}")
        if tls is not None:
            at = (*at, "--use_tls", f"--ca_file={tls.cert_file}", "--use_test_ca")
        for case in CASES:
            code, output = await _run(program, f"--test_case={case}", *at)
            print(f"  {case}: {'failed' if code else 'passed'}", flush=True)
            if code:
                failed.append(case)
                print(output)
    name = f"interop{'' if tls is None else ' (TLS)'}"
    print(f"{name}: {len(CASES) - len(failed)} of {len(CASES)} cases passed", flush=True)
    return not failed


async def _client(program: str, tls: TlsFiles | None) -> bool:
    """Let our client call the interop server, case by case. Return True if all pass."""
    port = free_port()
    options: tuple[str, ...] = (f"--port={port}",)
    context = None
    if tls is not None:
        options += (
            "--use_tls",
            f"--tls_cert_file={tls.cert_file}",
            f"--tls_key_file={tls.key_file}",
        )
        context = TlsSettings(ca_file=Path(tls.cert_file)).context
    process = await asyncio.create_subprocess_exec(
        program, *options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    failed = 0
    try:
        async with Http2Channel(f"localhost:{port}", context, _BACKOFF) as channel:
            async with asyncio.timeout(_CASE_S):
                await channel.channel_ready()
            cases = InteropCalls(channel).cases()
            for name, case in cases.items():
                reason = await run_case(case, _CASE_S)
                print(f"  {name}: {reason or 'passed'}", flush=True)
                failed += bool(reason)
    finally:
        process.kill()
        await process.wait()
    name = f"our client{'' if tls is None else ' (TLS)'}"
    print(f"{name}: {len(cases) - failed} of {len(cases)} cases passed", flush=True)
    return not failed


async def main(arguments: argparse.Namespace) -> int:
    """Run the tests of each named program. Return 1 if a case fails."""
    passed = []
    with tempfile.TemporaryDirectory() as directory:
        tls = _certificate(Path(directory))
        for number, files in enumerate((None, tls)):
            if arguments.h2spec is not None:
                passed.append(await _h2spec(arguments.h2spec, Path(directory, str(number)), files))
            if arguments.interop is not None:
                passed.append(await _interop(arguments.interop, files))
            if arguments.interop_server is not None:
                passed.append(await _client(arguments.interop_server, files))
    for kind, at in ((original, arguments.original), (version, arguments.version)):
        if at is not None:
            await _beside(kind(at))
    return 0 if all(passed) else 1


async def _beside(programs: Programs) -> None:
    """Let the programs of others share a cluster, logs and stores with ours."""
    with tempfile.TemporaryDirectory() as directory:
        await mixed(programs, Path(directory))
        if programs.tally:
            await handover(programs, Path(directory, "handover"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    parser.add_argument("--h2spec", metavar="PROGRAM", help="the program h2spec")
    parser.add_argument("--interop", metavar="PROGRAM", help="the interop client of grpc-go")
    parser.add_argument("--interop-server", metavar="PROGRAM", help="the interop server of grpc-go")
    parser.add_argument(
        "--original", metavar="DIRECTORY", type=Path, help="directory of the original's programs"
    )
    parser.add_argument(
        "--version",
        metavar="CHECKOUT",
        type=Path,
        help="checkout of another version, with an environment .venv",
    )
    arguments = parser.parse_args()
    if not any(vars(arguments).values()):
        parser.error(
            "name a program: --h2spec, --interop, --interop-server, --original or --version"
        )
    return arguments


if __name__ == "__main__":
    sys.exit(asyncio.run(main(_arguments())))
