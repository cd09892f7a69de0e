"""Readers that are no shards forget silent producers by the same rule, and nothing else."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.message.envelope_reader import CommittedReader
from gazette.message.message import Message
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, build_uuid, clock_at, uuid_text
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from tests.message.test_envelope_reader import JOURNAL, list_with
from tests.message.test_sequencer_oracle import (
    HOUR_NS,
    START_NS,
    Item,
    Oracle,
    far_clocks,
    history_of,
)
from tests.support.instant_clock import eventually
from tests.support.stub_broker import StubBroker


class Number(Message):
    n: int


class Calendar(SystemClock):
    """The machine's clock, but the date is the one that a test sets."""

    def __init__(self) -> None:
        self.unix_ns = START_NS

    def now(self) -> float:
        return self.unix_ns / 1e9


class Reading:
    """A journal that is read while it is written."""

    def __init__(self, broker: StubBroker, client: Client, calendar: Calendar) -> None:
        self._journal, self._client, self._calendar = broker.journal(JOURNAL), client, calendar
        self.numbers: list[int] = []
        """The messages that were read, and acknowledgements."""
        self.written = 0
        self.reader = self._reader(SourceCheckpoint())

    def _reader(self, source: SourceCheckpoint) -> CommittedReader[Number]:
        params = ReadParams(JOURNAL, block=True)
        return CommittedReader(
            self._client, params, Number, source=source, ring_size=3, acknowledgements=True
        )

    async def read(self) -> None:
        async with aclosing(self.reader.batches()) as batches:
            async for batch in batches:
                self.numbers += [envelope.message.n for envelope in batch]

    def write(self, item: Item) -> None:
        producer = item.producer.to_bytes(5, "big")
        uuid = uuid_text(build_uuid(b"\1" + producer, item.clock, item.flags))
        self._journal.append(b'{"n":%d,"uuid":"%s"}\n' % (self.written, uuid.encode()))
        self.written += 1

    async def caught_up(self) -> None:
        end = self._journal.end
        await eventually(lambda: self.reader.checkpoint().read_through == end)

    def restart(self) -> None:
        """Go on with a new reader, from the checkpoint of the last one."""
        self.reader = self._reader(self.reader.checkpoint())

    async def follow(self, items: list[tuple[int, Item]], restarts: set[int]) -> None:
        """Read each item once it is written, at its time. Restart before some of them."""
        remaining = list(enumerate(items))
        while remaining:
            async with TaskScope("test") as scope:
                reading = scope.spawn(self.read(), name="read")
                while remaining:
                    number, (at_ns, item) = remaining[0]
                    if number in restarts:
                        restarts = restarts - {number}
                        break
                    self._calendar.unix_ns = max(self._calendar.unix_ns, at_ns)
                    self.write(item)
                    await self.caught_up()
                    del remaining[0]
                reading.cancel()
            self.restart()


@pytest.fixture
async def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
async def reading(calendar: Calendar) -> AsyncIterator[Reading]:
    async with StubBroker() as broker:
        list_with(broker)
        async with Client(broker.endpoint, zone="local", clock=calendar) as client:
            yield Reading(broker, client, calendar)


async def test_a_reader_does_not_grow_with_the_publishers_that_have_ended(
    reading: Reading,
) -> None:
    """A new publisher each 20 minutes of 12 days. One transaction stays open for most of a day."""
    items, hour = list[tuple[int, Item]](), clock_at(START_NS + HOUR_NS) - clock_at(START_NS)
    first, late_ns = clock_at(START_NS), START_NS + 200 * HOUR_NS
    for number in range(864):
        at_ns, clock = START_NS + number * HOUR_NS // 3, first + number * hour // 3
        items.append((at_ns, Item(number + 10, clock, CONTINUE_TXN)))
        items.append((at_ns, Item(number + 10, clock + 16, ACK_TXN)))
        if at_ns == late_ns:
            items.append((at_ns, Item(1, clock, CONTINUE_TXN)))
            opened_as = len(items) - 1
        if at_ns == late_ns + 22 * HOUR_NS:
            items.append((at_ns, Item(1, clock, ACK_TXN)))
            ended_as = len(items) - 1
    await reading.follow(items, restarts=set())
    assert 3 * 24 <= len(reading.reader.checkpoint().producers) <= 3 * 27
    expected = [n for n in range(len(items)) if n != opened_as]
    expected.insert(expected.index(ended_as), opened_as)
    assert reading.numbers == expected


@pytest.mark.parametrize("seed", range(24))
async def test_far_clocks_cost_a_reader_no_message(
    reading: Reading, calendar: Calendar, seed: int
) -> None:
    """As they cost a shard none: see the same test of the sequencer."""
    rng = random.Random(seed)
    writes = far_clocks(rng, rng.randint(20, 60), dead=rng.choice([0, 0, 5]))
    oracle = Oracle()
    for envelope in history_of([write.item for write in writes]):
        oracle.read(envelope)
    if rng.random() < 0.3:
        calendar.unix_ns = writes[-1].at_ns + 100 * HOUR_NS
    restarts = {rng.randrange(len(writes)) for _ in range(rng.randint(0, 2))}
    await reading.follow([(write.at_ns, write.item) for write in writes], restarts)
    assert reading.numbers == [envelope.message for envelope in oracle.delivered]
