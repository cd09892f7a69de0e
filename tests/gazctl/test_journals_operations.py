"""What operators do to journals: fragments, prune, reset-head, suspend, store-health."""

from __future__ import annotations

import json
import random
import re
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from google.protobuf import text_format

from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Corrupt, Unavailable
from gazette.gazctl.context import Context
from gazette.gazctl.journals.fragment_removal import blob_stores
from gazette.gazctl.journals.fragments import holes
from gazette.gazctl.settings import prepare
from gazette.labels import CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.protocol.fragment import Fragment
from gazette.protocol.journal import JournalSpec, Suspend, SuspendLevel
from gazette.protocol.journal_tree import JournalNode
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.text import duration
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import STORE, BrokerFixture, journal_spec
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.gazctl.runner import Runner, Streams
from tests.gazctl.stored import path_of, store, stored
from tests.support.instant_clock import breathe

NOW = int(time.time())  # noqa: TID251 - stores and brokers are in real time
DAY = 86400


def spec_with(
    name: str, *, retention_s: int = 0, template: str = "", **fields: object
) -> JournalSpec:
    spec = journal_spec(name, **fields)  # type: ignore[arg-type]
    fragment = replace(
        spec.fragment,
        retention_ns=retention_s * duration.SECOND,
        path_postfix_template=template,
    )
    return replace(spec, fragment=fragment)


async def test_fragments_are_listed(broker: BrokerFixture, gazctl: Runner, tmp_path: Path) -> None:
    old = store(broker, "a/one", b"old", begin=0, mod_time=NOW - 3 * DAY)
    new = store(broker, "a/one", b"newer", begin=3, mod_time=NOW - 60)
    await broker.create(journal_spec("a/one"), journal_spec("a/empty"))
    await broker.client.append(AppendParams("a/one", offset=8), b"local")
    suspended = journal_spec("a/suspended", suspend=Suspend(SuspendLevel.FULL, 10))
    await broker.client.apply_journals([JournalChange(upsert=suspended)])

    # Case: a table, with what is not persisted.
    result = await gazctl.ok("journals", "fragments")
    rows = result.rows
    assert [row[:4] for row in rows] == [
        ["a/one", "0", "3", "B"],
        ["a/one", "3", "5", "B"],
        ["a/one", "8", "5", "B"],
    ]
    assert "(3d ago)" in result.out
    assert re.search(r"\(\d+m ago\)", result.out)
    assert "<not persisted>" in result.out.splitlines()[3]
    assert rows[0][-2:] == [old.sum.hex()[:12] + "...", "NONE"]

    # Case: JSON, one object on each line, within times (both inclusive).
    async def listed(*argv: str) -> list[int]:
        out = (await gazctl.ok("journals", "fragments", "-o", "json", *argv)).out
        return [json.loads(line)["spec"]["begin"] for line in out.splitlines()]

    assert await listed() == [0, 3, 8]
    assert await listed("--from", "24h") == [3, 8]
    assert await listed("--from", str(old.mod_time), "--to", str(old.mod_time)) == [0]
    assert await listed("--to", "2h") == [0]
    out = (await gazctl.ok("journals", "fragments", "-o", "json", "--from", "24h")).out
    first = json.loads(out.splitlines()[0])
    text = (await gazctl.ok("journals", "fragments", "-o", "yaml", "--from", "24h")).out
    assert yaml.safe_load(text) == [json.loads(line) for line in out.splitlines()]
    assert first == {
        "spec": {
            "journal": "a/one",
            "begin": 3,
            "end": 8,
            "sha1": new.sum.hex(),
            "compression_codec": "NONE",
            "backing_store": "file:///fragments/",
            "mod_time": new.mod_time,
            "path_postfix": "",
        },
        "path": new.content_path(),
        "signed_url": "",
    }

    # Case: signed URLs, and the text of protocol buffers.
    out = (await gazctl.ok("journals", "fragments", "-o", "json", "--url-ttl", "1m")).out
    urls = [json.loads(line)["signed_url"] for line in out.splitlines()]
    assert urls[0].startswith("file:///")
    assert urls[2] == ""
    root = broker.file_root
    with urllib.request.urlopen("file://" + str(root) + urls[1].removeprefix("file://")) as file:
        assert file.read() == b"newer"
    assert "URL" in (await gazctl.ok("journals", "fragments", "--url-ttl", "1m")).out
    text = (await gazctl.ok("journals", "fragments", "-o", "proto")).out
    response = text_format.Parse(text, broker_pb2.FragmentsResponse())
    assert [one.spec.begin for one in response.fragments] == [0, 3, 8]

    # Case: a journal that refuses is reported, the others are listed.
    await broker.create(journal_spec("a/write-only", flags=2))
    result = await gazctl("journals", "fragments")
    assert (result.code, len(result.rows)) == (1, 3)
    assert "a/write-only: the journal's flags" in result.err


async def test_fragments_in_conflict_are_named(broker: BrokerFixture, gazctl: Runner) -> None:
    """The one that is hidden as well: nothing else shows that there are two histories."""
    names = [
        store(broker, "a/one", content, begin=0, mod_time=NOW - DAY).content_name()
        for content in (b"one", b"two")
    ]
    store(broker, "a/one", b"both", begin=3, mod_time=NOW - DAY)
    await broker.create(journal_spec("a/one"))
    result = await gazctl.ok("journals", "fragments")
    assert [row[1:3] for row in result.rows] == [["0", "3"], ["3", "4"]]
    assert "a/one: conflict: " in result.err
    assert "hold different bytes at the same offsets" in result.err
    assert all(name in result.err for name in names)
    lines = (await gazctl.ok("journals", "fragments", "-o", "json")).out.splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["conflicts_with"][0] in names
    assert "conflicts_with" not in second


async def test_fragments_past_their_retention_are_pruned(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    old = store(broker, "a/one", b"0123456789", begin=0, mod_time=NOW - 3 * DAY)
    older = store(broker, "a/one", b"345", begin=3, mod_time=NOW - 4 * DAY)  # covered by `old`
    young_within = store(broker, "a/one", b"6", begin=6, mod_time=NOW - 60)  # covered, and young
    young = store(broker, "a/one", b"abc", begin=10, mod_time=NOW - 60)
    # Journals below another, and what is in none.
    nested = store(broker, "a/one/nested", b"nested", begin=0, mod_time=NOW - 9 * DAY)
    postfixed = store(
        broker, "a/one", b"xyz", begin=13, mod_time=NOW - 3 * DAY, postfix="date=2020-01-01"
    )
    stranger = store(broker, "a/one", b"y", begin=2, mod_time=NOW - 9 * DAY, postfix="elsewhere")
    kept = store(broker, "a/forever", b"kept", begin=0, mod_time=NOW - 99 * DAY)
    log = store(broker, "a/log", b"log", begin=0, mod_time=NOW - 99 * DAY)
    logs = LabelSet.of((CONTENT_TYPE, CONTENT_RECOVERY_LOG))
    await broker.create(
        spec_with("a/one", retention_s=DAY),
        spec_with("a/one/nested"),
        spec_with("a/forever"),
        spec_with("a/log", retention_s=DAY, labels=logs),
    )
    await broker.client.append(AppendParams("a/one", offset=16), b"local")
    everything = stored(broker)

    # Case: a dry run tells, and removes nothing.
    prune = ("journals", "prune", "-l", "name:prefix=a/")
    dry = await gazctl.ok(*prune, "--dry-run")
    assert "3 fragments would be removed" in dry.err
    assert stored(broker) == everything
    assert "a/forever" in dry.out
    assert "skipped: it has no retention" in dry.out
    assert "skipped: a recovery log is pruned by `gazctl shards prune`" in dry.out

    # Case: those that are past it go, with the duplicates that only they hid; all else stays.
    result = await gazctl.ok(*prune)
    assert "removed 3 fragments" in result.err
    gone = {one.content_path() for one in (old, older, postfixed)}
    stays = {one.content_path() for one in (young_within, young, nested, stranger, kept, log)}
    assert everything - stored(broker) == gone
    assert stays <= stored(broker)

    # Case: there is nothing more; brokers may not know yet, and that does no harm.
    again = await gazctl.ok(*prune)
    assert everything - stored(broker) == gone
    assert again.code == 0

    # Case: nothing matches.
    assert (await gazctl("journals", "prune", "-l", "name=none")).code == 1


async def test_pruning_needs_stores_that_can_be_used(broker: BrokerFixture, gazctl: Runner) -> None:
    old = store(broker, "a/one", b"old", begin=0, mod_time=NOW - 3 * DAY)
    await broker.create(spec_with("a/one", retention_s=DAY))
    prune = ("journals", "prune", "-l", "name=a/one")

    # Case: without the directory of file:// stores.
    result = await gazctl(*prune, BROKER_FILE_ROOT="")
    assert result.code == 2
    assert "--broker.file-root" in result.err

    # Case: what cannot be removed is reported, and is a failure.
    path = path_of(broker, old)
    path.unlink()
    path.mkdir()
    result = await gazctl(*prune)
    assert result.code == 1
    assert f"failed: file:///fragments/{old.content_path()}" in result.err
    assert "removed 0 fragments" in result.err


async def test_a_store_that_hangs_is_named(tmp_path: Path) -> None:
    """No call of it has a deadline of its own: a file may be on a mount that does not answer."""
    streams, clock, go_on = Streams(), ManualClock(), threading.Event()
    argv = ["journals", "prune", "-l", "name=a", f"--broker.file-root={tmp_path}"]
    prepared = prepare(argv, {}, streams.terminal)
    assert not isinstance(prepared, int)
    context = Context(prepared[1], {}, streams.terminal, clock, random.Random())
    async with blob_stores(context) as stores, TaskScope("test") as scope:

        async def hang() -> None:
            with raises(Unavailable, store="file:///", says="a call has not returned for 60 s"):
                await stores.get("file:///").calls.run(go_on.wait, 30)

        call = scope.spawn(hang(), name="call")
        while not call.done():
            clock.advance(1.0)
            await breathe()
        go_on.set()


async def test_a_negative_retention_removes_nothing(broker: BrokerFixture, gazctl: Runner) -> None:
    """Brokers take it, as those of the original do. It would make all fragments old."""
    store(broker, "a/one", b"precious", begin=0, mod_time=NOW)
    spec = spec_with("a/one", retention_s=-DAY)
    tree = JournalNode.of([(spec, 0)]).to_yaml()
    result = await gazctl("journals", "apply", stdin=tree.encode())
    assert (result.code, "invalid Retention (-24h0m0s" in result.err) == (2, True), result
    await broker.create(spec)
    result = await gazctl("journals", "prune", "-l", "name=a/one")
    assert (result.code, "its retention is negative" in result.out) == (1, True), result


async def test_the_head_of_a_journal_that_lost_its_brokers_is_reset(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    # What the brokers of before had persisted.
    store(broker, "a/lost", b"what is left of it", begin=8, mod_time=NOW)
    await broker.create(journal_spec("a/lost"), journal_spec("a/well"), journal_spec("a/empty"))
    await broker.client.append(AppendParams("a/well"), b"well")
    suspended = journal_spec("a/suspended", suspend=Suspend(SuspendLevel.FULL, 10))
    await broker.client.apply_journals([JournalChange(upsert=suspended)])
    with raises(Corrupt, journal="a/lost", status="INDEX_HAS_GREATER_OFFSET"):
        await broker.client.append(AppendParams("a/lost"), b"more")

    # Case: nothing is moved by looking.
    result = await gazctl.ok("journals", "reset-head", "-l", "name=a/lost", "--dry-run")
    assert result.rows[0][:5] == ["a/lost", "26", "would", "be", "reset,"]
    assert "beyond what its brokers know" in result.out
    result = await gazctl.ok("journals", "reset-head", "-l", "name=a/well", "--dry-run")
    assert result.rows == [["a/well", "4", "not", "needed:", "it", "takes", "appends"]]
    with raises(Corrupt, journal="a/lost", status="INDEX_HAS_GREATER_OFFSET"):
        await broker.client.append(AppendParams("a/lost"), b"more")

    result = await gazctl.ok("journals", "reset-head", "-l", "name:prefix=a/")
    assert result.rows == [
        ["a/empty", "0", "empty:", "the", "journal", "has", "no", "fragments", "to", "reset", "to"],
        ["a/lost", "26", "reset"],
        ["a/suspended", "?", "skipped:", "it", "is", "fully", "suspended"],
        ["a/well", "4", "not", "needed:", "it", "takes", "appends"],
    ]
    appended = await broker.client.append(AppendParams("a/lost"), b"more")
    assert (appended.commit.begin, appended.commit.end) == (26, 30)
    assert (await broker.client.get_journal("a/suspended")).spec.suspend == suspended.suspend

    # Case: a journal that refuses is reported.
    await broker.create(journal_spec("a/write-only", flags=2))
    result = await gazctl("journals", "reset-head", "-l", "name=a/write-only")
    assert result.code == 1
    assert "failed:" in result.out


async def test_unexplained_fragments_are_decided(
    broker: BrokerFixture, gazctl: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    day = '{{ .Spool.FirstAppendTime.Format "2006/01/02" }}'
    store(broker, "a/dated", b"own", begin=0, mod_time=NOW - DAY, postfix="2025/06/01")
    store(broker, "a/dated", b"of another", begin=3, mod_time=NOW - DAY, postfix="else, where")
    await broker.create(journal_spec("a/dated"), journal_spec("a/well"))
    decide = ("journals", "decide-fragments", "-l", "name:prefix=a/")

    async def undecided() -> str:
        """Return what is undecided once brokers have listed; empty if nothing is."""
        result = await gazctl(*decide)
        assert "explained" in result.out.splitlines()[2]
        return "" if result.code == 0 else result.out

    assert "2025/06/01" in await undecided()
    # Case: nothing is decided by a dry run.
    result = await gazctl.ok(*decide, "--former-template", day, "--dry-run")
    assert [row[0] for row in result.rows] == ["a/dated", "a/well"]
    assert "2025/06/01" in await undecided()
    await gazctl.ok(*decide, "--former-template", day)
    while "2025/06/01" in (left := await undecided()):
        await SystemClock().sleep(0.05)
    assert "else, where" in left
    await gazctl.ok(*decide, "--foreign", ".")
    while await undecided():
        await SystemClock().sleep(0.05)
    assert "known" in (await gazctl.ok(*decide, "--foreign", ".")).out
    rows = (await gazctl.ok("journals", "fragments", "-l", "name=a/dated")).rows
    assert [row[1:3] for row in rows] == [["0", "3"]]
    for template in ("{{ .Bogus", "{{ range .Labels }}x{{ end }}"):
        assert (await gazctl(*decide, "--former-template", template)).code != 0


async def test_problems_of_journals_are_listed(
    broker: BrokerFixture, gazctl: Runner, etcd: Etcd, tmp_path: Path
) -> None:
    """Whichever broker serves them: of stores that refuse, and of fragments that nothing explains."""
    store(broker, "a/dated", b"whose?", begin=0, mod_time=NOW - DAY, postfix="2025/06/01")
    (broker.file_root / "fragments" / "b").write_bytes(b"a file in the place of a directory")
    await broker.create(journal_spec("a/dated"), journal_spec("b/refused"), journal_spec("c/well"))
    await broker.client.append(AppendParams("b/refused"), b"content")

    async def problems(*argv: str) -> dict[str, str]:
        result = await gazctl.ok("journals", "list", *argv)
        return dict(line.split(": ", 1) for line in result.err.splitlines() if ": " in line)

    while len(found := await problems()) < 2:
        await SystemClock().sleep(0.05)
    assert sorted(found) == ["a/dated", "b/refused"]
    assert "2025/06/01" in found["a/dated"]
    assert "Not a directory" in found["b/refused"]
    assert list(await problems("-l", "name:prefix=b/")) == ["b/refused"]
    assert await problems("-l", "name=c/well") == {}
    # Case: the broker that is asked serves none of them.
    async with await BrokerFixture.start(etcd, tmp_path, id="broker-two") as other:
        address = f"--broker.address={other.endpoint}"
        assert sorted(await problems(address)) == ["a/dated", "b/refused"]
        result = await gazctl("journals", "store-health", STORE, address)
        assert result.code == 1
        assert "b/refused" in result.out
    (broker.file_root / "fragments" / "b").unlink()


async def test_offsets_that_no_fragment_has_are_named(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    store(broker, "a/holed", b"before", begin=8, mod_time=NOW)
    store(broker, "a/holed", b"behind", begin=1040, mod_time=NOW)
    await broker.create(journal_spec("a/holed"))
    for command in ("fragments", "reset-head"):
        result = await gazctl.ok("journals", command, "-l", "name=a/holed")
        assert "a/holed: no fragment has offsets 14 to 1040 (1.0 KiB)" in result.err
        assert "6 h" in result.err
    # Case: of some times only, something is always missing.
    result = await gazctl.ok("journals", "fragments", "-l", "name=a/holed", "--from", "1h")
    assert "no fragment has" not in result.err


def test_holes_between_fragments_and_before_the_head() -> None:
    def fragments(*spans: tuple[int, int]) -> list[Fragment]:
        return [Fragment("a/journal", begin, end) for begin, end in spans]

    assert list(holes(fragments((20, 30), (5, 9), (7, 10), (6, 8)), 0)) == [(10, 20)]
    assert list(holes(fragments((5, 10)), 12)) == [(10, 12)]
    assert list(holes(fragments((5, 10)), 10)) == list(holes([], 10)) == []


async def test_journals_are_suspended(broker: BrokerFixture, gazctl: Runner) -> None:
    await broker.create(journal_spec("a/idle"), journal_spec("a/dirty"))
    await broker.client.append(AppendParams("a/dirty"), b"content")

    # Case: nothing is suspended by looking.
    result = await gazctl.ok("journals", "suspend", "-l", "name:prefix=a/", "--force", "--dry-run")
    assert [row[:5] for row in result.rows] == [
        ["a/dirty", "NONE", "NONE", "would", "be"],
        ["a/idle", "NONE", "NONE", "would", "be"],
    ]

    # Case: one that was never written to is suspended in full; one that was written to lately is not.
    result = await gazctl.ok("journals", "suspend", "-l", "name:prefix=a/")
    assert result.rows[0][:3] == ["a/dirty", "NONE", "NONE"]
    assert "use --force" in result.out
    assert result.rows[1] == ["a/idle", "NONE", "FULL"]

    # Case: with --force it is, and keeps a broker for its fragments.
    result = await gazctl.ok("journals", "suspend", "-l", "name:prefix=a/", "--force")
    assert result.rows == [["a/dirty", "NONE", "PARTIAL"], ["a/idle", "FULL", "FULL"]]
    suspend = (await broker.client.get_journal("a/dirty")).spec.suspend
    assert suspend == Suspend(SuspendLevel.PARTIAL, 7)
    while not stored(broker):  # Its fragment is on its way.
        await broker.service.context.clock.sleep(0.005)

    # Case: once more changes nothing, and neither does looking at it.
    result = await gazctl.ok("journals", "suspend", "-l", "name=a/dirty", "-f")
    assert result.rows == [["a/dirty", "PARTIAL", "PARTIAL"]]
    assert (await gazctl.ok("journals", "reset-head", "-l", "name=a/dirty")).rows[0][1] == "7"
    assert (await broker.client.get_journal("a/dirty")).spec.suspend == suspend

    # Case: it resumes with the next append.
    await gazctl.ok("journals", "append", "-l", "name=a/dirty", stdin=b"!")
    assert (await broker.client.get_journal("a/dirty")).spec.suspend_level is SuspendLevel.NONE
    assert (await gazctl.ok("journals", "read", "-l", "name=a/dirty")).out == "content!"


async def test_stores_are_checked_by_brokers(broker: BrokerFixture, gazctl: Runner) -> None:
    health = ("journals", "store-health")
    result = await gazctl.ok(*health, "file:///fragments/")
    assert result.out == "file:///fragments/ is healthy\n"
    result = await gazctl(*health, "file:///missing/")
    assert result.code == 1
    assert result.out.startswith("file:///missing/ is unhealthy: ")

    # Case: removal is checked where it is asked for, at the root as well.
    for prefix in ("a/journal/", ""):
        result = await gazctl.ok(*health, "file:///fragments/", "--check-delete-prefix", prefix)
        assert "is healthy" in result.out
    assert stored(broker) == set()
