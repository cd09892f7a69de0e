"""Runs of a backfill: what is built and published is what the live shard would have come to."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from gazette.client.journals import FragmentsParams, JournalChange
from gazette.errors import (
    Closed,
    Conflict,
    Corrupt,
    Fenced,
    Invalid,
    NotAllowed,
    NotFound,
    Unavailable,
)
from gazette.history.backfill.local import LocalRunner
from gazette.history.backfill.settings import HistoryEnd
from gazette.history.backfill.staging import DirectoryStaging, garbage, state_name
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.framing.framing import framing_of
from gazette.message.key_hash import fnv32a
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import clock_at
from gazette.protocol.text import duration
from gazette.runtime.clock import SystemClock
from gazette.runtime.failpoints import armed
from gazette.testing.broker import STORE
from gazette.testing.stored import write_journal
from tests.backfill.apps import (
    ArchivesBackfill,
    Documents,
    DocumentsBackfill,
    FailingBackfill,
    FractionsBackfill,
    IndexedBackfill,
    MappedBackfill,
    Pairs,
    PairsBackfill,
    TimedDocumentsBackfill,
    TimedPairsBackfill,
    Word,
    Words,
    WordsBackfill,
    WrongBackfill,
)
from tests.backfill.cluster import ALPHA, GAMMA, history, line, shard_settings, source
from tests.facts import raises

SOURCES = ("words/part-000", "words/part-001")
LIVE, BUILT = "live", "built"


@pytest.mark.parametrize(
    ("application", "backfill"),
    [(Words, WordsBackfill), (Pairs, PairsBackfill), (Documents, DocumentsBackfill)],
)
async def test_a_backfilled_state_and_the_live_tail_are_a_full_replay(
    start: Any, application: Any, backfill: Any
) -> None:
    """Row for row, the checkpoint included, with transactions that are open at the snapshot's end."""
    if application is Pairs:
        pytest.importorskip("rocksdict")
    rng = random.Random(application.__name__)
    cluster = await start(application())
    await cluster.broker.create(*map(source, SOURCES))
    await cluster.create(shard_settings(LIVE, *SOURCES), shard_settings(BUILT, *SOURCES))
    lines = {name: history(rng, 400) for name in SOURCES}
    for name in SOURCES:
        await cluster.append(name, lines[name][:250])
    report = await cluster.backfill(backfill(), shards=f"id = {BUILT}", verify=3, enable=True)
    assert report.published
    assert report.verified == (BUILT,)
    assert report.shards[0].open_producers, "no transaction is open: the test shows nothing"
    await cluster.consumer.await_primary(BUILT)
    for name in SOURCES:
        await cluster.append(name, lines[name][250:])
    await cluster.enable(LIVE)
    built, live = [await cluster.state(one, backfill()) for one in (BUILT, LIVE)]
    assert built[0] == live[0]
    assert len(built[0]) > 20
    assert built[1] == live[1]
    # Nothing is left in the staging area but the run's records.
    names = sorted(path.name for path in cluster.staging.rglob("*") if path.is_file())
    assert len(names) == 6, names
    assert {"PLAN.json", "MANIFEST.json", "PUBLISHED.json"} < set(names)


class Interposed(LocalRunner):
    """A runner that has something done behind its back, between the build and the rest."""

    def __init__(self, act: Any) -> None:
        super().__init__(1)
        self.act = act
        self.loop = asyncio.get_running_loop()

    def build(self, tasks: Any, on_read: Any) -> Any:
        built = super().build(tasks, on_read)
        asyncio.run_coroutine_threadsafe(self.act(), self.loop).result()
        return built


async def old_state(start: Any, count: int = 100) -> tuple[Any, list[bytes]]:
    """Return a cluster with a shard that has consumed the first ``count`` lines, and is disabled."""
    cluster = await start(Words())
    lines = history(random.Random(count), 300)
    await cluster.broker.create(source(SOURCES[0]))
    await cluster.create(shard_settings(BUILT, SOURCES[0]))
    await cluster.append(SOURCES[0], lines[:count])
    await cluster.enable(BUILT)
    await cluster.consumer.read_to_heads(BUILT)
    await cluster.disable(BUILT)
    await cluster.append(SOURCES[0], lines[count:250])
    return cluster, lines


def expected(lines: list[bytes]) -> list[tuple[str, tuple[str, int]]]:
    """Return what a sequencer that reads these lines makes of them."""
    decoder: EnvelopeDecoder[Any] = EnvelopeDecoder(
        "expected", framing_of(CONTENT_JSON_LINES, Word), 0
    )
    decoder.feed(b"".join(lines))
    sequencer: Sequencer[Any] = Sequencer({}, 1 << 16)
    counts: Counter[str] = Counter()
    while batch := decoder.decode():
        index = 0
        while index < len(batch):
            index = sequencer.queue_batch(batch, index)
            while found := sequencer.dequeue(1 << 16):
                counts.update(one.message.word for one in found if not one.is_ack)
    return [("counts", row) for row in sorted(counts.items())]


@pytest.mark.parametrize(
    ("point", "then"),
    [
        ("backfill.built", "resume"),
        ("backfill.staged", "resume"),
        ("backfill.appending", "resume"),
        ("backfill.appending", "go back"),
        ("backfill.publishing", "resume"),
        ("backfill.publishing", "go back"),
        ("backfill.published", "resume"),
    ],
)
async def test_wherever_it_ends_the_old_state_is_in_force_or_the_new_one(
    start: Any, point: str, then: str
) -> None:
    cluster, lines = await old_state(start)
    with armed(f"{point}=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(WordsBackfill(), overwrite=True)
    if then == "resume":
        for _ in range(2):  # The second one has nothing to do.
            report = await cluster.backfill(WordsBackfill(), overwrite=True)
            assert report.published
            assert report.resumed
        with raises(Conflict, says="tests.backfill.apps:WordsBackfill"):
            await cluster.backfill(WrongBackfill(), overwrite=True)
    await cluster.append(SOURCES[0], lines[250:])
    await cluster.enable(BUILT)
    assert (await cluster.state(BUILT, WordsBackfill()))[0] == expected(lines)
    if then == "go back":
        # The shard ran meanwhile: the run that was interrupted is of the past.
        with armed("backfill.publishing=error"), pytest.raises((Conflict, Fenced, Unavailable)):
            await cluster.backfill(WordsBackfill(), overwrite=True)
        await cluster.backfill(WordsBackfill(), overwrite=True, run_id="again")
        await cluster.append(SOURCES[0], [line(GAMMA, 1 << 30, word="last")])
        await cluster.enable(BUILT)
        lines.append(line(GAMMA, 1 << 30, word="last"))
        assert (await cluster.state(BUILT, WordsBackfill()))[0] == expected(lines)


async def test_shards_that_may_run_are_refused(start: Any) -> None:
    cluster, lines = await old_state(start)

    # Case: it has a state.
    with raises(NotAllowed, shard="built", advises="--overwrite"):
        await cluster.backfill(WordsBackfill())

    # Case: it runs.
    await cluster.enable(BUILT)
    with raises(NotAllowed, says=BUILT, advises="disable: true"):
        await cluster.backfill(WordsBackfill(), overwrite=True)
    await cluster.disable(BUILT)

    # Case: it ran while its state was built.
    async def run_it() -> None:
        await cluster.enable(BUILT)
        await cluster.disable(BUILT)

    with raises(Conflict, shard="built"):
        await cluster.backfill(
            WordsBackfill(), overwrite=True, run_id="two", runner=Interposed(run_it)
        )

    # Case: another backfill was faster.
    async def backfill_it() -> None:
        await cluster.backfill(WordsBackfill(), overwrite=True, run_id="faster")

    job = cluster.job(
        WrongBackfill(), overwrite=True, run_id="slower", runner=Interposed(backfill_it)
    )
    with pytest.raises((Conflict, Fenced)):
        await job.run()

    # Case: it is gone.
    async def delete_it() -> None:
        await cluster.consumer.delete(BUILT)

    job = cluster.job(WordsBackfill(), overwrite=True, run_id="three", runner=Interposed(delete_it))
    with raises(Conflict, shard=BUILT):
        await job.run()
    with raises(NotFound, selector="id"):
        await cluster.backfill(WordsBackfill(), run_id="four")
    await cluster.consumer.update(shard_settings(BUILT, SOURCES[0]))
    await cluster.enable(BUILT)
    assert (await cluster.state(BUILT, WordsBackfill()))[0] == expected(lines[:250])


async def test_states_belong_to_the_application_and_no_other(start: Any) -> None:
    """A shard would refuse the state of another application; a run refuses to replace it."""
    cluster, _ = await old_state(start)
    name = "tests.backfill.apps.Words"
    await cluster.backfill(WordsBackfill(), overwrite=True)
    _, checkpoint = await cluster.played(BUILT, WordsBackfill())
    assert checkpoint.application == name

    # Case: the members of another application run here.
    with raises(NotAllowed, shard="built", says="tests.backfill.apps.Words") as raised:
        await cluster.backfill(WordsBackfill(), overwrite=True, run_id="other", application="other")
    assert f"--application={name}" in str(raised.value.hint)
    await cluster.backfill(
        WrongBackfill(), overwrite=True, run_id="same", application=name, enable=True
    )
    await cluster.consumer.await_primary(BUILT)


async def test_a_state_that_was_staged_for_another_application_is_built_again(
    start: Any,
) -> None:
    cluster = await start(Words())
    await cluster.broker.create(source(SOURCES[0]))
    await cluster.create(shard_settings(BUILT, SOURCES[0]))
    await cluster.append(SOURCES[0], history(random.Random(1), 50))
    with armed("backfill.staged=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(WordsBackfill(), application="other")
    await cluster.backfill(WordsBackfill())
    _, checkpoint = await cluster.played(BUILT, WordsBackfill())
    assert checkpoint.application == "tests.backfill.apps.Words"


async def test_a_driver_that_comes_late_does_not_fence_a_live_shard(start: Any) -> None:
    """Neither one that finds the shard live, nor one that the shard overtakes as it begins to append."""
    cluster, lines = await old_state(start)

    async def publish_it() -> None:
        await cluster.backfill(WordsBackfill(), overwrite=True, enable=True)
        await cluster.consumer.await_primary(BUILT)

    late = cluster.job(WordsBackfill(), overwrite=True, runner=Interposed(publish_it))
    with raises(Conflict, shard="built"):
        await late.run()
    await cluster.append(SOURCES[0], lines[250:])
    assert (await cluster.state(BUILT, WordsBackfill()))[0] == expected(lines)

    # Case: it looked while the shard was idle.
    overtaken = cluster.job(WordsBackfill(), overwrite=True, run_id="overtaken")
    require, calls = overtaken._cutover._require_idle, 0

    async def require_and_enable(listed: Any) -> None:
        nonlocal calls
        calls += 1
        await require(listed)
        if calls == 2:  # The head of the log is known, and nothing is appended.
            await cluster.enable(BUILT)

    overtaken._cutover._require_idle = require_and_enable
    with raises(Fenced, shard="built", log="recovery/test/built"):
        await overtaken.run()
    lines.append(line(GAMMA, 1 << 30, word="last"))
    await cluster.append(SOURCES[0], lines[-1:])
    assert (await cluster.state(BUILT, WordsBackfill()))[0] == expected(lines)


async def test_a_build_that_is_wrong_or_fails_publishes_nothing(start: Any) -> None:
    cluster, lines = await old_state(start)
    with raises(Corrupt, says="row 1"):
        await cluster.backfill(WrongBackfill(), overwrite=True, verify=1)
    with pytest.raises(LookupError, match="does not work"):
        await cluster.backfill(FailingBackfill(), overwrite=True, run_id="failing")
    await cluster.enable(BUILT)
    assert (await cluster.state(BUILT, WordsBackfill()))[0] == expected(lines[:250])


async def test_states_differ_by_other_databases_definitions_types_and_timers(start: Any) -> None:
    cluster = await start(Words())
    await cluster.broker.create(source(SOURCES[0]))
    await cluster.create(shard_settings(BUILT, SOURCES[0]))
    now = clock_at(1_700_000_000 * 10**9) >> 4
    await cluster.append(SOURCES[0], [line(ALPHA, now, word="new")])
    for backfill, says in {
        ArchivesBackfill: "archive.words",
        IndexedBackfill: "CREATE INDEX by_n",
        FractionsBackfill: "1.0",
        TimedDocumentsBackfill: "PROCESSING",
    }.items():
        with raises(Corrupt, says=says):
            await cluster.backfill(backfill(), verify=1, run_id=backfill.__name__)
    pytest.importorskip("rocksdict")
    with raises(Corrupt, says="PROCESSING"):
        await cluster.backfill(TimedPairsBackfill(), verify=1, run_id="pairs")


async def test_a_resumed_run_reads_no_journal_that_its_plan_lacks(start: Any) -> None:
    """A journal of the history that was created between the two attempts of the run."""
    cluster = await start(Words())
    await cluster.broker.create(*map(source, SOURCES), source("history/a"))
    await cluster.create(shard_settings(LIVE, SOURCES[0]), shard_settings(BUILT, SOURCES[1]))
    lines = history(random.Random("planned"), 200)
    await cluster.append("history/a", lines)
    with armed("backfill.staged=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(MappedBackfill())
    await cluster.broker.create(source("history/b"))
    late = [line(ALPHA, 9000 + n, word=f"late{n}") for n in range(20)]
    await cluster.append("history/b", late)
    report = await cluster.backfill(MappedBackfill(), enable=True)
    assert report.resumed
    rows = []
    for shard in (LIVE, BUILT):
        await cluster.consumer.await_primary(shard)
        rows += (await cluster.state(shard, WordsBackfill()))[0]
    assert sorted(rows) == expected(lines)


async def test_a_resumed_run_maps_as_its_plan_says(start: Any) -> None:
    """Whatever journals were created or deleted between the two attempts of the run."""
    cluster = await start(Words())
    await cluster.broker.create(*map(source, SOURCES), source("history/a"))
    await cluster.create(shard_settings(LIVE, SOURCES[0]), shard_settings(BUILT, SOURCES[1]))
    lines = history(random.Random("mapped again"), 200)
    await cluster.append("history/a", lines)
    with armed("backfill.staged=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(MappedBackfill())
    late = "words/part-000-late"
    await cluster.broker.create(source(late))
    report = await cluster.backfill(MappedBackfill(), enable=True)
    assert report.resumed
    rows = []
    for shard in (LIVE, BUILT):
        await cluster.consumer.await_primary(shard)
        rows += (await cluster.state(shard, WordsBackfill()))[0]
    assert sorted(rows) == expected(lines)


async def test_a_resumed_run_of_which_a_partition_is_gone(start: Any) -> None:
    cluster = await start(Words())
    await cluster.broker.create(*map(source, SOURCES), source("history/a"), source("words/third"))
    await cluster.create(shard_settings(LIVE, SOURCES[0]), shard_settings(BUILT, SOURCES[1]))
    await cluster.append("history/a", history(random.Random("gone"), 20))
    with armed("backfill.staged=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(MappedBackfill())
    delete = JournalChange(delete="words/third", expect_mod_revision=-1)
    await cluster.broker.client.apply_journals([delete])
    with raises(Conflict, says="words/third"):
        await cluster.backfill(MappedBackfill())


async def test_a_resumed_run_of_which_messages_were_pruned(start: Any) -> None:
    """Between its two attempts: states of the first have them already, and the second cannot."""
    cluster = await start(Words())
    spec = source("history/a")
    spec = replace(spec, fragment=replace(spec.fragment, retention_ns=duration.HOUR))
    lines = [b"".join(history(random.Random(n), 20, n * 1000)) for n in (1, 2)]
    broker, root = cluster.broker, cluster.broker.file_root
    old = SystemClock().now() - 2 * 3600
    fragments = write_journal(root, STORE, "history/a", lines)
    paths = [root / "fragments" / fragment.content_path() for fragment in fragments]
    for path in paths:
        os.utime(path, (old, old))
    await cluster.broker.create(*map(source, SOURCES), spec)
    await cluster.create(shard_settings(LIVE, SOURCES[0]), shard_settings(BUILT, SOURCES[1]))
    with armed("backfill.staged=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(MappedBackfill())
    paths[0].unlink()
    listing = FragmentsParams("history/a")
    async with asyncio.timeout(60):
        while (await broker.client.list_fragments(listing))[0].fragment.begin == 0:
            await SystemClock().sleep(0.1)
    with raises(Conflict, says="pruned", advises="--run-id"):
        await cluster.backfill(MappedBackfill())
    assert not (await cluster.backfill(MappedBackfill(), run_id="again")).resumed


async def test_a_resumed_run_of_which_a_journal_was_created_again(start: Any) -> None:
    cluster = await start(Words())
    spec = source("history/a")
    spec = replace(spec, fragment=replace(spec.fragment, stores=()))
    await cluster.broker.create(*map(source, SOURCES), spec)
    await cluster.create(shard_settings(LIVE, SOURCES[0]), shard_settings(BUILT, SOURCES[1]))
    await cluster.append("history/a", history(random.Random("former life"), 20))
    with armed("backfill.staged=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(MappedBackfill())
    delete = JournalChange(delete="history/a", expect_mod_revision=-1)
    await cluster.broker.client.apply_journals([delete])
    await cluster.broker.create(spec)
    await cluster.append("history/a", history(random.Random("this life"), 200))
    with raises(Corrupt, journal="history/a", says="created again"):
        await cluster.backfill(MappedBackfill())


async def test_a_history_elsewhere_is_mapped_as_the_publisher_maps(start: Any) -> None:
    """Many old journals, and new partitions that the shards read: each word is in one of them."""
    cluster = await start(Words())
    rng = random.Random("mapped")
    await cluster.broker.create(*map(source, SOURCES), source("history/a"), source("history/b"))
    await cluster.create(shard_settings(LIVE, SOURCES[0]), shard_settings(BUILT, SOURCES[1]))
    lines = {name: history(rng, 200) for name in ("history/a", "history/b")}
    for name, content in lines.items():
        await cluster.append(name, content)
    report = await cluster.backfill(MappedBackfill(), enable=True)
    assert [dict(one.sources) for one in report.shards] == [{}, {}]
    for shard in (LIVE, BUILT):
        await cluster.consumer.await_primary(shard)
    await cluster.append(SOURCES[0], [line(ALPHA, 9000, word="new")])
    states = [(await cluster.state(one, WordsBackfill()))[0] for one in (LIVE, BUILT)]
    counts: Counter[str] = Counter()
    for content in lines.values():
        counts.update({word: n for _, (word, n) in expected(content)})
    parts = []
    for number, state in enumerate(states):
        found = {word: n for _, (word, n) in state}
        assert (found.pop("new", 0) == 1) == (number == 0)
        assert {fnv32a(word.encode()) % 2 for word in found} == {number}
        parts.append(Counter(found))
    assert parts[0] + parts[1] == counts


@pytest.mark.long
async def test_processes_build_as_this_one_does(start: Any) -> None:
    cluster = await start(Words())
    await cluster.broker.create(*map(source, SOURCES))
    await cluster.create(*(shard_settings(f"shard-{n}", SOURCES[n]) for n in range(2)))
    lines = {name: history(random.Random(name), 200) for name in SOURCES}
    for name, content in lines.items():
        await cluster.append(name, content)
    name = "tests.backfill.apps:"
    failing = cluster.job(
        FailingBackfill(), runner=LocalRunner(2), name=f"{name}FailingBackfill", run_id="f"
    )
    with pytest.raises(LookupError, match="does not work"):
        await failing.run()
    job = cluster.job(
        WordsBackfill(), runner=LocalRunner(2), name=f"{name}WordsBackfill", enable=True
    )
    report = await job.run()
    assert sum(one.messages for one in report.shards) > 200
    for number, source_name in enumerate(SOURCES):
        await cluster.consumer.await_primary(f"shard-{number}")
        state = await cluster.state(f"shard-{number}", WordsBackfill())
        assert state[0] == expected(lines[source_name])


def test_a_task_that_fails_ends_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, stopped = LocalRunner(2), threading.Event()

    def build(task: Any, _: Any) -> Any:
        if task == "failing":
            raise LookupError("the fold does not work")
        assert stopped.wait(30), "it was not stopped"
        raise Closed("it was stopped")

    monkeypatch.setattr(runner, "_in_process", build)
    monkeypatch.setattr(runner, "stop", stopped.set)
    tasks: Any = ["slow", "failing"]
    with pytest.raises(LookupError, match="does not work"):
        runner.build(tasks, lambda _: None)


async def test_a_dry_run_changes_nothing_and_bounds_end_the_history(start: Any) -> None:
    cluster, lines = await old_state(start)
    report = await cluster.job(WordsBackfill()).run(dry_run=True)
    assert not report.published
    assert report.history_messages == 250
    assert not cluster.staging.exists()
    end = len(b"".join(lines[:200])) + 3
    bounds = HistoryEnd({SOURCES[0]: end})
    report = await cluster.job(WordsBackfill(), end=bounds).run(dry_run=True)
    assert report.history_messages == 200
    assert report.shards[0].sources == {SOURCES[0]: end - 3}
    with raises(Invalid, path="--offsets", says="other"):
        await cluster.job(WordsBackfill(), end=HistoryEnd({"other": 1})).run(dry_run=True)
    # Nothing had been persisted by then.
    report = await cluster.job(WordsBackfill(), end=HistoryEnd(until_s=1)).run(dry_run=True)
    assert report.history_messages == 0


async def test_garbage_is_what_no_run_needs(start: Any) -> None:
    cluster, _ = await old_state(start)
    staging = DirectoryStaging(cluster.staging)

    def found(age_s: float = 0.0) -> set[tuple[str, str]]:
        now = SystemClock().now() + 1
        return {(one.object.name.split("/")[0], one.reason) for one in garbage(staging, now, age_s)}

    assert found() == set()
    with armed("backfill.staged=error"), pytest.raises(Unavailable):
        await cluster.backfill(WordsBackfill(), overwrite=True, run_id="given-up")
    with armed("backfill.publishing=error"), pytest.raises(Unavailable):
        await cluster.backfill(WordsBackfill(), overwrite=True, run_id="late")
    assert found(3600) == set()
    assert found() == {("given-up", "its run was abandoned")}
    # A losing attempt of a run comes late.
    lost = state_name("late", BUILT, "ffff")
    path = cluster.staging / "loser"
    path.write_bytes(b"state")
    staging.put(lost, path)
    path.unlink()
    assert {one.object.name for one in garbage(staging, SystemClock().now() + 1, 0)} >= {lost}
    await cluster.backfill(WordsBackfill(), overwrite=True, run_id="late")
    doomed = garbage(staging, SystemClock().now() + 1, 0)
    assert {one.reason for one in doomed} == {"its run was abandoned", "its run is published"}
    for one in doomed:
        staging.remove(one.object.name)
    left = [path.relative_to(cluster.staging).as_posix() for path in cluster.staging.rglob("*")]
    assert sorted(left) == ["late", "late/PUBLISHED.json"]
    assert (await cluster.backfill(WordsBackfill(), run_id="late")).resumed
