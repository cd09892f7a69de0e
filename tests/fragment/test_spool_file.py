from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from gazette.errors import Bug, Closed, Corrupt, Invalid, Unavailable
from gazette.fragment import spool_bytes, spool_file
from gazette.fragment.completed_spool import CompletedSpool
from gazette.fragment.local_file import Closer, LocalDisk, LocalFile, LocalFragment, disk_error
from gazette.fragment.spool import Content, Proposal, SpoolResult
from gazette.fragment.spool_bytes import SpoolMemory
from gazette.fragment.spool_file import Spool
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import ZERO_SUM, Codec, Fragment
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.instant_clock import breathe
from tests.support.no_threads import no_thread_starts

JOURNAL = "a/journal"
REGISTERS = [LabelSet.of(("author", name)) for name in ("one", "two")]


class Observer:
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.commits: list[LocalFragment] = []
        self.completed: list[tuple[CompletedSpool, bool]] = []

    def spool_commit(self, local: LocalFragment) -> None:
        self.commits.append(local)

    def spool_complete(self, spool: CompletedSpool, *, primary: bool) -> None:
        self.completed.append((spool, primary))


def sha(content: bytes) -> bytes:
    return hashlib.sha1(content).digest() if content else ZERO_SUM


def content_of(spool: CompletedSpool) -> bytes:
    with DecodedFile(spool.open(), FragmentDecoder(spool.fragment)) as decoded:
        return b"".join(iter(lambda: decoded.read(1000), b""))


def read_all(local: LocalFragment) -> bytes:
    content, offset = b"", local.begin
    while piece := local.pread(offset, 1 << 20):
        content += piece
        offset += len(piece)
    return content


@pytest.fixture
async def pool() -> AsyncIterator[BlockingPool]:
    pool = BlockingPool("spools", 2)
    yield pool
    pool.close()


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
async def spool(
    clock: ManualClock, pool: BlockingPool, observer: Observer, tmp_path: Path
) -> Spool:
    return Spool(JOURNAL, observer, clock=clock, pool=pool, disk=LocalDisk(tmp_path))


async def append(spool: Spool, *pieces: bytes, primary: bool = True) -> SpoolResult:
    for piece in pieces:
        await spool.apply(Content(piece, spool.delta), primary=primary)
    return await spool.apply(Proposal(spool.next(), spool.registers), primary=primary)


async def roll(spool: Spool, codec: Codec = Codec.NONE, *, primary: bool = True) -> SpoolResult:
    end = spool.fragment.end
    empty = replace(spool.fragment, begin=end, end=end, sum=ZERO_SUM, codec=codec)
    return await spool.apply(Proposal(empty, spool.registers), primary=primary)


class Model:
    """What a spool must be, in plain bytes and by the words of the rules."""

    def __init__(self) -> None:
        self.begin, self.committed, self.pending = 0, b"", b""
        self.registers, self.codec = EMPTY_LABELS, Codec.NONE
        self.completed: list[tuple[int, bytes]] = []

    def at(self, content: bytes) -> Fragment:
        end = self.begin + len(content)
        return Fragment(JOURNAL, self.begin, end, sha(content), self.codec)

    @property
    def fragment(self) -> Fragment:
        return self.at(self.committed)

    @property
    def next(self) -> Fragment:
        return self.at(self.committed + self.pending)

    def propose(self, proposal: Proposal) -> Status:
        proposed = proposal.fragment
        ordered = proposed.end == self.fragment.end and proposed.begin == proposed.end
        if proposed.end > self.next.end or ordered:
            if self.committed:
                self.completed.append((self.begin, self.committed))
            if proposed.end > self.fragment.end:
                self.registers = proposal.registers
            self.begin, self.committed, self.pending = proposed.end, b"", b""
            self.codec = proposed.codec
        if proposal == Proposal(self.fragment, self.registers):
            self.pending = b""
            return Status.OK
        if self.pending and proposed == self.next:
            self.committed += self.pending
            self.pending, self.registers = b"", proposal.registers
            return Status.OK
        return Status.PROPOSAL_MISMATCH


replicas = st.integers(0, 2)
subsets = st.sets(replicas, min_size=1)


class SpoolMachine(RuleBasedStateMachine):
    """Three replicas of one journal, whose primary changes and whose messages get lost."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.pool = BlockingPool("spools", 2)
        self.observers = [Observer() for _ in range(3)]
        self.models = [Model() for _ in range(3)]
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(spool_file, "INLINE_BYTES", 64)
        self.patch.setattr(spool_bytes, "_PART_BYTES", 40)
        clock = ManualClock()
        self.disk = RoughDisk(Path(self.directory.name))
        self.memory = SpoolMemory(self.pool, 1000)
        self.spools = [
            Spool(
                JOURNAL, observer, clock=clock, pool=self.pool, disk=self.disk, memory=self.memory
            )
            for observer in self.observers
        ]

    def teardown(self) -> None:
        assert self.disk.on_loop == []
        self.disk.gate.set()
        self.disk.full = False
        for spool in self.spools:
            self.runner.run(spool.close())
        for observer, model in zip(self.observers, self.models, strict=True):
            assert [
                (spool.fragment.begin, content_of(spool)) for spool, _ in observer.completed
            ] == model.completed
        for observer in self.observers:
            observer.completed.clear()
            observer.commits.clear()
        self.spools.clear()
        # A thread may still have some of them.
        self.runner.run(until(lambda: gc.collect() >= 0 and self.memory.unwritten == 0))
        self.patch.undo()
        self.pool.close()
        self.runner.close()
        self.directory.cleanup()

    def propose(self, hearers: set[int], proposal: Proposal, leader: int) -> None:
        for replica in hearers:
            spool, model = self.spools[replica], self.models[replica]
            expected = model.propose(proposal)
            result = self.runner.run(spool.apply(proposal, primary=replica == leader))
            assert result == SpoolResult(expected, model.fragment, model.registers)

    @rule(state=st.sampled_from(["good", "good", "stalls", "full"]))
    def change_disk(self, state: str) -> None:
        self.disk.full = state == "full"
        if state == "stalls":
            self.disk.gate.clear()
        else:
            self.disk.gate.set()

    @rule(hearers=subsets, leader=replicas, content=st.binary(min_size=1, max_size=200))
    def extend(self, hearers: set[int], leader: int, content: bytes) -> None:
        """Let the leader send content; a replica with another delta refuses it."""
        delta = len(self.models[leader].pending)
        for replica in hearers | {leader}:
            spool, model = self.spools[replica], self.models[replica]
            if len(content) > 64 or not self.memory.takes(len(content)):
                self.disk.gate.set()  # It would wait.
            request = spool.apply(Content(content, delta), primary=replica == leader)
            if delta == len(model.pending):
                try:
                    assert self.runner.run(request).status is Status.OK
                    model.pending += content
                except Unavailable:
                    assert self.disk.full
                    model.pending = b""
            else:
                with pytest.raises(Invalid):
                    self.runner.run(request)

    @rule(hearers=subsets, leader=replicas, registers=st.sampled_from(REGISTERS))
    def commit(self, hearers: set[int], leader: int, registers: LabelSet) -> None:
        self.propose(hearers | {leader}, Proposal(self.models[leader].next, registers), leader)

    @rule(
        leader=replicas,
        content=st.binary(min_size=1, max_size=64),
        registers=st.sampled_from(REGISTERS),
    )
    def commit_now(self, leader: int, content: bytes, registers: LabelSet) -> None:
        """Let the leader commit in one step, if nothing is pending and it has room."""
        spool, model = self.spools[leader], self.models[leader]
        if spool.room < len(content):
            return
        model.pending += content
        assert model.propose(Proposal(model.next, registers)) is Status.OK
        assert spool.commit_now(content, registers) == model.fragment
        assert spool.registers == model.registers

    @rule(hearers=subsets, leader=replicas)
    def synchronize(self, hearers: set[int], leader: int) -> None:
        model = self.models[leader]
        self.propose(hearers | {leader}, Proposal(model.fragment, model.registers), leader)

    @rule(
        hearers=subsets,
        leader=replicas,
        codec=st.sampled_from([Codec.NONE, Codec.GZIP, Codec.SNAPPY, Codec.ZSTANDARD]),
        jump=st.sampled_from([0, 0, 0, 50]),
        registers=st.none() | st.sampled_from(REGISTERS),
    )
    def complete(
        self, hearers: set[int], leader: int, codec: Codec, jump: bool, registers: LabelSet
    ) -> None:
        model = self.models[leader]
        end = model.fragment.end + jump
        proposal = Proposal(Fragment(JOURNAL, end, end, codec=codec), registers or model.registers)
        self.propose(hearers | {leader}, proposal, leader)

    @precondition(lambda self: any(model.committed for model in self.models))
    @rule(hearers=subsets, field=st.sampled_from(["begin", "end", "sum", "codec"]), leader=replicas)
    def disagree(self, hearers: set[int], leader: int, field: str) -> None:
        """Propose what is not quite ours. Never propose beyond our end, which would roll us."""
        model = self.models[leader]
        change: dict[str, Any] = {
            "begin": model.begin + 1,
            "end": max(model.begin, model.fragment.end - 1),
            "sum": sha(b"something else"),
            "codec": Codec.GZIP_OFFLOAD_DECOMPRESSION,
        }
        if model.committed:
            proposed = replace(model.fragment, **{field: change[field]})
            self.propose(hearers, Proposal(proposed, model.registers), leader)

    @invariant()
    def spools_are_what_the_model_is(self) -> None:
        for spool, model, observer in zip(self.spools, self.models, self.observers, strict=True):
            spool._state._check()
            assert spool.fragment == model.fragment
            assert spool.next() == model.next
            assert spool.delta == len(model.pending)
            if model.committed:
                assert read_all(observer.commits[-1]) == model.committed

    @invariant()
    def equal_fragments_have_equal_bytes(self) -> None:
        bytes_of = {model.fragment: model.committed for model in self.models}
        assert all(bytes_of[model.fragment] == model.committed for model in self.models)


SpoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSpoolMachine = SpoolMachine.TestCase


async def test_what_an_append_does(
    spool: Spool, observer: Observer, clock: ManualClock, tmp_path: Path
) -> None:
    """Committed bytes can be read while more is written; files have no names."""
    await roll(spool, Codec.NONE)
    assert (await append(spool, b"hello, ", b"world")).status is Status.OK
    first = observer.commits[-1]
    assert spool.first_append_time == clock.now()
    await spool.apply(Content(b"pending", 0), primary=True)
    assert read_all(first) == b"hello, world"
    assert first.pread(7, 3) == b"wor"
    assert first.pread(12, 10) == b""
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Bug):
        structs.replace(first, fragment=replace(first.fragment, begin=5)).pread(4, 1)


async def test_a_reader_outlives_the_spool(spool: Spool, observer: Observer) -> None:
    """The file ends with the last one that holds it. Short content needs none."""
    long, before = bytes(spool_file.INLINE_BYTES + 1), len(os.listdir("/proc/self/fd"))
    await append(spool, long)
    local = observer.commits.pop()
    await roll(spool)
    await append(spool, b"more")
    await spool.close()
    observer.completed.clear()
    observer.commits.clear()
    assert read_all(local) == long
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del local
    while len(os.listdir("/proc/self/fd")) > before:
        await SystemClock().sleep(0.001)  # A thread closes it.


async def test_long_content_is_written_in_a_thread(spool: Spool, observer: Observer) -> None:
    """And is the same as short content."""
    long = os.urandom(spool_file.INLINE_BYTES + 1)
    await append(spool, b"short", long, b"short")
    assert read_all(observer.commits[-1]) == b"short" + long + b"short"
    assert spool.fragment.sum == sha(b"short" + long + b"short")


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
async def test_a_primary_compresses_as_it_goes(
    spool: Spool, observer: Observer, codec: Codec
) -> None:
    """In threads, while commits go on; a replica does not."""
    await roll(spool, codec)
    content = b"".join(b"some line number %d\n" % n for n in range(200_000))
    for at in range(0, len(content), 100_000):
        await append(spool, content[at : at + 100_000])
    compression = spool._compression
    assert compression is not None
    clock = ManualClock()
    while len(content) - compression.through >= 1 << 20:
        await clock.sleep(0)
    await roll(spool, codec, primary=False)
    for at in range(0, len(content), 1 << 20):
        await append(spool, content[at : at + (1 << 20)], primary=False)
    assert spool._compression is None
    await roll(spool, codec, primary=False)

    (ours, primary), (theirs, replica) = observer.completed
    assert (primary, replica) == (False, False)
    assert content_of(ours) == content_of(theirs) == content
    if codec is Codec.GZIP:
        assert ours.open().read().count(b"\x1f\x8b\x08") >= 2
        assert theirs.open().read().count(b"\x1f\x8b\x08") == 1


async def test_commits_do_not_wait_for_compression(
    clock: ManualClock, observer: Observer, tmp_path: Path
) -> None:
    """With all threads of the pool taken, commits go on as before."""
    pool = BlockingPool("busy", 1)
    gate = threading.Event()
    pool.submit(gate.wait, 10)
    spool = Spool(JOURNAL, observer, clock=clock, pool=pool, disk=LocalDisk(tmp_path))
    await roll(spool, Codec.SNAPPY)
    for _ in range(30):
        await append(spool, bytes(200_000))
    assert spool._compression is not None
    assert spool._compression.through == 0
    await roll(spool, Codec.SNAPPY)
    # Case: the persisting task takes over what the busy pool has not begun.
    assert content_of(observer.completed[0][0]) == bytes(6_000_000)
    gate.set()
    await pool.run(int)
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may accept the stack")
async def test_a_write_for_which_no_thread_starts(
    spool: Spool, pool: BlockingPool, observer: Observer
) -> None:
    """It is never done later: other content may have its place by then."""
    await spool.apply(Content(b"pending", 0), primary=True)
    with no_thread_starts(), raises(Unavailable, says="no thread", advises="ulimit"):
        await append(spool, bytes(2 * spool_file.INLINE_BYTES))
    assert spool.delta == 0
    content = os.urandom(100)
    await spool.apply(Content(content, 0), primary=True)
    await pool.run(int)  # This thread has done all that waited.
    await spool.apply(Proposal(spool.next(), spool.registers), primary=True)
    await roll(spool)
    # Case: the pool has a thread already, which does the write.
    more = os.urandom(2 * spool_file.INLINE_BYTES)
    gate = threading.Event()
    pool.submit(gate.wait, 10)
    async with TaskScope("test") as scope:
        with no_thread_starts():
            appending = scope.spawn(append(spool, more), name="append")
            await breathe()
        assert not appending.done()
        gate.set()
        await appending
    await roll(spool)
    for (completed, _), expected in zip(observer.completed, (content, more), strict=True):
        assert completed.fragment.sum == sha(expected)
        assert content_of(completed) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may accept the stack")
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
async def test_commits_need_no_thread(
    clock: ManualClock, observer: Observer, tmp_path: Path, codec: Codec
) -> None:
    """Bytes that no thread compresses or writes to the disk are committed all the same."""
    pool = BlockingPool("spools", 1)
    memory = SpoolMemory(pool, 4 << 20)
    spool = Spool(
        JOURNAL, observer, clock=clock, pool=pool, disk=LocalDisk(tmp_path), memory=memory
    )
    await roll(spool, codec)
    content = os.urandom(1 << 18)
    with no_thread_starts():
        for count in range(1, 9):
            if not spool.room:
                break
            spool.commit_now(content, spool.registers)
            assert read_all(observer.commits[-1]) == content * count
    await append(spool, content)
    expected = content * len(observer.commits)
    await roll(spool)
    ((completed, _),) = observer.completed
    assert completed.fragment.sum == sha(expected)
    assert await pool.run(content_of, completed) == expected
    pool.close()


async def test_appends_at_the_end_of_a_broker(
    clock: ManualClock, observer: Observer, tmp_path: Path
) -> None:
    """No thread writes any more. Content that fits into memory is committed; other content is refused."""
    pool = BlockingPool("spools", 1)
    memory = SpoolMemory(pool, 4 << 20)
    spool = Spool(
        JOURNAL, observer, clock=clock, pool=pool, disk=LocalDisk(tmp_path), memory=memory
    )
    pool.close()
    content = os.urandom(1 << 18)
    count = 0
    while spool.room >= len(content):
        spool.commit_now(content, spool.registers)
        count += 1
        assert read_all(observer.commits[-1]) == content * count
    assert count == 16
    with raises(Closed, says="the broker ends"):
        await append(spool, content)
    spool.propose_now(Proposal(spool.fragment, spool.registers), primary=True)
    assert read_all(observer.commits[-1]) == content * count


async def test_a_rollback_needs_no_thread(
    spool: Spool, pool: BlockingPool, observer: Observer
) -> None:
    await append(spool, b"kept")
    await spool.apply(Content(bytes(1 << 26), 0), primary=True)
    pool.close()
    result = spool.propose_now(Proposal(spool.fragment, spool.registers), primary=True)
    assert (result.status, spool.delta) == (Status.OK, 0)
    await roll(spool)
    ((completed, _),) = observer.completed
    assert content_of(completed) == b"kept"


async def test_a_cancelled_write_is_waited_for(
    clock: ManualClock, observer: Observer, tmp_path: Path
) -> None:
    """What its thread still writes cannot get between the bytes of the next append."""
    pool = BlockingPool("slow", 1)
    gate = threading.Event()
    spool = Spool(JOURNAL, observer, clock=clock, pool=pool, disk=LocalDisk(tmp_path))
    await append(spool, b"committed,")
    pool.submit(gate.wait, 10)
    old, new = b"o" * (1 << 20), b"n" * (1 << 20)
    async with TaskScope("test") as scope:
        await spool.apply(Content(b"pending", 0), primary=True)
        cancelled = scope.spawn(spool.apply(Content(old, 7), primary=True), name="cancelled")
        await clock.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert spool.delta == 0
        assert spool.next() == spool.fragment
        following = scope.spawn(append(spool, new), name="following")
        await clock.sleep(0)
        assert not following.done()
        # Case: giving up that wait as well does no harm.
        following.cancel()
        await asyncio.wait({following})
        gate.set()
        await append(spool, new)
    assert read_all(observer.commits[-1]) == b"committed," + new
    assert spool.fragment.sum == sha(b"committed," + new)
    await spool.close()
    pool.close()


@pytest.mark.parametrize("length", [200_000, 2_000_000], ids=["short", "long"])
async def test_a_full_disk_fails_appends_and_nothing_else(
    pool: BlockingPool, clock: ManualClock, observer: Observer, tmp_path: Path, length: int
) -> None:
    """The error names the cause. Committed bytes stay, and the next append that fits succeeds."""
    disk = RoughDisk(tmp_path)
    memory = SpoolMemory(pool, 0)
    spool = Spool(JOURNAL, observer, clock=clock, pool=pool, disk=disk, memory=memory)
    await append(spool, b"committed")
    await spool.apply(Content(b"pending", 0), primary=True)
    disk.full = True
    with raises(Unavailable, "directory", errno="ENOSPC") as raised:
        await spool.apply(Content(bytes(length), 7), primary=True)
    assert str(tmp_path) in raised.value.hint
    disk.full = False
    assert spool.delta == 0
    # Case: a peer which goes on is refused.
    with pytest.raises(Invalid, match="ContentDelta"):
        await spool.apply(Content(b"more", 7 + length), primary=True)
    # Case: a roll-back is the usual end of a failed append.
    result = await spool.apply(Proposal(spool.fragment, spool.registers), primary=True)
    assert result.status is Status.OK
    assert (await append(spool, b", more")).status is Status.OK
    assert read_all(observer.commits[-1]) == b"committed, more"
    assert spool.fragment.sum == sha(b"committed, more")


async def test_what_was_acknowledged_stays_in_memory_while_the_disk_is_full(
    pool: BlockingPool,
    clock: ManualClock,
    observer: Observer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Threads find it full after the answer. Then all appends are refused, until one can be written.

    The log says so once.
    """
    disk, memory = RoughDisk(tmp_path), SpoolMemory(pool, 1600)
    one, two = (
        Spool(JOURNAL, observer, clock=clock, pool=pool, disk=disk, memory=memory) for _ in range(2)
    )
    disk.full = True
    await append(one, b"1" * 99)
    assert not memory.failing
    await append(one, b"2")
    await pool.run(int)
    await until(lambda: memory.failing)
    for spool in (one, two):
        with raises(Unavailable, "directory", errno="ENOSPC"):
            await append(spool, b"refused")
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in said] == ["gazette.fragment.spool_bytes"]
    assert read_all(one.committed()) == b"1" * 99 + b"2"
    disk.full = False
    await append(two, b"taken")
    await append(one, b"3")
    assert not memory.failing
    assert read_all(one.committed()) == b"1" * 99 + b"23"
    assert read_all(two.committed()) == b"taken"
    assert one.fragment.sum == sha(b"1" * 99 + b"23")


def test_space_that_was_written_in_part_is_freed() -> None:
    """A write which the kernel cuts short, at a real limit, gives back what it took."""
    code = """
import asyncio, os, resource, tempfile
from pathlib import Path
from gazette.runtime.clock import SystemClock
from gazette.errors import Unavailable
from gazette.fragment.local_file import LocalDisk
from gazette.fragment.spool import Content, Proposal
from gazette.fragment.spool_file import Spool
from gazette.fragment.spool_bytes import SpoolMemory
from gazette.runtime.tasks import BlockingPool

class Observer:
    def spool_commit(self, local): self.local = local
    def spool_complete(self, spool, *, primary): pass

async def main(directory):
    observer, pool = Observer(), BlockingPool("p", 1)
    disk, memory = LocalDisk(directory), SpoolMemory(pool, 0)
    clock = SystemClock()
    spool = Spool("a/journal", observer, clock=clock, pool=pool, disk=disk, memory=memory)
    async def append(content):
        await spool.apply(Content(content, spool.delta), primary=True)
        await spool.apply(Proposal(spool.next(), spool.registers), primary=True)
    await append(b"a" * 500_000)
    for length in (400_000, 4_000_000):
        try:
            await append(b"b" * 600_000 + b"b" * length)
        except Unavailable as error:
            print(error)
        await spool.apply(Proposal(spool.fragment, spool.registers), primary=True)
        print(os.fstat(spool._bytes._file._fd).st_size)
    await append(b"c" * 500_000)
    assert observer.local.pread(0, 2_000_000) == b"a" * 500_000 + b"c" * 500_000
    await spool.close()
    pool.close()

resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "EFBIG" not in line] == ["500000", "500000"]
    assert len(lines) == 4


async def test_a_directory_that_is_gone(
    clock: ManualClock, pool: BlockingPool, observer: Observer, tmp_path: Path
) -> None:
    """No file can be made: the append fails, and works again once the directory is back."""
    directory = tmp_path / "spools"
    disk, memory = LocalDisk(directory), SpoolMemory(pool, 0)
    spool = Spool(JOURNAL, observer, clock=clock, pool=pool, disk=disk, memory=memory)
    with raises(Unavailable, "directory", errno="ENOENT"):
        await append(spool, b"content")
    directory.mkdir()
    assert (await append(spool, b"content")).status is Status.OK


def held_below(directory: Path) -> list[int]:
    """Return the bytes of each file below a directory that this process has open. They have no names."""
    sizes = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith(f"{directory}/"):
                sizes.append(os.stat(entry.path).st_size)
    return sizes


async def test_the_space_of_a_large_roll_back_is_freed(spool: Spool, tmp_path: Path) -> None:
    """A client that gave up after gigabytes does not keep them on our disk."""
    await append(spool, b"committed")
    piece = bytes(4 << 20)
    for at in range(0, 64 << 20, len(piece)):
        await spool.apply(Content(piece, at), primary=True)
    assert held_below(tmp_path) == [9 + (64 << 20)]
    await spool.apply(Proposal(spool.fragment, spool.registers), primary=True)
    await append(spool, b"!")
    assert held_below(tmp_path) == [9]
    assert read_all(spool.committed()) == b"committed!"


class RoughDisk(LocalDisk):
    """A disk that may be full, whose operations wait at ``gate``. It says which ones the loop did."""

    __slots__ = ("done", "full", "gate", "on_loop")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.full = False
        self.gate = threading.Event()
        self.gate.set()
        self.done: list[str] = []
        self.on_loop: list[str] = []

    def do(self, operation: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self.on_loop.append(operation)
        self.gate.wait(30)
        self.done.append(operation)
        if self.full:
            full = OSError(errno.ENOSPC, "No space left on device")
            raise disk_error(operation, self.directory, full)

    def create(self) -> RoughFile:
        self.do("create")
        return RoughFile(self)


class RoughFile(LocalFile):
    __slots__ = ("disk",)

    def __init__(self, disk: RoughDisk) -> None:
        super().__init__(disk.directory)
        self.disk = disk

    def pwrite(self, content: bytes, position: int) -> None:
        self.disk.do("write")
        super().pwrite(content, position)

    def sibling(self) -> RoughFile:
        return self.disk.create()


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await SystemClock().sleep(0.001)


async def test_a_disk_that_stalls_from_its_first_operation(
    pool: BlockingPool, clock: ManualClock, observer: Observer, tmp_path: Path
) -> None:
    """Appends wait for it only once memory is full, and no operation is the loop's."""
    disk, memory = RoughDisk(tmp_path), SpoolMemory(pool, 160)
    one, two = (
        Spool(JOURNAL, observer, clock=clock, pool=pool, disk=disk, memory=memory) for _ in range(2)
    )
    disk.gate.clear()
    for _ in range(7):
        await append(one, b"0123456789")
        await append(two, b"abcdefghij")
    assert disk.done == []
    assert read_all(one.committed()) == b"0123456789" * 7
    assert one.committed().pread_now(65, 100) == b"56789"
    await append(one, b"0123456789")
    await append(two, b"abcdefghij")
    async with TaskScope("test") as scope:
        waiting = [scope.spawn(append(spool, b"!"), name="append") for spool in (one, two)]
        await clock.sleep(0)
        assert not any(one.done() for one in waiting)
        assert disk.done == []
        disk.gate.set()
        await asyncio.wait(waiting)
    assert disk.on_loop == []
    assert sorted(set(disk.done)) == ["create", "write"]
    await append(one, b"?")
    assert read_all(one.committed()) == b"0123456789" * 8 + b"!?"
    assert read_all(two.committed()) == b"abcdefghij" * 8 + b"!"
    assert one.fragment.sum == sha(b"0123456789" * 8 + b"!?")


async def test_bytes_that_are_rolled_back_while_they_are_written(
    pool: BlockingPool, clock: ManualClock, observer: Observer, tmp_path: Path
) -> None:
    """Later bytes are written over them, also where memory began behind these."""
    disk, memory = RoughDisk(tmp_path), SpoolMemory(pool, 160)
    spool = Spool(JOURNAL, observer, clock=clock, pool=pool, disk=disk, memory=memory)
    await append(spool, b"kept,")
    await spool.apply(Content(b"x" * 20, 0), primary=True)
    await until(lambda: memory.unwritten == 0)
    disk.gate.clear()
    await spool.apply(Content(b"y" * 20, 20), primary=True)
    await spool.apply(Proposal(spool.fragment, spool.registers), primary=True)
    await append(spool, b"new,")
    assert read_all(spool.committed()) == b"kept,new,"
    disk.gate.set()
    await append(spool, bytes(spool_file.INLINE_BYTES + 1))
    await append(spool, b"last")
    assert memory.unwritten == 4
    expected = b"kept,new," + bytes(spool_file.INLINE_BYTES + 1) + b"last"
    assert read_all(spool.committed()) == expected
    assert spool.fragment.sum == sha(expected)


async def test_the_longest_spools_are_written_first(
    pool: BlockingPool, clock: ManualClock, observer: Observer, tmp_path: Path
) -> None:
    """Half of what is in memory, so a journal with few bytes needs no file."""
    disk, memory = RoughDisk(tmp_path), SpoolMemory(pool, 1600)
    spools = [
        Spool(JOURNAL, observer, clock=clock, pool=pool, disk=disk, memory=memory) for _ in range(9)
    ]
    for spool in spools[:8]:
        await append(spool, b"few")
    await append(spools[8], b"m" * 76)
    await until(lambda: memory.unwritten == 24)
    assert disk.done == ["create", "write"]
    await spools[0].close()
    assert memory.unwritten == 24  # Its reader still has it.
    observer.commits.clear()
    assert memory.unwritten == 21


async def test_what_is_not_in_the_page_cache_is_not_read_at_once(tmp_path: Path) -> None:
    """As after a while, on file systems that say what is in the cache; others never say so."""
    file = LocalFile(tmp_path)
    file.pwrite(b"0123456789", 0)
    cached = file.pread_now(5, 3)
    if cached is None:
        pytest.skip("this file system does not say what is in the page cache")
    assert cached == b"34567"
    assert file.pread_now(5, 8) == b"89"
    assert file.pread_now(5, 10) == b""
    os.fsync(file._fd)
    # The kernel begins to read what it does not have. A quick disk may deliver it before the kernel answers.
    for _ in range(1000):
        os.posix_fadvise(file._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if (cached := file.pread_now(5, 3)) is None:
            break
        assert cached == b"34567"
    assert cached is None
    assert file.pread(5, 3) == b"34567"


async def test_files_are_closed_by_a_thread(tmp_path: Path) -> None:
    """To free the space of one may take the disk seconds."""
    reader, writer = os.pipe()
    Closer().close(writer)
    assert await asyncio.to_thread(os.read, reader, 1) == b""  # The other end is closed.
    Closer().close(reader)


async def test_a_write_to_a_slow_disk_can_be_given_up(
    clock: ManualClock, pool: BlockingPool, observer: Observer, tmp_path: Path
) -> None:
    """Also while its file is created: nothing of it is left, and the next one is in order."""
    disk, memory = RoughDisk(tmp_path), SpoolMemory(pool, 0)
    spool = Spool(JOURNAL, observer, clock=clock, pool=pool, disk=disk, memory=memory)
    await append(spool, b"first")
    for new_file in (False, True):
        if new_file:
            await roll(spool)
        disk.gate.clear()
        before = spool.fragment
        async with TaskScope("test") as scope:
            given_up = scope.spawn(spool.apply(Content(b"given up", 0), primary=True), name="one")
            await clock.sleep(0)
            given_up.cancel()
            await asyncio.wait({given_up})
            assert (spool.delta, spool.fragment) == (0, before)
            following = scope.spawn(append(spool, b", next"), name="following")
            await clock.sleep(0)
            assert not following.done()
            disk.gate.set()
            assert (await following).status is Status.OK
    assert content_of(observer.completed[0][0]) == b"first, next"
    assert read_all(observer.commits[-1]) == b", next"
    assert spool.fragment.sum == sha(b", next")
    # Case: what cannot be written is rolled back.
    disk.full = True
    await roll(spool)
    with raises(Unavailable, "directory", errno="ENOSPC"):
        await append(spool, b"content")
    disk.full = False
    assert (await append(spool, b"content")).status is Status.OK
    await spool.close()


def test_a_shorter_file_is_corrupt(tmp_path: Path) -> None:
    """Readers do not take the missing end of a file for the end of a fragment."""
    file = LocalFile(tmp_path)
    file.pwrite(b"12345", 0)
    local = LocalFragment.of(Fragment(JOURNAL, 100, 110), file)
    assert local.pread(103, 10) == b"45"
    with pytest.raises(Corrupt):
        local.pread(105, 1)
