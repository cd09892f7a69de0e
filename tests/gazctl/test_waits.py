"""What waits says why: shards that recover, a read of a store that cannot be listed, a publisher."""

from __future__ import annotations

import httpx
import pytest

from gazette import CommitFailed, Message
from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import LOGS, ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import source_spec
from tests.gazctl.runner import Runner
from tests.support.instant_clock import breathe

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


async def test_a_publisher_that_waits_names_the_store(broker: BrokerFixture) -> None:
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    spec = journal_spec("a/journal", stores=(MISSING,), labels=labels)
    await broker.client.apply_journals([JournalChange(upsert=spec)])
    async with ClientPublisher(broker.client, timeout_s=2.0) as publisher:
        with pytest.raises(CommitFailed) as raised:
            await publisher.publish("a/journal", Word(word="to"))
    assert "a/journal: FRAGMENT_STORE_UNHEALTHY: " in str(raised.value)
    assert MISSING in str(raised.value)
