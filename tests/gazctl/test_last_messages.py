"""`gazctl read --last N`: the end of what a read of the whole journal writes."""

from __future__ import annotations

import asyncio
import random

import pytest
from prometheus_client import REGISTRY
from word_count import ngram_pb2

from gazette.client.append.appender import AppendParams
from gazette.client.read.reader import ReadParams
from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.context import Context
from gazette.gazctl.last_messages import MessageJournal, find_last
from gazette.gazctl.perform import run_in_loop
from gazette.gazctl.settings import schema_of
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.envelope_reader import CommittedReader
from gazette.message.framing.framing import framing_of
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, uuid_text
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.stored import json_line
from tests.gazctl.runner import Runner, Streams
from tests.support.instant_clock import eventually

JOURNAL = "events/all"
FRAGMENT_BYTES = 1 << 16
PAD = "x" * 3000
COUNTS = "--message=word_count.ngram_pb2:NGramCount"


def line(producer: int, clock: int, flags: int, n: int = 0) -> bytes:
    uuid = build_uuid(bytes([1, 0, 0, 0, 0, producer]), clock, flags)
    return json_line({"n": n, "pad": "" if flags == ACK_TXN else PAD}, uuid)


def row(producer: int, clock: int, flags: int, n: int = 0) -> bytes:
    """Return a row over several lines."""
    uuid = build_uuid(bytes([1, 0, 0, 0, 0, producer]), clock, flags)
    return f'{uuid_text(uuid)},{n},"{PAD}\n"\n'.encode()


def count(producer: int, clock: int, flags: int, n: int = 0) -> bytes:
    uuid = build_uuid(bytes([1, 0, 0, 0, 0, producer]), clock, flags)
    framing = framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount)
    return framing.encode(ngram_pb2.NGramCount(uuid=uuid, n_gram=PAD, count=n))


FRAMES = {CONTENT_JSON_LINES: line, CONTENT_CSV: row, CONTENT_PROTO_FIXED: count}


async def create(broker: BrokerFixture, content_type: str = CONTENT_JSON_LINES) -> None:
    labels = LabelSet.of((CONTENT_TYPE, content_type))
    await broker.create(journal_spec(JOURNAL, labels=labels, length=FRAGMENT_BYTES))


async def append(broker: BrokerFixture, *frames: bytes) -> None:
    for frame in frames:
        await broker.client.append(AppendParams(JOURNAL), frame)


def history(rng: random.Random, content_type: str) -> list[bytes]:
    """Return appends of five producers: transactions, some rolled back, repeated or pending."""
    frame, clocks, acknowledged = FRAMES[content_type], [1] * 5, [0] * 5
    appends = []
    for n in range(150):
        at = rng.randrange(5)
        clocks[at] += 1
        flags = rng.choice((OUTSIDE_TXN, CONTINUE_TXN, CONTINUE_TXN))
        if flags == OUTSIDE_TXN and clocks[at] - 1 > acknowledged[at]:
            flags = CONTINUE_TXN
        content = frame(at, clocks[at], flags, n)
        if flags == OUTSIDE_TXN:
            acknowledged[at] = clocks[at]
        elif rng.random() < 0.5:
            clocks[at] += rng.random() < 0.9
            rolled_back = rng.random() < 0.2
            acknowledged[at] = acknowledged[at] if rolled_back else clocks[at]
            content += frame(at, acknowledged[at], ACK_TXN)
        appends += [content] * (2 if rng.random() < 0.1 else 1)
    return appends


@pytest.mark.parametrize("content_type", FRAMES)
async def test_the_last_messages_are_the_end_of_all_of_them(
    broker: BrokerFixture, gazctl: Runner, content_type: str
) -> None:
    """Over many fragments, with transactions that end late, repeated appends, and pending messages."""
    await create(broker, content_type)
    await append(broker, *history(random.Random(content_type), content_type))
    assert len((await gazctl.ok("journals", "fragments")).rows) > 4
    for options in ([], ["--uncommitted"]):
        argv = ["read", JOURNAL, "--meta", COUNTS, *options]
        whole = (await gazctl.ok(*argv)).out.splitlines()
        assert 50 < len(whole) < 200
        for number in (1, 2, 7, 30, len(whole) - 1, len(whole), len(whole) + 1, 10**12):
            found = await gazctl.ok(*argv, f"--last={number}")
            assert found.out.splitlines() == whole[-number:]
            assert found.err == ""


def bytes_read() -> float:
    labels = {"journal": JOURNAL}
    return REGISTRY.get_sample_value("gazette_read_bytes_total", labels) or 0.0


@pytest.mark.parametrize("content_type", FRAMES)
async def test_only_the_end_of_the_journal_is_read(
    broker: BrokerFixture, gazctl: Runner, content_type: str
) -> None:
    await create(broker, content_type)
    frame = FRAMES[content_type]
    frames = [frame(1, n, OUTSIDE_TXN, n) for n in range(1, 701)]
    await append(broker, *(b"".join(frames[at : at + 10]) for at in range(0, 700, 10)))
    total = sum(map(len, frames))
    before = bytes_read()
    found = await gazctl.ok("read", JOURNAL, "--last=5", COUNTS)
    assert len(found.out.splitlines()) == 5
    assert 0 < bytes_read() - before < total / 4


async def test_a_transaction_that_began_long_before_is_found(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    """Its messages are written where it ends, as by a read of the whole journal."""
    await create(broker)
    await append(broker, line(1, 1, OUTSIDE_TXN, 1), line(2, 1, CONTINUE_TXN, 2))
    others = b"".join(line(3, n, OUTSIDE_TXN, 3) for n in range(1, 101))
    await append(broker, others, line(2, 2, ACK_TXN))
    whole = (await gazctl.ok("read", JOURNAL)).out.splitlines()
    assert '"n":2' in whole[-1]
    for number in (1, 2, 60):
        found = await gazctl.ok("read", JOURNAL, f"--last={number}")
        assert found.out.splitlines() == whole[-number:]


async def test_a_transaction_that_is_partly_at_the_end_is_whole(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    """Its first message lies before what is read at first, and its second one does not."""
    await create(broker)
    before = b"".join(line(3, n, OUTSIDE_TXN, 3) for n in range(1, 21))
    between = b"".join(line(3, n, OUTSIDE_TXN, 3) for n in range(21, 41))
    await append(
        broker, before, line(2, 1, CONTINUE_TXN, 21), between, line(2, 2, CONTINUE_TXN, 22)
    )
    await append(broker, *(line(3, n, OUTSIDE_TXN, 3) for n in range(41, 51)), line(2, 3, ACK_TXN))
    whole = (await gazctl.ok("read", JOURNAL)).out.splitlines()
    assert ['"n":21' in whole[-2], '"n":22' in whole[-1]] == [True, True]
    for number in (1, 2, 3):
        found = await gazctl.ok("read", JOURNAL, f"--last={number}")
        assert found.out.splitlines() == whole[-number:]


async def test_a_transaction_that_may_have_begun_before_what_was_read_is_noted(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    """One message lies more than 4 MiB before the end, and one does not. Nothing else says that it is one."""
    await create(broker)
    others = [line(3, n, OUTSIDE_TXN, n) for n in range(1, 1511)]
    early, late = line(2, 1, CONTINUE_TXN, 20), line(2, 2, CONTINUE_TXN, 21)
    between = [b"".join(others[at : at + 100]) for at in range(0, 1500, 100)]
    await append(broker, early, *between, late + line(2, 3, ACK_TXN), b"".join(others[1500:]))
    acknowledged = sum(map(len, [early, *between, late]))
    whole = (await gazctl.ok("read", JOURNAL)).out.splitlines()
    assert ['"n":20' in whole[-12], '"n":21' in whole[-11]] == [True, True]
    for number in (1, 10, 11):  # The message that lacks would not be among these.
        found = await gazctl.ok("read", JOURNAL, f"--last={number}")
        assert (found.out.splitlines(), found.err) == (whole[-number:], "")
    for number in (12, 20):
        found = await gazctl.ok("read", JOURNAL, f"--last={number}")
        assert f"acknowledged at {acknowledged}" in found.err
        assert f"gazctl read {JOURNAL} | tail -n {number}" in found.err
        assert found.out.splitlines()[-11:] == whole[-11:]


async def test_a_transaction_that_began_too_long_before_is_noted(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await create(broker)
    await append(broker, line(2, 1, CONTINUE_TXN, 2))
    others = b"".join(line(3, n, OUTSIDE_TXN, 3) for n in range(1, 101))
    await append(broker, others, line(2, 2, ACK_TXN))
    (command,) = (one for one in COMMANDS if one.words == ("read",))
    streams = Streams()
    loaded = schema_of(command).load(["--skip-malformed"], gazctl.environ)
    context = Context(loaded, gazctl.environ, streams.terminal, SystemClock(), random.Random(1))

    def read(params: ReadParams) -> object:
        return CommittedReader(broker.client, params, dict, acknowledgements=True).batches()

    journal = MessageJournal(JOURNAL, True, True, read)  # type: ignore[arg-type]
    found = await find_last(context, broker.client, journal, 3, transaction_bytes_max=1)
    end = len(line(2, 1, CONTINUE_TXN, 2) + others + line(2, 2, ACK_TXN))
    assert end - (1 << 16) <= found.begin < found.end == end
    assert f"acknowledged at {end - len(line(2, 2, ACK_TXN))}" in streams.err.getvalue()


async def test_the_last_messages_come_before_those_that_follow(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await create(broker)
    await append(broker, b"".join(line(1, n, OUTSIDE_TXN, n) for n in range(1, 101)))
    streams = Streams()
    argv = ["read", JOURNAL, "--last=2", "--follow", "--limit=4"]
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(run_in_loop(argv, gazctl.environ, streams.terminal))
        await eventually(lambda: streams.out.getvalue().count(b"\n") == 2)
        await append(broker, line(1, 101, OUTSIDE_TXN, 101), line(1, 102, OUTSIDE_TXN, 102))
    assert reading.result() == 0
    numbers = [
        one.split('"n":')[1].split(",")[0] for one in streams.out.getvalue().decode().splitlines()
    ]
    assert numbers == ["99", "100", "101", "102"]


async def test_each_journal_has_its_last_messages(broker: BrokerFixture, gazctl: Runner) -> None:
    """An empty one has none. A journal that begins late counts from there."""
    await create(broker)
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    await broker.create(
        journal_spec("events/empty", labels=labels), journal_spec("events/other", labels=labels)
    )
    await append(broker, line(1, 1, OUTSIDE_TXN, 1), line(1, 2, OUTSIDE_TXN, 2))
    await broker.client.append(AppendParams("events/other"), line(1, 1, OUTSIDE_TXN, 3))
    found = await gazctl.ok("read", "-l", "name:prefix=events/", "--last=1", "--meta")
    journals = [one.split('"journal":"')[1].split('"')[0] for one in found.out.splitlines()]
    assert journals == [JOURNAL, "events/other"]


async def test_what_is_no_message_is_noted_once(broker: BrokerFixture, gazctl: Runner) -> None:
    await create(broker)
    good = b"".join(line(1, n, OUTSIDE_TXN, n) for n in range(1, 41))
    await append(broker, good, b"nothing\n", line(1, 50, OUTSIDE_TXN, 50))
    result = await gazctl("read", JOURNAL, "--last=1")
    assert result.code == 1
    assert "not a message" in result.err
    result = await gazctl.ok("read", JOURNAL, "--last=2", "--skip-malformed")
    assert len(result.out.splitlines()) == 2
    assert result.err.count("skipped: ") == 1


@pytest.mark.parametrize(
    "argv", [["--last=-1"], ["--last=1", "--tail"], ["--last=1", "--begin=5"], ["--last=x"]]
)
async def test_what_last_cannot_be_is_refused(gazctl: Runner, argv: list[str]) -> None:
    result = await gazctl("read", JOURNAL, *argv)
    assert result.code == 2
    assert "--last" in result.err


async def test_a_journal_without_fragments_has_no_last_messages(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_CSV))
    suspend = Suspend(SuspendLevel.PARTIAL, 1 << 20)
    await broker.create(journal_spec(JOURNAL, labels=labels, suspend=suspend))
    result = await gazctl.ok("read", JOURNAL, "--last=3")
    assert result.out == ""
