"""The views of an application, of a shard with its state, and from an output back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import LOGS, ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import Gate, Tally, append, frame, source_spec
from tests.run.console.conftest import Console, Page
from tests.run.console.shop import HOSTILE, LETTERS, OUTPUT, SHARD, SOURCE, Shop
from tests.run.console.test_cluster_view import until

LONG = "instr(zeroblob(1000000), zeroblob(499999) || x'01')"
"""One step of SQLite, which no interrupt ends."""
ENDLESS = f"SELECT {' + '.join([LONG] * 9)}"
SORT = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT zeroblob(900000) AS r FROM n"
    " ORDER BY r"
)
WIDE = f"SELECT {', '.join(['hex(randomblob(500000))'] * 60)}"
COUNTS = "SELECT word, n FROM counts ORDER BY word"


@pytest.fixture
async def shop(etcd: Etcd, broker: BrokerFixture, tmp_path: Path) -> AsyncIterator[ConsumerFixture]:
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), (MESSAGE_TYPE, "DeadLetter"))
    await broker.create(
        *(
            source_spec(SOURCE),
            source_spec(OUTPUT),
            journal_spec(LETTERS, labels=labels),
            log_spec(SHARD),
        )
    )
    member = await ConsumerFixture.start(etcd, broker, Shop(), tmp_path, lease_ttl_s=60.0)
    await member.create(shard_spec(SHARD, SOURCE))
    yield member
    await member.crash()


@pytest.fixture
async def page(
    console: Console, broker: BrokerFixture, shop: ConsumerFixture
) -> AsyncIterator[Page]:
    async with console(
        f"--broker.address={broker.endpoint}", f"--consumer.address={shop.endpoint}"
    ) as page:
        await until(page, "cluster", lambda seen: seen["shards"] == 1)
        yield page


async def consumed(broker: BrokerFixture, shop: ConsumerFixture, *words: str) -> int:
    """Publish words, and return the offset of the log behind the transaction that consumed them."""
    await append(broker, *map(frame, words), journal=SOURCE)
    await shop.read_to_heads(SHARD)
    head = await broker.client.append(AppendParams(f"{LOGS}/{SHARD}"))
    return head.commit.end


async def asked(page: Page, route: str, **arguments: object) -> dict[str, Any]:
    """Ask for something of a state, as often as the page does: until the state has been recovered."""
    return await until(page, route, lambda seen: "recovering" not in seen, **arguments)


async def test_the_application_is_a_graph_with_rates_and_dead_letters(
    page: Page, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    await consumed(broker, shop, "one", "poison", "two")
    document = await until(
        page,
        "application",
        lambda seen: seen["rows"][0]["poison_messages"] >= 1.0 and seen["edges"][0]["outputs"],
    )
    assert document["name"] == "test"
    assert document["edges"] == [
        {
            "id": SHARD,
            "sources": [SOURCE],
            "outputs": [OUTPUT, LETTERS],
            "dead_letters": [LETTERS],
            "bad": False,
        }
    ]
    shard = document["rows"][0]
    assert shard["status"] == "PRIMARY"
    assert (
        shard["read_messages"] >= 3.0
    )  # The counter is of this process: other tests may have moved it.
    assert set(shard["phases"]) >= {"20-consuming", "50-committing"}
    assert shard["replicas"][0]["primary"] is True
    assert (await page("application", search="FAILED"))["rows"] == []
    letters = (await page("messages", name=LETTERS))["messages"]
    letter = json.loads(letters[0]["text"])
    assert (letter["reason"], HOSTILE in letter["error"]) == ("application", True)
    original = await page("messages", name=SOURCE, offset=letter["begin"], count=1)
    assert '"poison"' in original["messages"][0]["text"]


async def test_the_age_of_a_message_without_a_time_is_not_known(
    etcd: Etcd, broker: BrokerFixture, tmp_path: Path, console: Console
) -> None:
    gate = Gate()
    await broker.create(source_spec(SOURCE), log_spec(SHARD))
    member = await ConsumerFixture.start(
        etcd, broker, Tally(on_word=gate), tmp_path, lease_ttl_s=60.0
    )
    await member.create(shard_spec(SHARD, SOURCE))
    await append(broker, b'{"word":"one"}\n', journal=SOURCE)
    await asyncio.to_thread(gate.entered.wait)
    try:
        async with console(
            f"--broker.address={broker.endpoint}", f"--consumer.address={member.endpoint}"
        ) as page:

            def is_behind(seen: dict[str, Any]) -> bool:
                return any(row["lag_bytes"] and row["read_through"] for row in seen["rows"])

            document = await until(page, "application", is_behind)
            assert document["rows"][0]["lag_s"] is None
    finally:
        gate.open()
        await member.crash()


async def test_messages_behind_are_counted_by_the_mean_size_of_those_read(
    etcd: Etcd, broker: BrokerFixture, tmp_path: Path, console: Console
) -> None:
    gate, other = Gate(), "shard-sizes"  # Counters of SHARD are those of all tests.

    def act(word: str) -> None:
        if word == "stop":
            gate()

    await broker.create(source_spec(SOURCE), log_spec(other))
    member = await ConsumerFixture.start(
        etcd, broker, Tally(on_word=act), tmp_path, lease_ttl_s=60.0
    )
    await member.create(shard_spec(other, SOURCE))
    await append(broker, *(frame("four", n) for n in range(1, 4)), journal=SOURCE)
    await member.read_to_heads(other)
    await append(broker, *(frame("stop", n) for n in range(4, 11)), journal=SOURCE)
    await asyncio.to_thread(gate.entered.wait)
    try:
        async with console(
            f"--broker.address={broker.endpoint}", f"--consumer.address={member.endpoint}"
        ) as page:

            def is_behind(seen: dict[str, Any]) -> bool:
                return any(row["lag_bytes"] and row["read_messages"] for row in seen["rows"])

            document = await until(page, "application", is_behind)
            assert document["rows"][0]["lag_messages"] == 7
    finally:
        gate.open()
        await member.crash()


async def test_a_state_is_queried_now_and_at_past_moments(
    page: Page, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    first = await consumed(broker, shop, "one", "two", "one")
    second = await consumed(broker, shop, "one", HOSTILE)
    moments = await page("moments", id=SHARD)
    assert moments["commits"][-1]["end"] == moments["head"] == second
    assert moments["first_ms"] <= moments["commits"][-1]["time_ms"]

    state = await asked(page, "state", id=SHARD, at=second)
    assert (state["kind"], state["offset"]) == ("sqlite", second)
    assert "counts" in [name for name, *_ in state["tables"]]
    rows = await asked(page, "query", id=SHARD, at=second, sql=COUNTS)
    assert rows["rows"] == [[HOSTILE, 1], ["one", 3], ["two", 1]]
    past = await asked(page, "query", id=SHARD, at=first, sql=COUNTS)
    assert past["rows"] == [["one", 2], ["two", 1]]
    timers = "SELECT key FROM gazette_timer ORDER BY key"
    assert len((await asked(page, "query", id=SHARD, at=second, sql=timers))["rows"]) == 3

    tables = (await asked(page, "difference", id=SHARD, before=first, after=second))["tables"]
    counts = next(table for table in tables if table["name"] == "counts")
    assert counts["changed"] == [[["one", 2], ["one", 3], [1]]]
    assert (counts["added"], counts["removed"]) == ([[HOSTILE, 1]], [])
    assert (await asked(page, "difference", id=SHARD, before=first, after=first))["tables"] == []


async def test_what_a_state_cannot_answer_is_a_sentence(
    page: Page, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    at = await consumed(broker, shop, "one")
    await asked(page, "state", id=SHARD, at=at)

    async def refused(sql: str) -> str:
        return await page.error("query", id=SHARD, at=at, sql=sql)

    assert "readonly database" in await refused("DELETE FROM counts")
    assert "only read" in await refused("ATTACH '/etc/passwd' AS x")
    assert "one statement" in await refused("SELECT 1; SELECT 2")
    assert "no such table" in await refused("SELECT * FROM none")
    assert "more than 1.0 MiB" in await refused("SELECT zeroblob(1100000)")
    assert "more than 4.0 MiB" in await refused(WIDE)
    assert "out of memory" in await refused(SORT)
    assert "too many columns" in await refused(f"SELECT {', '.join('1' * 201)}")
    assert "did not end within" in await refused(ENDLESS)
    # The next one is not held up.
    assert (await page("query", id=SHARD, at=at, sql="SELECT 1"))["rows"] == [[1]]
    many = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 5000) SELECT i FROM n"
    )
    rows = await asked(page, "query", id=SHARD, at=at, sql=many)
    assert (len(rows["rows"]), rows["truncated"]) == (1000, True)
    wide = await asked(
        page, "query", id=SHARD, at=at, sql="SELECT hex(zeroblob(4000)), 1 << 60, 9e999"
    )
    assert wide["rows"][0][0].endswith("(8000 characters)")
    assert wide["rows"][0][1:] == [str(1 << 60), "inf"]
    assert "not a time" in await page.error("state", id=SHARD, at="soon")
    assert "no shard" in await page.error("shard", id="</script>")
    # The state before the first commit has no database.
    assert "no transaction" in await page.error("state", id=SHARD, at="1")


async def test_from_an_output_back_to_inputs_and_rows(
    page: Page, broker: BrokerFixture, shop: ConsumerFixture
) -> None:
    await consumed(broker, shop, "one", "two")
    await consumed(broker, shop, "one", "three")
    await consumed(broker, shop, "four")
    outputs = (await page("messages", name=OUTPUT))["messages"]
    three = next(one for one in outputs if '"three"' in one["text"])
    traced = await asked(page, "trace", name=OUTPUT, offset=three["begin"])
    assert (traced["shard"], traced["message"]["uuid"]) == (SHARD, three["uuid"])
    words = [json.loads(one["text"])["word"] for one in traced["inputs"][0]["messages"]]
    assert words == ["one", "three"]
    counts = next(table for table in traced["tables"] if table["name"] == "counts")
    assert (counts["changed"], counts["added"]) == ([[["one", 1], ["one", 2], [1]]], [["three", 1]])

    first = next(one for one in outputs if '"two"' in one["text"])
    traced = await asked(page, "trace", name=OUTPUT, offset=first["begin"])
    assert [json.loads(one["text"])["word"] for one in traced["inputs"][0]["messages"]] == [
        "one",
        "two",
    ]

    assert "no message" in await page.error("trace", name=OUTPUT, offset=three["begin"] + 1)
    await append(broker, frame("alone", 7), journal=OUTPUT)
    end = (await page("messages", name=OUTPUT))["messages"][-1]["begin"]
    assert "outside of any transaction" in await page.error("trace", name=OUTPUT, offset=end)


async def test_a_json_state_is_queried_and_compared_as_tables(
    etcd: Etcd, broker: BrokerFixture, tmp_path: Path, console: Console
) -> None:
    await broker.create(source_spec(SOURCE), log_spec(SHARD))
    member = await ConsumerFixture.start(etcd, broker, Tally(), tmp_path, lease_ttl_s=60.0)
    await member.create(shard_spec(SHARD, SOURCE))
    first = await consumed(broker, member, "one", "two")
    second = await consumed(broker, member, "two")
    async with console(
        f"--broker.address={broker.endpoint}", f"--consumer.address={member.endpoint}"
    ) as page:
        await until(page, "cluster", lambda seen: seen["shards"] == 1)
        sql = "SELECT path, value FROM state ORDER BY path"
        rows = await asked(page, "query", id=SHARD, at=second, sql=sql)
        assert rows["rows"] == [["$.one", 1], ["$.two", 2]]
        tables = (await asked(page, "difference", id=SHARD, before=first, after=second))["tables"]
        assert [table["changed"] for table in tables] == [
            [[["$.two", 1, "integer"], ["$.two", 2, "integer"], [1]]]
        ]
    await member.crash()


async def test_a_shard_that_failed_is_named_with_its_error(
    etcd: Etcd, broker: BrokerFixture, tmp_path: Path, console: Console
) -> None:
    def fail(word: str) -> None:
        raise RuntimeError(f"{HOSTILE} failed")

    await broker.create(source_spec(SOURCE), log_spec(SHARD))
    app = Tally(on_word=fail)
    member = await ConsumerFixture.start(etcd, broker, app, tmp_path, lease_ttl_s=60.0)
    await member.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("one"), journal=SOURCE)
    async with console(
        f"--broker.address={broker.endpoint}", f"--consumer.address={member.endpoint}"
    ) as page:
        document = await until(
            page, "cluster", lambda seen: any(HOSTILE in one["reason"] for one in seen["verdicts"])
        )
        failed = document["verdicts"][0]
        assert failed["command"] == (
            f"gazctl shards unassign --failed -l id={SHARD}"
            f" --broker.address={broker.endpoint} --consumer.address={member.endpoint}"
        )
        assert (await page("shard", id=SHARD))["verdicts"][0]["severity"] == "critical"
    await member.crash()


async def test_a_shard_in_recovery_is_named_and_has_no_state_yet(
    etcd: Etcd, broker: BrokerFixture, tmp_path: Path, console: Console
) -> None:
    gate = Gate()

    class Slow(Tally):
        def new_store(self, shard: Any, recorder: Any) -> Any:
            gate()
            return super().new_store(shard, recorder)

    await broker.create(source_spec(SOURCE), log_spec(SHARD))
    member = await ConsumerFixture.start(etcd, broker, Slow(), tmp_path, lease_ttl_s=60.0)
    try:
        await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
        await asyncio.to_thread(gate.entered.wait)
        async with console(
            f"--broker.address={broker.endpoint}", f"--consumer.address={member.endpoint}"
        ) as page:
            document = await until(
                page,
                "cluster",
                lambda seen: any("being recovered" in one["reason"] for one in seen["verdicts"]),
            )
            (recovers,) = (
                one for one in document["verdicts"] if "being recovered" in one["reason"]
            )
            assert (recovers["severity"], recovers["names"]) == ("note", [SHARD])
            shard = await page("shard", id=SHARD)
            assert shard["verdicts"][0]["reason"] == recovers["reason"]
            assert shard["status"] != "PRIMARY"
            moments = await page("moments", id=SHARD)
            assert moments["commits"] == []
            says = await page.error("state", id=SHARD, at=moments["head"])
            assert "no transaction was committed up to there" in says
            assert "first transaction" in says
    finally:
        gate.open()
        await member.crash()
