"""Publishing: which bytes reach which journal, in which order, and what acknowledges them."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.errors import Closed, Invalid, NotFound
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import Partition, Partitions, fixed_mapping, modulo_mapping
from gazette.message.message import CSVRecord, Message
from gazette.message.publisher import BUFFER_BYTES_MAX, JOURNAL_BUFFER_BYTES, Appends, Publisher
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    TICK,
    Clock,
    clock_at,
    clock_unix_ns,
)
from gazette.runtime.tasks import OpFuture, await_future, resolved
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.stub_broker import LoseReply, StubBroker

PRODUCER = b"\x01abcde"
START = clock_at(1_700_000_000 * 10**9)


class Word(Message):
    word: str


class Checked(Message):
    word: str

    def validate(self) -> None:
        if not self.word:
            raise Invalid("a word is needed")


def word_of(message: Any) -> str:
    return str(message.word)


class Setting(Message):
    """Publishes when its UUID is set."""

    word: str
    during: ClassVar[Callable[[], Any]]

    def __setattr__(self, name: str, value: Any) -> None:
        type(self).during()
        super().__setattr__(name, value)


@dataclass
class Property:
    """Publishes when its UUID is set, by a property."""

    word: str
    uuid: str = ""
    during: ClassVar[Callable[[], Any]]


def _set_uuid(message: Property, value: Any) -> None:
    if isinstance(value, str):  # Otherwise it is the property itself, as the default of the field.
        Property.during()
        message.__dict__["uuid"] = value


Property.uuid = property(lambda message: message.__dict__.get("uuid", ""), _set_uuid)  # type: ignore[assignment]


class Acknowledging(Message):
    """Publishes when its acknowledgement is made."""

    word: str
    during: ClassVar[Callable[[], Any]]

    def new_acknowledgement(self, journal: str) -> Acknowledging:
        type(self).during()
        return Acknowledging(word="")


class Reading(Message):
    """Publishes when it is read back, which its check does."""

    word: str
    during: ClassVar[Callable[[], Any]]

    def __post_init__(self) -> None:
        type(self).during()


class Refusing:
    """An append service in memory. ``refuse`` fails the next write."""

    def __init__(self) -> None:
        self.journals: defaultdict[str, bytearray] = defaultdict(bytearray)
        self.released: list[Any] = []
        self.refuse = False
        self.full = False
        self.on_write: Callable[[], Any] = lambda: None
        self.on_wait: Callable[[], Any] = lambda: None

    def journal(self, params: AppendParams) -> _Journal:
        return _Journal(self, params.journal)


class _Journal:
    """``await_room`` counts its calls, and needs the lock of no publisher."""

    def __init__(self, service: Refusing, journal: str) -> None:
        self.service, self.name = service, journal
        self.must_wait = False

    def enqueue(self, content: bytearray) -> OpFuture[None]:
        if self.service.refuse:
            self.service.refuse = False
            raise Closed("refused")
        self.service.on_write()
        self.service.journals[self.name] += content
        self.service.released.append(self.name)
        self.must_wait = self.service.full
        return resolved(None)

    def in_place(
        self, write: Callable[[Any, int, bytearray], None], item: Any, flags: int, length_max: int
    ) -> OpFuture[None] | None:
        content = bytearray()
        write(item, flags, content)
        return None if len(content) > length_max else self.enqueue(content)

    def await_room(self) -> None:
        self.must_wait = False
        self.service.on_wait()


@pytest.fixture
def appends() -> Refusing:
    return Refusing()


@pytest.fixture
def publisher(appends: Refusing) -> Publisher:
    return Publisher(cast("Appends", appends), producer=PRODUCER, clock=Clock(START))


def read(
    content: bytes | bytearray, kind: type[Any] = Word, content_type: str = CONTENT_JSON_LINES
) -> list[Envelope[Any]]:
    decoder = EnvelopeDecoder("a/journal", framing_of(content_type, kind), 0)
    decoder.feed(bytes(content))
    envelopes = []
    while batch := decoder.decode():
        envelopes += batch
    decoder.finish()
    return envelopes


def parts(envelopes: list[Envelope[Any]]) -> list[tuple[int, int]]:
    return [((e.clock - START) // 160, e.flags) for e in envelopes]


ONE = fixed_mapping("one/journal", CONTENT_JSON_LINES)
TWO = fixed_mapping("two/journal", CONTENT_JSON_LINES)


def test_committed_messages_are_appended_at_once(publisher: Publisher, appends: Refusing) -> None:
    message = Word("a")
    future = publisher.publish_committed(ONE, message)
    assert future.done()
    (envelope,) = read(appends.journals["one/journal"])
    assert envelope.message == message
    assert (envelope.producer, envelope.clock, envelope.flags) == (
        PRODUCER,
        START + 160,
        OUTSIDE_TXN,
    )


def test_uncommitted_messages_are_gathered_and_ended_by_their_acknowledgement(
    publisher: Publisher, appends: Refusing
) -> None:
    publisher.publish_uncommitted(TWO, Word("a"))
    publisher.publish_uncommitted(ONE, Word("b"))
    publisher.publish_uncommitted(TWO, Word("c"))
    assert appends.released == []
    intents = publisher.build_ack_intents()
    assert appends.released == ["two/journal", "one/journal"]
    assert list(intents) == ["two/journal", "one/journal"]
    two = read(appends.journals["two/journal"] + intents["two/journal"])
    assert parts(two) == [(1, CONTINUE_TXN), (3, CONTINUE_TXN), (4, ACK_TXN)]
    assert [e.message.word for e in two] == ["a", "c", ""]
    one = read(appends.journals["one/journal"] + intents["one/journal"])
    assert parts(one) == [(2, CONTINUE_TXN), (5, ACK_TXN)]
    # Case: the next transaction begins with nothing.
    assert publisher.build_ack_intents() == {}
    publisher.publish_uncommitted(ONE, Word("d"))
    assert list(publisher.build_ack_intents()) == ["one/journal"]


def test_committed_messages_go_behind_uncommitted_ones(
    publisher: Publisher, appends: Refusing
) -> None:
    """Else the reader would take the ones with the smaller clocks for duplicates."""
    publisher.publish_uncommitted(ONE, Word("a"))
    publisher.publish_committed(ONE, Word("b"))
    publisher.publish_uncommitted(ONE, Word("c"))
    publisher.build_ack_intents()
    envelopes = read(appends.journals["one/journal"])
    assert parts(envelopes) == [(1, CONTINUE_TXN), (2, OUTSIDE_TXN), (3, CONTINUE_TXN)]


def test_a_journal_with_metadata_is_the_same_journal(
    publisher: Publisher, appends: Refusing
) -> None:
    """Two lines for it, and two acknowledgements, could arrive with their clocks out of order."""
    with_meta = fixed_mapping("one/journal;meta", CONTENT_JSON_LINES)
    publisher.publish_uncommitted(ONE, Word("a"))
    publisher.publish_committed(with_meta, Word("b"))
    publisher.publish_uncommitted(with_meta, Word("c"))
    assert list(publisher.build_ack_intents()) == ["one/journal"]
    assert list(appends.journals) == ["one/journal"]
    assert [e.message.word for e in read(appends.journals["one/journal"])] == ["a", "b", "c"]


def test_much_content_does_not_wait_for_the_end(publisher: Publisher, appends: Refusing) -> None:
    while not appends.released:
        publisher.publish_uncommitted(ONE, Word("x" * 1000))
    held = len(appends.journals["one/journal"])
    assert JOURNAL_BUFFER_BYTES <= held < JOURNAL_BUFFER_BYTES + 2000
    appends.released.clear()
    # Case: many journals, each with little.
    for number in range(100):
        mapping = fixed_mapping(f"journal/{number:03d}", CONTENT_JSON_LINES)
        publisher.publish_uncommitted(mapping, Word("y" * 200_000))
        if appends.released:
            break
    assert number == BUFFER_BYTES_MAX // 200_000
    intents = publisher.build_ack_intents()
    assert len(intents) == number + 2
    assert all(parts(read(content)) for content in appends.journals.values())


def test_a_batch_is_one_append_for_each_journal(publisher: Publisher, appends: Refusing) -> None:
    current = Partitions([Partition("one/journal", CONTENT_JSON_LINES)] * 1 + [TWO(None)])
    mapping = modulo_mapping(lambda: current, word_of)
    messages = [Word(f"w{number}") for number in range(50)]
    futures = publisher.publish_committed_batch(mapping, messages)
    assert sorted(futures) == sorted(appends.released) == ["one/journal", "two/journal"]
    found = [read(content) for content in appends.journals.values()]
    assert sorted(e.message.word for part in found for e in part) == sorted(
        m.word for m in messages
    )
    for part in found:
        clocks = [e.clock for e in part]
        assert clocks == sorted(clocks)
        words = [int(e.message.word[1:]) for e in part]
        assert words == sorted(words)


async def test_tasks_publish_without_waiting_for_threads(
    publisher: Publisher, appends: Refusing
) -> None:
    futures = await publisher.publish_from_loop(ONE, [Word("a"), Word("b")])
    assert list(futures) == ["one/journal"]
    assert len(read(appends.journals["one/journal"])) == 2


@pytest.mark.parametrize(
    ("message", "mapping", "error"),
    [
        (Checked(""), ONE, Invalid),
        (Word("a"), fixed_mapping("one/journal", "application/other"), Invalid),
        (Word("a"), fixed_mapping("one/journal", CONTENT_PROTO_FIXED), Invalid),
        (Word("a"), modulo_mapping(lambda: Partitions(()), word_of), NotFound),
        (Word(cast("str", object())), ONE, Invalid),
        (Word("x" * 3000), ONE, Invalid),
    ],
)
def test_what_cannot_be_published_leaves_nothing(
    appends: Refusing, message: Any, mapping: Any, error: type[Exception]
) -> None:
    publisher = Publisher(
        cast("Appends", appends), producer=PRODUCER, clock=Clock(START), frame_bytes_max=2000
    )
    for publish in (publisher.publish_committed, publisher.publish_uncommitted):
        with pytest.raises(error):
            publish(mapping, message)
    with pytest.raises(error):
        publisher.publish_committed_batch(mapping, [message])
    assert not any(appends.journals.values())
    # Case: and does not keep what is right from being published.
    publisher.publish_uncommitted(ONE, Word("good"))
    with pytest.raises(error):
        publisher.publish_uncommitted(mapping, message)
    publisher.publish_uncommitted(ONE, Word("better"))
    assert list(publisher.build_ack_intents()) == ["one/journal"]
    assert [e.message.word for e in read(appends.journals["one/journal"])] == ["good", "better"]


def test_types_without_a_uuid_are_published_outside_of_transactions(
    publisher: Publisher, appends: Refusing
) -> None:
    raw = fixed_mapping("raw/journal", CONTENT_PROTO_FIXED)
    publisher.publish_committed(raw, b"raw")
    with raises(Invalid, says="uuid"):
        publisher.publish_uncommitted(raw, b"raw")
    assert publisher.build_ack_intents() == {}
    assert len(read(appends.journals["raw/journal"], bytes, CONTENT_PROTO_FIXED)) == 1


def test_rows_are_acknowledged_by_rows(publisher: Publisher, appends: Refusing) -> None:
    rows = fixed_mapping("csv/journal", CONTENT_CSV)
    publisher.publish_uncommitted(rows, CSVRecord(["", "a", "b"]))
    intents = publisher.build_ack_intents()
    content = appends.journals["csv/journal"] + intents["csv/journal"]
    row, ack = read(content, CSVRecord, CONTENT_CSV)
    assert (row.message[1:], ack.message[1:], ack.flags) == (["a", "b"], ["", ""], ACK_TXN)


def test_an_append_that_fails_keeps_what_was_in_line(
    publisher: Publisher, appends: Refusing
) -> None:
    publisher.publish_uncommitted(ONE, Word("a"))
    appends.refuse = True
    with pytest.raises(Closed):
        publisher.publish_committed(ONE, Word("lost"))
    publisher.publish_uncommitted(ONE, Word("b"))
    appends.refuse = True
    with pytest.raises(Closed):
        publisher.build_ack_intents()
    intents = publisher.build_ack_intents()
    assert list(intents) == ["one/journal"]
    envelopes = read(appends.journals["one/journal"])
    assert [e.message.word for e in envelopes] == ["a", "b"]
    assert [e.clock for e in envelopes] == sorted(e.clock for e in envelopes)


def test_a_standalone_publisher_follows_the_wall(appends: Refusing) -> None:
    clock = ManualClock()
    publisher = Publisher.standalone(cast("Appends", appends), clock, random.Random(5))
    publisher.publish_committed(ONE, Word("a"))
    clock.advance(60)
    publisher.publish_committed_batch(ONE, [Word("b")])
    clock.jump(-3600)
    publisher.publish_committed(ONE, Word("c"))
    first, second, third = read(appends.journals["one/journal"])
    assert second.clock - first.clock == 60 * 10**7 << 4
    assert third.clock == second.clock + 160
    assert abs(clock_unix_ns(first.clock) / 1e9 - 1_700_000_000) < 0.001
    assert first.producer[0] & 1


def test_a_message_may_be_published_twice_and_after_it_was_read(
    publisher: Publisher, appends: Refusing
) -> None:
    message = Word("a")
    publisher.publish_uncommitted(ONE, message)
    publisher.publish_uncommitted(TWO, message)
    message.word = "changed after"
    publisher.build_ack_intents()
    (one,), (two,) = map(read, appends.journals.values())
    assert (one.message.word, two.message.word) == ("a", "a")
    assert one.clock < two.clock


def test_threads_that_publish_at_once_keep_clocks_in_order(
    publisher: Publisher, appends: Refusing
) -> None:
    """One runs a transaction, the others publish beside it to the same journals."""
    stop = threading.Event()

    def beside() -> None:
        while not stop.is_set():
            publisher.publish_committed(ONE, Word("beside"))
            publisher.publish_committed_batch(TWO, [Word("beside"), Word("beside")])

    threads = [threading.Thread(target=beside) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(300):
            publisher.publish_uncommitted(ONE if number % 3 else TWO, Word(f"{number}"))
            if number % 50 == 49:
                assert set(publisher.build_ack_intents()) == {"one/journal", "two/journal"}
                # Case: all of the transaction is in the journals when its intents are given out.
                content = b"".join(map(bytes, appends.journals.values()))
                for published in range(number - 49, number + 1):
                    assert f'"{published}"'.encode() in content
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for written in appends.journals.values():
        clocks = [envelope.clock for envelope in read(written)]
        assert clocks == sorted(set(clocks))


def test_waiting_for_room_does_not_hold_up_other_threads(
    publisher: Publisher, appends: Refusing
) -> None:
    """A publisher whose journal is full waits without the lock, behind what it has enqueued."""
    appends.full = True
    beside: list[Any] = []

    def publish_beside() -> None:
        if not beside:
            thread = threading.Thread(
                target=lambda: beside.append(publisher.publish_committed(TWO, Word("beside")))
            )
            beside.append(thread)
            thread.start()
            thread.join(10)

    appends.on_wait = publish_beside
    publisher.publish_committed(ONE, Word("a"))
    assert len(beside) == 2
    assert [e.message.word for e in read(appends.journals["two/journal"])] == ["beside"]
    # Case: uncommitted messages wait, too, once they are enqueued.
    waits: list[int] = []
    appends.on_wait = lambda: waits.append(len(appends.journals["one/journal"]))
    publisher.publish_uncommitted(ONE, Word("b"))
    assert waits == []
    publisher.build_ack_intents()
    assert waits == [len(appends.journals["one/journal"])]


def test_intents_wait_for_another_thread_that_took_what_was_in_line(
    publisher: Publisher, appends: Refusing
) -> None:
    """Else the commit might not wait for these messages, since their append is not known yet."""
    publisher.publish_uncommitted(ONE, Word("a"))
    taken, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        taken.set()
        go_on.wait(10)

    appends.on_write = hold
    beside = threading.Thread(target=publisher.publish_committed, args=(ONE, Word("b")))
    beside.start()
    assert taken.wait(10)
    seen = []

    def build() -> None:
        publisher.build_ack_intents()
        seen.append(bytes(appends.journals["one/journal"]))

    building = threading.Thread(target=build)
    building.start()
    building.join(0.02)  # It cannot end, however long we wait.
    go_on.set()
    beside.join()
    building.join()
    assert [e.message.word for e in read(seen[0])] == ["a", "b"]


async def test_the_real_append_service_carries_transactions() -> None:
    """With a broker that loses replies, so that batches are written twice, each message counts once."""
    async with StubBroker() as broker, Client(broker.endpoint, zone="local") as client:
        service = AppendService(client)
        publisher = Publisher(service, producer=PRODUCER, clock=Clock(START))
        expected = []
        for transaction in range(6):
            broker.on_append(LoseReply())
            for number in range(20):
                word = f"{transaction}/{number}"
                expected.append(word)
                publisher.publish_uncommitted(ONE, Word(word))
            intents = publisher.build_ack_intents()
            for future in service.pending_except(""):
                await await_future(future)
            if transaction % 2:
                broker.on_append(LoseReply())
            for journal, intent in intents.items():
                await await_future(service.append(AppendParams(journal), intent))
        await service.close()
        content = broker.content_of("one/journal")
    envelopes = read(content)
    assert len(envelopes) > len(expected) + 6
    sequencer: Sequencer[Any] = Sequencer({}, 4096)
    committed, index = [], 0
    while index < len(envelopes):
        index = sequencer.queue_batch(envelopes, index)
        while batch := sequencer.dequeue(100):
            committed += [e.message.word for e in batch if not e.is_ack]
    assert committed == expected


@pytest.mark.parametrize("held", [False, True])
def test_a_message_that_cannot_be_encoded_leaves_the_transaction_as_it_was(
    publisher: Publisher, held: bool
) -> None:
    """Its journal gets no acknowledgement: nothing was published there."""
    words = fixed_mapping("a/words", CONTENT_JSON_LINES)
    if held:
        publisher.hold()
    with raises(Invalid):
        publisher.publish_uncommitted(words, Word(word=cast("Any", object())))
    if held:
        publisher.roll_back()
    assert publisher.build_ack_intents() == {}


@pytest.mark.parametrize("way", ["one", "batch", "uncommitted"])
def test_a_clock_is_at_most_half_a_millisecond_behind_the_wall_clock(
    appends: Refusing, way: str
) -> None:
    wall = ManualClock()
    publisher = Publisher(
        cast("Appends", appends), producer=PRODUCER, clock=Clock(), wall_clock=wall
    )
    mapping = fixed_mapping("a/journal", CONTENT_JSON_LINES)
    clocks = [0]
    for step in (0.0, 0.0001, 0.0003, 0.0002, 0.1, 0.00049, 3600.0, -1800.0, 0.00001, 1800.0):
        wall.jump(step)
        if way == "one":
            publisher.publish_committed(mapping, Word(word="a"))
        elif way == "batch":
            publisher.publish_committed_batch(mapping, [Word(word="a")])
        else:
            publisher.publish_uncommitted(mapping, Word(word="a"))
        assert publisher.clock.value > clocks[-1]
        clocks.append(publisher.clock.value)
        assert clock_unix_ns(publisher.clock.value) / 1e9 > wall.now() - 0.0005 - 1e-6
    # A wall clock that goes back moves nothing.
    assert clocks[8] - clocks[7] == clocks[9] - clocks[8] == TICK


def test_a_committed_message_that_fails_in_the_fast_path_publishes_nothing(
    appends: Refusing, publisher: Publisher
) -> None:
    mapping = fixed_mapping("a/journal", CONTENT_JSON_LINES)
    small = Publisher(
        cast("Appends", appends), producer=PRODUCER, clock=Clock(START), frame_bytes_max=100
    )
    for word in ("a", "b" * 100, "c"):
        if len(word) > 1:
            with raises(Invalid, says="too long"):
                small.publish_committed(mapping, Word(word=word))
        else:
            small.publish_committed(mapping, Word(word=word))
    appends.refuse = True
    with raises(Closed, says="refused"):
        small.publish_committed(mapping, Word(word="d"))
    small.publish_committed(mapping, Word(word="e"))
    found = [one.message.word for one in read(appends.journals["a/journal"])]
    assert found == ["a", "c", "e"]


@pytest.mark.parametrize("way", ["one", "batch", "uncommitted"])
@pytest.mark.parametrize("kind", [Setting, Property, Acknowledging, Reading])
def test_code_that_runs_while_a_message_is_encoded_cannot_publish(
    publisher: Publisher, appends: Refusing, kind: Any, way: str
) -> None:
    """It would wait for ever for the lock that its caller holds."""
    mapping = fixed_mapping("a/journal", CONTENT_JSON_LINES)
    ways: dict[str, Callable[[Any], Any]] = {
        "one": lambda message: publisher.publish_committed(mapping, message),
        "batch": lambda message: publisher.publish_committed_batch(mapping, [message]),
        "uncommitted": lambda message: publisher.publish_uncommitted(mapping, message),
    }
    kind.during = lambda: None
    message = kind("a")
    kind.during = lambda: ways[way](Word(word="b"))
    if kind is not Acknowledging or way == "uncommitted":
        with raises(
            Invalid, says="while another message is being encoded", advises="before or after"
        ):
            ways[way](message)
    # Another thread may publish meanwhile: it waits.
    with ThreadPoolExecutor() as pool:
        others = []
        kind.during = lambda: others.append(pool.submit(ways[way], Word(word="c")))
        ways[way](message)
    assert not any(other.exception() for other in others)
    for intent in publisher.build_ack_intents().values():
        appends.journals["a/journal"] += intent
    found = [one.message.word for one in read(appends.journals["a/journal"]) if not one.is_ack]
    assert found == ["a", *["c" for _ in others]]
