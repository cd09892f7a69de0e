"""Appends that wait for their journal: with content at hand, and no more of them than may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from gazette.broker.append import line as append_line
from gazette.broker.append.line import WAITING_MAX, ContentAhead, Line
from gazette.errors import Broken, Invalid, Unavailable
from gazette.protocol.content import COMMIT
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import journal_spec
from tests.broker.test_append_api import JOURNAL, Append, append, in_step, written
from tests.facts import call_refused, raises
from tests.support.fixed_cluster import FixedCluster
from tests.support.loop_time import LoopTime, turns


class Script:
    """A stream of which the parts are there at once; then an error, or nothing more."""

    def __init__(self, *parts: bytes | None, error: Exception | None = None) -> None:
        self.parts = list(parts)
        self._error = error

    async def next(self) -> bytes | None:
        if self.parts:
            return self.parts.pop(0)
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()
        raise AssertionError


@contextmanager
def taken(line: Line, count: int) -> Iterator[None]:
    """Let so many appends wait in a line, which send nothing."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(line.wait(ContentAhead(Script())))
        yield


async def all_of(content: ContentAhead) -> list[bytes | None]:
    parts: list[bytes | None] = []
    while not parts or parts[-1] is not None:
        parts.append(await content.next())
    return parts


async def test_content_is_read_to_its_end_and_given_in_order() -> None:
    content = ContentAhead(Script(b"ab", b"c", b"", None))
    await content.read_ahead(0)
    assert content.held == 3
    await content.read_ahead(0)
    assert await all_of(content) == [b"ab", b"c", b"", None]
    assert content.held == 0


async def test_content_is_read_up_to_a_bound() -> None:
    script = Script(*[bytes(1 << 16)] * 10, None)
    content = ContentAhead(script)
    await content.read_ahead(0)
    assert content.held == append_line.AHEAD_BYTES
    assert len(script.parts) == 7
    assert len(await all_of(content)) == 11
    # Case: many chunks of nothing.
    content = ContentAhead(Script(*[b""] * 5000))
    await content.read_ahead(0)
    assert len(content._ahead) == 4096


async def test_what_is_wrong_with_a_stream_is_raised_in_its_place() -> None:
    content = ContentAhead(Script(b"ab", error=Invalid("no chunk")))
    await content.read_ahead(0)
    await content.read_ahead(0)
    assert await content.next() == b"ab"
    for _ in range(2):
        with pytest.raises(Invalid, match="no chunk"):
            await content.next()


async def test_a_client_that_sends_too_little_is_too_slow() -> None:
    time, content = LoopTime(), ContentAhead(Script(b"a"))

    async def let_it_pass() -> None:
        await turns()
        time.advance(append_line.AHEAD_S)

    with raises(Broken, "rate_min"):
        await asyncio.gather(content.read_ahead(1 << 30), let_it_pass())


def test_a_line_is_bounded_in_count_and_bytes() -> None:
    line, one, two = Line(), ContentAhead(Script()), ContentAhead(Script())
    with line.wait(one):
        with taken(line, WAITING_MAX - 2), line.wait(two):
            with (
                raises(Unavailable, "waiting_bytes", waiting=WAITING_MAX),
                line.wait(ContentAhead(Script())),
            ):
                pass
        one.held = append_line.WAITING_BYTES_MAX
        with raises(Unavailable, "waiting_bytes", waiting=1), line.wait(two):
            pass
        one.held -= 1
        with line.wait(two):
            pass
    assert not line.waiting


@pytest.fixture
async def ready(tmp_path: Path) -> AsyncIterator[FixedCluster]:
    async with await FixedCluster.start(2, tmp_path) as cluster:
        cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
        await in_step(cluster)
        yield cluster


@pytest.mark.parametrize("content", [b"", b"a bit"])
async def test_appends_that_stall_delay_no_other(ready: FixedCluster, content: bytes) -> None:
    """By way of another broker, too, which leaves it to the primary to read ahead."""
    stalled = []
    for index in range(20):
        one = await Append(ready["a" if index % 2 else "b"]).open()
        stalled.append(await one.send(content) if content else one)
    line = ready["a"].replica(JOURNAL).line
    while line.waiting < 20:
        await SystemClock().sleep(0.001)
    response = await append(ready["a"], b"honest")
    assert response.status == Status.OK
    assert not any(one.call.done() for one in stalled)
    for one in stalled:
        one.call.cancel()
    while line.waiting:
        await SystemClock().sleep(0.001)
    assert (await append(ready["a"], b" again")).commit.end == len(b"honest again")


async def test_content_that_was_read_ahead_is_passed_on_to_another_primary(
    ready: FixedCluster,
) -> None:
    """The journal is handed over while the append waits for its turn."""
    replica = ready["a"].replica(JOURNAL)
    held = await replica.pipeline.take()
    one = await (await Append(ready["a"]).open()).send(b"all of it")
    await one.call.write(COMMIT)
    await one.call.done_writing()
    while not replica.line.waiting:
        await SystemClock().sleep(0.001)
    ready.assign(JOURNAL, "b", "a")
    replica.pipeline.give(held)
    assert (await one.call).commit.end == len(b"all of it")
    assert written(ready, "b") == b"all of it"


async def test_large_content_does_not_wait_for_its_end(ready: FixedCluster) -> None:
    one = await Append(ready["a"]).open()
    part = bytes(1 << 17)
    await one.send(part, part, part)
    replica = ready["a"].replica(JOURNAL)
    while replica.pipeline.idle or replica.line.waiting:
        await SystemClock().sleep(0.001)
    assert (await one.commit()).commit.end == 3 * len(part)
    assert written(ready, "b") == 3 * part


async def test_appends_beyond_what_may_wait_are_refused_so_that_they_come_again(
    ready: FixedCluster,
) -> None:
    """A pulse does not count: replicas come into step however many wait."""
    stalled = await Append(ready["a"]).open()
    line = ready["a"].replica(JOURNAL).line
    while not line.waiting:
        await SystemClock().sleep(0.001)
    with taken(line, WAITING_MAX - 1):
        for broker in "ab":
            with call_refused(grpc.StatusCode.UNAVAILABLE, f"waiting={WAITING_MAX}") as e:
                await append(ready[broker], b"x")
            assert e.value.code() is grpc.StatusCode.UNAVAILABLE
        ready.assign(JOURNAL, "a")
        ready.put_spec(journal_spec(JOURNAL, replication=1))
        await in_step(ready)
    stalled.call.cancel()
    while line.waiting:
        await SystemClock().sleep(0.001)
    assert (await append(ready["a"], b"x")).status == Status.OK
