"""The stream of a journal across everything that can happen to brokers and fragments."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from gazette.client.client import Client
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.read.reader import WRITE_HEAD, OffsetJump, Reader, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.channel import ChannelSettings
from gazette.client.waits import LAG_S, Grace
from gazette.errors import Closed, Corrupt, Invalid, NotAllowed, NotFound, NotYet, Unavailable
from gazette.protocol.codecs.codec import new_compressor
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Route
from gazette.protocol.status import Status
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from tests.support.instant_clock import InstantClock, eventually
from tests.support.stub_broker import Send, StubBroker, StubJournal

J = "a/journal"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def journal(broker: StubBroker) -> StubJournal:
    journal = broker.journal(J)
    journal.append(b"0123456789")
    return journal


def content(offset: int, data: bytes) -> broker_pb2.ReadResponse:
    return broker_pb2.ReadResponse(offset=offset, content=data)


async def collect(reader: RetryReader) -> bytes:
    async with reader:
        return b"".join([piece async for piece in reader.chunks()])


async def test_a_stream_survives_breaks_and_ends_at_its_end(
    client: Client, broker: StubBroker, journal: StubJournal, instant: InstantClock
) -> None:
    broker.on_read(
        Send((broker.metadata(J, 0), content(0, b"012")), fail=UNAVAILABLE),
        Send(fail=grpc.StatusCode.UNKNOWN),
        Send((broker.metadata(J, 3, Status.INSUFFICIENT_JOURNAL_BROKERS),)),
        Send((broker.metadata(J, 3), content(3, b"34"))),  # The broker stops: a clean end.
    )
    breaks: list[int] = []
    reader = RetryReader(
        client,
        ReadParams(J, end_offset=9),
        clock=instant,
        on_interrupted=lambda: breaks.append(reader.offset),
    )
    assert await collect(reader) == b"012345678"
    assert reader.offset == 9
    assert breaks == [3, 3, 3, 5]
    assert [read.offset for read in broker.reads] == [0, 3, 3, 3, 5]
    assert instant.slept == [0.05, 0.05, 0.1]


async def test_ends_without_progress_are_backed_off(
    client: Client, broker: StubBroker, journal: StubJournal, instant: InstantClock
) -> None:
    broker.on_read(*[Send((broker.metadata(J, 0),))] * 6)
    assert await collect(client.retry_reader(ReadParams(J, end_offset=1))) == b"0"
    assert instant.slept == [0.05, 0.05, 0.1, 0.1, 1.0, 1.0]


async def test_every_piece_ends_where_the_offset_says(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.retry_reader(ReadParams(J, end_offset=10))
    at = 0
    while piece := await reader.read(3):
        at += len(piece)
        assert reader.offset == at
        assert len(piece) <= 3
    assert (reader.write_head, reader.fragment is not None) == (10, True)
    assert reader.header is not None


async def test_brokers_may_be_replaced_under_a_blocked_read(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.retry_reader(ReadParams(J, block=True))
    assert await reader.read() == b"0123456789"
    async with TaskScope("test") as scope:
        blocked = scope.spawn(reader.read(), name="read")
        await eventually(lambda: broker.reads)
        await broker.stop()
        await broker.start()
        await eventually(lambda: len(broker.reads) > 1)
        journal.append(b"abc")
        assert await blocked == b"abc"
    reader.close()


async def test_a_read_moves_to_the_member_that_serves_the_journal(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    async with StubBroker("new-broker", journals=broker.journals) as member:
        moved = broker.metadata(J, 0, Status.NOT_JOURNAL_BROKER)
        moved.header.route.CopyFrom(Route((member.id,), 0, (member.endpoint,)).to_pb())
        broker.on_read(Send((moved,)))
        params = ReadParams(J, end_offset=10, do_not_proxy=True)
        assert await collect(client.retry_reader(params)) == b"0123456789"
        assert len(member.reads) == 1


async def test_a_jump_is_surfaced_once(client: Client, broker: StubBroker) -> None:
    journal = broker.journal(J)
    journal.begin = 100
    journal.append(b"abc")
    reader = client.retry_reader(ReadParams(J, offset=1, end_offset=103))
    with pytest.raises(OffsetJump):
        await reader.read()
    assert reader.offset == 100
    assert await collect(reader) == b"abc"


async def test_at_the_head_it_says_not_yet_until_it_may_block(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.retry_reader(ReadParams(J, offset=WRITE_HEAD))
    for _ in range(5):
        with pytest.raises(NotYet):
            await reader.read()
    assert reader.offset == 10
    journal.append(b"a")
    assert await reader.read() == b"a"
    reader.set_block(True)
    assert reader.block
    async with TaskScope("test") as scope:
        blocked = scope.spawn(reader.read(), name="read")
        await eventually(lambda: broker.reads[-1].block)
        journal.append(b"b")
        assert await blocked == b"b"

    async def stop_blocking() -> None:
        await eventually(lambda: len(broker.reads) > reads)
        reader.set_block(False)

    # Case: and back again, while it waits.
    reader.seek(11)
    reader.seek(12)
    reads = len(broker.reads)
    error, _ = await asyncio.gather(reader.read(), stop_blocking(), return_exceptions=True)
    assert isinstance(error, NotYet)
    journal.append(b"c")
    assert await reader.read() == b"c"
    reader.close()


async def test_suspension_and_missing_journals_are_surfaced(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    broker.on_read(Send((broker.metadata(J, 0, Status.SUSPENDED),)))
    reader = client.retry_reader(ReadParams(J))
    with pytest.raises(NotAllowed):
        await reader.read()
    assert await reader.read() == b"0123456789"
    # A journal may be missing for a moment: on brokers that have not heard of it yet.
    unknown = [Send((broker.metadata(J, 0, Status.JOURNAL_NOT_FOUND),))] * 5
    broker.on_read(*unknown)
    reader = client.retry_reader(ReadParams(J, end_offset=10))
    assert await reader.read(1) == b"0"
    # Case: the reader moves to another such broker later.
    reader.set_block(True)
    reader.seek(5)
    await client.clock.sleep(LAG_S)
    broker.on_read(*unknown)
    assert await collect(reader) == b"56789"
    # Case: other answers come between two of these, without bytes.
    reader = client.retry_reader(ReadParams(J, offset=10))
    for _ in range(2):
        broker.on_read(unknown[0])
        with pytest.raises(NotYet):
            await reader.read()
        await client.clock.sleep(LAG_S)
    ends = [Send((broker.metadata(J, 0),))] * 5
    broker.on_read(unknown[0], *ends, unknown[0])
    assert await collect(client.retry_reader(ReadParams(J, end_offset=1))) == b"0"
    broker.missing.add(J)
    begun = client.clock.monotonic()
    with pytest.raises(NotFound):
        await client.retry_reader(ReadParams(J)).read()
    assert LAG_S <= client.clock.monotonic() - begun < LAG_S + 1


async def test_refused_credentials_are_surfaced_after_some_time(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    broker.on_read(*[Send(fail=grpc.StatusCode.UNAUTHENTICATED)] * 9)
    reader = client.retry_reader(ReadParams(J))
    begun = client.clock.monotonic()
    with pytest.raises(NotAllowed):
        await reader.read()
    assert LAG_S <= client.clock.monotonic() - begun < LAG_S + 1
    assert await reader.read() == b"0123456789"


async def test_cancellation_loses_nothing(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.retry_reader(ReadParams(J, offset=10, block=True))
    async with TaskScope("test") as scope:
        blocked = scope.spawn(reader.read(), name="read")
        await eventually(lambda: broker.reads)
        blocked.cancel()
    journal.append(b"abc")
    assert await reader.read() == b"abc"
    reader.close()


async def test_time_in_which_nobody_reads_makes_no_journal_missing(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    unknown = [Send((broker.metadata(J, 0, Status.JOURNAL_NOT_FOUND),))]
    reader = client.retry_reader(ReadParams(J, offset=10, block=True))
    broker.on_read(*unknown)
    async with TaskScope("test") as scope:
        blocked = scope.spawn(reader.read(), name="read")
        await eventually(lambda: len(broker.reads) == 2)
        blocked.cancel()
    await client.clock.sleep(LAG_S)
    broker.on_read(*unknown * 3)
    journal.append(b"abc")
    assert await reader.read() == b"abc"
    reader.close()


def test_calls_that_are_cancelled_again_and_again_have_one_grace_together() -> None:
    clock = ManualClock()
    grace = Grace(clock)
    for _ in range(4):
        assert grace.covers(NotFound("not known"))
        clock.advance(LAG_S / 4)
        grace.pause()
        clock.advance(3600)
        grace.pause()
    assert not grace.covers(NotFound("not known"))
    # Case: another answer begins it again, also while it is paused.
    for _ in range(2):
        grace.pause()
        assert not grace.covers(Unavailable("no answer"))
        assert grace.covers(NotFound("not known"))
        clock.advance(LAG_S / 2)


async def test_seeking_goes_on_elsewhere(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.retry_reader(ReadParams(J))
    assert await reader.read(2) == b"01"
    reader.seek(7)
    assert await reader.read(2) == b"78"
    reader.seek(9)
    reader.seek(1)
    assert await reader.read(1) == b"1"
    with pytest.raises(Invalid):
        reader.seek(-1)
    reader.close()


async def test_a_closed_reader_says_so(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.retry_reader(ReadParams(J, offset=10, block=True))

    async def close() -> None:
        await eventually(lambda: broker.reads)
        reader.close()

    error, _ = await asyncio.gather(reader.read(), close(), return_exceptions=True)
    assert isinstance(error, Closed)
    with pytest.raises(Closed):
        await reader.read()
    reader.close()


async def test_metadata_only_has_no_content(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.retry_reader(ReadParams(J, offset=4, metadata_only=True))
    assert await reader.read() == b""
    assert (reader.offset, reader.write_head) == (4, 10)


# Fragments at their store.


@pytest.fixture
async def direct(
    broker: StubBroker, tmp_path: Path, instant: InstantClock
) -> AsyncIterator[Client]:
    access = FragmentAccess(file_root=tmp_path)
    settings = ChannelSettings(silence_s=0)
    async with Client(
        broker.endpoint, fragments=access, clock=instant, channel_settings=settings
    ) as client:
        yield client
    access.close()


def store(root: Path, journal: StubJournal, *bounds: int) -> list[Path]:
    """Store consecutive spans of a journal, zstd-compressed; their files."""
    paths = []
    for begin, end in itertools.pairwise(bounds):
        data = bytes(journal.content[begin:end])
        fragment = Fragment(
            J, begin, end, hashlib.sha1(data).digest(), Codec.ZSTANDARD, "file:///", 1
        )
        compressor = new_compressor(Codec.ZSTANDARD)
        path = root / fragment.content_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressor.compress(data) + compressor.finish())
        journal.stored.append((fragment, f"file:///{fragment.content_path()}"))
        paths.append(path)
    return paths


@pytest.mark.parametrize("do_not_proxy", [False, True])
async def test_a_cold_read_takes_fragments_from_their_store_one_ahead(
    direct: Client, broker: StubBroker, tmp_path: Path, do_not_proxy: bool
) -> None:
    """Then goes on with what brokers have; each byte once, in order."""
    journal = broker.journal(J)
    data = b"".join(b"%07d\n" % i for i in range(50_000))
    journal.append(data)
    store(tmp_path, journal, 0, 100_000, 250_000, 251_000, 390_000)
    reader = direct.retry_reader(ReadParams(J, end_offset=len(data), do_not_proxy=do_not_proxy))
    first = await reader.read(10)
    assert reader._next is not None, "the second fragment is opened while the first is read"
    assert first + await collect(reader) == data
    assert [read.offset for read in broker.reads] == [0, 100_000, 250_000, 251_000, 390_000]


def opened() -> float:
    """Return how many fragments of the journal were opened at their store."""
    labels = {"journal": J, "codec": Codec.ZSTANDARD.name}
    return REGISTRY.get_sample_value("gazette_fragment_open_total", labels) or 0.0


@pytest.mark.parametrize("is_read_first", [True, False])
async def test_a_fragment_is_opened_once_by_a_read_and_a_look_ahead(
    direct: Client, broker: StubBroker, tmp_path: Path, is_read_first: bool
) -> None:
    """A fragment may be so short that its bytes are wanted before its look-ahead has begun."""
    journal = broker.journal(J)
    journal.append(b"0123456789" * 200)
    store(tmp_path, journal, 0, 1000)
    before = opened()
    async with (
        Reader(direct, ReadParams(J, do_not_proxy=True), direct=True) as reader,
        TaskScope("test") as scope,
    ):
        calls: list[Callable[[], Coroutine[Any, Any, bytes | None]]]
        calls = [reader.read, reader.open_ahead]
        tasks = [scope.spawn(call(), name="call") for call in calls[:: 1 if is_read_first else -1]]
        assert {await task for task in tasks} == {b"0123456789" * 100, None}
        assert await reader.read() == b""
    assert opened() - before == 1


async def refused(call: Callable[[], Coroutine[Any, Any, object]]) -> None:
    with pytest.raises(Closed):
        await call()


async def test_a_read_that_waits_for_a_look_ahead_makes_no_call_after_a_close(
    direct: Client, broker: StubBroker
) -> None:
    broker.journal(J)
    reader = Reader(direct, ReadParams(J, block=True), direct=True)

    async with TaskScope("test") as scope:
        scope.spawn(refused(reader.open_ahead), name="open")
        scope.spawn(refused(reader.read), name="read")
        await eventually(lambda: len(broker.reads) == 1)
        reader.close()
    assert len(broker.reads) == 1


async def test_a_reader_that_is_closed_while_it_opens_a_fragment_closes_it(
    direct: Client, broker: StubBroker, tmp_path: Path
) -> None:
    journal = broker.journal(J)
    journal.append(b"0123456789" * 200)
    store(tmp_path, journal, 0, 1000)
    reader = Reader(direct, ReadParams(J, do_not_proxy=True), direct=True)
    await reader.open()
    async with TaskScope("test") as scope:
        opening = scope.spawn(refused(reader.open_ahead), name="open")
        await asyncio.wait({opening}, timeout=0)
        reader.close()
    assert reader.direct is None


async def test_a_fragment_whose_store_fails_comes_through_the_broker(
    direct: Client, broker: StubBroker, tmp_path: Path
) -> None:
    """That fragment only: the next is tried at the store again."""
    journal = broker.journal(J)
    data = b"".join(b"%07d\n" % i for i in range(10_000))
    journal.append(data)
    paths = store(tmp_path, journal, 0, 20_000, 40_000, 60_000, 80_000)
    paths[1].unlink()
    reader = direct.retry_reader(ReadParams(J, end_offset=len(data), do_not_proxy=True))
    assert await collect(reader) == data
    proxied = [read for read in broker.reads if not read.do_not_proxy]
    assert [(read.offset, read.end_offset) for read in proxied] == [(20_000, 40_000)]


async def test_a_store_that_always_fails_is_not_asked_for_ever(
    direct: Client, broker: StubBroker, tmp_path: Path
) -> None:
    journal = broker.journal(J)
    data = b"".join(b"%07d\n" % i for i in range(10_000))
    journal.append(data)
    for path in store(tmp_path, journal, *range(0, 80_001, 10_000)):
        path.unlink()
    reader = direct.retry_reader(ReadParams(J, end_offset=len(data)))
    assert await collect(reader) == data
    assert len(broker.reads) < 8


async def test_a_corrupt_fragment_is_surfaced(
    direct: Client, broker: StubBroker, tmp_path: Path, journal: StubJournal
) -> None:
    (path,) = store(tmp_path, journal, 0, 8)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt):
        await collect(direct.retry_reader(ReadParams(J, end_offset=8)))


async def test_fragments_that_cannot_be_opened_are_asked_of_brokers_although_not_to_be_proxied(
    client: Client, broker: StubBroker, tmp_path: Path, journal: StubJournal, instant: InstantClock
) -> None:
    """The broker sends no content of a stored fragment then, and we cannot read it: ask otherwise."""
    store(tmp_path, journal, 0, 4, 8)
    params = ReadParams(J, end_offset=10, do_not_proxy=True)
    assert await collect(client.retry_reader(params)) == b"0123456789"
    assert instant.slept == []
