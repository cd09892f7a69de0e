"""Sources that cannot be read, or be watched: the shard hears of it, and does not wait in silence."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.read.reader import ReadParams
from gazette.client.waits import Waits
from gazette.consumer.inbox import Inbox, SourceFailed
from gazette.consumer.shard import source_reader as source_reading
from gazette.consumer.shard.source_reader import check_source, read_source
from gazette.errors import Closed, Corrupt, NotAllowed, NotFound
from gazette.protocol.journal import JournalSpec
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.route import EMPTY_ROUTE
from gazette.runtime.tasks import TaskScope
from tests.support.instant_clock import InstantClock, eventually
from tests.support.stub_broker import Send, StubBroker

JOURNAL = "a/source"


@pytest.fixture(autouse=True)
def appends_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail each append: no test here has a broker to append to."""

    async def write_head(client: object, journal: str) -> int:
        raise NotAllowed("appends are refused")

    monkeypatch.setattr(source_reading, "write_head", write_head)


class Reader:
    """Of a client that is closed."""

    offset = 7

    def __init__(self, _client: object, params: ReadParams, **__: object) -> None:
        self.params = params
        self.closed = False

    async def read(self, size: int = 0) -> bytes:
        raise Closed("the client was closed")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_reader_that_was_closed_fails_the_shard(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """Unless the shard has stopped, whose inbox takes nothing any more."""
    monkeypatch.setattr(source_reading, "RetryReader", Reader)
    inbox, client = Inbox(10, asyncio.get_running_loop()), None
    if stopped:
        inbox.stop()
    of: Any = client
    await read_source(ReadParams(JOURNAL, 7), inbox, of, InstantClock(), "a-shard", {})
    if stopped:
        assert not inbox.inputs
        return
    event = inbox.get(0)
    assert isinstance(event, SourceFailed)
    assert isinstance(event.error, Closed)


@pytest.mark.parametrize("again", [True, False])
async def test_a_source_that_is_created_again_while_it_is_read_fails_the_shard(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Its reader is interrupted for a moment, and the new journal is longer already."""
    lives = [None, 5 if again else 3, 5 if again else 3][: 2 if again else 3]
    may_break = asyncio.Event()

    class Interrupted(Reader):
        def __init__(self, *arguments: Any, on_interrupted: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.on_interrupted = on_interrupted

        async def read(self, max_bytes: int = 0) -> bytes:
            await may_break.wait()
            self.offset = 80
            self.on_interrupted()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    class Brokers:
        """They do not know the journal for a moment, and then one of another life."""

        waits = Waits()

        def reader(self, params: ReadParams) -> Reader:
            return Reader(self, params)

        async def get_journal(self, name: str) -> Any:
            created = lives.pop(0)
            if created is None:
                raise NotFound("journal not found", journal=name)
            return ListedJournal(JournalSpec(name), 9, created, EMPTY_ROUTE, 1)

    async def journal_head(client: object, journal: str) -> int | None:
        may_break.set()
        return 100

    monkeypatch.setattr(source_reading, "RetryReader", Interrupted)
    monkeypatch.setattr(source_reading, "journal_head", journal_head)
    inbox, client = Inbox(10, asyncio.get_running_loop()), Brokers()
    of: Any = client
    async with TaskScope("test") as scope:
        params = ReadParams(JOURNAL, 7, life=JournalLife(1, 3))
        scope.spawn(read_source(params, inbox, of, InstantClock(), "a-shard", {}), name="read")
        await eventually(lambda: not lives)
        if again:
            await eventually(lambda: inbox.inputs)
        scope.cancel()
    assert bool(inbox.inputs) == again
    if again:
        event = inbox.get(0)
        assert isinstance(event, SourceFailed)
        assert isinstance(event.error, Corrupt)
        assert "offset=80" in str(event.error)


@pytest.mark.parametrize(
    ("heads", "is_short"),
    [
        ([None, None, None, None, None, None, None, 100], False),
        ([None, 50, None, 50, 50, None, 100], False),
        ([None, 50, 50, None, 50, 50, 50], True),
    ],
)
async def test_a_head_that_is_not_known_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, heads: list[int | None], is_short: bool
) -> None:
    """Brokers may be away as the shard is promoted: that says nothing of what the source holds."""
    left = list(heads)

    async def journal_head(client: object, journal: str) -> int | None:
        return left.pop(0)

    monkeypatch.setattr(source_reading, "journal_head", journal_head)
    inbox, client = Inbox(10, asyncio.get_running_loop()), None
    of: Any = client
    await check_source(JOURNAL, 80, inbox, of, InstantClock())
    assert not left
    event = inbox.get(0)
    assert isinstance(event, SourceFailed) == is_short
    if isinstance(event, SourceFailed):
        assert isinstance(event.error, Corrupt)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE])
async def test_a_broker_that_fails_to_tell_the_head_is_asked_again(code: grpc.StatusCode) -> None:
    """A broker that stops may fail a call with any code: the shard, or its standby, must not fail too."""
    inbox = Inbox(10, asyncio.get_running_loop())
    async with StubBroker() as broker, Client(broker.endpoint) as client:
        broker.journal(JOURNAL).append(b"x" * 100)
        broker.on_read(Send(fail=code))
        await check_source(JOURNAL, 80, inbox, client, InstantClock())
    assert len(broker.reads) == 2
    assert not inbox.inputs
