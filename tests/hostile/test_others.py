"""What others get of a broker while it is attacked: their worst append and list, its lease, its memory.

Brokers and attackers are processes of their own. `make hostile` runs these tests one by one.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from gazette.auth import Claims
from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.etcd.client import Etcd
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import journal_spec
from gazette.testing.etcd import EtcdServer
from tests.hostile.attacks import ATTACKS, JOURNAL
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
OWN: Final = "others/0000"
"""The journal of the others: an attacker with a token may append to its own."""
JOURNALS: Final = 200


class Others:
    """Clients with a token beside an attack, and the worst that they got."""

    def __init__(self, client: Client, endpoint: str) -> None:
        self._client = client
        self._endpoint = endpoint
        self.worst = {"append": 0.0, "list": 0.0, "connect": 0.0}
        self.done = dict.fromkeys(self.worst, 0)

    async def go_on(self, kind: str, call: Callable[[], Awaitable[Any]]) -> None:
        """Make calls of a kind, one after the other, until it is cancelled."""
        while True:
            began = CLOCK.monotonic()
            try:
                await call()
            finally:
                self.worst[kind] = max(self.worst[kind], CLOCK.monotonic() - began)
            self.done[kind] += 1
            await CLOCK.sleep(0.02)

    async def append(self) -> None:
        await self._client.append(AppendParams(OWN), b"beside.")

    async def list(self) -> None:
        await self._client.list_journals()

    async def connect(self) -> None:
        """Append by a connection of its own."""
        async with Client(self._endpoint, signer=AUTH, clock=CLOCK) as client:
            await client.append(AppendParams(OWN), b"new.")


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


async def attack(name: str, port: int, token: str) -> None:
    """Run an attack to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.hostile.attacks", name, str(port), str(SECONDS), token),
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
        others = Others(client, endpoint)
        async with TaskScope("others") as scope:
            for kind in others.worst:
                scope.spawn(others.go_on(kind, getattr(others, kind)), name=kind)
            await attack(name, attacked.grpc_port, token)
            await CLOCK.sleep(1.0)
            scope.cancel()
    memory = memory_mb(attacked.child.pid)
    results = matrix(f"HTTP/2 beside others x {name}")
    for kind, worst in others.worst.items():
        results.count(f"{kind}s, the worst in {worst:.2f} s", others.done[kind])
    results.count(f"times {memory:.0f} MB")
    await holds(etcd, attacked, kv.create_revision)
    assert max(others.worst.values()) <= WORST_S, others.worst
    assert memory <= RSS_MB_MAX
