"""The views of the cluster and its journals, on a real broker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gazette.auth import Capability, Claims, KeyedAuth
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.label_set import EVERYTHING, LabelSet
from gazette.run.console.views import PAGE_ROWS
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.consumer.apps import PRODUCER, ack, append, frame, pending, source_spec
from tests.run.console.conftest import Console, Page

KEYS = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
HOSTILE = "</td><script>alert(1)</script>\x1b[31m\x00\u202e"
CLOCK = SystemClock()
UNTIL_S = 60.0


async def until(page: Page, route: str, holds: Any, **arguments: object) -> dict[str, Any]:
    """Ask until an answer fulfils a condition: the console asks brokers at its own pace."""
    document: dict[str, Any] = {}
    try:
        async with asyncio.timeout(UNTIL_S):
            while not holds(document := await page(route, **arguments)):
                await CLOCK.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"after {UNTIL_S:g} s, {route} is still {json.dumps(document)}")
    return document


async def test_the_overview_names_members_and_what_is_wrong(
    page: Page, broker: BrokerFixture
) -> None:
    await broker.create(source_spec("a/source"))
    specs = [journal_spec(f"{name}/thin", replication=3) for name in "bc"]
    await broker.client.apply_journals([JournalChange(spec) for spec in specs])
    document = await until(
        page, "cluster", lambda seen: any(one["count"] == 2 for one in seen["verdicts"])
    )
    thin = document["verdicts"][0]
    assert (thin["names"], thin["count"], thin["severity"]) == (["b/thin", "c/thin"], 2, "warning")
    assert "1 of 3 replicas" in thin["reason"]
    assert thin["command"] == f"gazctl members --broker.address={broker.endpoint}"
    assert "no consumer address" in document["verdicts"][-1]["reason"]
    document = await until(page, "cluster", lambda seen: seen["members"][0]["state"] == "ready")
    member = document["members"][0]
    assert (member["kind"], member["id"], member["replicas"]) == ("broker", "broker-one", 3)
    assert member["version"]
    assert member["memory"] > 0


async def test_journals_are_searched_sorted_and_paged_at_the_server(
    page: Page, broker: BrokerFixture
) -> None:
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_CSV))
    specs = [journal_spec(f"many/{index:03d}") for index in range(PAGE_ROWS + 5)]
    await broker.create(*specs, journal_spec("other/csv", labels=labels))
    document = await until(page, "journals", lambda seen: seen["total"] == PAGE_ROWS + 6)
    assert (len(document["rows"]), document["pages"]) == (PAGE_ROWS, 2)
    last = await page("journals", page=99)
    assert [row["name"] for row in last["rows"]][-1] == "other/csv"
    assert last["page"] == 1
    labelled = await page("journals", search="csv CONTENT-TYPE=text")
    assert [row["name"] for row in labelled["rows"]] == ["other/csv"]
    assert (await page("journals", search="no such"))["total"] == 0
    await broker.client.append(AppendParams("many/054"), b"x\n")
    document = await until(
        page, "journals", lambda seen: seen["rows"] and seen["rows"][0]["head"] == 2, search="054"
    )
    assert (await page("journals", sort="head"))["rows"][0]["name"] == "many/054"


async def test_messages_are_read_at_offsets_times_and_as_they_come(
    page: Page, broker: BrokerFixture
) -> None:
    await broker.create(source_spec("a/source"))
    frames = [frame(f"w{number}", number + 1) for number in range(3000)]
    await append(broker, *frames, journal="a/source")
    await until(page, "journals", lambda seen: seen["total"] == 1)

    def words(document: dict[str, Any]) -> list[str]:
        return [json.loads(one["text"])["word"] for one in document["messages"]]

    last = await page("messages", name="a/source", count=2)
    assert words(last) == ["w2998", "w2999"]
    assert last["next"] == last["head"]
    await append(broker, frame("later", 4000), journal="a/source")
    assert words(await page("messages", name="a/source", next=last["next"])) == ["later"]
    second = len(frames[0])
    for offset in (second, second - 5):
        document = await page("messages", name="a/source", offset=offset, count=1)
        assert (words(document), document["messages"][0]["begin"]) == (["w1"], second)
    time_ms = last["messages"][0]["time_ms"]
    assert words(await page("messages", name="a/source", time_ms=time_ms + 1, count=9)) == [
        "later"
    ] or (last["messages"][1]["time_ms"] <= time_ms + 1)
    assert "ends at" in await page.error("messages", name="a/source", offset=10**9)
    assert "invalid number" in await page.error("messages", name="a/source", offset="-1")


async def test_the_last_messages_are_the_last_however_large_they_are(
    page: Page, broker: BrokerFixture
) -> None:
    await broker.create(source_spec("a/source"))
    large = [b"%d" % number + b"x" * (5 << 20) + b"\n" for number in range(7)]
    for line in large:
        await append(broker, line, journal="a/source")
    await append(broker, b"half a line", journal="a/source")
    await until(page, "journals", lambda seen: seen["total"] == 1)
    last = await page("messages", name="a/source", count=2)
    assert [one["text"][:2] for one in last["messages"]] == ["5x", "6x"]
    assert last["next"] == sum(map(len, large))
    many = await page("messages", name="a/source", count=9)
    assert [one["text"][:2] for one in many["messages"]] == ["4x", "5x", "6x"]
    assert any("only the last 16.0 MiB" in note for note in many["notes"])
    # The rest of a line that is not whole is read once, and again when there is more.
    seen = await page("messages", name="a/source", next=last["next"], seen=last["head"])
    assert (seen["messages"], seen["next"], seen["behind"]) == ([], last["next"], False)
    await append(broker, b" and the rest\n", journal="a/source")
    rest = await page("messages", name="a/source", next=last["next"], seen=last["head"])
    assert [one["text"] for one in rest["messages"]] == ["half a line and the rest"]
    first = await page("messages", name="a/source", next=0, count=1)
    assert (first["messages"][0]["text"][:2], first["behind"]) == ("0x", True)


async def test_messages_have_the_roles_that_their_uuids_give(
    page: Page, broker: BrokerFixture
) -> None:
    await broker.create(source_spec("a/source"))
    other = bytes(range(6))
    await append(
        broker,
        pending("kept", 10),
        ack(11),
        pending("dropped", 30),
        ack(20),
        pending("open", 40),
        frame("alone", 5, producer=other),
        journal="a/source",
    )
    await until(page, "journals", lambda seen: seen["total"] == 1)
    messages = (await page("messages", name="a/source"))["messages"]
    assert [one["role"] for one in messages] == [
        *("pending", "acknowledgement", "pending", "acknowledgement", "pending", "alone")
    ]
    assert messages[0]["producer"] == messages[1]["producer"] == PRODUCER.hex()
    assert int(messages[2]["clock"]) > int(messages[3]["clock"])


async def test_hostile_contents_are_texts_and_are_cut(page: Page, broker: BrokerFixture) -> None:
    await broker.create(source_spec("a/source"))
    long = b"x" * (10 << 20)
    content = [HOSTILE.encode(), b"\xff\xfe", long, b'{"uuid":"nonsense"}', b"[" * 100_000, b""]
    await append(broker, *(one + b"\n" for one in content), journal="a/source")
    await until(page, "journals", lambda seen: seen["total"] == 1)
    answer = await page.ask("messages", name="a/source")
    assert len(answer.content) < 40_000
    messages = answer.json()["messages"]
    assert [messages[0]["text"], messages[1]["text"]] == [HOSTILE, "\\xff\\xfe"]
    assert messages[2]["more_bytes"] == (10 << 20) - 4096
    assert all("uuid" not in one for one in messages)
    one = await page("messages", name="a/source", offset=len(content[0]) + 4, count=1)
    assert one["messages"][0]["more_bytes"] == (10 << 20) - 4096


async def test_fragments_are_bars_and_journals_without_messages_say_so(
    page: Page, broker: BrokerFixture
) -> None:
    await broker.create(source_spec("a/source"), journal_spec("a/plain"))
    await append(broker, frame("one", 1), journal="a/source")
    await until(page, "journals", lambda seen: seen["total"] == 2)
    document = await page("fragments", name="a/source")
    assert (document["count"], len(document["bars"])) == (1, 1)
    assert document["bars"][0]["in_spool"] == 1 - document["stored"]
    assert (await page("messages", name="a/plain"))["messages"] == []
    journal = await page("journal", name="a/source")
    assert journal["labels"] == {CONTENT_TYPE: CONTENT_JSON_LINES}
    assert "no journal" in await page.error("journal", name="</script>")
    assert "name" in await page.error("journal")


async def test_a_cluster_that_is_away_is_a_sentence(console: Console) -> None:
    async with console("--broker.address=http://127.0.0.1:1") as page:
        document = await page("cluster")
        assert "127.0.0.1:1" in document["verdicts"][0]["reason"]
        assert document["verdicts"][0]["severity"] == "critical"
        assert (await page("journals"))["rows"] == []


async def test_a_broker_that_dies_is_named_and_the_lists_stay(
    etcd: Etcd, tmp_path: Path, console: Console
) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0)
    async with console(f"--broker.address={broker.endpoint}", "--timeout=3s") as page:
        await broker.create(source_spec("a/source"))
        await until(page, "journals", lambda seen: seen["total"] == 1)
        await broker.crash()
        document = await until(
            page,
            "cluster",
            lambda seen: any(
                "the broker does not answer" in one["reason"] for one in seen["verdicts"]
            ),
        )
        assert document["journals"] == 1
        member = (await until(page, "cluster", lambda seen: not seen["members"][0]["serves"]))[
            "members"
        ]
        assert "cannot connect" in member[0]["state"] or "refused" in member[0]["state"]


@pytest.mark.parametrize(("cap", "expired"), [(Capability.APPEND, False), (Capability.LIST, True)])
async def test_a_token_that_is_refused_is_a_sentence(
    etcd: Etcd, tmp_path: Path, console: Console, cap: Capability, expired: bool
) -> None:
    auth = KeyedAuth.parse(CLOCK, KEYS)
    token = auth.sign(Claims(cap, EVERYTHING), -60.0 if expired else 60.0)
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth) as broker:
        flags = (f"--broker.address={broker.endpoint}", f"--broker.auth-token={token}")
        async with console(*flags) as page:
            text = await page.error("cluster")
            assert (
                "token" in text.lower() or "expired" in text.lower() or "permi" in text.lower()
            ), text


async def test_changes_are_commands_of_gazctl_and_show_first_what_they_do(
    console: Console, broker: BrokerFixture
) -> None:
    await broker.create(source_spec("a/source"))
    await append(broker, frame("one", 1), journal="a/source")
    async with console(f"--broker.address={broker.endpoint}", "--allow-changes") as page:
        body = {"name": "a/source"}
        dry = (await page.http.post("/api/suspend", json=body)).json()
        assert dry["command"] == "gazctl journals suspend -l name=a/source --dry-run"
        assert (dry["code"], "would be suspended" in dry["output"]) == (0, True)
        made = (await page.http.post("/api/reset-head", json=body | {"dry_run": "no"})).json()
        assert "not needed" in made["output"]
        wrong = await page.http.post("/api/suspend", json={"name": "a,b=c"})
        assert (wrong.status_code, "name" in wrong.json()["error"]) == (400, True)
