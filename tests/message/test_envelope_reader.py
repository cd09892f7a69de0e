"""Reading journals through the client: what is written, and what of it has committed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import pytest

from gazette.client.client import Client
from gazette.client.read.reader import WRITE_HEAD, OffsetJump, ReadParams
from gazette.errors import Corrupt, Invalid, NotFound, NotYet, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_TIME
from gazette.message.envelope import Envelope
from gazette.message.envelope_reader import CommittedReader, UncommittedReader, read_batches
from gazette.message.framing.framing import MalformedMessage, TruncatedFrame, framing_of
from gazette.message.message import Message
from gazette.message.message_time import MessageTime, UnusableTime
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    Clock,
    UuidMint,
    clock_at,
)
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status
from gazette.runtime.tasks import TaskScope
from tests.facts import raises
from tests.support.instant_clock import InstantClock, eventually
from tests.support.stub_broker import Send, StubBroker

JOURNAL = "a/journal"


class Word(Message):
    word: str


class Writer:
    """Writes words of two producers into a journal."""

    def __init__(self, broker: StubBroker) -> None:
        self.journal = broker.journal(JOURNAL)
        clock = Clock(clock_at(10**18))
        self.mints = [UuidMint(b"\x01aaaaa", clock), UuidMint(b"\x01bbbbb", clock)]
        self.framing = framing_of(CONTENT_JSON_LINES, Word)

    def write(self, word: str, flags: int = OUTSIDE_TXN, producer: int = 0) -> None:
        message = self.framing.codec.stamp(Word(word), self.mints[producer], flags)
        self.journal.append(self.framing.encode(message))


@pytest.fixture
async def broker() -> AsyncIterator[StubBroker]:
    async with StubBroker() as broker:
        list_with(broker)
        yield broker


def list_with(broker: StubBroker, *labels: tuple[str, str]) -> None:
    """Have the broker list the journal with these labels as well."""
    spec = JournalSpec(
        JOURNAL,
        1,
        LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), *labels),
        FragmentSpec(1024, Codec.NONE, (), 10**9, 0, 0, ""),
    )

    def list_journals(request: broker_pb2.ListRequest) -> list[broker_pb2.ListResponse]:
        (label,) = request.selector.include.labels
        response = broker_pb2.ListResponse(header=broker.header().to_pb())
        if label.value == JOURNAL:
            response.journals.add(
                spec=spec.to_pb(),
                mod_revision=1,
                create_revision=1,
                route=broker.route_of(JOURNAL).to_pb(),
            )
        return [response]

    broker.answers["List"] = list_journals


@pytest.fixture
async def client(broker: StubBroker) -> AsyncIterator[Client]:
    async with Client(broker.endpoint, zone="local", clock=InstantClock()) as client:
        yield client


@pytest.fixture
def writer(broker: StubBroker) -> Writer:
    return Writer(broker)


async def words_of(reader: UncommittedReader[Any] | CommittedReader[Any]) -> list[str]:
    return [envelope.message.word async for batch in reader.batches() for envelope in batch]


async def test_uncommitted_reading_gives_everything_up_to_the_head(
    client: Client, writer: Writer
) -> None:
    writer.write("a", CONTINUE_TXN)
    writer.write("b", OUTSIDE_TXN, 1)
    writer.write("", ACK_TXN)
    reader = UncommittedReader(client, ReadParams(JOURNAL), Word)
    assert await words_of(reader) == ["a", "b", ""]
    # Case: between two offsets, and with the metadata segment of the read.
    params = ReadParams(JOURNAL + ";meta", end_offset=writer.journal.end)
    batches = [batch async for batch in UncommittedReader(client, params, Word).batches()]
    envelopes = [envelope for batch in batches for envelope in batch]
    assert [e.journal for e in envelopes] == [JOURNAL + ";meta"] * 3
    assert envelopes[0].begin == 0
    assert envelopes[-1].end == writer.journal.end


async def test_reading_from_the_head_gives_what_is_written_later(
    client: Client, broker: StubBroker, writer: Writer
) -> None:
    writer.write("before")
    begin = writer.journal.end
    reader = UncommittedReader(client, ReadParams(JOURNAL, WRITE_HEAD, block=True), Word)
    async with TaskScope("test") as scope, aclosing(reader.batches()) as batches:
        first = scope.spawn(_next(batches), name="read")
        await eventually(lambda: broker.reads)
        writer.write("after")
        (envelope,) = await first
    assert (envelope.message.word, envelope.begin) == ("after", begin)


async def _next(batches: AsyncIterator[list[Envelope[Word]]]) -> list[Envelope[Word]]:
    return await anext(batches)


async def test_committed_reading_gives_each_message_once_when_it_commits(
    client: Client, writer: Writer
) -> None:
    writer.write("a1", CONTINUE_TXN)
    writer.write("b1", CONTINUE_TXN, 1)
    writer.write("a2", CONTINUE_TXN)
    writer.write("out", OUTSIDE_TXN, 1)  # Rolls back b1.
    writer.journal.append(bytes(writer.journal.content))  # As a retry would.
    writer.write("", ACK_TXN)
    writer.write("a3", CONTINUE_TXN)
    reader = CommittedReader(client, ReadParams(JOURNAL), Word)
    assert await words_of(reader) == ["out", "a1", "a2"]
    reader = CommittedReader(client, ReadParams(JOURNAL), Word, acknowledgements=True)
    assert await words_of(reader) == ["out", "a1", "a2", ""]


@pytest.mark.parametrize("ring_size", [1, 3, 100])
@pytest.mark.parametrize("batch_max", [1, 7, 1000])
async def test_long_transactions_are_read_again(
    client: Client, broker: StubBroker, writer: Writer, ring_size: int, batch_max: int
) -> None:
    words = [f"word-{number}" for number in range(50)]
    writer.journal.append(b"poison\n")
    for number, word in enumerate(words):
        writer.write(word, CONTINUE_TXN)
        if number % 10 == 5:
            writer.write("other", CONTINUE_TXN, 1)
            writer.journal.append(b"poison\n")
    writer.write("", ACK_TXN)
    writer.write("end")
    malformed: list[MalformedMessage] = []
    reader = CommittedReader(
        client,
        ReadParams(JOURNAL),
        Word,
        ring_size=ring_size,
        batch_max=batch_max,
        on_malformed=malformed.append,
    )
    assert await words_of(reader) == [*words, "end"]
    assert len(malformed) == 6
    assert len(broker.reads) == (1 if ring_size == 100 else 2)


async def test_a_reader_goes_on_where_another_stopped(client: Client, writer: Writer) -> None:
    for number in range(10):
        writer.write(f"{number}", CONTINUE_TXN)
    writer.write("", ACK_TXN)
    writer.write("open", CONTINUE_TXN)
    first = CommittedReader(client, ReadParams(JOURNAL), Word, batch_max=4)
    async with aclosing(first.batches()) as batches:
        taken = [e.message.word for e in await anext(batches)]
        # Case: the batch that was given last has not taken effect, unless that is said.
        assert first.checkpoint().producers[b"\x01aaaaa"].begin == 0
        first.consumed()
        checkpoint = first.checkpoint()
    second = CommittedReader(client, ReadParams(JOURNAL), Word, source=checkpoint, ring_size=2)
    taken += await words_of(second)
    assert taken == [f"{number}" for number in range(10)]
    second.consumed()
    assert second.checkpoint().read_through == writer.journal.end


async def test_malformed_messages_end_the_reading_unless_they_are_taken(
    client: Client, writer: Writer
) -> None:
    writer.write("a")
    begin = writer.journal.end
    writer.journal.append(b'{"word":7}\n')
    writer.write("b")
    writer.journal.append(b"more\n")
    for reader_type in (UncommittedReader, CommittedReader):
        words = []
        with pytest.raises(MalformedMessage) as caught:
            async for batch in reader_type(client, ReadParams(JOURNAL), Word).batches():
                words += [e.message.word for e in batch]
        assert words == ["a"]
        assert (caught.value.journal, caught.value.begin) == (JOURNAL, begin)
        malformed: list[MalformedMessage] = []
        reader = reader_type(client, ReadParams(JOURNAL), Word, on_malformed=malformed.append)
        assert await words_of(reader) == ["a", "b"]
        assert [error.raw for error in malformed] == [b'{"word":7}\n', b"more\n"]
    # Case: what was passed over at the end is not met again.
    assert isinstance(reader, CommittedReader)
    assert reader.checkpoint().read_through == writer.journal.end


async def test_a_torn_message_at_the_head_is_truncated(client: Client, writer: Writer) -> None:
    writer.write("a")
    writer.journal.append(b'{"word":')
    words = []
    with pytest.raises(TruncatedFrame):
        async for batch in UncommittedReader(client, ReadParams(JOURNAL), Word).batches():
            words += [e.message.word for e in batch]
    assert words == ["a"]


async def test_reading_goes_on_behind_bytes_that_are_gone(
    client: Client, broker: StubBroker, writer: Writer
) -> None:
    writer.write("a")
    writer.journal.begin = 1000
    reader = UncommittedReader(client, ReadParams(JOURNAL), Word)
    batches = [batch async for batch in reader.batches()]
    assert [(e.begin, e.message.word) for e in batches[0]] == [(1000, "a")]


class Source:
    """Bytes, jumps and failures, as given."""

    def __init__(self, offset: int, *steps: Any) -> None:
        self.offset, self.steps, self.closed = offset, list(steps), False

    async def read(self, max_bytes: int = 0) -> Any:
        step = self.steps.pop(0) if self.steps else b""
        if isinstance(step, OffsetJump):
            self.offset = step.offset
        if isinstance(step, Exception):
            raise step
        self.offset += len(step)
        return step

    def close(self) -> None:
        self.closed = True


async def test_a_jump_within_a_message_gives_up_its_begin() -> None:
    def source() -> Any:
        return Source(
            100,
            b'{"word":"a"}\n{"wo',
            OffsetJump(JOURNAL, 117, 500),
            b'{"word":"b"}\n',
            NotYet("the head"),
        )

    framing = framing_of(CONTENT_JSON_LINES, Word)
    malformed: list[MalformedMessage] = []
    read = source()
    batches = [
        batch async for batch in read_batches(read, JOURNAL, framing, on_malformed=malformed.append)
    ]
    assert [(e.begin, e.message.word) for batch in batches for e in batch] == [
        (100, "a"),
        (500, "b"),
    ]
    assert [(e.begin, e.end) for e in malformed] == [(113, 117)]
    assert read.closed
    read = source()
    with pytest.raises(MalformedMessage, match="500"):
        [batch async for batch in read_batches(read, JOURNAL, framing)]
    assert read.closed


async def test_a_transaction_that_is_gone_up_to_where_reading_goes_on_is_corrupt(
    client: Client, broker: StubBroker, writer: Writer
) -> None:
    """Another reader stopped within it. What that had read must be read again, and is pruned."""
    for number in range(3):
        writer.write(f"{number}", CONTINUE_TXN)
    first = CommittedReader(client, ReadParams(JOURNAL), Word)
    assert [batch async for batch in first.batches()] == []
    middle = writer.journal.end
    writer.write("3", CONTINUE_TXN)
    writer.write("", ACK_TXN)
    del writer.journal.content[:middle]
    writer.journal.begin = middle
    params = ReadParams(JOURNAL, middle, end_offset=writer.journal.end)
    second = CommittedReader(client, params, Word, source=first.checkpoint())
    with raises(Corrupt, begin=0, end=177, says="a/journal") as error:
        [batch async for batch in second.batches()]
    assert error.value.facts["begin"] == 0


@pytest.mark.parametrize("is_shorter", [False, True])
async def test_a_transaction_is_not_read_again_from_another_life_of_the_journal(
    client: Client, broker: StubBroker, writer: Writer, is_shorter: bool
) -> None:
    """Its bytes would be others. A shorter journal does not have the reader wait."""
    broker.created = 7
    writer.write("first")
    for number in range(6):
        writer.write(f"{number}", CONTINUE_TXN)
    writer.write("", ACK_TXN)
    reader = CommittedReader(client, ReadParams(JOURNAL), Word, ring_size=2)
    async with aclosing(reader.batches()) as batches:
        assert [envelope.message.word for envelope in await anext(batches)] == ["first"]
        broker.created = 8
        if is_shorter:
            del writer.journal.content[1:]
        with raises(Corrupt, created=8, created_before=7, journal=JOURNAL):
            await anext(batches)


async def test_a_transaction_that_a_broker_does_not_know_yet_is_read_again_later(
    client: Client, broker: StubBroker, writer: Writer
) -> None:
    """As a broker that has just started, or after a fail-over."""
    writer.write("first")
    words = [f"{number}" for number in range(6)]
    for word in words:
        writer.write(word, CONTINUE_TXN)
    writer.write("", ACK_TXN)
    reader = CommittedReader(client, ReadParams(JOURNAL), Word, ring_size=2)
    async with aclosing(reader.batches()) as batches:
        await anext(batches)
        not_yet = broker.metadata(JOURNAL, 0, Status.OFFSET_NOT_YET_AVAILABLE)
        broker.on_read(*[Send((not_yet,))] * 3)
        read = []
        async for batch in batches:
            assert not client.waits.reason(JOURNAL)
            read += [envelope.message.word for envelope in batch]
    assert read == words


async def test_a_transaction_that_brokers_have_no_more_is_not_waited_for_without_end(
    client: Client, broker: StubBroker, writer: Writer
) -> None:
    """A broker without a replica has lost its disk, for example. Its head is before the transaction now."""
    writer.write("first")
    for number in range(6):
        writer.write(f"{number}", CONTINUE_TXN)
    writer.write("", ACK_TXN)
    journal = broker.journal(JOURNAL)
    reader = CommittedReader(client, ReadParams(JOURNAL), Word, ring_size=2)
    async with aclosing(reader.batches()) as batches:
        await anext(batches)
        resume_at = journal.content.index(b"\n") + 1
        lost = journal.content[resume_at:]
        del journal.content[resume_at:]
        began = client.clock.monotonic()
        with raises(Unavailable, journal=JOURNAL, offset=resume_at, says="for 60 s"):
            await anext(batches)
        assert client.clock.monotonic() - began >= 60
    # Case: the brokers have the bytes again. Another reader goes on.
    journal.content += lost
    reader = CommittedReader(client, ReadParams(JOURNAL), Word, source=reader.checkpoint())
    words = [e.message.word async for batch in reader.batches() for e in batch]
    assert words == [f"{number}" for number in range(6)]


async def test_a_transaction_whose_begin_is_gone_is_corrupt(
    client: Client, broker: StubBroker, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        writer.write(f"{number}", CONTINUE_TXN)
    writer.write("", ACK_TXN)
    original = broker.journal(JOURNAL)
    reader = CommittedReader(client, ReadParams(JOURNAL), Word, ring_size=2)

    async def read() -> None:
        async for _ in reader.batches():
            pass

    served = broker._served

    def shortened(request: Any) -> Any:
        if request.end_offset:
            gone = original.content.index(b"\n") + 1
            del original.content[:gone]
            original.begin = gone
        return served(request)

    monkeypatch.setattr(broker, "_served", shortened)
    with raises(Corrupt, begin=0, end=295, says="a/journal"):
        await read()


async def test_the_journal_must_be_there_and_hold_the_type(client: Client) -> None:
    with pytest.raises(NotFound):
        await words_of(UncommittedReader(client, ReadParams("other/journal"), Word))
    with raises(Invalid, path="a/journal", says="int"):
        await words_of(UncommittedReader(client, ReadParams(JOURNAL), int))


class Order(Message):
    at: int = 0


READERS = [UncommittedReader, CommittedReader]
PLACED = datetime(1999, 5, 17, tzinfo=UTC)


@pytest.fixture
def order(broker: StubBroker, writer: Writer) -> Order:
    """Publish an order of 1999."""
    found = Order(at=int(PLACED.timestamp()))
    writer.framing.codec.stamp(found, writer.mints[0], OUTSIDE_TXN)
    writer.journal.append(framing_of(CONTENT_JSON_LINES, Order).encode(found))
    return found


async def only(reader: UncommittedReader[Any] | CommittedReader[Any]) -> Envelope[Any]:
    (found,) = [envelope async for batch in reader.batches() for envelope in batch]
    return found


@pytest.mark.parametrize("kind", READERS)
async def test_the_label_of_a_journal_says_the_time_of_its_messages(
    client: Client, broker: StubBroker, order: Order, kind: Any
) -> None:
    published = (await only(kind(client, ReadParams(JOURNAL), Order))).time
    assert published.year > PLACED.year
    list_with(broker, (MESSAGE_TIME, MessageTime("at", unit="s").text))
    envelope = await only(kind(client, ReadParams(JOURNAL), Order))
    assert (envelope.time, envelope.message) == (PLACED, order)
    envelope = await only(kind(client, ReadParams(JOURNAL), dict))
    assert (envelope.time, envelope.message["at"]) == (PLACED, order.at)


@pytest.mark.parametrize("kind", READERS)
async def test_a_reader_may_say_the_time_of_messages(
    client: Client, broker: StubBroker, order: Order, kind: Any
) -> None:
    list_with(broker, (MESSAGE_TIME, "word"))
    for time in (MessageTime("at", unit="s"), lambda m: datetime.fromtimestamp(m.at, UTC)):
        envelope = await only(kind(client, ReadParams(JOURNAL), Order, time=time))
        assert envelope.time == PLACED


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("label", "message_type", "says"),
    [
        (MessageTime(lambda m: m.at, unit="s").text, Order, "time="),
        ("ordered_at", Order, "ordered_at"),
        ("at", Order, "unit"),
        ("placed/s", dict, "placed"),
    ],
)
async def test_the_clock_of_a_publisher_is_not_taken_for_another_time(
    client: Client,
    broker: StubBroker,
    order: Order,
    kind: Any,
    label: str,
    message_type: Any,
    says: str,
) -> None:
    """The message is read, and its time is an error."""
    list_with(broker, (MESSAGE_TIME, label))
    envelope = await only(kind(client, ReadParams(JOURNAL), message_type))
    with raises(UnusableTime, "field", says=says):
        _ = envelope.time


async def test_a_label_of_an_unknown_unit_is_refused(client: Client, broker: StubBroker) -> None:
    list_with(broker, (MESSAGE_TIME, "at/days"))
    with raises(Invalid, says="days"):
        await only(CommittedReader(client, ReadParams(JOURNAL), Order))


async def test_the_times_of_a_long_transaction_are_read_again(
    client: Client, broker: StubBroker, writer: Writer
) -> None:
    list_with(broker, (MESSAGE_TIME, "at/s"))
    framing = framing_of(CONTENT_JSON_LINES, Order)
    for at in range(9):
        message = framing.codec.stamp(Order(at=at), writer.mints[0], CONTINUE_TXN)
        writer.journal.append(framing.encode(message))
    writer.journal.append(framing.encode(framing.codec.stamp(Order(), writer.mints[0], ACK_TXN)))
    reader = CommittedReader(client, ReadParams(JOURNAL), Order, ring_size=2)
    times = [envelope.time async for batch in reader.batches() for envelope in batch]
    assert times == [datetime.fromtimestamp(at, UTC) for at in range(9)]
