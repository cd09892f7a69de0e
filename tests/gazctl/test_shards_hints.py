"""`gazctl shards hints`: the hints of shards, and what a recovery by them reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gazette.protocol.hints import FnodeSegments, FSMHints, Property, Segment, decode_hints
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.playback.player import Player
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import BlockingPool
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import LOGS, ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import append, frame, source_spec
from tests.gazctl.runner import Runner
from tests.gazctl.test_shards import Logs, segment

ONE = f"{LOGS}/shard-one"


@pytest.fixture
async def logs(broker: BrokerFixture, consumer: ConsumerFixture) -> Logs:
    await broker.create(source_spec("a/source"))
    return Logs(broker, consumer)


async def test_each_slot_is_a_row(gazctl: Runner, logs: Logs) -> None:
    """Logs have 1000 bytes. A recovery reads segments, and from the last one on to the end."""
    await logs.create("shard-one", hint_backups=2)
    await logs.create("shard-two", hint_backups=0)
    await logs.hint("shard-one", "primary", segment(1, 210, 220), segment(9, 850, 860))
    await logs.hint("shard-one", "backup.0")
    fork = segment(1, 410, 420, log=ONE)
    await logs.hint("shard-two", "primary", fork, segment(20, 150, 0))
    result = await gazctl.ok("shards", "hints")
    assert result.out.splitlines()[0].split() == [
        *("Shard", "Slot", "Log", "Files", "Segments", "Properties", "Size", "Begin", "Reads")
    ]
    assert result.err == ""
    rows = [" ".join(row) for row in result.rows]
    size = [len(FSMHints(ONE).to_json())]
    assert rows[1:] == [
        f"shard-one backup 0 {ONE} 0 0 0 {size[0]} B 0 1000 B",
        "shard-one backup 1 <none>",
        rows[3],
    ]
    assert rows[0].startswith(f"shard-one primary {ONE} 1 2 0 ")
    assert rows[0].endswith(" B 210 160 B")
    assert rows[3].startswith(f"shard-two primary {LOGS}/shard-two 1 2 0 ")
    assert rows[3].endswith(" B 150 860 B")
    selected = await gazctl.ok("shards", "hints", "-l", "id=shard-two")
    assert len(selected.rows) == 1
    assert (await gazctl.ok("shards", "hints", "-l", "id=none")).err == "no shard matches\n"


async def test_files_and_documents_have_all_that_hints_say(gazctl: Runner, logs: Logs) -> None:
    await logs.create("shard-one", hint_backups=1)
    own = Segment(7, 5, 300, 99, 8, 0)
    hints = FSMHints(
        ONE,
        (
            FnodeSegments(3, (segment(3, 100, 110, log=f"{LOGS}/other"), own)),
            FnodeSegments(6, (Segment(7, 6, 350, 98, 8, 0),)),
        ),
        (Property("/IDENTITY", "an identity"),),
    )
    spec = shard_spec("shard-one")
    await logs.consumer.etcd.put(spec.hint_primary_key, hints.to_json())
    files = await gazctl.ok("shards", "hints", "--files")
    assert files.rows == [
        ["shard-one", "primary", "3", "1", "3-3", "100-110", f"{LOGS}/other"],
        ["shard-one", "primary", "3", "7", "5-8", "300-", ONE],
        ["shard-one", "primary", "6", "7", "6-8", "350-", ONE],
        ["shard-one", "primary", "/IDENTITY", "property", ONE],
    ]
    (document,) = json.loads((await gazctl.ok("shards", "hints", "-o", "json")).out)
    assert yaml.safe_load((await gazctl.ok("shards", "hints", "-o", "yaml")).out) == [document]
    primary, backup = document["slots"]
    assert primary["hints"] == json.loads(hints.to_json())
    assert primary["hints_bytes"] == len(hints.to_json())
    assert primary["reads"] == [
        {"log": f"{LOGS}/other", "begin": 100, "end": 110},
        {"log": ONE, "begin": 300, "end": 1000},
    ]
    assert primary["read_bytes"] == 710
    assert backup == {"slot": "backup 0", "hints": None}


async def test_errors_of_one_shard_do_not_hide_others(gazctl: Runner, logs: Logs) -> None:
    """Damaged hints, hints that contradict themselves, a log that is not there, and a store elsewhere."""
    for name in ("shard-bad", "shard-good", "shard-odd"):
        await logs.create(name, hint_backups=0)
        await logs.hint(name, "primary", segment(1, 600, 610))
    await logs.consumer.etcd.put(shard_spec("shard-bad").hint_primary_key, b"{damaged")
    await logs.hint("shard-odd", "primary", segment(1, 600, 610), segment(2, 500, 510))
    await logs.consumer.update(
        shard_spec("shard-lost", "a/source", disable=True, hint_backups=0),
    )
    await logs.hint("shard-lost", "primary", segment(1, 600, 610))
    await logs.consumer.update(ShardSpec("shard-sql", max_txn_duration_ns=1, disable=True))
    result = await gazctl("shards", "hints")
    assert result.code == 1
    assert [(row[0], row[-1]) for row in result.rows] == [("shard-good", "B"), ("shard-lost", "?")]
    assert "shard-bad: GetHints: hints are damaged" in result.err
    assert "shard-odd: " in result.err
    assert f"{LOGS}/shard-lost: " in result.err
    assert "shard-sql: it has no recovery log" in result.err
    document = json.loads((await gazctl("shards", "hints", "-o", "json")).out)
    assert [one["shard"] for one in document if "error" in one] == ["shard-bad", "shard-odd"]
    slots = {one["shard"]: one.get("slots") for one in document}
    assert slots["shard-good"][0]["read_bytes"] == 400
    assert slots["shard-lost"][0]["read_bytes"] is None
    assert slots["shard-sql"] == []


async def hints_of(gazctl: Runner) -> list[Any]:
    """Return the slots of the one shard that have hints."""
    (document,) = json.loads((await gazctl.ok("shards", "hints", "-o", "json")).out)
    return [slot for slot in document["slots"] if slot["hints"]]


async def test_a_recovery_reads_as_many_bytes(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    """As the player counts, by the hints of each slot."""
    await broker.create(source_spec("a/source"), log_spec("shard-one"))
    spec = shard_spec("shard-one", "a/source")
    await consumer.create(spec)
    await append(broker, frame("one"), frame("two"), journal="a/source")
    await consumer.read_to_heads("shard-one")
    await gazctl.ok("shards", "unassign", "-l", "id=shard-one")
    while not await hints_of(gazctl):  # The promotion writes some.
        pass
    await append(broker, frame("three"), journal="a/source")
    await consumer.read_to_heads("shard-one")
    played = 0
    for slot in await hints_of(gazctl):
        hints = decode_hints(json.dumps(slot["hints"]).encode())
        pool = BlockingPool("play", 1)
        try:
            directory = tmp_path / slot["slot"]
            player = Player(hints, directory, broker.client, SystemClock(), pool)
            player.finish()
            await player.play()
        finally:
            pool.close()
        assert player.progress.bytes_read == slot["read_bytes"] > 0
        played += 1
    assert played
