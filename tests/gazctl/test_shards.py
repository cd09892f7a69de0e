"""What operators do to shards, on a member that counts words."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from gazette import Application, Envelope, Publisher
from gazette.client.append.appender import AppendParams
from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.gazctl.shards.recover import sole_use
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.protocol.hints import FnodeSegments, FSMHints, Segment
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.shard import ReplicaCode, ShardSource, ShardSpec
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import LOGS, ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import Tally, Word, append, frame, source_spec
from tests.gazctl.runner import Runner
from tests.gazctl.stored import store, stored

DAY_AGO = int(time.time()) - 86400  # noqa: TID251 - stores are in real time


def fail_on(word: str) -> Tally:
    def check(found: str) -> None:
        if found == word:
            raise ValueError(f"the word is {word}")

    return Tally(on_word=check)


async def member(
    etcd: Etcd, broker: BrokerFixture, gazctl: Runner, application: Any, tmp_path: Path
) -> ConsumerFixture:
    started = await ConsumerFixture.start(etcd, broker, application, tmp_path, lease_ttl_s=60.0)
    gazctl.environ["CONSUMER_ADDRESS"] = started.endpoint
    return started


async def test_shards_are_listed_with_their_status_lag_and_errors(
    etcd: Etcd, broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    consumer = await member(etcd, broker, gazctl, fail_on("poison"), tmp_path)
    try:
        await broker.create(
            source_spec("a/source"),
            source_spec("b/source"),
            *(log_spec(name) for name in ("shard-good", "shard-fails", "shard-off")),
        )
        labels = LabelSet.of(("team", "one"))
        later = ShardSpec(
            "shard-off",
            (ShardSource("a/source"),),
            LOGS,
            "/gazette/hints/test",
            max_txn_duration_ns=10**9,
            disable=True,
        )
        await consumer.create(
            shard_spec("shard-good", "a/source", labels=labels),
            shard_spec("shard-fails", "b/source"),
        )
        await consumer.update(later)
        await append(broker, frame("one"), journal="a/source")
        await append(broker, frame("poison"), journal="b/source")
        await consumer.await_failed("shard-fails")
        head = await append(broker, frame("two"), journal="b/source")
        assert head > 0

        # Case: a table; what failed is shown in full, with what to do.
        result = await gazctl.ok("shards", "list", "-pr", "--rf", "-L", "team")
        lines = result.out.splitlines()
        process = "local#consumer-one"
        assert lines[0].split() == ["ID", "Status", "Primary", "Replicas", "RF", "team"]
        assert lines[1].split() == [
            "shard-fails",
            "FAILED",
            process,
            f"{process}:FAILED",
            "1",
            "<none>",
        ]
        assert lines[3].split() == ["shard-off", "DISABLED", "<none>", "<none>", "0", "<none>"]
        assert "FAILED:" in result.out
        assert "shard-fails at local#consumer-one: " in result.out
        assert "the word is poison" in result.out
        assert "gazctl shards unassign --failed" in result.out

        # Case: the lag, where a member can tell.
        result = await gazctl.ok("shards", "list", "--lag", "-l", "id in (shard-fails, shard-off)")
        assert [row[:3] for row in result.rows[:2]] == [
            ["shard-fails", "FAILED", "?"],
            ["shard-off", "DISABLED", "?"],
        ]
        assert "Lag is unknown of:\n  shard-fails: " in result.out
        assert "  shard-off: it has no primary" in result.out

        # Case: YAML is what apply reads; JSON and the text of protocol buffers are the response.
        yaml = (await gazctl.ok("shards", "list", "-l", "id=shard-off", "-o", "yaml")).out
        assert "revision: " in yaml
        assert "1 put" in (await gazctl.ok("shards", "apply", stdin=yaml.encode())).err
        document = json.loads((await gazctl.ok("shards", "list", "-o", "json")).out)
        codes = {one["spec"]["id"]: one["status"] for one in document["shards"]}
        assert codes["shard-fails"][0]["code"] == "FAILED"
        text = (await gazctl.ok("shards", "list", "-o", "proto", "-l", "team=one")).out
        response = text_format.Parse(text, consumer_pb2.ListResponse())
        assert [one.spec.id for one in response.shards] == ["shard-good"]
        nothing = await gazctl.ok("shards", "list", "-l", "id=none")
        assert nothing.err == "no shard matches\n"

        # Case: shards that failed are restarted by being unassigned; a dry run only tells.
        unassign = ("shards", "unassign", "-l", "id", "--failed")
        dry = await gazctl.ok(*unassign, "--dry-run")
        assert (dry.out, dry.err) == ("shard-fails\n", "1 of 3 shards would be unassigned\n")
        before = consumer.assignments("shard-fails")[0].raw.create_revision
        result = await gazctl.ok(*unassign)
        assert (result.out, result.err) == ("shard-fails\n", "1 of 3 shards unassigned\n")
        await consumer.until(
            lambda: any(
                kv.raw.create_revision > before for kv in consumer.assignments("shard-fails")
            )
        )
        assert (await gazctl("shards", "unassign", "-l", "id=none")).code == 1
    finally:
        await consumer.crash()


async def test_the_lag_is_what_was_not_consumed(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner
) -> None:
    await broker.create(source_spec("a/source"), source_spec("b/source"), log_spec("shard-one"))
    head = await append(broker, frame("word"), journal="a/source")
    await append(broker, frame("word"), journal="b/source")
    # One source is read from an offset that it does not have yet: nothing before it is lag.
    sources = (ShardSource("a/source"), ShardSource("b/source", min_offset=10_000))
    await consumer.create(shard_spec("shard-one", sources=sources))
    await consumer.read_through("shard-one", {"a/source": head})
    result = await gazctl.ok("shards", "list", "--lag")
    assert "a/source:0 B,b/source:0 B" in result.out


SHARDS = """
common:
  recovery_log_prefix: recovery/test
  hint_prefix: /gazette/hints/test
  max_txn_duration: 1s
  disable: true
shards:
- id: shard-one
  sources: [{journal: a/source}]
- id: shard-two
  sources: [{journal: a/source}]
"""


async def test_specifications_are_applied_if_their_journals_are_as_needed(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner
) -> None:
    apply = ("shards", "apply")
    await broker.create(
        journal_spec("a/source"), journal_spec(f"{LOGS}/shard-one"), log_spec("shard-two")
    )

    # Case: everything that is wrong is reported, and nothing is applied.
    result = await gazctl(
        *apply,
        stdin=SHARDS.replace("a/source}]\n- id: shard-two", "a/none}]\n- id: shard-two").encode(),
    )
    assert result.code == 2
    assert "shard-one: its source a/none does not exist" in result.err
    assert f"shard-one: {LOGS}/shard-one is not labeled as a recovery log" in result.err
    assert "shard-two: messages of its source a/source cannot be decoded" in result.err
    assert "--verify=false" in result.err
    assert (await consumer.shards.list_shards()).shards == ()

    # Case: a dry run checks as well, unless a flag forbids it.
    assert (await gazctl(*apply, "--dry-run", stdin=SHARDS.encode())).code == 2
    dry = await gazctl.ok(*apply, "--dry-run", "--verify=false", stdin=SHARDS.encode())
    request = text_format.Parse(dry.out, consumer_pb2.ApplyRequest())
    assert [change.upsert.id for change in request.changes] == ["shard-one", "shard-two"]
    assert (await consumer.shards.list_shards()).shards == ()

    # Case: as needed.
    labels = {"a/source": CONTENT_JSON_LINES, f"{LOGS}/shard-one": CONTENT_RECOVERY_LOG}
    for name, content_type in labels.items():
        spec = journal_spec(name, labels=LabelSet.of((CONTENT_TYPE, content_type)))
        yaml = (await gazctl.ok("journals", "list", "-l", f"name={name}", "-o", "yaml")).out
        text = yaml + f"labels: [{{name: content-type, value: {content_type}}}]\n"
        await gazctl.ok("journals", "apply", stdin=text.encode())
        assert (await broker.client.get_journal(name)).spec == spec
    assert "2 put" in (await gazctl.ok(*apply, stdin=SHARDS.encode())).err

    # Case: they exist now; the table says which member has which.
    result = await gazctl(*apply, stdin=SHARDS.encode())
    assert result.code == 1
    assert "shard-two is at revision" in result.err

    # Case: edited, with the same checks.
    script = (
        "import sys,pathlib as p; f=p.Path(sys.argv[1]); f.write_text(f.read_text().replace({!r}))"
    )
    for old, new, code, text in (
        ("'1s', '2s'", "", 0, "2 put"),
        ("'a/source', 'a/other'", "", 2, "its source a/other does not exist"),
    ):
        program = script.replace("{!r}", old) + new
        path = Path("editor.py")
        path.write_text(program)
        result = await gazctl(
            "shards", "edit", "-l", "id", GAZ_EDITOR=f"{sys.executable} {path.absolute()}"
        )
        assert (result.code, text in result.err) == (code, True), result
    for shard in (await consumer.shards.list_shards()).shards:
        assert shard.spec.max_txn_duration_ns == 2 * 10**9

    # Case: deleted.
    listed = (await gazctl.ok("shards", "list", "-o", "yaml")).out
    delete = listed.replace("- id:", "- delete: true\n  id:")
    assert "2 deleted" in (await gazctl.ok(*apply, stdin=delete.encode())).err
    assert (await consumer.shards.list_shards()).shards == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SHARDS.replace("disable", "dissable"), "unknown field dissable"),
        (SHARDS.replace("max_txn_duration: 1s", ""), "shard-one: invalid MaxTxnDuration"),
        (SHARDS.replace("shard-two", "shard-one"), "expected Shards to be ordered"),
        (SHARDS + "  delete: true\n", "cannot delete shard-two: it has no revision"),
        ("shards: [", "not YAML"),
    ],
)
async def test_what_is_wrong_with_specifications_is_named(text: str, problem: str) -> None:
    result = await Runner({})("shards", "apply", stdin=text.encode())
    assert result.code == 2
    assert problem in result.err


class Words(Application[SQLiteStore]):
    """Counts words in SQLite."""

    message_type = Word

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(
            recorder, "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"
        )

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        store.execute(
            "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1",
            (envelope.message.word,),
        ).fetchall()


@pytest.fixture
async def words(
    etcd: Etcd, broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> AsyncIterator[ConsumerFixture]:
    consumer = await member(etcd, broker, gazctl, Words(), tmp_path)
    yield consumer
    await consumer.crash()


def counts(directory: Path) -> list[tuple[str, int]]:
    """Return what stock SQLite finds."""
    connection = sqlite3.connect(directory / "primary.db")
    try:
        return connection.execute("SELECT word, n FROM counts ORDER BY word").fetchall()
    finally:
        connection.close()


async def test_a_shard_is_recovered_into_a_directory(
    broker: BrokerFixture, words: ConsumerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    await broker.create(source_spec("a/source"), log_spec("shard-one"))
    await words.create(shard_spec("shard-one", "a/source"))
    first = await append(broker, frame("one"), frame("two"), frame("one"), journal="a/source")
    await words.read_to_heads("shard-one")

    # Case: into a directory that is made; the database is a plain one.
    target = tmp_path / "some" / "where"
    recover = ("shards", "recover", "--id", "shard-one", "--dir")
    result = await gazctl.ok(*recover, target)
    assert [row[0] for row in result.rows] == ["primary.db"]
    assert "primary.db is a SQLite database" in result.err
    assert counts(target) == [("one", 2), ("two", 1)]

    # Case: another recovery into the directory, which would mix the files of both.
    with sole_use(target):
        result = await gazctl(*recover, target, "--force")
    assert (result.code, "another recovery writes to" in result.err) == (1, True), result
    assert counts(target) == [("one", 2), ("two", 1)]

    # Case: the shard goes on, undisturbed.
    await append(broker, frame("three"), journal="a/source")
    await words.read_to_heads("shard-one")
    assert words.status_of("shard-one").code is ReplicaCode.PRIMARY  # type: ignore[union-attr]

    # Case: a directory that is not empty is left as it is, unless it may be replaced.
    (target / "mine").write_text("mine")
    (target / "sub").mkdir()
    result = await gazctl(*recover, target)
    assert result.code == 2
    assert "is not empty" in result.err
    assert (target / "mine").read_text() == "mine"
    assert counts(target) == [("one", 2), ("two", 1)]
    await gazctl.ok(*recover, target, "--force")
    assert os.listdir(target) == ["primary.db"]
    assert counts(target) == [("one", 2), ("three", 1), ("two", 1)]

    # Case: the state of the past, by a checkpoint, by a time, and by an offset of the log.
    for at in (f"a/source={first}", f"a/source={first},an/other=0"):
        result = await gazctl.ok(*recover, tmp_path / "past", "--force", "--at", at)
        assert "the state at offset" in result.err
        assert counts(tmp_path / "past") == [("one", 2), ("two", 1)]
    result = await gazctl.ok(*recover, tmp_path / "now", "--at", "2100-01-01T00:00:00Z")
    assert counts(tmp_path / "now") == [("one", 2), ("three", 1), ("two", 1)]
    result = await gazctl.ok(*recover, tmp_path / "nothing", "--at", "1")
    for wrong in (("--at", "soon"), ("--at", "5", "--backup", "0")):
        result = await gazctl(*recover, tmp_path / "wrong", *wrong)
        assert (result.code, "--at" in result.err) == (2, True)

    # Case: a recovery that fails leaves what was there, also with --force.
    lost = FSMHints(f"{LOGS}/shard-one", (FnodeSegments(1, (Segment(1, 1, 10**9, 0, 1),)),))
    spec = shard_spec("shard-one", "a/source")
    await words.etcd.put(spec.hint_primary_key, lost.to_json())
    result = await gazctl(*recover, target, "--force")
    assert result.code == 1
    assert "data was lost" in result.err
    assert counts(target) == [("one", 2), ("three", 1), ("two", 1)]

    # Case: by another backup of the hints; which there is not, too.
    empty = FSMHints(f"{LOGS}/shard-one")
    await words.etcd.put(spec.hint_backup_keys[1], empty.to_json())
    await gazctl.ok(*recover, target, "--force", "--backup", "1")
    assert counts(target) == [("one", 2), ("three", 1), ("two", 1)]
    result = await gazctl(*recover, tmp_path / "none", "--backup", "7")
    assert (result.code, "no such backup" in result.err) == (1, True)

    # Case: there is no such shard, or it has no log.
    result = await gazctl("shards", "recover", "--id", "shard-none", "-d", tmp_path / "none")
    assert (result.code, "shard not found" in result.err) == (1, True)
    result = await gazctl(*recover, Path(__file__))
    assert (result.code, "cannot use" in result.err) == (2, True)


async def test_a_log_without_hints_is_recovered_only_if_it_is_all_there(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    """A pruned log would otherwise play back to nothing."""
    store(broker, f"{LOGS}/shard-one", b"x" * 100, begin=1000, mod_time=DAY_AGO)
    await broker.create(source_spec("a/source"), log_spec("shard-one"))
    await consumer.update(shard_spec("shard-one", "a/source", disable=True))
    result = await gazctl("shards", "recover", "--id", "shard-one", "-d", tmp_path / "out")
    assert result.code == 1
    assert "the shard has no hints, and its recovery log was pruned" in result.err

    await consumer.update(ShardSpec("shard-two", max_txn_duration_ns=1, disable=True))
    result = await gazctl("shards", "recover", "--id", "shard-two", "-d", tmp_path / "out")
    assert (result.code, "has no recovery log" in result.err) == (2, True)


class Logs:
    """Shards that are disabled, with recovery logs and hints of the test's making."""

    def __init__(self, broker: BrokerFixture, consumer: ConsumerFixture) -> None:
        self.broker, self.consumer = broker, consumer

    async def create(self, shard_id: str, *, hint_backups: int = 1, **fields: Any) -> None:
        """Create a shard whose log has ten fragments of 100 bytes."""
        for begin in range(0, 1000, 100):
            content = f"{shard_id} {begin}".encode().ljust(100)
            store(self.broker, f"{LOGS}/{shard_id}", content, begin=begin, mod_time=DAY_AGO)
        await self.broker.create(log_spec(shard_id, **fields))
        await self.consumer.update(
            shard_spec(shard_id, "a/source", disable=True, hint_backups=hint_backups)
        )

    async def hint(self, shard_id: str, slot: str, *segments: Segment) -> None:
        hints = FSMHints(
            f"{LOGS}/{shard_id}",
            (FnodeSegments(segments[0].first_seq_no, segments),) if segments else (),
        )
        key = f"{shard_spec(shard_id).hint_prefix}/{shard_id}.{slot}"
        await self.consumer.etcd.put(key, hints.to_json())

    def begins(self, shard_id: str) -> list[int]:
        """Return the begins of the fragments that a log still has."""
        names = [Path(path) for path in stored(self.broker)]
        log = Path(LOGS, shard_id)
        return sorted(int(path.name[:16], 16) for path in names if path.parent == log)


@pytest.fixture
def logs(broker: BrokerFixture, consumer: ConsumerFixture) -> Iterator[Logs]:
    return Logs(broker, consumer)  # type: ignore[return-value]


def segment(seq: int, begin: int, end: int, log: str = "") -> Segment:
    return Segment(1, seq, begin, 0, seq, end, log)


async def test_fragments_that_no_shard_needs_are_pruned(gazctl: Runner, logs: Logs) -> None:
    """Hints of all shards count, whatever was selected, and whatever slot they are in."""
    await logs.broker.create(source_spec("a/source"))
    for shard_id in ("shard-one", "shard-fork", "shard-new", "shard-empty"):
        await logs.create(shard_id)
    await logs.hint("shard-one", "primary", segment(1, 210, 220), segment(9, 850, 860))
    await logs.hint("shard-one", "backup.0", segment(1, 210, 220), segment(5, 610, 620))
    # The fork needs a part of the log that it came from; and it was not selected.
    source = f"{LOGS}/shard-one"
    fork = (segment(1, 410, 420, log=source), segment(20, 150, 0))
    await logs.hint("shard-fork", "primary", *fork)
    await logs.hint("shard-fork", "backup.0", *fork)
    await logs.hint("shard-new", "primary", segment(1, 910, 920))
    await logs.hint("shard-empty", "primary", segment(1, 910, 920))
    await logs.hint("shard-empty", "backup.0")
    everything = stored(logs.broker)

    # Case: a dry run removes nothing.
    one = ("shards", "prune", "-l", "id=shard-one")
    dry = await gazctl.ok(*one, "--dry-run")
    assert "4 fragments would be removed" in dry.err
    assert stored(logs.broker) == everything

    # Case: [200, 300) and [600, …) are needed by the shard, [400, 500) by its fork.
    result = await gazctl.ok(*one)
    assert "removed 4 fragments" in result.err
    assert logs.begins("shard-one") == [200, 400, 600, 700, 800, 900]
    assert logs.begins("shard-fork") == list(range(0, 1000, 100))

    # Case: logs whose shards lack hints are left alone, and that is reported.
    result = await gazctl.ok("shards", "prune", "-l", "id")
    assert "skipped: shard shard-new has no hints yet in slot backup 0" in result.out
    assert "skipped: shard shard-empty has hints without files in slot backup 0" in result.out
    assert logs.begins("shard-fork") == list(range(100, 1000, 100))
    assert logs.begins("shard-new") == logs.begins("shard-empty") == list(range(0, 1000, 100))
    assert (await gazctl("shards", "prune", "-l", "id=none")).code == 1


async def test_nothing_is_pruned_when_hints_cannot_be_trusted(gazctl: Runner, logs: Logs) -> None:
    await logs.broker.create(source_spec("a/source"))
    for shard_id in ("shard-one", "shard-two"):
        await logs.create(shard_id, hint_backups=0)
        await logs.hint(shard_id, "primary", segment(1, 510, 520))
    everything = stored(logs.broker)
    prune = ("shards", "prune", "-l", "id=shard-one")

    # Case: hints of another shard are damaged: they may need any log.
    key = shard_spec("shard-two").hint_primary_key
    await logs.consumer.etcd.put(key, b"{damaged")
    result = await gazctl(*prune)
    assert result.code == 1
    assert "cannot read hints of shard shard-two" in result.err
    assert "Nothing was removed" in result.err
    assert stored(logs.broker) == everything

    # Case: hints name what the log does not have.
    await logs.hint("shard-two", "primary", segment(1, 510, 520), segment(9, 5000, 5010))
    result = await gazctl("shards", "prune", "-l", "id")
    assert result.code == 1
    assert "fragments of the log end before what hints need" in result.err
    assert stored(logs.broker) == everything


async def test_logs_are_not_pruned_that_brokers_may_not_see_in_full(
    gazctl: Runner, logs: Logs
) -> None:
    await logs.broker.create(source_spec("a/source"))
    prune = ("shards", "prune", "-l", "id=shard-one")

    # Case: a store of the log is unhealthy, which is a failure.
    stores = ("file:///fragments/", "file:///missing/")
    await logs.create("shard-one", hint_backups=0, length=1024)
    await logs.hint("shard-one", "primary", segment(1, 510, 520))
    listed = await logs.broker.client.get_journal(f"{LOGS}/shard-one")
    yaml = (await gazctl.ok("journals", "list", "-l", f"name={LOGS}/shard-one", "-o", "yaml")).out
    both = yaml.replace(
        "  - file:///fragments/", "".join(f"  - {url}\n" for url in stores).rstrip()
    )
    await gazctl.ok("journals", "apply", stdin=both.encode())
    everything = stored(logs.broker)
    result = await gazctl(*prune)
    assert result.code == 1
    assert "skipped: file:///missing/ is unhealthy" in result.out
    assert stored(logs.broker) == everything

    # Case: it is not a recovery log, by its label.
    again = (await gazctl.ok("journals", "list", "-l", f"name={LOGS}/shard-one", "-o", "yaml")).out
    plain = again.replace("  - file:///missing/\n", "").replace(CONTENT_RECOVERY_LOG, "text/csv")
    await gazctl.ok("journals", "apply", stdin=plain.encode())
    assert "skipped: label content-type is not" in (await gazctl.ok(*prune)).out
    assert stored(logs.broker) == everything
    assert listed.spec.name == f"{LOGS}/shard-one"

    # Case: a fragment that is not needed is not persisted, as far as brokers know.
    labeled = plain.replace("text/csv", CONTENT_RECOVERY_LOG)
    head, _, _ = labeled.partition("revision:")
    await gazctl.ok("journals", "apply", stdin=f"{head}revision: -1\n".encode())
    await logs.broker.settled(f"{LOGS}/shard-one")
    params = AppendParams(f"{LOGS}/shard-one", offset=1000)
    await logs.broker.client.append(params, b"x" * 1100)
    await logs.broker.client.append(AppendParams(f"{LOGS}/shard-one"), b"next")
    await logs.hint("shard-one", "primary", segment(1, 110, 120), segment(9, 2100, 2104))
    result = await gazctl.ok(*prune)
    assert "is not needed, but not persisted either" in result.out
    assert logs.begins("shard-one")[:10] == list(range(0, 1000, 100))

    # Case: it is needed, so that others may go.
    await logs.hint("shard-one", "primary", segment(1, 110, 120), segment(9, 2000, 2104))
    result = await gazctl.ok(*prune)
    assert "removed 9 fragments" in result.err, result
    assert logs.begins("shard-one")[:1] == [100]


async def test_a_shard_that_is_gone_is_reported(consumer: ConsumerFixture, gazctl: Runner) -> None:
    change = ShardChange(upsert=ShardSpec("shard-one", max_txn_duration_ns=1, disable=True))
    await consumer.shards.apply_shards([change])
    result = await gazctl.ok("shards", "prune", "-l", "id=shard-one")
    assert "removed 0 fragments" in result.err


async def test_apply_waits_until_shards_are_served(
    etcd: Etcd, broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    apply = ("shards", "apply", "--wait")
    consumer = await member(etcd, broker, gazctl, fail_on("poison"), tmp_path)
    try:
        await broker.create(source_spec("a/source"), log_spec("shard-one"), log_spec("shard-two"))
        enabled = SHARDS.replace("  disable: true\n", "")
        await gazctl.ok(*apply, stdin=enabled.encode())
        listed = (await consumer.shards.list_shards()).shards
        codes = {one.spec.id: [status.code for status in one.status] for one in listed}
        assert codes["shard-one"] == [ReplicaCode.PRIMARY]

        # Case: one more member than there is.
        standby = enabled.replace(
            "id: shard-one", "id: shard-one\n  revision: -1\n  hot_standbys: 1"
        )
        standby = standby.replace("id: shard-two", "id: shard-two\n  revision: -1")
        result = await gazctl(*apply, "--timeout=1s", stdin=standby.encode())
        assert result.code == 1
        assert "after 1 s, members do not serve 1 shard, such as shard-one (PRIMARY)" in result.err

        # Case: a shard that has failed ends the wait, long before the timeout.
        await append(broker, frame("poison"), journal="a/source")
        await consumer.await_failed("shard-two")
        result = await gazctl(*apply, "--timeout=10m", stdin=standby.encode())
        assert result.code == 1
        assert "the word is poison" in result.err
        assert "unassign --failed" in result.err
    finally:
        await consumer.crash()
