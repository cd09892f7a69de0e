"""One Read RPC as a stream of bytes."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gazette.auth import Capability, KeyedAuth
from gazette.client.client import Client
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.read.reader import WRITE_HEAD, OffsetJump, Reader, ReadParams, read_all
from gazette.errors import (
    Broken,
    Closed,
    GazetteError,
    Invalid,
    Moved,
    NotAllowed,
    NotFound,
    NotYet,
    Unavailable,
)
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Route
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from tests.facts import raises
from tests.support.instant_clock import eventually
from tests.support.stub_broker import Send, StubBroker, StubJournal

J = "a/journal"


@pytest.fixture
def journal(broker: StubBroker) -> StubJournal:
    journal = broker.journal(J)
    journal.append(b"0123456789")
    return journal


def content(offset: int, data: bytes) -> broker_pb2.ReadResponse:
    return broker_pb2.ReadResponse(offset=offset, content=data)


async def test_a_span_is_read_to_its_end(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.reader(ReadParams(J, offset=2, end_offset=8))
    assert await reader.read(4) == b"2345"
    assert (reader.offset, reader.write_head) == (6, 10)
    assert await reader.read() == b"67"
    assert await reader.read() == b""
    assert await reader.read() == b""
    assert reader.offset == 8
    reader.close()


async def test_opening_tells_what_comes_before_content(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    async with client.reader(ReadParams(J, offset=3, metadata_only=True)) as reader:
        await reader.open()
        await reader.open()
        assert (reader.offset, reader.write_head) == (3, 10)
        assert reader.fragment is not None
        assert (reader.fragment.begin, reader.fragment.end) == (0, 10)
        assert reader.header is not None
        assert reader.header.process_id == broker.id
        assert await reader.read() == b""
    assert len(broker.reads) == 1


async def test_large_spans_come_in_the_brokers_pieces(client: Client, broker: StubBroker) -> None:
    data = bytes(range(256)) * 4_000
    broker.journal(J).append(data)
    reader = client.reader(ReadParams(J, end_offset=len(data)))
    assert len(await reader.read()) == 131_072
    assert len(await reader.read(1000)) == 1000
    assert await read_all(reader) == data[132_072:]


async def test_the_head_is_resolved(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    """Reading at the head is no jump."""
    reader = client.reader(ReadParams(J, offset=WRITE_HEAD, block=True))

    async def append() -> None:
        await eventually(lambda: broker.reads)
        journal.append(b"new")

    piece, _ = await asyncio.gather(reader.read(), append())
    assert (piece, reader.offset) == (b"new", 13)
    reader.close()


async def test_at_the_head_a_read_that_does_not_block_says_not_yet(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.reader(ReadParams(J))
    assert await reader.read() == b"0123456789"
    with pytest.raises(NotYet) as caught:
        await reader.read()
    assert caught.value.facts["write_head"] == 10
    head = client.reader(ReadParams(J, offset=WRITE_HEAD))
    with pytest.raises(NotYet):
        await head.read()
    assert head.offset == 10


async def test_a_jump_is_reported_once_and_reading_goes_on(
    client: Client, broker: StubBroker
) -> None:
    journal = broker.journal(J)
    journal.begin = 100
    journal.append(b"abc")
    reader = client.reader(ReadParams(J, offset=40, end_offset=103))
    with pytest.raises(OffsetJump) as caught:
        await reader.read()
    assert (caught.value.expected, caught.value.offset, reader.offset) == (40, 100, 100)
    assert await reader.read() == b"abc"
    assert await reader.read() == b""


async def test_a_jump_between_fragments_is_reported(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    first = broker.metadata(J, 0)
    second = broker.metadata(J, 5, first=False)
    broker.on_read(Send((first, content(0, b"012"), second, content(5, b"56"))))
    reader = client.reader(ReadParams(J))
    assert await reader.read() == b"012"
    with raises(OffsetJump, expected=3, offset=5):
        await reader.read()
    assert await reader.read() == b"56"
    assert await reader.read() == b""


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.JOURNAL_NOT_FOUND, NotFound),
        (Status.NOT_JOURNAL_BROKER, Moved),
        (Status.INSUFFICIENT_JOURNAL_BROKERS, Unavailable),
        (Status.SUSPENDED, NotAllowed),
        (Status.NOT_ALLOWED, NotAllowed),
        (Status.FRAGMENT_STORE_UNHEALTHY, Unavailable),
    ],
)
async def test_refusals_are_errors_of_their_kind(
    client: Client,
    broker: StubBroker,
    journal: StubJournal,
    status: Status,
    kind: type[GazetteError],
) -> None:
    broker.on_read(Send((broker.metadata(J, 0, status),)))
    reader = client.reader(ReadParams(J))
    with pytest.raises(kind) as caught:
        await reader.read()
    assert caught.value.facts["status"] == status.name


async def test_answers_that_cannot_be_right_are_the_brokers_fault(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    good = broker.metadata(J, 4)
    cases: list[tuple[broker_pb2.ReadResponse, ...]] = [
        (content(4, b"x"),),  # content before metadata
        (broker.metadata(J, 2),),  # an offset before the one asked for
        (good, content(5, b"x")),  # content of another offset
        (good, broker_pb2.ReadResponse(offset=4, content=b"x", write_head=9)),  # both in one
        (broker_pb2.ReadResponse(offset=4, write_head=10),),  # neither
    ]
    for messages in cases:
        broker.on_read(Send(messages))
        async with client.reader(ReadParams(J, offset=4)) as reader:
            with pytest.raises(Broken):
                await reader.read()


async def test_a_broker_that_gives_its_replica_up_is_no_broken_one(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    """It ends the read before it answers."""
    client.observe_route(J, broker.route_of(J))
    broker.on_read(Send(()))
    async with client.reader(ReadParams(J)) as reader:
        with raises(Unavailable, endpoint=broker.endpoint):
            await reader.read()
    assert len(client._routes) == 0
    assert await client.reader(ReadParams(J, end_offset=3)).read() == b"012"


async def test_content_with_an_unusual_encoding_is_content(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    """At offset zero there is no offset on the wire."""
    reader = client.reader(ReadParams(J, end_offset=3))
    assert await reader.read() == b"012"


async def test_a_break_in_the_middle_is_raised_after_what_came(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    messages = (broker.metadata(J, 0), content(0, b"01"))
    broker.on_read(Send(messages, fail=grpc.StatusCode.UNAVAILABLE))
    client.observe_route(J, broker.route_of(J))
    reader = client.reader(ReadParams(J))
    assert await reader.read() == b"01"
    with pytest.raises(Unavailable):
        await reader.read()
    assert client.endpoint_of(J) == broker.endpoint
    assert len(client._routes) == 0


async def test_closing_wakes_a_read(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.reader(ReadParams(J, offset=10, block=True))

    async def close() -> None:
        await eventually(lambda: broker.reads)
        reader.close()

    error, _ = await asyncio.gather(reader.read(), close(), return_exceptions=True)
    assert isinstance(error, Closed)
    reader.close()


async def test_cancellation_ends_the_call(
    client: Client, broker: StubBroker, journal: StubJournal
) -> None:
    reader = client.reader(ReadParams(J, offset=10, block=True))
    async with TaskScope("test") as scope:
        task = scope.spawn(reader.read(), name="read")
        await eventually(lambda: broker.reads)
        task.cancel()
    assert task.cancelled()
    reader.close()


async def test_claims_and_parameters_are_sent(broker: StubBroker, journal: StubJournal) -> None:
    auth = KeyedAuth.parse(SystemClock(), "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
    seen = []
    original = broker.Read

    async def read(request: Any, context: Any) -> AsyncIterator[broker_pb2.ReadResponse]:
        seen.append(dict(context.invocation_metadata()))
        async for response in original(request, context):
            yield response

    broker.Read = read  # type: ignore[method-assign]
    await broker.stop()
    await broker.start()
    params = ReadParams(
        J + ";meta", offset=2, end_offset=4, begin_mod_time=5, do_not_proxy=True, block=True
    )
    async with Client(broker.endpoint, signer=auth) as client:
        assert await read_all(client.reader(params)) == b"23"
    (request,) = broker.reads
    assert request == params.to_pb()
    claims = auth.verify(seen[0]["authorization"], Capability.READ)
    assert claims.selector == LabelSelector.of(name=J)


async def test_reads_prefer_the_zone(client: Client, broker: StubBroker) -> None:
    async with StubBroker("far-broker", zone="far", journals=broker.journals) as far:
        broker.journal(J).append(b"x")
        route = Route((far.id, broker.id), 0, (far.endpoint, broker.endpoint))
        client.observe_route(J, route)
        assert await read_all(client.reader(ReadParams(J, end_offset=1))) == b"x"
        assert (len(far.reads), len(broker.reads)) == (0, 1)


def test_parameters_are_checked() -> None:
    for params in (
        ReadParams("no"),
        ReadParams(J, offset=-2),
        ReadParams(J, offset=5, end_offset=4),
        ReadParams(J, end_offset=-1),
    ):
        with pytest.raises(Invalid):
            params.validate()


# Reading fragments at their store.


def store(
    root: Path, journal: StubJournal, begin: int, end: int, *, missing: bool = False
) -> Fragment:
    """Put a span of a journal into a store."""
    data = bytes(journal.content[begin:end])
    digest = hashlib.sha1(data).digest()
    fragment = Fragment(J, begin, end, digest, Codec.NONE, "file:///", 1)
    path = root / fragment.content_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not missing:
        path.write_bytes(data)
    journal.stored.append((fragment, f"file:///{fragment.content_path()}"))
    return fragment


@pytest.fixture
async def direct(broker: StubBroker, tmp_path: Path) -> AsyncIterator[Client]:
    access = FragmentAccess(file_root=tmp_path)
    async with Client(broker.endpoint, fragments=access) as client:
        yield client


async def test_the_threads_that_read_fragments_end_with_the_client(
    broker: StubBroker, journal: StubJournal, tmp_path: Path
) -> None:
    """A process waits at its exit for threads."""
    fragment = store(tmp_path, journal, 0, 6)
    access = FragmentAccess(file_root=tmp_path)
    before = set(threading.enumerate())
    async with Client(broker.endpoint, fragments=access) as client:
        assert await read_all(client.reader(ReadParams(J, end_offset=6))) == b"012345"
        begun = {one for one in threading.enumerate() if one.name.startswith("fragments")} - before
        assert begun
    for thread in begun:
        thread.join(30.0)
        assert not thread.is_alive()
    with pytest.raises(Closed):
        await access.open(fragment, f"file:///{fragment.content_path()}", 0)


@pytest.mark.parametrize("do_not_proxy", [False, True])
async def test_a_stored_fragment_is_read_at_its_store(
    direct: Client, broker: StubBroker, journal: StubJournal, tmp_path: Path, do_not_proxy: bool
) -> None:
    """To the fragment's end, which is the reader's; whether or not the broker would send it."""
    store(tmp_path, journal, 0, 6)
    reader = direct.reader(ReadParams(J, offset=2, do_not_proxy=do_not_proxy))
    assert await reader.read(1) == b"2"
    assert reader.direct is not None
    assert await read_all(reader) == b"345"
    assert reader.offset == 6


async def test_the_end_of_a_span_holds_at_the_store_too(
    direct: Client, journal: StubJournal, tmp_path: Path
) -> None:
    store(tmp_path, journal, 0, 6)
    assert await read_all(direct.reader(ReadParams(J, offset=2, end_offset=4))) == b"23"


async def test_a_stream_goes_over_to_the_store_when_it_reaches_a_stored_fragment(
    direct: Client, broker: StubBroker, journal: StubJournal, tmp_path: Path
) -> None:
    store(tmp_path, journal, 4, 7)
    journal.stored.insert(0, (Fragment(J, 0, 4, bytes(20)), ""))
    reader = direct.reader(ReadParams(J))
    assert await reader.read() == b"0123"
    assert reader.direct is None
    assert await reader.read() == b"456"
    assert reader.direct is not None
    assert await reader.read() == b""


async def test_a_fragment_that_cannot_be_opened_here_comes_from_the_broker(
    client: Client, broker: StubBroker, journal: StubJournal, tmp_path: Path
) -> None:
    store(tmp_path, journal, 0, 6)
    reader = client.reader(ReadParams(J, end_offset=6))
    assert await reader.read() == b"012345"
    assert reader.direct is None
    assert await read_all(Reader(client, ReadParams(J, end_offset=6), direct=False)) == b"012345"


async def test_a_failure_of_the_store_is_distinguished_from_one_of_the_broker(
    direct: Client, journal: StubJournal, tmp_path: Path
) -> None:
    store(tmp_path, journal, 0, 6, missing=True)
    reader = direct.reader(ReadParams(J))
    with pytest.raises(NotFound):
        await reader.read()
    assert reader.direct_failed
    reader.close()


async def test_opening_ahead_opens_the_fragment_too(
    direct: Client, journal: StubJournal, tmp_path: Path
) -> None:
    store(tmp_path, journal, 0, 6)
    reader = direct.reader(ReadParams(J))
    _, piece = await asyncio.gather(reader.open_ahead(), reader.read())
    assert reader.direct is not None
    assert piece == b"012345"
    reader.close()
