"""What waits says why: shards that recover, a read of a store that cannot be listed, a publisher."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from gazette import CommitFailed, Message
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange
from gazette.client.wait_question import ask_reason
from gazette.cluster.etcd.client import Etcd
from gazette.gazctl.perform import run_in_loop
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.message.uuid import OUTSIDE_TXN, build_uuid
from gazette.protocol.label_set import LabelSet
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import LOGS, ConsumerFixture, log_spec, shard_spec
from gazette.testing.stored import json_line
from tests.consumer.apps import source_spec
from tests.gazctl.runner import Runner, Streams
from tests.support.instant_clock import breathe, eventually

SHARD = "shard-waits"
MISSING = "file:///missing/"


class Word(Message):
    word: str


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"replication": 3}, "INSUFFICIENT_JOURNAL_BROKERS: "),
        ({"stores": (MISSING,)}, "FRAGMENT_STORE_UNHEALTHY: "),
    ],
)
async def test_a_shard_that_waits_for_its_log_says_why(
    fields: dict[str, object],
    reason: str,
    broker: BrokerFixture,
    consumer: ConsumerFixture,
    gazctl: Runner,
) -> None:
    log = f"{LOGS}/{SHARD}"
    await broker.create(source_spec("a/source"))
    await broker.client.apply_journals([JournalChange(upsert=log_spec(SHARD, **fields))])
    spec = shard_spec(SHARD, "a/source")
    await consumer.shards.apply_shards([ShardChange(upsert=spec)])
    async with httpx.AsyncClient() as http:
        waits = None
        while not waits:
            shown = await http.get(f"{consumer.http}/debug/shards")
            waits = next((one["waits_for"] for one in shown.json()["shards"]), None)
            await breathe()
    assert waits.startswith(f"{log}: {reason}")

    # Case: the list says so, and the lag is not waited for.
    result = await gazctl.ok("shards", "list", "--lag")
    assert result.rows[0] == [SHARD, "BACKFILL", "?"]
    assert f"it waits for {log}: {reason}" in result.out
    assert f"{SHARD}: waits for {log}: {reason}" in result.err

    # Case: its row on the screen says so, too.
    top = await gazctl.ok("top", "--once", "--interval=500ms", "-l", f"id={SHARD}")
    assert f"it waits for {log}: {reason}" in top.out

    # Case: others ask for other shards.
    assert reason not in (await gazctl.ok("shards", "list", "-l", "id=other")).err


async def test_a_read_of_a_store_that_cannot_be_listed_ends_with_the_reason(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.client.apply_journals(
        [JournalChange(upsert=journal_spec("a/journal", stores=(MISSING,)))]
    )
    while not (await broker.client.get_journal("a/journal")).route.members:
        await breathe()  # Until a broker serves it, that is the reason.
    result = await gazctl("journals", "read", "-l", "name=a/journal", "--timeout", "6s")
    assert result.code == 1
    # Once while it waits, once at its end.
    assert result.err.count("a/journal: FRAGMENT_STORE_UNHEALTHY: ") == 2
    assert MISSING in result.err


JSON_LINES = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
UNHEALTHY = "a/journal: FRAGMENT_STORE_UNHEALTHY: "
UNASSIGNED = "a/journal: INSUFFICIENT_JOURNAL_BROKERS: "
READS = [
    ("read", "a/journal"),
    ("read", "-l", "name=a/journal", "--uncommitted"),
    ("read", "a/journal", "--last=2"),
    ("read", "a/journal", "--tail", "--follow"),
    ("journals", "tail", "a/journal"),
    ("journals", "tail", "a/journal", "--no-follow"),
    ("journals", "fragments", "-l", "name=a/journal"),
]


async def create_waiting(broker: BrokerFixture, reason: str, **fields: Any) -> None:
    """Create ``a/journal``, and wait until its brokers give a reason why it cannot be read."""
    spec = journal_spec("a/journal", labels=JSON_LINES, **fields)
    await broker.client.apply_journals([JournalChange(upsert=spec)])
    while reason not in f"a/journal: {await ask_reason(broker.client, 'a/journal')}":
        await breathe()


async def test_commands_that_read_an_unlisted_store_end_with_the_reason(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await create_waiting(broker, UNHEALTHY, stores=(MISSING,))
    for argv in READS:
        result = await gazctl(*argv, "--timeout=1s")
        assert result.code == 1, argv
        assert f" within 1 s: {UNHEALTHY}" in result.err, argv
        assert MISSING in result.err


async def test_commands_that_read_without_a_primary_end_with_the_reason(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with await BrokerFixture.start(
        etcd, tmp_path, journal_limit=1, lease_ttl_s=60.0
    ) as broker:
        await broker.create(journal_spec("a/first"))
        await create_waiting(broker, UNASSIGNED)
        gazctl = Runner({"BROKER_ADDRESS": broker.endpoint})
        for argv in READS:
            result = await gazctl(*argv, "--timeout=1s")
            assert result.code == 1, argv
            assert "INSUFFICIENT_JOURNAL_BROKERS" in result.err, argv


@pytest.mark.parametrize(
    "argv",
    [
        ("read", "a/journal", "--follow", "--limit=1"),
        ("journals", "read", "-l", "name=a/journal", "--block"),
    ],
)
async def test_a_read_that_follows_says_the_reason_once_and_goes_on(
    argv: tuple[str, ...], broker: BrokerFixture, gazctl: Runner
) -> None:
    await create_waiting(broker, UNHEALTHY, stores=(MISSING,))
    streams = Streams()
    async with TaskScope("test") as scope:
        scope.spawn(run_in_loop(argv, gazctl.environ, streams.terminal), name="read")
        await eventually(lambda: UNHEALTHY in streams.err.getvalue())
        (broker.file_root / "missing").mkdir()
        line = json_line({"word": "to"}, build_uuid(bytes([1, 0, 0, 0, 0, 1]), 1, OUTSIDE_TXN))
        await broker.client.append(AppendParams("a/journal"), line)
        await eventually(lambda: b"to" in streams.out.getvalue())
        scope.cancel()
    assert streams.err.getvalue().count(UNHEALTHY) == 1


async def test_a_read_beyond_the_end_of_a_journal_says_so(
    broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    await broker.create(journal_spec("a/journal", labels=JSON_LINES))
    await broker.client.append(AppendParams("a/journal"), b"content")
    offsets = tmp_path / "offsets.json"
    offsets.write_text('{"a/journal": 9}')
    reads = [
        ("read", "a/journal", "--follow", "--begin=9"),
        ("journals", "read", "-l", "name=a/journal", "--block", f"--offsets={offsets}"),
    ]
    terminals = [Streams() for _ in reads]
    said = "waiting for a/journal: the read is at offset 9, beyond the journal's end at 7\n"
    async with TaskScope("test") as scope:
        for argv, streams in zip(reads, terminals, strict=True):
            scope.spawn(run_in_loop(argv, gazctl.environ, streams.terminal), name=argv[0])
        await eventually(lambda: all(said in streams.err.getvalue() for streams in terminals))
        scope.cancel()


async def test_a_publisher_that_waits_names_the_store(broker: BrokerFixture) -> None:
    spec = journal_spec("a/journal", stores=(MISSING,), labels=JSON_LINES)
    await broker.client.apply_journals([JournalChange(upsert=spec)])
    async with ClientPublisher(broker.client, timeout_s=2.0) as publisher:
        with pytest.raises(CommitFailed) as raised:
            await publisher.publish("a/journal", Word(word="to"))
    assert "a/journal: FRAGMENT_STORE_UNHEALTHY: " in str(raised.value)
    assert MISSING in str(raised.value)


async def test_a_row_of_top_says_why_its_journal_does_not_answer(
    etcd: Etcd, tmp_path: Path
) -> None:
    first = await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0)
    await first.create(journal_spec("a/journal"))
    async with await BrokerFixture.start(
        etcd, tmp_path, id="broker-two", lease_ttl_s=60.0
    ) as second:
        await first.crash()
        gazctl = Runner({"BROKER_ADDRESS": second.endpoint})
        top = await gazctl.ok("top", "--once", "--interval=500ms", "-l", "name=a/journal")
        assert re.search(r"no answer from \S+ within 3 s: .*refused", top.out), top.out
        await first.die()
