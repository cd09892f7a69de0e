"""Replicas: their daemons, and how they end. With pulses, and the waits that may be overtaken."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from gazette.auth import Capability, Claims
from gazette.broker.append.events import (
    AppendTerms,
    Ending,
    Outcome,
    PipelineBuilt,
    SuspendControl,
)
from gazette.broker.append.invalidation import Superseded, changed, take_unless
from gazette.broker.commit.driver import AppendCall, AppendDriver
from gazette.broker.pulser import Heartbeat, cause_of, problem_of
from gazette.errors import Broken, Closed, GazetteError, Unavailable
from gazette.fragment.cover_set import CoverSet
from gazette.fragment.local_file import LocalDisk
from gazette.fragment.spool import Content, Proposal
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import JournalSpec, SuspendLevel
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.protocol.status import Status
from gazette.protocol.text import duration
from gazette.runtime.clock import SystemClock
from gazette.runtime.latch import Latch
from gazette.runtime.log_limit import OncePerMinute
from gazette.runtime.mutex import Mutex
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import journal_spec
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.fixed_cluster import ROOT, FixedBroker, FixedCluster

JOURNAL = "a/journal"


class Chunks:
    """Content of an append, with its commit."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = [*chunks, b""]

    async def next(self) -> bytes | None:
        return self._chunks.pop(0) if self._chunks else None


async def append(
    broker: FixedBroker, *chunks: bytes, journal: str = JOURNAL, **terms: Any
) -> Outcome:
    call = AppendCall(
        AppendTerms(journal, **terms),
        Claims.of_journal(Capability.APPEND, journal),
        may_proxy=False,
    )
    return await AppendDriver(broker.context, call, Chunks(*chunks)).run()


async def turns(count: int = 8) -> None:
    """Let tasks run that wait for no other than each other."""
    for _ in range(count):
        await SystemClock().sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Let the brokers run until it holds. Bounded by the test's timeout."""
    while not condition():
        await SystemClock().sleep(0)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FixedCluster]:
    async with await FixedCluster.start(3, tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def timed(tmp_path: Path, clock: ManualClock) -> AsyncIterator[FixedCluster]:
    """Yield brokers whose time is ``clock``; journals are put to rest after two idle pulses."""
    async with await FixedCluster.start(
        5, tmp_path, clock=clock, auto_suspend=True, suspend_after_idle_ticks=2
    ) as cluster:
        yield cluster


async def pass_time(clock: ManualClock, seconds: float, condition: Callable[[], object]) -> None:
    """Let time pass in steps of a second, until it holds; which it may not for ``seconds``, and more on
    a machine that is slower than our clock."""
    for _ in range(int(seconds)):
        clock.advance(1.0)
        for _ in range(20):
            await clock.sleep(0)
        if condition():
            return
    while not condition():
        clock.advance(1.0)
        await SystemClock().sleep(0.001)


async def elapsed(clock: ManualClock, condition: Callable[[], object]) -> float:
    """Let time pass until it holds, so slowly that threads keep up; the seconds that it took."""
    began = clock.monotonic()
    while not condition():
        clock.advance(1.0)
        await SystemClock().sleep(0.01)
    return clock.monotonic() - began


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def stored(tmp_path: Path) -> list[str]:
    directory = tmp_path / "root" / "fragments" / JOURNAL
    names = (path.name for path in directory.iterdir()) if directory.exists() else ()
    return sorted(name for name in names if not name.startswith("."))


def name_of(begin: int, content: bytes) -> str:
    sum = hashlib.sha1(content).digest()
    return Fragment(JOURNAL, begin, begin + len(content), sum, Codec.NONE).content_name()


# Pulses.


async def test_pulses_alone_bring_replicas_into_step(cluster: FixedCluster) -> None:
    """At once, and whenever the route changes: brokers come and go without any client."""
    cluster.create(journal_spec(JOURNAL), "a")
    await until(lambda: cluster.consistent(JOURNAL))
    for names in ("ab", "abc", "cab", "bc", "b"):
        cluster.put_spec(journal_spec(JOURNAL, replication=len(names)))
        cluster.assign(JOURNAL, *names)
        assert not cluster.consistent(JOURNAL)
        await until(lambda: cluster.consistent(JOURNAL))


def test_pulses_of_many_journals_that_fail_for_one_reason_have_one_cause() -> None:
    causes = {
        cause_of(Outcome(Ending.FAILED, context="recv", error=Unavailable("peer", journal=name)))
        for name in ("a/journal", "b/journal")
    }
    assert causes == {"recv: peer"}
    assert cause_of(Outcome(Ending.REFUSED, Status.SUSPENDED)) == "SUSPENDED"


def test_a_pulse_that_fails_says_what_to_do() -> None:
    lost = problem_of(Outcome(Ending.REFUSED, Status.INDEX_HAS_GREATER_OFFSET))
    assert lost is not None
    assert str(lost) == "INDEX_HAS_GREATER_OFFSET"
    assert "gazctl journals reset-head" in lost.hint
    unhealthy = problem_of(
        Outcome(Ending.REFUSED, Status.FRAGMENT_STORE_UNHEALTHY, store_error="403")
    )
    assert str(unhealthy) == "FRAGMENT_STORE_UNHEALTHY 403"
    failed = problem_of(
        Outcome(Ending.FAILED, error=Unavailable("gone", hint="Start it."), context="resolve")
    )
    assert failed is not None
    assert (str(failed), failed.hint) == ("resolve: gone", "Start it.")
    # Case: of what is stopping, or not ours, nothing is said.
    assert problem_of(Outcome(Ending.FAILED, error=Closed("x"))) is None
    assert problem_of(Outcome(Ending.REFUSED, Status.SUSPENDED)) is None


async def test_pulse_is_retried_when_a_peer_could_not_be_reached(
    timed: FixedCluster, clock: ManualClock
) -> None:
    """Soon, and not only on the next minute."""
    await timed["b"].server.stop(0)
    timed.create(journal_spec(JOURNAL, replication=2), "a", "b")
    replica = timed["a"].replica(JOURNAL)
    await until(lambda: replica.pipeline.idle and clock.sleepers)
    assert not timed.consistent(JOURNAL)
    # Case: the route leaves it out.
    timed.assign(JOURNAL, "a", "c")
    await until(lambda: timed.consistent(JOURNAL))


def test_heartbeat() -> None:
    heartbeat = Heartbeat(60.0, 2)
    assert heartbeat.next_s(succeeded=True) == 60.0
    # Case: failures are retried soon, then later and later.
    assert [heartbeat.next_s(succeeded=False) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert heartbeat.next_s(succeeded=True) == 60.0
    assert heartbeat.next_s(succeeded=False) == 1.0
    heartbeat.on_route_change()
    assert heartbeat.next_s(succeeded=False) == 1.0
    # Case: a journal is put to rest after enough ticks without a change of the route.
    controls = []
    for _ in range(3):
        controls.append(heartbeat.control)
        assert not heartbeat.on_timer(rests=False)
    assert controls == [
        SuspendControl.NO_RESUME,
        SuspendControl.NO_RESUME,
        SuspendControl.IF_FLUSHED,
    ]
    heartbeat.on_route_change()
    assert heartbeat.control is SuspendControl.NO_RESUME
    # Case: unless that is not wanted.
    never = Heartbeat(60.0, None)
    never.idle_ticks = 1_000
    assert never.control is SuspendControl.NO_RESUME


def spec_of(cluster: FixedCluster) -> JournalSpec:
    item = cluster["a"].context.state.item(JOURNAL)
    assert item is not None
    spec: JournalSpec = item.decoded.value.spec
    return spec


async def test_idle_journal_is_put_to_rest(timed: FixedCluster, clock: ManualClock) -> None:
    """One that is empty entirely."""
    timed.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await until(lambda: timed.consistent(JOURNAL))
    assert spec_of(timed).suspend_level is SuspendLevel.NONE
    await pass_time(clock, 200, lambda: spec_of(timed).suspend_level is SuspendLevel.FULL)


async def test_flushed_journal_is_put_to_rest_and_resumed(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path
) -> None:
    """One replica is left, which holds nothing that is not in the store; and the next append wakes it."""
    clock.jump(SystemClock().now() - clock.now())  # Files have the machine's time.
    spec = journal_spec(JOURNAL, replication=1)
    fragment = replace(spec.fragment, flush_interval_ns=duration.MINUTE)
    timed.create(replace(spec, fragment=fragment), "a")
    assert (await append(timed["a"], b"content")).status is Status.OK
    # Case: the pulse of the next minute flushes; two idle ones later the journal is suspended.
    await pass_time(clock, 200, lambda: stored(tmp_path))
    assert stored(tmp_path) == [name_of(0, b"content")]
    await pass_time(clock, 400, lambda: spec_of(timed).suspend_level is SuspendLevel.PARTIAL)
    suspend = spec_of(timed).suspend
    assert suspend is not None
    assert suspend.offset == 7
    # Case: pulses leave it at rest, and other controls say so.
    outcome = await append(timed["a"], suspend=SuspendControl.NO_RESUME)
    assert outcome.status is Status.SUSPENDED
    outcome = await append(timed["a"], b"more")
    assert (outcome.ending, outcome.status) == (Ending.COMMITTED, Status.OK)
    assert outcome.commit is not None
    assert outcome.commit.begin == 7
    assert spec_of(timed).suspend_level is SuspendLevel.NONE


async def test_readers_do_not_jump_over_a_store_that_is_not_mounted(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory is empty, and brokers fill it again."""
    clock.jump(SystemClock().now() - clock.now())  # Files have the machine's time.
    spec = journal_spec(JOURNAL)
    times: dict[str, Any] = {
        "flush_interval_ns": duration.MINUTE,
        "refresh_interval_ns": 10 * duration.SECOND,
    }
    timed.create(replace(spec, fragment=replace(spec.fragment, **times)), "a")
    broker = timed["a"]
    await append(broker, b"content")
    index = broker.replica(JOURNAL).index
    await pass_time(clock, 200, lambda: [one.mod_time for one in index.fragments()] != [0])
    mounted, root = tmp_path / "mounted", tmp_path / "root" / "fragments"
    root.rename(mounted)
    root.mkdir()
    await append(broker, b"more")
    await pass_time(clock, 200, lambda: stored(tmp_path) == [name_of(7, b"more")])
    await pass_time(clock, 60, lambda: "check that it is mounted" in caplog.text)
    found = await index.query(0)
    assert (found.status, found.offset) == (Status.OK, 0)
    # Case: the store is back, with what was stored elsewhere in the meantime.
    (root / JOURNAL / name_of(7, b"more")).rename(mounted / JOURNAL / name_of(7, b"more"))
    root.rename(tmp_path / "unmounted")  # The broker may write there meanwhile.
    mounted.rename(root)
    await pass_time(clock, 60, lambda: not broker.replica(JOURNAL).emptied_stores)
    assert (index.begin_offset, index.end_offset) == (0, 11)


async def test_resumed_journal_keeps_its_offsets(cluster: FixedCluster) -> None:
    """Although no broker has a spool of it, and its store is empty."""
    cluster.create(journal_spec(JOURNAL, stores=()), "a")
    assert (await append(cluster["a"], b"content")).status is Status.OK
    outcome = await append(cluster["a"], suspend=SuspendControl.NOW)
    assert outcome.status is Status.SUSPENDED
    assert spec_of(cluster).suspend_level is SuspendLevel.PARTIAL
    cluster.assign(JOURNAL)
    cluster.assign(JOURNAL, "b")
    outcome = await append(cluster["b"], b"x")
    assert outcome.commit is not None
    assert outcome.commit.begin == 7


async def test_suspension_of_a_spec_keeps_fields_of_newer_versions(cluster: FixedCluster) -> None:
    spec = journal_spec(JOURNAL, stores=())
    unknown = b"\xfa\x3f\x03new"  # field 1023
    key = f"{cluster['a'].context.settings.root}/items/{JOURNAL}"
    cluster.etcd.change({key: spec.to_pb().SerializeToString() + unknown})
    cluster.assign(JOURNAL, "a")
    await append(cluster["a"], suspend=SuspendControl.IF_FLUSHED)
    assert spec_of(cluster).suspend_level is SuspendLevel.FULL
    assert unknown in cluster.etcd.kvs[key.encode()].value


# Refreshes.


def _refreshed_each_minute(**fields: Any) -> JournalSpec:
    spec = journal_spec(JOURNAL, **fields)
    return replace(spec, fragment=replace(spec.fragment, refresh_interval_ns=duration.MINUTE))


async def test_stores_are_listed_again_until_it_succeeds(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path
) -> None:
    directory = tmp_path / "root" / "fragments" / JOURNAL
    directory.mkdir(parents=True)
    (directory / name_of(0, b"content")).write_bytes(b"content")
    (tmp_path / "root" / "fragments" / f"{JOURNAL}/below").mkdir()
    timed.put_spec(journal_spec(f"{JOURNAL}/below"))
    good, bad = _refreshed_each_minute(), _refreshed_each_minute(stores=("file:///missing/",))
    timed.create(bad, "a")
    replica = timed["a"].replica(JOURNAL)
    await until(lambda: replica.refresh_error)
    assert "missing" in str(replica.refresh_error)
    assert not replica.index.first_refresh.is_set
    timed.put_spec(good)
    await pass_time(clock, 3, lambda: replica.index.first_refresh.is_set)
    assert replica.refresh_error is None
    assert replica.index.end_offset == 7
    # Case: a new replica lists at intervals that double, up to the refresh interval.
    (directory / name_of(7, b"more")).write_bytes(b"more")
    await pass_time(clock, 1 + 2 + 4 + 8 + 16 + 32 + 60, lambda: replica.index.end_offset == 11)
    # Case: a failure keeps what we know.
    timed.put_spec(bad)
    await pass_time(clock, 120, lambda: replica.refresh_error)
    assert replica.index.end_offset == 11


async def test_a_store_that_was_down_at_the_start_is_listed_soon_after_its_repair(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path
) -> None:
    """Not when the next of ever longer pauses is over; and callers learn of the store until then."""
    spec = journal_spec(JOURNAL, stores=("file:///missing/",))
    slow = replace(spec.fragment, refresh_interval_ns=10 * duration.MINUTE)
    timed.create(replace(spec, fragment=slow), "a")
    replica = timed["a"].replica(JOURNAL)
    await pass_time(clock, 130, lambda: clock.monotonic() > 1_130)
    assert not replica.index.first_refresh.is_set
    with raises(Unavailable, journal=JOURNAL, says="missing"):
        await replica.wait_listed(0.0)
    (tmp_path / "root" / "missing").mkdir()
    assert await elapsed(clock, lambda: replica.index.first_refresh.is_set) <= 60
    # It is checked at once, too: appends need not wait for the next check.
    active = timed["a"].context.blob_stores.get("file:///missing/")
    assert await elapsed(clock, lambda: active.health.error is None) <= 60


async def test_a_store_that_is_down_is_logged_once_a_minute_for_all_of_its_journals(
    timed: FixedCluster, clock: ManualClock
) -> None:
    """Each of them lists it every few seconds, until the first listing has succeeded."""
    written: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    handler, seen = Handler(), 0

    def see(record: logging.LogRecord) -> bool:
        nonlocal seen
        seen += 1
        return True

    handler.addFilter(see)
    handler.addFilter(OncePerMinute(handler, later=lambda delay_s, call: None))
    logging.getLogger("gazette.broker.replica").addHandler(handler)
    try:
        for number in range(4):
            timed.create(journal_spec(f"a/journal-{number}", stores=("file:///missing/",)), "a")
        await pass_time(clock, 30, lambda: seen >= 12)
    finally:
        logging.getLogger("gazette.broker.replica").removeHandler(handler)
    assert len(written) == 1
    assert "could not be listed: invalid file store directory" in written[0]


async def test_kept_files_are_bounded(tmp_path: Path) -> None:
    """However many fragments are stored before the next listing of their journals."""
    async with await FixedCluster.start(1, tmp_path, kept_spools=5) as cluster:
        journals = [f"a/journal-{number}" for number in range(4)]
        for journal in journals:
            cluster.create(journal_spec(journal, length=1024), "a")
        broker = cluster["a"]
        for journal in journals:
            broker.replica(journal).stop_daemons()  # No listing lets them go.
            broker.replica(journal).index.replace_remote(CoverSet())
        before = len(os.listdir("/proc/self/fd"))
        for number in range(8):
            for journal in journals:
                outcome = await append(broker, b"%1025d" % number, journal=journal)
                assert outcome.ending is Ending.COMMITTED
        persister = broker.context.persister
        await until(lambda: not persister.unpersisted)
        assert len(os.listdir("/proc/self/fd")) <= before + 5 + len(journals) + 2
        for journal in journals:
            replica = broker.replica(journal)
            found = await replica.index.query(0)
            assert found.fragment is not None
            assert (found.local, found.fragment.backing_store) == (None, "file:///fragments/")
            assert replica.index.end_offset == 8 * 1025


async def test_stores_are_listed_again_as_soon_as_they_are_healthy(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path
) -> None:
    """Not when the refresh interval is over."""
    good, bad = journal_spec(JOURNAL), journal_spec(JOURNAL, stores=("file:///missing/",))
    good, bad = (
        replace(one, fragment=replace(one.fragment, refresh_interval_ns=duration.HOUR))
        for one in (good, bad)
    )
    timed.create(good, "a")
    replica = timed["a"].replica(JOURNAL)
    await until(lambda: replica.index.first_refresh.is_set)
    timed.put_spec(bad)
    await pass_time(clock, 600, lambda: replica.refresh_error)
    await pass_time(clock, 300, lambda: clock.monotonic() > 1_600)
    (tmp_path / "root" / "missing").mkdir()
    assert await elapsed(clock, lambda: replica.refresh_error is None) <= 300


async def test_what_a_former_owner_uploads_is_soon_readable(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path
) -> None:
    """A new replica does not leave readers waiting for the refresh interval of minutes."""
    directory = tmp_path / "root" / "fragments" / JOURNAL
    timed.create(_refreshed_each_minute(), "a")
    replica = timed["a"].replica(JOURNAL)
    await until(lambda: replica.index.first_refresh.is_set)
    directory.mkdir(parents=True)
    (directory / name_of(0, b"content")).write_bytes(b"content")
    await pass_time(clock, 5, lambda: replica.index.end_offset == 7)
    assert replica.index.end_offset == 7


async def test_fragments_in_conflict_are_reported_once(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that another broker has uploaded at offsets which are in a spool of this one."""
    directory = tmp_path / "root" / "fragments" / JOURNAL
    directory.mkdir(parents=True)
    timed.create(_refreshed_each_minute(), "a")
    await append(timed["a"], b"content")
    (directory / name_of(0, b"CONTENT")).write_bytes(b"CONTENT")
    index = timed["a"].replica(JOURNAL).index
    before = metric("gazette_fragment_conflicts_total")
    await pass_time(clock, 120, lambda: index.conflicts)
    # One or two: the bytes may be seen in the spool, and in the store where they were uploaded to.
    sums = {hashlib.sha1(content).digest() for content in (b"content", b"CONTENT")}
    assert all({conflict.kept.sum, conflict.hidden.sum} == sums for conflict in index.conflicts)
    for _ in range(200):
        clock.advance(1.0)
        await SystemClock().sleep(0.001)
    texts = [record.getMessage() for record in caplog.records]
    reported = [text for text in texts if "the same offsets hold different bytes" in text]
    assert (
        len(reported) == len(set(reported)) == metric("gazette_fragment_conflicts_total") - before
    )
    assert 1 <= len(reported) <= 2  # Of the spool, and of what became of it.


# Shutting down.


async def test_primary_that_is_shut_down_uploads_at_once(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """So that a journal with one replica is readable at its next broker."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"content")
    cluster.assign(JOURNAL, "b")
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    assert stored(tmp_path) == [name_of(0, b"content")]


async def test_replica_that_is_shut_down_uploads_at_once(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path
) -> None:
    """No time passes here: it cannot know for how long its primary lives."""
    timed.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await append(timed["a"], b"content")
    timed.put_spec(journal_spec(JOURNAL, replication=1))
    timed.assign(JOURNAL, "a")
    await timed["b"].context.resolver.wait_torn_down(10.0)
    await until(lambda: not timed["b"].context.persister.unpersisted)
    assert stored(tmp_path) == [name_of(0, b"content")]


async def test_survivor_uploads_at_once_when_its_new_primary_holds_nothing(
    timed: FixedCluster, tmp_path: Path
) -> None:
    """Two of three have died. The primary rolled before that, and the survivor waits for its upload;
    what it has since is in its open spool. No time passes here."""
    timed.create(journal_spec(JOURNAL, replication=3), "a", "b", "c")
    await append(timed["a"], b"first")  # A fragment of its own.
    await append(timed["a"], b"second")
    await timed["a"].stop()
    await timed["b"].stop()
    timed.forget("a")
    timed.forget("b")
    survivor = timed["c"].context.persister
    assert survivor.unpersisted == 1
    timed.assign(JOURNAL, "d", "e", "c")
    await until(lambda: len(stored(tmp_path)) == 2)
    await until(lambda: not survivor.unpersisted)
    assert stored(tmp_path) == [name_of(0, b"first"), name_of(5, b"second")]


async def test_survivors_that_are_too_few_upload_what_they_hold(
    timed: FixedCluster, tmp_path: Path
) -> None:
    """No append comes, and no broker joins: the last holder of these bytes must not wait for either."""
    timed.create(journal_spec(JOURNAL, replication=3), "a", "b", "c")
    await append(timed["a"], b"first")
    await append(timed["a"], b"second")
    await timed["a"].stop()
    timed.forget("a")
    timed.assign(JOURNAL, "c", "b")
    await until(lambda: len(stored(tmp_path)) == 2)
    assert stored(tmp_path) == [name_of(0, b"first"), name_of(5, b"second")]


async def test_follower_lets_go_of_what_its_primary_has_uploaded(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path
) -> None:
    timed.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await append(timed["a"], b"first")
    await append(timed["a"], b"second")
    await until(lambda: stored(tmp_path) == [name_of(0, b"first")])
    follower = timed["b"].context.persister
    assert follower.unpersisted == 1
    for _ in range(16):
        clock.advance(1.0)
        await SystemClock().sleep(0.001)
    await until(lambda: not follower.unpersisted)


async def test_journal_that_is_created_again_gets_nothing_of_its_former_life(
    timed: FixedCluster, clock: ManualClock, tmp_path: Path
) -> None:
    """Its store was away: spools of the former life still wait when it is back."""
    timed.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await append(timed["a"], b"first")  # A fragment of its own.
    fragments = tmp_path / "root" / "fragments"
    await until(lambda: stored(tmp_path))
    moved = fragments.rename(fragments.with_name("moved"))
    await append(timed["a"], b"former")
    timed.etcd.change({}, [f"{ROOT}/items/{JOURNAL}"])
    timed.put_spec(journal_spec(JOURNAL, replication=2))
    for name in "ab":
        await timed[name].context.resolver.wait_torn_down(10.0)
    for path in (moved / JOURNAL).iterdir():
        path.unlink()  # As `gazctl journals prune` would, of a journal that is deleted.
    moved.rename(fragments)
    await pass_time(
        clock, 300, lambda: not any(timed[name].context.persister.unpersisted for name in "ab")
    )
    assert stored(tmp_path) == []
    async with TaskScope("append") as scope:
        # It waits until the store is found healthy again, as does the pulse before it.
        latter = scope.spawn(append(timed["a"], b"latter"), name="latter")
        await pass_time(clock, 300, latter.done)
        outcome = await latter
    assert outcome.commit is not None
    assert outcome.commit.begin == 0


# Acknowledgements.


@pytest.mark.parametrize("replication", [1, 2])
async def test_nothing_is_acknowledged_without_a_lease(
    cluster: FixedCluster, replication: int
) -> None:
    """Not even with one replica, where no peer is asked: another broker may lead by now."""
    cluster.create(journal_spec(JOURNAL, replication=replication), *"ab"[:replication])
    assert (await append(cluster["a"], b"first")).ending is Ending.COMMITTED
    await append(
        cluster["a"]
    )  # The first fragment is complete behind it, and no pulse is under way.
    cluster["a"].replica(JOURNAL).stop_daemons()  # No pulse finds it out before.
    cluster["a"].lease.remaining_s = 0.0
    outcome = await append(cluster["a"], b"second")
    assert outcome.ending is Ending.FAILED
    assert outcome.uncertain
    assert isinstance(outcome.error, GazetteError)
    assert "late_s" in outcome.error.facts
    # Case: what it holds beyond is not agreed, and is not uploaded.
    assert cluster["a"].replica(JOURNAL)._upload_gate.end == 5


async def test_append_without_a_peer_s_acknowledgement_under_its_lease_fails(
    cluster: FixedCluster,
) -> None:
    cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
    assert (await append(cluster["a"], b"first")).ending is Ending.COMMITTED
    cluster["a"].replica(JOURNAL).stop_daemons()  # No pulse finds it out before.
    await append(cluster["a"])  # The last pulse is over.
    cluster["b"].lease.remaining_s = -1.0
    outcome = await append(cluster["a"], b"second")
    assert outcome.ending is Ending.FAILED
    assert outcome.uncertain


async def test_what_is_not_committed_is_not_handed_over(cluster: FixedCluster) -> None:
    cluster.create(journal_spec(JOURNAL), "a")
    replica = cluster["a"].replica(JOURNAL)
    await append(cluster["a"], b"content")
    pipeline = await replica.pipeline.take()
    assert pipeline is not None
    await pipeline.content(bytes(1 << 20), 0)
    await pipeline.content(b"more", 1 << 20)
    replica.pipeline.give(pipeline)
    spool = pipeline.spool
    await replica.shut_down()
    assert (spool.fragment.begin, spool.fragment.end, spool.delta) == (7, 7, 0)


async def test_spools_change_hands_without_what_is_pending(cluster: FixedCluster) -> None:
    """Its holder was cut short. The next holder would take those bytes for its own."""
    cluster.create(journal_spec(JOURNAL), "a")
    replica = cluster["a"].replica(JOURNAL)
    await append(cluster["a"], b"content")
    replica.stop_daemons()
    # Case: a pipeline is torn down in the middle of an append.
    pipeline = await replica.pipeline.take()
    assert pipeline is not None
    await pipeline.content(b"pending", 0)
    await pipeline.local.flush()
    assert pipeline.spool.delta == 7
    await replica.tear_down(pipeline)
    replica.pipeline.give(None)
    async with replica.spool.hold() as spool:
        assert (spool.fragment.end, spool.delta) == (7, 0)
        # Case: a spool that is given back as its holder left it, to an append that builds a pipeline.
        await spool.apply(Content(b"pending", 0), primary=True)
    call = AppendCall(
        AppendTerms(JOURNAL), Claims.of_journal(Capability.APPEND, JOURNAL), may_proxy=False
    )
    driver = AppendDriver(cluster["a"].context, call, Chunks())
    await driver._resolve(0)
    await driver._take_pipeline()
    built = await driver._build_pipeline()
    assert isinstance(built, PipelineBuilt)
    pipeline = driver._hold.held_pipeline
    assert (pipeline.spool.delta, pipeline.delta) == (0, 0)
    driver._hold.drop()


async def test_waiters_of_a_replica_that_is_shut_down(cluster: FixedCluster) -> None:
    cluster.create(journal_spec(JOURNAL), "a")
    replica = cluster["a"].replica(JOURNAL)
    pipeline = await replica.pipeline.take()
    async with TaskScope("waiters") as scope:
        shutting_down = scope.spawn(replica.shut_down(), name="shut down")
        await until(lambda: len(replica.pipeline._waiters) == 1)
        late = scope.spawn(_outcome(replica.pipeline.take()), name="late")
        await until(lambda: len(replica.pipeline._waiters) == 2)
        replica.pipeline.give(pipeline)
        await shutting_down
        assert isinstance(await late, Closed)
    with pytest.raises(Closed):
        await replica.spool.take()
    with pytest.raises(Closed):
        await replica.index.query(0, block=True)


async def test_append_finds_out_that_its_replica_is_gone(cluster: FixedCluster) -> None:
    """Also if nothing says that the resolution is superseded: it must not try again for ever."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"content")
    await cluster["a"].replica(JOURNAL).shut_down()
    outcome = await append(cluster["a"], b"x")
    assert isinstance(outcome.error, Closed)


async def test_broken_pipeline_does_not_keep_spools(tmp_path: Path) -> None:
    """An append lost its acknowledgement and no append follows: all spools come free."""
    async with await FixedCluster.start(2, tmp_path, peer_timeout_s=0.2) as cluster:
        cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
        await until(lambda: cluster.consistent(JOURNAL))
        replica = cluster["a"].replica(JOURNAL)
        await until(lambda: replica.index.first_refresh.is_set)
        replica.stop_daemons()  # No pulse, either.
        pipeline = await replica.pipeline.take()
        assert pipeline is not None
        peer = pipeline._peers[0]
        replica.pipeline.give(pipeline)
        peer._answers.arrived = _Lossy()  # type: ignore[assignment]
        outcome = await append(cluster["a"], b"x")
        assert outcome.uncertain
        assert isinstance(outcome.error, Unavailable)
        async with replica.spool.hold() as spool:
            assert spool.fragment.end == 1
        async with cluster["b"].replica(JOURNAL).spool.hold():
            pass


async def test_primary_uploads_what_all_replicas_have(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """It was cut off in mid-append, and another one leads now: the journal's bytes are the other's."""
    cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await append(cluster["a"], b"first")  # A fragment of its own.
    await append(cluster["a"], b"agreed")
    cluster.put_spec(journal_spec(JOURNAL))
    replica = cluster["a"].replica(JOURNAL)
    replica.stop_daemons()  # No pulse comes in between.
    pipeline = await replica.pipeline.take()
    assert pipeline is not None
    await pipeline.content(b"-lost", 0)
    # Only its own spool gets the proposal, as the stream is cut off in front of it.
    await pipeline.local.propose(Proposal(await pipeline.next(), EMPTY_LABELS))
    pipeline.fail(Broken("cut off"))
    with pytest.raises(Broken):
        async with pipeline.take_turn():
            await pipeline.gather_acks()
    assert pipeline.spool.fragment.end == 16
    replica.pipeline.give(pipeline)
    cluster.assign(JOURNAL, "b")
    outcome = await append(cluster["b"], b", and on")
    assert outcome.commit is not None
    assert outcome.commit.begin == 11
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    cluster.assign(JOURNAL)
    await cluster["b"].context.resolver.wait_torn_down(10.0)
    contents = [(0, b"first"), (5, b"agreed"), (5, b"agreed, and on")]
    await until(lambda: len(stored(tmp_path)) == len(contents))
    assert stored(tmp_path) == [name_of(*content) for content in contents]


async def test_primary_that_is_shut_down_waits_for_answers(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """They come after it has lost the spool: an acknowledged client must find its append in the store."""
    cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await append(cluster["a"], b"first")  # A fragment of its own.
    await append(cluster["a"], b"agreed")
    replica = cluster["a"].replica(JOURNAL)
    pipeline = await replica.pipeline.take()
    assert pipeline is not None
    await pipeline.content(b"-late", 0)
    await pipeline.propose(await pipeline.next(), EMPTY_LABELS, acknowledge=True)
    turn = pipeline.take_turn()
    replica.pipeline.give(pipeline)
    async with TaskScope("shut down") as scope:
        shutting_down = scope.spawn(replica.shut_down(), name="shut down")
        await until(lambda: replica._gathering)
        assert not shutting_down.done()
        async with turn:
            answers = await pipeline.gather_acks()
        assert [answer.status for answer in answers] == [Status.OK]
        await shutting_down
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    assert stored(tmp_path) == [name_of(0, b"first"), name_of(5, b"agreed-late")]


class _Lossy(list[Any]):
    """The answers of a peer, of which none arrives any more."""

    def append(self, item: Any) -> None:
        pass


async def test_disk_of_the_primary_is_full(cluster: FixedCluster, tmp_path: Path) -> None:
    """The append fails on all replicas, and the next one finds everything in order."""
    cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await until(lambda: cluster.consistent(JOURNAL))
    replica = cluster["a"].replica(JOURNAL)
    pipeline = await replica.pipeline.take()
    assert pipeline is not None
    disk = pipeline.spool._disk
    replica.pipeline.give(pipeline)
    assert isinstance(disk, LocalDisk)
    directory, disk.directory = disk.directory, tmp_path / "does" / "not" / "exist"
    for chunk in (bytes(1 << 20), b"small"):
        outcome = await append(cluster["a"], chunk, b"x")
        assert isinstance(outcome.error, Unavailable)
        assert outcome.error.facts["errno"] == "ENOENT"
        assert not outcome.uncertain
    disk.directory = directory
    outcome = await append(cluster["a"], b"x")
    assert outcome.commit is not None
    assert outcome.commit.begin == 0


# Waits that may be overtaken.


async def test_take_unless() -> None:
    mutex, invalidated = Mutex("thing", 1), Latch()
    assert await take_unless(mutex, invalidated) == 1
    async with TaskScope("test") as scope:
        # Case: it comes.
        waiting = scope.spawn(take_unless(mutex, invalidated), name="waiting")
        await turns()
        mutex.give(2)
        assert await waiting == 2
        # Case: the wait is cancelled.
        waiting = scope.spawn(take_unless(mutex, invalidated), name="waiting")
        await turns()
        waiting.cancel()
        await asyncio.wait({waiting})
        mutex.give(2)
        assert mutex.idle
        assert await mutex.take() == 2
        # Case: it is cancelled just when the thing comes.
        waiting = scope.spawn(take_unless(mutex, invalidated), name="waiting")
        await turns()
        mutex.give(3)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert mutex.idle
        assert await mutex.take() == 3
        # Case: it is overtaken, just when the thing comes.
        waiting = scope.spawn(_outcome(take_unless(mutex, invalidated)), name="waiting")
        await turns()
        mutex.give(4)
        invalidated.set()
        assert isinstance(await waiting, Superseded)
        assert mutex.idle
        # Case: it was overtaken before.
        assert isinstance(await _outcome(take_unless(mutex, invalidated)), Superseded)
        # Case: the mutex is closed.
        await mutex.take()
        waiting = scope.spawn(_outcome(take_unless(mutex, Latch())), name="waiting")
        await turns()
        mutex.close()
        assert isinstance(await waiting, Closed)


async def test_changed() -> None:
    invalidated, event = Latch(), Latch()
    never = Latch()
    async with TaskScope("test") as scope:
        waiting = scope.spawn(
            _outcome(changed(invalidated, event.wait(), never.wait())), name="waiting"
        )
        await SystemClock().sleep(0)
        event.set()
        assert await waiting is None

        async def fails() -> None:
            raise Broken("failed")

        assert isinstance(await _outcome(changed(invalidated, fails())), Broken)
        waiting = scope.spawn(_outcome(changed(invalidated, never.wait())), name="waiting")
        await SystemClock().sleep(0)
        invalidated.set()
        assert isinstance(await waiting, Superseded)


async def _outcome(awaitable: Any) -> Any:
    try:
        return await awaitable
    except (Superseded, Broken, Closed) as error:
        return error


async def test_a_replica_that_has_ended_is_freed_without_a_collection(
    timed: FixedCluster, clock: ManualClock
) -> None:
    """Brokers of many journals exclude them from garbage collection."""
    timed.create(journal_spec(JOURNAL, replication=2), "a", "b")
    assert (await append(timed["a"], b"content")).ending is Ending.COMMITTED
    ended: list[Callable[[], object]] = [weakref.ref(timed[name].replica(JOURNAL)) for name in "ab"]
    ended += [weakref.ref(timed[name].replica(JOURNAL).index) for name in "ab"]
    gc.collect()
    gc.disable()
    try:
        timed.assign(JOURNAL)
        for name in "ab":
            await timed[name].context.resolver.wait_torn_down(10.0)
        await pass_time(clock, 900, lambda: not any(one() for one in ended))
    finally:
        gc.enable()
