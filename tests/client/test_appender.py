"""One Append RPC, and the plain append that repeats it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gazette.auth import Capability, KeyedAuth
from gazette.client.append.appender import Appender, AppendParams, SuspendControl, backoff_s
from gazette.client.client import Client
from gazette.errors import Broken, Closed, Conflict, Fenced, Invalid, NotAllowed, Unavailable
from gazette.protocol.content import CHUNK_BYTES, TOO_SLOW, WHOLE_BYTES
from gazette.protocol.label_set import Label, LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Route
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from tests.support.instant_clock import InstantClock, eventually
from tests.support.stub_broker import Fail, Hold, LoseReply, Reply, StubBroker

JOURNAL = AppendParams("a/journal")


async def test_content_arrives_in_chunks_and_is_committed(
    client: Client, broker: StubBroker
) -> None:
    content = bytes(range(256)) * 5_000
    result = await client.append(JOURNAL, content)
    assert broker.content_of("a/journal") == content
    assert result.commit.length == len(content)
    assert result.header.process_id == broker.id
    # The last piece may be up to twice as long; the commit is a message too.
    assert result.total_chunks == len(content) // CHUNK_BYTES + 1


@pytest.mark.parametrize(
    ("content", "chunks"),
    [
        (bytes(WHOLE_BYTES), 2),
        (bytes(WHOLE_BYTES + 1), 2),
        ([b"one", b"", memoryview(b"two"), bytearray(b"three")], 2),
        ((bytes(WHOLE_BYTES), b"x"), 3),
        (memoryview(array("i", range(7))), 2),
        (iter([b"one", b"two"]), 3),
        ([], 1),
    ],
    ids=["whole", "longer", "pieces", "long-pieces", "integers", "iterator", "nothing"],
)
async def test_content_in_any_form_arrives(
    client: Client, broker: StubBroker, content: Any, chunks: int
) -> None:
    """Content that is all there and not long is one chunk. Each other piece is a chunk of its own."""
    pieces = content if isinstance(content, list | tuple) else [content]
    expected = b"onetwo" if chunks == 3 and len(pieces) == 1 else b"".join(pieces)
    result = await client.append(JOURNAL, content)
    assert broker.content_of("a/journal") == expected
    assert result.commit.length == len(expected)
    assert broker.appends[0].chunks == chunks


async def test_labels_in_a_list_are_taken(client: Client, broker: StubBroker) -> None:
    """They have no hash, and need none."""
    labels = LabelSet([Label("fence", "7")])  # type: ignore[arg-type]
    params = AppendParams(
        "a/journal", check_registers=LabelSelector(labels), union_registers=labels
    )
    await client.append(params, b"content")
    assert LabelSet.from_pb(broker.appends[0].opening.union_registers).value_of("fence") == "7"


async def test_an_append_that_is_cancelled_ends_its_call(
    client: Client, broker: StubBroker
) -> None:
    hold = Hold(asyncio.Event())
    broker.on_append(hold)
    async with TaskScope("appends") as scope:
        appending = scope.spawn(client.append(JOURNAL, b"never"), name="append")
        await hold.reached.wait()
        appending.cancel()
    await client.append(JOURNAL, b"y")
    hold.until.set()
    await client.append(JOURNAL, b"z")
    assert broker.content_of("a/journal") == b"yz"


async def test_an_empty_append_asks_for_the_head(client: Client, broker: StubBroker) -> None:
    broker.journal("a/journal").append(b"12345")
    result = await client.append(JOURNAL)
    assert (result.commit.begin, result.commit.end) == (5, 5)
    assert broker.appends[0].chunks == 1


async def test_empty_pieces_are_not_sent_since_they_would_commit(
    client: Client, broker: StubBroker
) -> None:
    async with Appender(client, JOURNAL) as appender:
        await appender.write(b"")
        await appender.write(b"one")
        await appender.write(memoryview(b""))
        await appender.write(bytearray(b"two"))
        await appender.commit()
    assert broker.content_of("a/journal") == b"onetwo"


async def test_the_request_carries_every_parameter(client: Client, broker: StubBroker) -> None:
    params = AppendParams(
        "a/journal;meta/data",
        offset=0,
        check_registers=LabelSelector.of(("epoch", "1")),
        union_registers=LabelSet.of(("owner", "me")),
        subtract_registers=LabelSet.of(("owner", "you")),
        suspend=SuspendControl.NO_RESUME,
    )
    result = await client.append(params, b"x")
    opening = broker.appends[0].opening
    assert opening.journal == "a/journal"
    assert opening.suspend == broker_pb2.AppendRequest.SUSPEND_NO_RESUME
    assert result.registers == LabelSet.of(("owner", "me"))
    assert result.commit.journal == "a/journal"


async def test_claims_are_to_append_to_this_journal(broker: StubBroker) -> None:
    auth = KeyedAuth.parse(SystemClock(), "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
    async with Client(broker.endpoint, signer=auth) as client:
        await client.append(AppendParams("a/journal;meta"), b"x")
    headers = dict(broker.appends[0].metadata)
    claims = auth.verify(headers["authorization"], Capability.APPEND)
    assert claims.capability == Capability.APPEND
    assert claims.selector == LabelSelector.of(name="a/journal")


async def test_leaving_without_commit_appends_nothing(client: Client, broker: StubBroker) -> None:
    async with Appender(client, JOURNAL) as appender:
        await appender.write(b"x")
    with pytest.raises(ZeroDivisionError):
        async with Appender(client, JOURNAL) as appender:
            await appender.write(b"x")
            raise ZeroDivisionError
    await client.append(JOURNAL, b"y")
    assert broker.content_of("a/journal") == b"y"


async def test_a_broker_that_answers_early_is_heard(client: Client, broker: StubBroker) -> None:
    """It refuses before it read the content, which then cannot be sent."""
    broker.on_append(Reply(Status.NOT_ALLOWED, early=True))
    with pytest.raises(NotAllowed):
        await client.append(JOURNAL, bytes(50_000_000))
    assert broker.content_of("a/journal") == b""


async def test_refusals_are_errors_of_their_kind(client: Client, broker: StubBroker) -> None:
    broker.journal("a/journal").append(b"12345")
    with pytest.raises(Conflict) as caught:
        await client.append(AppendParams("a/journal", offset=3), b"x")
    assert caught.value.facts["status"] == "WRONG_APPEND_OFFSET"
    broker.journal("a/journal").registers = LabelSet.of(("owner", "you"))
    with pytest.raises(Fenced):
        await client.append(
            AppendParams("a/journal", check_registers=LabelSelector.of(owner="me")), b"x"
        )
    with pytest.raises(Invalid, match="CheckRegisters"):
        await client.append(
            AppendParams("a/journal", check_registers=LabelSelector.of(x="name too short"))
        )


async def test_a_plain_append_is_retried_while_the_journal_is_handed_over(
    client: Client, broker: StubBroker, instant: InstantClock
) -> None:
    broker.on_append(
        Reply(Status.NO_JOURNAL_PRIMARY_BROKER),
        Reply(Status.NOT_JOURNAL_PRIMARY_BROKER),
        Reply(Status.INSUFFICIENT_JOURNAL_BROKERS),
        Fail(after_bytes=1),
        LoseReply(),
    )
    await client.append(JOURNAL, [b"ab", b"c"])
    assert broker.content_of("a/journal") == b"abcabc"
    assert instant.slept == [0.05, 0.05, 0.1, 0.1, 1.0]


@pytest.mark.parametrize(
    "step",
    [
        Reply(Status.SUSPENDED),
        Reply(Status.FRAGMENT_STORE_UNHEALTHY),
        Fail(grpc.StatusCode.UNKNOWN),
    ],
    ids=str,
)
async def test_a_plain_append_is_not_retried_for_anything_else(
    client: Client, broker: StubBroker, step: Reply | Fail
) -> None:
    broker.on_append(step)
    with pytest.raises((NotAllowed, Unavailable, Broken)):
        await client.append(JOURNAL, b"x")
    assert len(broker.appends) == 1


async def test_bytes_that_came_too_slowly_are_retried_and_a_slow_source_is_not(
    client: Client, broker: StubBroker
) -> None:
    """A process that is starved of its processor is no reason to give up what it holds in memory."""
    details = f"append stream: {TOO_SLOW} (rate_min=65536)"
    broker.on_append(Fail(grpc.StatusCode.UNKNOWN, details))
    await client.append(JOURNAL, b"x")
    assert broker.content_of("a/journal") == b"x"
    broker.on_append(Fail(grpc.StatusCode.UNKNOWN, details))
    with pytest.raises(Broken, match="sustain"):
        await client.append(JOURNAL, lambda: [b"y"])


async def test_content_that_can_be_read_once_is_not_retried(
    client: Client, broker: StubBroker
) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    broker.on_append(Fail(after_bytes=6))
    with pytest.raises(Unavailable):
        await client.append(JOURNAL, content())
    broker.on_append(Fail(after_bytes=6))
    with pytest.raises(Unavailable):
        await client.append(JOURNAL, iter([b"one", b"two"]))
    broker.on_append(Fail(after_bytes=6))
    await client.append(JOURNAL, content)
    assert broker.content_of("a/journal") == b"onetwo"


async def test_an_answer_that_cannot_be_right_is_the_brokers_fault(
    client: Client, broker: StubBroker
) -> None:
    broker.revision = 0
    with pytest.raises(Broken, match="Revision"):
        await client.append(JOURNAL, b"x")


async def test_cancellation_before_the_commit_appends_nothing(
    client: Client, broker: StubBroker
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    async with TaskScope("test") as scope:
        task = scope.spawn(client.append(JOURNAL, endless()), name="append")
        await eventually(lambda: broker.appends and broker.appends[0].chunks)
        task.cancel()
    await client.append(JOURNAL, b"y")
    assert broker.content_of("a/journal") == b"y"


async def test_closing_the_client_ends_an_append(broker: StubBroker) -> None:
    client = Client(broker.endpoint)
    hold = Hold(asyncio.Event())
    broker.on_append(hold)

    async def close() -> None:
        await hold.reached.wait()
        await client.close()

    error, _ = await asyncio.gather(client.append(JOURNAL, b"x"), close(), return_exceptions=True)
    assert isinstance(error, Closed)
    hold.until.set()


async def test_appends_go_to_the_primary_that_a_broker_named(
    client: Client, broker: StubBroker
) -> None:
    async with StubBroker("another-broker", zone="far", journals=broker.journals) as primary:
        route = Route((primary.id, broker.id), 0, (primary.endpoint, broker.endpoint))
        broker.routes["a/journal"] = primary.routes["a/journal"] = route
        route.validate()
        await client.append(JOURNAL, b"1")
        await client.append(AppendParams("a/journal;meta"), b"2")
        assert [len(broker.appends), len(primary.appends)] == [1, 2]
        # It ends: the default address is asked again, and would proxy.
        await primary.stop()
        broker.routes.clear()
        await client.append(JOURNAL, b"3")
    assert broker.content_of("a/journal") == b"123"


async def test_a_failed_call_makes_the_next_go_to_the_default_address(
    client: Client, broker: StubBroker
) -> None:
    async with StubBroker("another-broker", journals=broker.journals) as primary:
        client.observe_route("a/journal", Route((primary.id,), 0, (primary.endpoint,)))
        primary.on_append(Fail())
        await client.append(JOURNAL, b"1")
        assert [len(primary.appends), len(broker.appends)] == [1, 1]


async def test_without_route_cache_the_default_address_is_always_called(
    broker: StubBroker,
) -> None:
    async with StubBroker("another-broker", journals=broker.journals) as primary:
        async with Client(broker.endpoint, route_cache_size=0) as client:
            await client.append(JOURNAL, b"1")
            client.observe_route("a/journal", Route((primary.id,), 0, (primary.endpoint,)))
            await client.append(JOURNAL, b"2")
        assert len(broker.appends) == 2


def test_the_backoff_is_the_documented_one() -> None:
    assert [backoff_s(attempt) for attempt in range(-1, 8)] == [
        *(0.0, 0.05, 0.05, 0.1, 0.1),
        *(1.0, 1.0, 5.0, 5.0),
    ]
