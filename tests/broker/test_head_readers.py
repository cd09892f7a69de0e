"""Readers at the head of a journal, which are served together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gazette.broker.head_readers import HeadReader, HeadReaders
from gazette.broker.lease_guard import LeaseGuard
from gazette.fragment.index import Index
from gazette.fragment.local_file import LocalFile, LocalFragment
from gazette.http2.messages import MessageQueue
from gazette.protocol.content import Content, decode_read
from gazette.protocol.fragment import Fragment
from gazette.protocol.pb import broker_pb2
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from tests.support.fixed_cluster import FixedLease

JOURNAL = "a/journal"
CHUNK = 10


class Caller:
    """A caller that takes responses while it has ``room``."""

    def __init__(self) -> None:
        self.room = True
        self.asked = 0
        self.responses: list[Content | broker_pb2.ReadResponse] = []

    def send(self, content: bytes, messages: int) -> bool:
        self.asked += 1
        if not self.room:
            return False
        queue = MessageQueue(1 << 20)
        queue.feed(memoryview(content))
        assert len(queue) == messages
        while queue:
            self.responses.append(decode_read(queue.take()[0]))
        return True

    @property
    def content(self) -> bytes:
        return b"".join(one.content for one in self.responses if isinstance(one, Content))


class CachedFile(LocalFile):
    """A file that is in the page cache, or not."""

    __slots__ = ("cached",)

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.cached = True

    def pread_now(self, length: int, position: int) -> bytes | None:
        return self.pread(length, position) if self.cached else None


class Journal:
    """An index with one local file, and its readers at the head."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self.index = Index(JOURNAL, clock)
        self.lease, guard = FixedLease(1), LeaseGuard()
        guard.attach(self.lease)
        self.readers = HeadReaders(self.index, guard, CHUNK)
        self.file = CachedFile(directory)
        self.end = 0

    def commit(self, content: bytes) -> None:
        self.file.pwrite(content, self.end)
        self.end += len(content)
        self.index.spool_commit(LocalFragment.of(Fragment(JOURNAL, 0, self.end), self.file))


@pytest.fixture
async def journal(tmp_path: Path, clock: ManualClock) -> Journal:
    return Journal(tmp_path, clock)


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await SystemClock().sleep(0)


async def test_commits_reach_all_readers(journal: Journal) -> None:
    """Each gets where the content is, and the content, from its own offset on."""
    callers = [Caller() for _ in range(250)]
    async with TaskScope("test") as scope:
        journal.commit(b"abc")
        for caller in callers:
            scope.spawn(journal.readers.serve(HeadReader(3, caller.send)), name="reader")
        await turns(1)
        journal.commit(b"de")
        late = Caller()
        scope.spawn(journal.readers.serve(HeadReader(5, late.send)), name="late")
        await turns()
        journal.commit(b"f")
        await turns()
        assert {caller.content for caller in callers} == {b"def"}
        assert late.content == b"f"
        located, content, *_ = callers[0].responses
        assert isinstance(located, broker_pb2.ReadResponse)
        assert (located.offset, located.write_head, located.fragment.end) == (3, 5, 5)
        assert content == Content(3, b"de")
        scope.cancel()


async def test_without_a_lease_readers_get_no_commits(journal: Journal) -> None:
    """They go on alone, and their reads are refused."""
    caller = Caller()
    reader = HeadReader(0, caller.send)
    async with TaskScope("test") as scope:
        serving = scope.spawn(journal.readers.serve(reader), name="reader")
        await turns(1)
        journal.lease.remaining_s = 0.0
        journal.commit(b"abc")
        await serving
    assert (caller.responses, reader.offset) == ([], 0)


async def test_answers_come_first(journal: Journal) -> None:
    """A commit's answer, which goes out in the next turn of the loop, is ahead of its readers."""
    caller, order = Caller(), list[str]()

    def send(content: bytes, messages: int) -> bool:
        order.append("reader")
        return caller.send(content, messages)

    async with TaskScope("test") as scope:
        scope.spawn(journal.readers.serve(HeadReader(0, send)), name="reader")
        await turns(1)
        journal.commit(b"abc")
        asyncio.get_running_loop().call_soon(order.append, "answer")
        await turns()
        assert order == ["answer", "reader"]
        scope.cancel()


async def test_large_commits(journal: Journal) -> None:
    """Content of more than one chunk is sent in several messages, none of them lost."""
    caller = Caller()
    async with TaskScope("test") as scope:
        scope.spawn(journal.readers.serve(HeadReader(0, caller.send)), name="reader")
        await turns(1)
        journal.commit(bytes(range(35)))
        await turns()
        assert caller.content == bytes(range(35))
        scope.cancel()


async def test_slow_caller(journal: Journal) -> None:
    """It goes on alone from where it is, and holds up no other one."""
    slow, fast = Caller(), Caller()
    async with TaskScope("test") as scope:
        reader = HeadReader(0, slow.send)
        alone = scope.spawn(journal.readers.serve(reader), name="slow")
        scope.spawn(journal.readers.serve(HeadReader(0, fast.send)), name="fast")
        await turns(1)
        journal.commit(b"abc")
        await turns()
        slow.room = False
        journal.commit(b"de")
        await turns()
        assert alone.done()
        assert (slow.content, reader.offset) == (b"abc", 3)
        journal.commit(b"f")
        await turns()
        assert (fast.content, slow.asked) == (b"abcdef", 2)
        scope.cancel()


async def test_readers_that_go_away(journal: Journal) -> None:
    """A cancelled reader gets nothing more, and the others do."""
    gone, stays = Caller(), Caller()
    async with TaskScope("test") as scope:
        going = scope.spawn(journal.readers.serve(HeadReader(0, gone.send)), name="gone")
        scope.spawn(journal.readers.serve(HeadReader(0, stays.send)), name="stays")
        await turns(1)
        going.cancel()
        await turns(2)
        journal.commit(b"abc")
        await turns()
        assert (gone.asked, stays.content) == (0, b"abc")
        scope.cancel()


@pytest.mark.parametrize("reason", ["not cached", "damaged file", "stored", "hole", "closed"])
async def test_each_goes_on_alone(journal: Journal, clock: ManualClock, reason: str) -> None:
    """Readers go on by their own tasks if the bytes cannot be read at once. These meet the errors."""
    caller = Caller()
    reader = HeadReader(0, caller.send)
    async with TaskScope("test") as scope:
        alone = scope.spawn(journal.readers.serve(reader), name="reader")
        await turns(1)
        if reason == "not cached":
            journal.file.cached = False
            journal.commit(b"abc")
        elif reason == "damaged file":
            missing = Fragment(JOURNAL, 0, 9)
            journal.index.spool_commit(LocalFragment.of(missing, journal.file))
        elif reason == "stored":
            stored = Fragment(JOURNAL, 0, 9, backing_store="s3://b/", mod_time=1)
            journal.index.replace_remote([stored])  # type: ignore[arg-type]
        elif reason == "hole":
            clock.advance(5.0)
            stored = Fragment(JOURNAL, 5, 9, backing_store="s3://b/", mod_time=1)
            journal.index.replace_remote([stored])  # type: ignore[arg-type]
        else:
            journal.index.close()
        await turns()
        assert alone.done()
        assert (caller.asked, reader.offset) == (0, 0)


async def test_nothing_new(journal: Journal) -> None:
    """A change that brings nothing for a reader leaves it waiting, also if the journal reaches further."""
    caller = Caller()
    async with TaskScope("test") as scope:
        waiting = scope.spawn(journal.readers.serve(HeadReader(5, caller.send)), name="reader")
        await turns(1)
        journal.index.adopt_head(100, ())
        journal.commit(b"abc")
        await turns()
        assert not waiting.done()
        assert caller.asked == 0
        journal.commit(b"defgh")
        await turns()
        assert caller.content == b"fgh"
        scope.cancel()
