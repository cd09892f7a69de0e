"""Content that is written while more comes in."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gazette.broker.replication.spool_writer import BATCH_BYTES, SpoolWriter
from gazette.errors import Closed, Invalid, Unavailable
from gazette.fragment.completed_spool import CompletedSpool
from gazette.fragment.local_file import LocalDisk, LocalFragment
from gazette.fragment.spool import Proposal
from gazette.fragment.spool_bytes import SpoolMemory
from gazette.fragment.spool_file import INLINE_BYTES, Spool
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import BlockingPool, TaskScope
from tests.facts import raises

CHUNK = 1 << 17


class Commits:
    def __init__(self) -> None:
        self.last: LocalFragment | None = None

    def spool_commit(self, local: LocalFragment) -> None:
        self.last = local

    def spool_complete(self, spool: CompletedSpool, *, primary: bool) -> None:
        raise AssertionError

    def content(self) -> bytes:
        assert self.last is not None
        return self.last.pread(self.last.begin, 1 << 30)


def holding(gate: threading.Event) -> Callable[[bytes], None]:
    def hold(_: bytes) -> None:
        gate.wait(10)

    return hold


class Bench:
    def __init__(self, tmp_path: Path) -> None:
        self.scope = TaskScope("bench")
        self.pool = BlockingPool("spools", 2)
        self.commits = Commits()
        self.disk = LocalDisk(tmp_path)
        self.spool = Spool(
            "a/journal",
            self.commits,
            clock=SystemClock(),
            pool=self.pool,
            disk=self.disk,
            memory=SpoolMemory(self.pool, 0),
        )
        self.local = SpoolWriter(self.spool, self.scope, self.pool, primary=True)

    async def commit(self) -> None:
        await self.local.flush()
        proposal = Proposal(self.spool.next(), EMPTY_LABELS)
        assert (await self.local.propose(proposal)).status is Status.OK


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    await bench.scope.stop()
    bench.pool.close()
    assert bench.scope.failure is None


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await SystemClock().sleep(0)


@pytest.mark.parametrize(
    "chunk", [1, 1000, CHUNK, INLINE_BYTES, INLINE_BYTES + 1, BATCH_BYTES, 2 << 20]
)
async def test_what_is_written_is_what_came(bench: Bench, chunk: int) -> None:
    """In order, whatever the sizes; and so is what the digest was given."""
    expected = b""
    for _ in range(2):
        digest = hashlib.sha1()
        bench.local.begin(digest.update)
        content, delta = bytes(range(256)) * (max(chunk * 9, 4096) // 256), 0
        for begin in range(0, len(content), chunk):
            if chunk == 1 and begin >= 300:
                break
            piece = content[begin : begin + chunk]
            await bench.local.content(piece, delta)
            delta += len(piece)
            assert bench.local.delta == delta
        await bench.commit()
        expected += content[:delta]
        assert digest.digest() == hashlib.sha1(content[:delta]).digest()
        assert bench.commits.content() == expected
        assert bench.spool.fragment.sum == hashlib.sha1(expected).digest()
        assert bench.local.delta == 0


async def test_content_that_comes_when_the_broker_ends(bench: Bench) -> None:
    bench.local.begin(hashlib.sha1().update)
    bench.pool.close()
    await bench.local.content(bytes(BATCH_BYTES), 0)
    with raises(Closed, says="the broker ends"):
        await bench.local.flush()


async def test_content_is_taken_while_a_batch_is_written(bench: Bench) -> None:
    """Up to another batch; then the writer is waited for."""
    gate = threading.Event()
    bench.local.begin(holding(gate))
    delta = 0

    async def fill() -> None:
        nonlocal delta
        for _ in range(20):
            await bench.local.content(bytes(CHUNK), delta)
            delta += CHUNK

    filling = bench.scope.spawn(fill(), name="fill")
    await until(lambda: delta >= 2 * BATCH_BYTES - CHUNK)
    for _ in range(100):
        await SystemClock().sleep(0)
    assert delta == 2 * BATCH_BYTES - CHUNK
    gate.set()
    await filling
    await bench.commit()
    assert bench.spool.fragment.length == 20 * CHUNK


@pytest.mark.parametrize("before", [0, 5, CHUNK, INLINE_BYTES + 1])
async def test_content_out_of_order(bench: Bench, before: int) -> None:
    bench.local.begin(None)
    if before:
        await bench.local.content(bytes(before), 0)
    with pytest.raises(Invalid, match="ContentDelta"):
        await bench.local.content(b"x", before + 1)


@pytest.mark.parametrize("length", [5, INLINE_BYTES + 1])
async def test_failure_to_write_is_reported_by_what_follows(
    bench: Bench, tmp_path: Path, length: int
) -> None:
    """Everything pending is rolled back; the next append finds the spool as it was."""
    bench.disk.directory = tmp_path / "missing"
    bench.local.begin(None)
    await bench.local.content(bytes(length), 0)
    with raises(Unavailable, "directory", errno="ENOENT"):
        await bench.local.flush()
    assert bench.local.delta == bench.spool.delta == 0
    await bench.local.content(bytes(length), 0)
    with raises(Unavailable, "directory", errno="ENOENT"):
        await bench.local.propose(Proposal(bench.spool.fragment, EMPTY_LABELS))
    bench.disk.directory = tmp_path
    bench.local.begin(None)
    await bench.local.content(b"x", 0)
    await bench.commit()
    assert bench.commits.content() == b"x"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_spool_is_let_go_of_only_when_nothing_writes_to_it(
    bench: Bench, cancelled: bool
) -> None:
    gate = threading.Event()
    bench.local.begin(holding(gate))
    await bench.local.content(bytes(BATCH_BYTES), 0)
    await bench.local.content(b"never", BATCH_BYTES)
    settling = bench.scope.spawn(bench.local.settle(), name="settle")
    for _ in range(20):
        await SystemClock().sleep(0)
        if cancelled:
            settling.cancel()
    assert not settling.done()
    gate.set()
    await asyncio.wait({settling})
    assert settling.cancelled() == cancelled
    # Case: what was gathered only is given up; what was written is rolled back by the next holder.
    assert bench.spool.delta == BATCH_BYTES
    proposal = Proposal(bench.spool.fragment, bench.spool.registers)
    assert (await bench.spool.apply(proposal, primary=True)).status is Status.OK
    assert bench.spool.delta == 0
