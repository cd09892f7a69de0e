"""The pass of shards over columns, against its specification: decoder and sequencer of messages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import Message
from gazette.consumer.contract.array_pass import MessageRows
from gazette.history.shard_tables.columns import MessageColumns
from gazette.history.shard_tables.decoder import TableDecoder, is_scanned
from gazette.history.shard_tables.rows import CommittedRows, TableForm
from gazette.history.shard_tables.sequencer import TableSequencer
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.framing.frames import MalformedMessage
from gazette.message.framing.framing import framing_of
from gazette.message.sequencer.sequencer import ReplayRange, Sequencer
from gazette.message.uuid import ACK_TXN, build_uuid, uuid_text
from gazette.protocol.checkpoint import SourceCheckpoint
from tests.fuzzing import examples, seeds
from tests.history.test_histories import JOURNAL, Item, histories

Sources = dict[str, SourceCheckpoint]


def crowd(rng: random.Random) -> list[Item]:
    """Draw messages of many producers: nearly all commit at once, and nearly all are in order."""
    clocks = [rng.randint(1, 40) for _ in range(rng.randint(8, 20))]
    flags = rng.choice([(0,), (0,), (0, 0, 0, 0, 1, 2, 0x2AA)])
    items = []
    for _ in range(rng.randint(20, 80)):
        producer = rng.randrange(len(clocks))
        step = rng.choice([1, 1, 1, 1, 1, 1, 2, rng.choice([1, 0, -1])])
        clocks[producer] = max(1, clocks[producer] + step)
        items.append(Item(producer, clocks[producer], rng.choice(flags)))
    return items


stories = st.one_of(histories, st.integers(0, 2**32).map(lambda seed: crowd(random.Random(seed))))


class Word(Message):
    word: str
    count: int = 1
    weight: float = 0.5
    note: str | None = None
    remark: str | msgspec.UnsetType = msgspec.UNSET


class Dated(Message):
    """A type that the scanner does not read."""

    word: str
    remark: str | msgspec.UnsetType = msgspec.UNSET
    counts: list[int] = msgspec.field(default_factory=list)
    pair: tuple[int, str] = (1, "a")
    extra: dict[str, int] = msgspec.field(default_factory=dict)


def form_of(message_type: type[Any]) -> TableForm:
    framing = framing_of(CONTENT_JSON_LINES, message_type)
    return TableForm(JOURNAL, framing, MessageColumns(framing), (("at", "offset"),))


ODD_LINES = (
    b"\n",
    b"{}\n",
    b"[]\n",
    b"null\n",
    b"garbage\n",
    b'{"word":"no uuid"}\n',
    b'{"word":"no uuid","count":null}\n',
    b'{"uuid":null,"word":"x"}\n',
    b'{"uuid":"not a uuid","word":"x"}\n',
    b'{"uuid":"12345678-1234-4234-9234-123456789012","word":"foreign"}\n',
)
BEYOND = b'"word":"a","count":9223372036854775808'
"""A message that is malformed for a table alone."""
ODD_FIELDS = (
    BEYOND,
    b'"word":5',
    b'"word":null',
    b'"word":"a","word":"b"',
    b'"word":"\\u0041\\n\xc3\xa9"',
    b'"word":"\\ud800"',
    b'"word":"\xff"',
    b'"word":"a","count":1.0',
    b'"word":"a","count":"1"',
    b'"word":"a","count":null',
    b'"word":"a","count":9223372036854775807',
    b'"word":"a","count":-0',
    b'"word":"a","weight":-0',
    b'"word":"a","weight":1e400',
    b'"word":"a","weight":NaN',
    b'"word":"a","weight":"NaN"',
    b'"word":"a","weight":"Infinity"',
    b'"word":"a","weight":1e-400',
    b'"word":"a","weight":0.1',
    b'"word":"a","weight":true',
    b'"word":"a","note":null',
    b'"word":"a","remark":null',
    b'"word":"a","remark":"set"',
    b'"word":"a","note":"null"',
    b'"word":"a","other":NaN',
    b'"word":"a","other":{"a":[1,{}]}',
    b'"count":7',
    b'"word" : "a" , "count" : 2 ',
    b'"word":"a",',
    b'"word":"a","count":01',
    b'"word":"a","weight":9007199254740993',
    b'"word":"a","weight":2.2250738585072011e-308',
    b'"w\\u006frd":"a"',
    b'"word":"a","extra":{"x":1},"counts":[1,2],"pair":[2,"b"]',
)


def line_of(
    item: Item, number: int, rng: random.Random, odd: float, among: Sequence[bytes] = ODD_FIELDS
) -> bytes:
    producer = bytes([1, 0, 0, 0, 0, item.producer])
    uuid = uuid_text(build_uuid(producer, item.clock, item.flags)).encode()
    if rng.random() < odd / 3 and item.flags != ACK_TXN:
        return rng.choice(ODD_LINES)
    fields = b'"word":"w%d","count":%d' % (number, number)
    if rng.random() < odd:
        fields = rng.choice(among)
    elif item.flags == ACK_TXN and rng.random() < 0.5:
        return b'{"uuid":"%s"}\n' % uuid
    return b'{"uuid":"%s",%s}\n' % (uuid, fields)


class Reading:
    """A shard without transactions: it decodes, skips malformed messages, sequences, and takes some rows."""

    def __init__(
        self,
        content: bytes,
        new_decoder: Callable[[int], EnvelopeDecoder[Any]],
        sequencer: Sequencer[Any],
        rng: random.Random,
    ) -> None:
        self.content = content
        self.new_decoder = new_decoder
        self.sequencer = sequencer
        self.rng = rng
        self.rows: list[tuple[Any, ...]] = []
        self.malformed: list[tuple[int, int]] = []

    def run(self, begin: int, chunk: int, until: int | None = None) -> None:
        """Read from ``begin`` on, until ``until`` rows were taken."""
        decoder = self.new_decoder(begin)
        for at in range(begin, len(self.content), chunk):
            decoder.feed(self.content[at : at + chunk])
            while True:
                try:
                    if not (batch := decoder.decode()):
                        break
                except MalformedMessage as error:
                    self.malformed.append((error.begin, error.end))
                    decoder.skip(error)
                    self.sequencer.skip(JOURNAL, error.end)
                    continue
                index = 0
                while index < len(batch):
                    index = self.sequencer.queue_batch(batch, index)
                    if (wanted := self.sequencer.replay_range) is not None:
                        self.sequencer.start_replay(self.replay(wanted))
                    while ready := self.sequencer.dequeue(7):
                        self.take(ready, until)
                        if until is not None and len(self.rows) >= until:
                            return

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Any]]:
        decoder = self.new_decoder(wanted.begin)
        at = wanted.begin
        while at < wanted.end:
            end = min(wanted.end, at + self.rng.randint(1, 300))
            decoder.feed(self.content[at:end])
            at = end
            while True:
                try:
                    if not (batch := decoder.decode()):
                        break
                except MalformedMessage as error:
                    decoder.skip(error)
                else:
                    yield batch

    def take(self, ready: Sequence[Any], until: int | None) -> None:
        """Take all rows or, as after a deferral, some."""
        count = len(ready)
        if self.rng.random() < 0.2:
            count = self.rng.randint(0, count)
        if until is not None and isinstance(ready, MessageRows):
            count = min(count, until - len(self.rows))
        rows = _rows(ready)
        while not isinstance(ready, MessageRows) and until is not None:
            delivered = sum(row is not None for row in rows[:count])
            if delivered <= until - len(self.rows):
                break
            count -= 1
        self.rows += [row for row in rows[:count] if row is not None]
        self.sequencer.consumed(count)

    def checkpoint(self) -> Sources:
        return self.sequencer.checkpoint()


def _rows(ready: Sequence[Any]) -> list[tuple[Any, ...] | None]:
    """Return offsets and values of messages; None for an acknowledgement."""
    if isinstance(ready, CommittedRows):
        assert [e.begin for e in ready] == ready.table["at"].to_pylist()
        sizes = [e.end - e.begin for e in ready]
        assert ready.size_of(len(ready)) == sum(sizes)
        assert ready.size_of(len(ready) // 2) == sum(sizes[: len(ready) // 2])
        assert ready[0] == next(iter(ready)) or ready[0].message != ready[0].message  # NaN
        return [tuple(map(_plain, row.values())) for row in ready.table.to_pylist()]
    rows: list[tuple[Any, ...] | None] = []
    for envelope in ready:
        if envelope.is_ack:
            rows.append(None)
            continue
        values = {f: getattr(envelope.message, f) for f in envelope.message.__struct_fields__}
        del values["uuid"]
        rows.append((_plain(envelope.begin), *map(_plain, values.values())))
    return rows


def _plain(value: Any) -> Any:
    """Return a value that compares by its text, also if it is NaN. Texts of JSON are read."""
    if value is msgspec.UNSET:
        value = None  # Arrow has one value for what is missing.
    if isinstance(value, str) and value[:1] in "[{":
        value = msgspec.json.decode(value)
    return repr(list(value) if isinstance(value, tuple) else value)


def by_messages(
    content: bytes, message_type: type[Any], sources: Sources, ring: int, rng: random.Random
) -> Reading:
    framing = framing_of(CONTENT_JSON_LINES, message_type)
    return Reading(
        content,
        lambda offset: _Fitting(JOURNAL, framing, offset),
        Sequencer(sources, ring),
        rng,
    )


class _Fitting(EnvelopeDecoder[Any]):
    """A decoder to which an integer beyond 64 bits is malformed, as it is to a column."""

    def _decode_buffer(self, buffer: bytes) -> tuple[list[Any], int, bool]:
        batch, consumed, stopped = super()._decode_buffer(buffer)
        for position, envelope in enumerate(batch):
            count = 0 if envelope.is_ack else getattr(envelope.message, "count", 0)
            if not -(1 << 63) <= count < 1 << 63:
                if position:
                    return batch[:position], envelope.begin - self.begin, True
                raise MalformedMessage("beyond", begin=envelope.begin, end=envelope.end, raw=b"")
        return batch, consumed, stopped


def by_tables(
    content: bytes, message_type: type[Any], sources: Sources, ring: int, rng: random.Random
) -> Reading:
    form = form_of(message_type)
    return Reading(
        content,
        lambda offset: TableDecoder(form, offset),
        TableSequencer(sources, ring * 100),
        rng,
    )


@pytest.mark.parametrize("message_type", [Word, Dated])
@settings(max_examples=examples(400), deadline=None)
@given(
    items=stories,
    seed=st.integers(0, 2**32),
    chunk=st.sampled_from([40, 100, 350, 5000]),
    ring=st.sampled_from([1, 4, 1000]),
    odd=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_tables_have_what_messages_have(
    message_type: type[Any], items: list[Item], seed: int, chunk: int, ring: int, odd: float
) -> None:
    """Rows in order, malformed frames, counts of outcomes, and the checkpoint."""
    rng = random.Random(seed)
    content = b"".join(line_of(item, n, rng, odd) for n, item in enumerate(items))
    content += rng.choice([b"", b'{"unframed":'])
    want = by_messages(content, message_type, {}, 1000, rng)
    want.run(0, chunk)
    tables = by_tables(content, message_type, {}, ring, rng)
    tables.run(0, chunk)
    assert tables.rows == want.rows
    assert tables.malformed == want.malformed
    assert tables.checkpoint() == want.checkpoint()
    if ring == 1000:
        assert +tables.sequencer.outcomes == Counter(want.sequencer.outcomes)


@settings(max_examples=examples(400), deadline=None)
@given(
    items=stories,
    seed=st.integers(0, 2**32),
    chunk=st.sampled_from([40, 350, 5000]),
    ring=st.sampled_from([1, 4, 1000]),
    until=st.integers(0, 30),
    is_first=st.booleans(),
)
def test_each_continues_from_a_checkpoint_of_the_other(
    items: list[Item], seed: int, chunk: int, ring: int, until: int, is_first: bool
) -> None:
    """Also in the middle of a transaction, or of what one chunk has committed."""
    rng = random.Random(seed)
    content = b"".join(line_of(item, n, rng, 0.05) for n, item in enumerate(items))
    want = by_messages(content, Word, {}, 1000, rng)
    want.run(0, chunk)
    first, second = (by_tables, by_messages) if is_first else (by_messages, by_tables)
    before = first(content, Word, {}, ring, rng)
    before.run(0, chunk, until)
    sources = before.checkpoint()
    after = second(content, Word, sources, ring, rng)
    begin = sources[JOURNAL].read_through if JOURNAL in sources else 0
    after.run(begin, chunk)
    assert before.rows + after.rows == want.rows
    assert after.checkpoint() == want.checkpoint()


@pytest.mark.parametrize("seed", seeds(20))
def test_plain_types_are_scanned(seed: int) -> None:
    """A chunk of good lines with a few odd ones is read by the scanner, with the same result."""
    assert is_scanned(form_of(Word))
    assert not is_scanned(form_of(Dated))
    rng = random.Random(seed)
    items = [Item(0, clock, 0) for clock in range(1, 2000)]
    content = b"".join(line_of(item, n, rng, 0.01) for n, item in enumerate(items))
    want = by_messages(content, Word, {}, 10, rng)
    want.run(0, 1 << 20)
    tables = by_tables(content, Word, {}, 10, rng)
    tables.run(0, 1 << 20)
    assert tables.rows == want.rows
    assert tables.malformed == want.malformed
