"""What others get of a broker while it is attacked: their worst append and list, its lease, its memory.

Brokers and attackers are processes of their own. `make hostile` runs these tests one by one. The same is
done to the interop server of grpc-go, if GRPC_INTEROP_SERVER names it: it is the yardstick.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from gazette.auth import Claims
from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.http2.grpc_client import Http2Channel
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import journal_spec
from gazette.testing.etcd import EtcdServer
from tests.hostile.attacks import ATTACKS, JOURNAL, SERVICES
from tests.hostile.conftest import SCALE, Matrix
from tests.test_authorization import ALL, AUTH, KEY
from tests.test_idle_connections import Process, holds, launched

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(180),
    pytest.mark.skipif(SCALE <= 1, reason="needs the machine for itself: `make hostile`"),
]

CLOCK: Final = SystemClock()
ROOT: Final = Path(__file__).parents[2]
SECONDS: Final = 12.0
WORST_S: Final = 2.0
RSS_MB_MAX: Final = 300
LONGEST_S: Final = 60.0
YARDSTICK: Final = os.environ.get("GRPC_INTEROP_SERVER", "")
OWN: Final = "others/0000"
"""The journal of the others: an attacker with a token may append to its own."""
JOURNALS: Final = 200


class Others:
    """Clients beside an attack, and the worst that they got, by the kind of their calls."""

    def __init__(self, **calls: Callable[[], Awaitable[Any]]) -> None:
        self._calls = calls
        self.worst = dict.fromkeys(calls, 0.0)
        self.done = dict.fromkeys(calls, 0)

    async def beside(self, attack: Awaitable[None], results: Matrix) -> None:
        """Make calls of each kind, one after the other, during an attack. Count them."""
        async with TaskScope("others") as scope:
            for kind in self._calls:
                scope.spawn(self._go_on(kind), name=kind)
            await attack
            await CLOCK.sleep(1.0)
            scope.cancel()
        for kind, worst in self.worst.items():
            results.count(f"{kind}s, the worst in {worst:.2f} s", self.done[kind])

    async def _go_on(self, kind: str) -> None:
        while True:
            began = CLOCK.monotonic()
            try:
                await self._calls[kind]()
            finally:
                self.worst[kind] = max(self.worst[kind], CLOCK.monotonic() - began)
            self.done[kind] += 1
            await CLOCK.sleep(0.02)


def memory_mb(pid: int) -> float:
    """Return the most memory that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the process has no memory")


@pytest.fixture
async def attacked(etcd: Etcd, etcd_server: EtcdServer, tmp_path: Path) -> AsyncIterator[Process]:
    (tmp_path / "root" / "fragments").mkdir(parents=True)
    key = "/gazette/cluster/members/local#member-one"
    flags = (
        f"--etcd.address={etcd_server.endpoint}",
        f"--broker.file-root={tmp_path / 'root'}",
        f"--broker.auth-keys={base64.b64encode(KEY).decode()}",
    )
    program = ["-m", "gazette.main", "serve"]
    async with launched("hard", "broker", program, key, tmp_path, *flags) as process:
        yield process


async def attack(name: str, port: int, service: str, token: str) -> None:
    """Run an attack to its end."""
    program = (sys.executable, "-m", "tests.hostile.attacks")
    process = await asyncio.create_subprocess_exec(
        *(*program, name, str(port), str(SECONDS), service, token),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("token", ["", AUTH.sign(Claims(ALL), 600)], ids=["stranger", "caller"])
@pytest.mark.parametrize("name", ATTACKS)
async def test_others_are_served_beside_an_attack(
    name: str, token: str, attacked: Process, etcd: Etcd, matrix: Callable[[str], Matrix]
) -> None:
    (kv,) = (await etcd.range(attacked.key)).kvs
    endpoint = f"http://127.0.0.1:{attacked.grpc_port}"
    async with Client(endpoint, signer=AUTH, clock=CLOCK) as client:
        names = [JOURNAL, *(f"others/{n:04}" for n in range(JOURNALS))]
        specs = [JournalChange(upsert=journal_spec(one)) for one in names]
        for at in range(0, len(specs), 100):
            await client.apply_journals(specs[at : at + 100])
        await client.append(AppendParams(OWN), b"before.")

        async def connect() -> None:
            """Append by a connection of its own."""
            async with Client(endpoint, signer=AUTH, clock=CLOCK) as another:
                await another.append(AppendParams(OWN), b"new.")

        results = matrix(f"HTTP/2 beside others x {name}")
        others = Others(
            append=lambda: client.append(AppendParams(OWN), b"beside."),
            list=client.list_journals,
            connect=connect,
        )
        await others.beside(attack(name, attacked.grpc_port, "journals", token), results)
    memory = memory_mb(attacked.child.pid)
    results.count(f"times {memory:.0f} MB")
    await holds(etcd, attacked, kv.create_revision)
    assert max(others.worst.values()) <= WORST_S, others.worst
    assert memory <= RSS_MB_MAX


@pytest.mark.skipif(not YARDSTICK, reason="GRPC_INTEROP_SERVER names no server of grpc-go")
@pytest.mark.parametrize("name", ATTACKS)
async def test_others_at_the_yardstick(name: str, matrix: Callable[[str], Matrix]) -> None:
    """Count what others get of a plain server of grpc-go. It may do worse than ours."""
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        YARDSTICK, f"--port={port}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    results = matrix(f"HTTP/2 beside others x {name}, grpc-go")
    try:
        async with Http2Channel(f"127.0.0.1:{port}", None) as channel:
            ask, asked = channel.unary_unary(SERVICES["interop"].ask), Counter[str]()

            async def connect() -> None:
                async with Http2Channel(f"127.0.0.1:{port}", None) as another:
                    await call(another.unary_unary(SERVICES["interop"].ask))

            async def call(method: Any) -> None:
                try:
                    await method(b"", timeout=LONGEST_S, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    asked[error.code().name] += 1

            async with asyncio.timeout(LONGEST_S):
                await channel.channel_ready()
            others = Others(call=lambda: call(ask), connect=connect)
            await others.beside(attack(name, port, "interop", ""), results)
        results.count(f"times {memory_mb(server.pid):.0f} MB")
        for code, count in asked.items():
            results.count(f"calls ended with {code}", count)
    finally:
        with suppress(ProcessLookupError):
            server.kill()
        await server.wait()
