"""The known head: what keeps an empty, stale or unmounted store from restarting a journal at 0."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gazette.auth import Capability, Claims
from gazette.blobs.blob_store import BlobStore
from gazette.broker.append.events import AppendTerms, Ending, Outcome, SuspendControl
from gazette.broker.commit.driver import AppendCall, AppendDriver
from gazette.broker.known_head import Head, head_key
from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.cluster.allocator.model import item_key, member_key
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Conflict, Unavailable
from gazette.fragment.cover_set import CoverSet
from gazette.fragment.set_aside import SetAside
from gazette.protocol.fragment import ZERO_SUM, Codec, Fragment
from gazette.protocol.journal import JournalFlag, Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.process import BrokerSpec
from gazette.protocol.status import Status
from gazette.protocol.text import duration
from gazette.runtime.clock import SystemClock
from gazette.runtime.latch import Latch
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import logged, raises
from tests.support.fixed_cluster import ROOT, FixedBroker, FixedCluster
from tests.support.loop_time import turns
from tests.support.tcp_proxy import TcpProxy

JOURNAL = "a/journal"
KEY = head_key(ROOT, JOURNAL)


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


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await SystemClock().sleep(0)


def known(cluster: FixedCluster) -> Head | None:
    kv = cluster.etcd.kvs.get(KEY.encode())
    return None if kv is None else Head.decode(kv.value)


def stored(tmp_path: Path) -> list[Path]:
    directory = tmp_path / "root" / "fragments" / JOURNAL
    paths = directory.iterdir() if directory.exists() else ()
    return sorted(path for path in paths if not path.name.startswith((".", "closed-")))


def name_of(begin: int, content: bytes) -> str:
    sum = hashlib.sha1(content).digest()
    return Fragment(JOURNAL, begin, begin + len(content), sum, Codec.NONE).content_name()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FixedCluster]:
    async with await FixedCluster.start(3, tmp_path) as cluster:
        yield cluster


async def pause_with_content(cluster: FixedCluster, tmp_path: Path) -> None:
    """Pause broker a beyond its lease, as the only replica of a journal. The store has ``[0, 5)``, and only
    the broker has ``[5, 14)``, which was acknowledged.
    """
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first")
    await until(lambda: stored(tmp_path) and not cluster["a"].context.persister.unpersisted)
    await append(cluster["a"], b"held by a")
    cluster["a"].lagging, cluster["a"].lease.remaining_s = [], 0.0


async def lose_all(cluster: FixedCluster, name: str) -> None:
    """Kill the broker, and with it all that it did not upload."""
    await cluster[name].stop()
    cluster.forget(name)
    cluster.assign(JOURNAL)


async def test_a_broker_paused_beyond_its_lease_shows_none_of_its_own_bytes(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """With R=1, an operator may have given the offsets of all other bytes to others meanwhile."""
    await pause_with_content(cluster, tmp_path)
    async with Client(cluster["a"].endpoint) as client:
        with pytest.raises(Unavailable, match="sends readers none of its own bytes"):
            await client.reader(ReadParams(JOURNAL, offset=5)).read()
        # Case: the lease is known to hold again.
        cluster["a"].lease.remaining_s = 1.0
        assert await client.reader(ReadParams(JOURNAL, offset=5)).read() == b"held by a"


def test_keys_are_outside_of_what_brokers_watch() -> None:
    assert head_key("/gazette/cluster", "a/journal") == "/gazette/.heads/cluster/a/journal"
    assert head_key("/one", "a") == "/.heads/one/a"


def test_values() -> None:
    head = Head(7).begun(5, 0, 10).begun(9, 10, 12)
    assert Head.decode(head.encode()) == Head(7, 12, ((5, 0), (9, 10)))
    assert Head.decode(head.begun(11, 12, 13, 7).encode()).lease == 7
    assert b"lease" not in head.encode()
    for registers in (LabelSet(), LabelSet.of(("a", "1"), ("b", ""))):
        closed = replace(head, closed=registers)
        assert Head.decode(closed.encode()) == closed
    assert [head.limit(tenure) for tenure in (4, 5, 8, 9, 10)] == [0, 10, 10, None, None]
    # Case: of many primaries it forgets no limit, and rather sets a lower one.
    exact = {5: 0, 9: 10}
    for tenure in range(10, 400):
        begin = tenure if tenure % 7 else tenure - 5
        head, exact[tenure] = head.begun(tenure, begin, tenure), begin
    assert 32 < len(head.tenures) <= 64
    assert head.tenures[0][0] > 100
    for former in range(400):
        later = [begin for tenure, begin in exact.items() if tenure > former]
        limit = head.limit(former)
        assert (limit is None) == (not later)
        if limit is not None:
            assert limit == min(later) or (limit < min(later) and former < head.tenures[0][0])
    for value in (
        b"",
        b"{}",
        b"[]",
        json.dumps({"life": 1, "offset": "x", "tenures": []}).encode(),
    ):
        with raises(Conflict, "value"):
            Head.decode(value)


async def test_the_first_fragment_is_stored_before_a_second_append(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await append(cluster["a"])
    for _ in range(500):
        await SystemClock().sleep(
            0
        )  # The pulses of new replicas are over; the next is a minute away.
    await append(cluster["a"], b"first")
    await until(lambda: stored(tmp_path))
    assert [path.name for path in stored(tmp_path)] == [name_of(0, b"first")]


async def test_it_is_not_written_per_append(cluster: FixedCluster) -> None:
    """Before and after the first one; then behind each fragment that is completed."""
    cluster.create(journal_spec(JOURNAL, length=1024), "a")
    assert known(cluster) is None
    await append(cluster["a"])
    head = known(cluster)
    assert head is not None
    assert (head.offset, [begin for _, begin in head.tenures]) == (0, [0])
    await append(cluster["a"], b"first")
    head = known(cluster)
    assert head is not None
    assert (head.life, head.offset) == (cluster.life(JOURNAL), 5)
    assert [begin for _, begin in head.tenures] == [0]
    written = cluster.etcd.kvs[KEY.encode()].version
    for _ in range(20):
        await append(cluster["a"], b"x" * 52)
    assert cluster.etcd.kvs[KEY.encode()].version == written
    await append(cluster["a"], b"x")
    await until(lambda: cluster.etcd.kvs[KEY.encode()].version == written + 1)
    head = known(cluster)
    assert head is not None
    assert head.offset == 5 + 20 * 52


@pytest.mark.parametrize("was_stored", [False, True])
async def test_an_empty_store_does_not_restart_a_journal(
    cluster: FixedCluster, tmp_path: Path, was_stored: bool
) -> None:
    """All replicas are lost, and the store has nothing: it was wiped, or is not mounted."""
    cluster.create(journal_spec(JOURNAL), "a")
    if was_stored:
        await append(cluster["a"], b"content")
        await until(lambda: stored(tmp_path))
    else:
        cluster["a"].replica(JOURNAL).stop_daemons()  # No pulse completes the fragment.
        cluster["a"].replica(JOURNAL).index.replace_remote(CoverSet())
        await append(cluster["a"], b"content")
    await lose_all(cluster, "a")
    for path in stored(tmp_path):
        path.unlink()
    cluster.assign(JOURNAL, "b")
    outcome = await append(cluster["b"], b"x")
    assert (outcome.ending, outcome.status) == (
        Ending.REFUSED,
        Status.INDEX_HAS_GREATER_OFFSET,
    )
    assert outcome.store_error.startswith("known head 7, stores end at 0, spools at 0; ")
    # Case: a read for the write head gives the known head, and an append there confirms it.
    assert cluster["b"].replica(JOURNAL).index.write_head == 7
    assert (await append(cluster["b"], offset=5)).status is Status.WRONG_APPEND_OFFSET
    assert (await append(cluster["b"], offset=7)).ending is Ending.COMMITTED
    outcome = await append(cluster["b"], b"x")
    assert outcome.commit is not None
    assert outcome.commit.begin == 7


async def test_a_stale_store_does_not_give_offsets_out_twice(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """A backup, or a bucket that lags: its fragments end before what is known to exist."""
    cluster.create(journal_spec(JOURNAL, length=1024), "a")
    for content in (bytes(1025), bytes(1025), b"open"):
        await append(cluster["a"], content)
    await until(lambda: len(stored(tmp_path)) == 2)
    await until(lambda: cluster["a"].replica(JOURNAL).head.offset == 2050)
    await cluster["a"].replica(JOURNAL).head.settle(10.0)
    await lose_all(cluster, "a")
    stored(tmp_path)[1].unlink()
    cluster.put_spec(journal_spec(JOURNAL, replication=2))
    cluster.assign(JOURNAL, "b", "c")
    outcome = await append(cluster["b"], b"x")
    assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    assert outcome.store_error.startswith("known head 2050, stores end at 1025, spools at 0; ")
    follower = cluster["c"].replica(JOURNAL)
    await until(lambda: follower.index.first_refresh.is_set)
    assert follower.index.write_head == 2050


async def test_a_journal_without_stores_goes_on_at_its_known_head(cluster: FixedCluster) -> None:
    """Nothing is to be waited for, and no offset is used again."""
    cluster.create(journal_spec(JOURNAL, stores=()), "a")
    await append(cluster["a"], b"content")
    cluster.assign(JOURNAL)
    cluster.assign(JOURNAL, "b")
    outcome = await append(cluster["b"], b"x")
    assert outcome.commit is not None
    assert outcome.commit.begin == 7


@pytest.mark.parametrize("content", [b"", b"x"], ids=["reset-head", "append"])
async def test_a_head_that_is_confirmed_has_no_hole_for_readers(
    cluster: FixedCluster, tmp_path: Path, content: bytes
) -> None:
    """All replicas are lost by power. Of what etcd knows, the store has two parts.

    Readers at the primary and at a follower go on where the journal does, and not six hours later.
    """
    cluster.create(journal_spec(JOURNAL, length=1024), "a")
    for _ in range(5):
        await append(cluster["a"], bytes(1025))
    await until(lambda: len(stored(tmp_path)) >= 4)
    await until(lambda: cluster["a"].replica(JOURNAL).head.offset >= 4100)
    cluster["a"].replica(JOURNAL).stop_daemons()  # No pulse completes another fragment.
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    await cluster["a"].replica(JOURNAL).head.settle(10.0)
    await lose_all(cluster, "a")
    for path in [stored(tmp_path)[1], *stored(tmp_path)[3:]]:
        path.unlink()
    cluster.put_spec(journal_spec(JOURNAL, length=1024, replication=2))
    cluster.assign(JOURNAL, "b", "c")
    assert (await append(cluster["b"], b"x")).status is Status.INDEX_HAS_GREATER_OFFSET
    indexes = [cluster[name].replica(JOURNAL).index for name in "bc"]
    await until(lambda: all(index.first_refresh.is_set for index in indexes))
    end = indexes[0].write_head

    async with TaskScope("readers") as scope:
        readers = [
            scope.spawn(index.query(at, block=True), name="reader")
            for index in indexes
            for at in (1025, 3075)
        ]
        control = SuspendControl.KEEP if not content else SuspendControl.RESUME
        confirmed = await append(
            cluster["b"], *filter(None, [content]), offset=end, suspend=control
        )
        assert confirmed.ending is Ending.COMMITTED
        if not content:
            assert (await append(cluster["b"], b"x")).ending is Ending.COMMITTED
        found = [await reader for reader in readers]
    assert [one.offset for one in found] == [2050, end, 2050, end]
    head = known(cluster)
    assert head is not None
    assert head.lost == ((1025, 2050), (3075, end))
    assert not any(index.has_hole for index in indexes)


async def test_the_head_of_another_life_means_nothing(cluster: FixedCluster) -> None:
    cluster.create(journal_spec(JOURNAL, stores=()), "a")
    cluster.etcd.change({KEY: Head(1, 100, ((2, 50),)).encode()})
    outcome = await append(cluster["a"], b"x")
    assert outcome.commit is not None
    assert outcome.commit.begin == 0
    head = known(cluster)
    assert head is not None
    assert (head.life, head.offset) == (cluster.life(JOURNAL), 1)


async def test_a_replica_of_a_former_life_does_not_write_over_the_head(
    cluster: FixedCluster,
) -> None:
    """Of a broker that does not know yet that the journal was created again."""
    cluster.create(journal_spec(JOURNAL, stores=()), "a")
    later = Head(cluster.life(JOURNAL) + 100, 7, ((2, 0),))
    cluster.etcd.change({KEY: later.encode()})
    outcome = await append(cluster["a"], b"x")
    assert outcome.ending is Ending.FAILED
    assert isinstance(outcome.error, Conflict)
    assert known(cluster) == later


async def test_no_answer_without_it(cluster: FixedCluster) -> None:
    """etcd refuses the write before the first answer: the append may have happened, and fails."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"])
    cluster.etcd.failing = KEY
    outcome = await append(cluster["a"], b"first")
    assert outcome.ending is Ending.FAILED
    assert outcome.uncertain
    assert isinstance(outcome.error, Unavailable)
    cluster.etcd.failing = ""
    outcome = await append(cluster["a"], b"second")
    assert outcome.commit is not None
    head = known(cluster)
    assert head is not None
    assert head.offset == outcome.commit.end


async def test_nothing_is_uploaded_before_it_names_the_primary(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """One replica, and the first append was not recorded. The next primary may not see the store."""
    cluster.create(journal_spec(JOURNAL, length=1), "a")
    await append(cluster["a"])
    cluster.etcd.failing = KEY
    assert (await append(cluster["a"], b"first")).ending is Ending.FAILED
    for _ in range(3):
        await append(
            cluster["a"]
        )  # As pulses: all replicas have the bytes, and the fragment is complete.
    assert not cluster["a"].context.persister.unpersisted
    assert not stored(tmp_path)
    # Case: the primary leaves. The write may have reached etcd, which then demands these bytes.
    cluster.etcd.failing = ""
    cluster.assign(JOURNAL, "b")
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    await until(lambda: stored(tmp_path))
    assert stored(tmp_path)[0].name == name_of(0, b"first")


async def test_what_it_names_is_uploaded_although_the_lease_ends_meanwhile(
    cluster: FixedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the journal would wait for bytes that no broker has."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"])
    head = cluster["a"].replica(JOURNAL).head
    acknowledge = head.record_first_append

    async def late(tenure: int, begin: int, end: int) -> None:
        await acknowledge(tenure, begin, end)
        cluster["a"].lease.remaining_s = 0.0

    monkeypatch.setattr(head, "record_first_append", late)
    await append(cluster["a"], b"first")
    cluster.assign(JOURNAL, "b")
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    await until(lambda: stored(tmp_path))
    assert stored(tmp_path)[0].name == name_of(0, b"first")
    assert (await append(cluster["b"], b"x", offset=5)).ending is Ending.COMMITTED


@pytest.mark.parametrize("stays", [False, True])
async def test_a_survivor_of_three_lists_stores_if_another_follower_has_gone(
    stays: bool, tmp_path: Path
) -> None:
    """The primary and a follower end. That follower was sent an append which the survivor never got."""
    async with await FixedCluster.start(5, tmp_path) as cluster:
        cluster.create(journal_spec(JOURNAL, replication=3), "a", "b", "c")
        await append(cluster["a"], b"first")
        await until(lambda: stored(tmp_path))
        survivor = cluster["b"].replica(JOURNAL)
        survivor.stop_daemons()  # The next listing is a while away.
        (stored(tmp_path)[0].parent / name_of(5, b"sent to c only")).write_bytes(b"sent to c only")
        cluster.expire("a")
        if not stays:
            cluster.expire("c")
        cluster.assign(JOURNAL, "b", "c" if stays else "e", "d")
        outcome = await append(cluster["b"], b"x")
        if stays:  # It would have brought these bytes along: they are of another journal's life.
            assert outcome.ending is Ending.COMMITTED
            assert survivor.index.end_offset == 6
        else:
            assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
            assert survivor.index.end_offset == 5 + len(b"sent to c only")
            assert (await append(cluster["b"], b"x", offset=19)).ending is Ending.COMMITTED
            assert survivor.others.any_gone(frozenset()) is False


async def test_two_primaries_do_not_both_begin(cluster: FixedCluster) -> None:
    """One replica, and its broker does not know that another one leads, and has appended."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"])
    cluster["a"].lagging = []
    cluster.assign(JOURNAL, "b")
    assert (await append(cluster["b"], b"content")).ending is Ending.COMMITTED
    outcome = await append(cluster["a"], b"other")
    assert outcome.ending is Ending.FAILED
    assert isinstance(outcome.error, Conflict)
    assert outcome.error.facts.keys() >= {"journal", "begun_at"}
    cluster["a"].catch_up()


async def test_a_primary_that_has_not_appended_yet_does_not_begin_late(
    cluster: FixedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica. The first primary leaves in good order. The second one, b, does not hear that c leads.

    Its first append comes when c has appended, and before c tells etcd.
    """
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first")
    await until(lambda: stored(tmp_path))
    cluster.assign(JOURNAL, "b")
    await until(lambda: (head := known(cluster)) is not None and head.closed is not None)
    await until(
        lambda: cluster.consistent(JOURNAL)
    )  # Else b waits to hear of what it wrote itself.
    cluster["b"].lagging = []
    cluster.assign(JOURNAL, "c")
    head = cluster["c"].replica(JOURNAL).head
    acknowledge = head.record_first_append
    late: list[Outcome] = []

    async def meanwhile(tenure: int, begin: int, end: int) -> None:
        if not late:
            late.append(await append(cluster["b"], b"of b"))
        await acknowledge(tenure, begin, end)

    monkeypatch.setattr(head, "record_first_append", meanwhile)
    outcome = await append(cluster["c"], b"of c")
    assert outcome.commit is not None
    assert (outcome.commit.begin, outcome.commit.end) == (5, 9)
    assert late[0].ending is Ending.FAILED
    assert isinstance(late[0].error, Conflict)
    cluster["b"].catch_up()
    await cluster["b"].context.resolver.wait_torn_down(10.0)
    cluster.assign(JOURNAL, "a")
    await cluster["c"].context.resolver.wait_torn_down(10.0)
    await until(lambda: len(stored(tmp_path)) == 2)
    assert stored(tmp_path)[1].name == name_of(5, b"of c")


async def test_no_head_is_written_for_a_journal_that_was_deleted(cluster: FixedCluster) -> None:
    """The primary does not know it yet."""
    cluster.create(journal_spec(JOURNAL), "a")
    await until(lambda: cluster.consistent(JOURNAL))
    cluster["a"].lagging = []
    cluster.etcd.change({}, [item_key(ROOT, JOURNAL)])
    outcome = await append(cluster["a"], b"late")
    assert outcome.ending is Ending.FAILED
    assert isinstance(outcome.error, Conflict)
    assert known(cluster) is None


async def test_a_journal_that_seemed_new_is_listed_once_its_end_is_known(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """Its former owner was a broker of the original, which writes no known heads."""
    spec = journal_spec(JOURNAL)
    fragment = replace(spec.fragment, refresh_interval_ns=duration.HOUR)
    cluster.create(replace(spec, fragment=fragment), "a")
    replica = cluster["a"].replica(JOURNAL)
    await append(cluster["a"])  # It has begun, which lists the store.
    directory = tmp_path / "root" / "fragments" / JOURNAL
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name_of(0, b"former")).write_bytes(b"former")
    replica.follow(Fragment(JOURNAL, 6, 6, ZERO_SUM, Codec.NONE), Latch(), 1)
    await until(lambda: replica.index.end_offset == 6)


async def test_a_head_stays_closed_until_a_primary_answers(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """One that begins and ends without an append leaves nothing for an operator to do."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first")
    await until(lambda: stored(tmp_path))
    cluster.assign(JOURNAL, "b")
    await until(lambda: (head := known(cluster)) is not None and head.closed is not None)
    replica = cluster["b"].replica(JOURNAL)
    await replica.load_head()
    await replica.begin(cluster.etcd.revision, 5)
    assert (head := known(cluster)) is not None
    assert head.closed == LabelSet(())
    assert head.limit(0) == 0
    # Bytes of others that b finds in stores from now on may be removed again.
    assert replica.head.closed_registers is None
    cluster.assign(JOURNAL, "c")
    outcome = await append(cluster["c"], b"x")
    assert outcome.commit is not None
    assert outcome.commit.begin == 5
    assert (head := known(cluster)) is not None
    assert head.closed is None


async def test_an_upload_between_listing_and_first_append_is_not_hidden(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """One replica. The broker that was paused uploads before the next one begins, which does not know."""
    await pause_with_content(cluster, tmp_path)
    cluster.assign(JOURNAL, "b")
    assert (await append(cluster["b"])).status is Status.INDEX_HAS_GREATER_OFFSET
    cluster["b"].replica(JOURNAL).stop_daemons()  # The next listing is a while away.
    assert cluster["b"].replica(JOURNAL).index.end_offset == 5
    cluster["a"].catch_up()
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    assert stored(tmp_path)[1].name == name_of(5, b"held by a")
    assert (await append(cluster["b"], offset=5)).status is Status.WRONG_APPEND_OFFSET
    # Broker a has left in good order: nothing was acknowledged behind its bytes.
    outcome = await append(cluster["b"], b"x")
    assert outcome.commit is not None
    assert outcome.commit.begin == 14


async def test_what_a_broker_that_wakes_up_saves_is_not_given_out_again(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """One replica, paused. An operator confirms the head at b, which appends nothing.

    Then broker a leaves in good order: its bytes are stored, and the known head is behind them.
    """
    await pause_with_content(cluster, tmp_path)
    cluster.assign(JOURNAL, "b")
    assert (await append(cluster["b"])).status is Status.INDEX_HAS_GREATER_OFFSET
    replica = cluster["b"].replica(JOURNAL)
    replica.stop_daemons()  # The next listing is a while away, and so is the next pulse.
    for _ in range(10):
        await SystemClock().sleep(0)  # A pulse that runs learns of it.
    confirm: dict[str, Any] = {"offset": 5, "suspend": SuspendControl.KEEP}
    assert (await append(cluster["b"], **confirm)).ending is Ending.COMMITTED
    # As if b had followed a primary that appended nothing either.
    replica.others.follow(frozenset())
    cluster["a"].catch_up()
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    assert stored(tmp_path)[1].name == name_of(5, b"held by a")
    outcome = await append(cluster["b"], b"x")
    assert outcome.commit is not None
    assert outcome.commit.begin == 14


async def test_a_primary_answers_no_append_at_offsets_that_were_acknowledged(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """The same, and broker b takes itself for a primary that need not look."""
    await pause_with_content(cluster, tmp_path)
    cluster.assign(JOURNAL, "b")
    await append(cluster["b"])
    await append(cluster["b"], offset=5, suspend=SuspendControl.KEEP)
    replica = cluster["b"].replica(JOURNAL)
    replica.stop_daemons()
    replica.others.clear()
    cluster["a"].catch_up()
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    outcome = await append(cluster["b"], b"x")
    assert isinstance(outcome.error, Conflict)
    assert (outcome.error.facts["begin"], outcome.error.facts["known_head"]) == (5, 14)
    assert replica.index.write_head == 14
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    cluster.assign(JOURNAL)
    await until(lambda: not cluster["b"].context.persister.unpersisted)
    assert [one.name for one in stored(tmp_path)] == [
        name_of(0, b"first"),
        name_of(5, b"held by a"),
    ]


async def test_a_broker_that_wakes_up_uploads_nothing_at_offsets_of_a_later_one(
    cluster: FixedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One replica. It was paused beyond its lease, and an operator went on without what it held."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first")
    await until(lambda: stored(tmp_path))
    await append(cluster["a"], b"held by a")
    cluster["a"].lagging, cluster["a"].lease.remaining_s = [], 0.0
    cluster.assign(JOURNAL, "b")
    assert (await append(cluster["b"])).status is Status.INDEX_HAS_GREATER_OFFSET
    assert (await append(cluster["b"], offset=5)).ending is Ending.COMMITTED
    assert (await append(cluster["b"], b"of b")).ending is Ending.COMMITTED
    cluster["a"].catch_up()
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    assert [path.name for path in stored(tmp_path)] == [name_of(0, b"first")]
    logged(caplog, journal=JOURNAL, begin=5, end=14)
    cluster.assign(JOURNAL)
    await until(lambda: len(stored(tmp_path)) == 2)
    assert stored(tmp_path)[1].name == name_of(5, b"of b")


async def test_a_follower_that_sees_no_changes_of_etcd_uploads_nothing_of_a_former_primary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps its lease, and takes a primary for the present one that has gone."""
    async with await FixedCluster.start(4, tmp_path) as cluster:
        cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
        await append(cluster["a"], b"first")
        await until(lambda: stored(tmp_path))
        await append(cluster["a"], b"held by a and b")
        cluster["a"].lagging, cluster["a"].lease.remaining_s = [], 0.0
        cluster["b"].lagging = []
        cluster.assign(JOURNAL, "c", "d")
        assert (await append(cluster["c"])).status is Status.INDEX_HAS_GREATER_OFFSET
        assert (await append(cluster["c"], offset=5)).ending is Ending.COMMITTED
        assert (await append(cluster["c"], b"of c")).ending is Ending.COMMITTED
        cluster["b"].context.resolver.stop_serving()
        await cluster["b"].context.resolver.wait_torn_down(10.0)
        await cluster["b"].context.persister.finish(10.0)
        assert [path.name for path in stored(tmp_path)] == [name_of(0, b"first")]
        logged(caplog, journal=JOURNAL, begin=5, end=20)


async def cut_off(cluster: FixedCluster, tmp_path: Path, *, reset: bool) -> None:
    """Cut broker a, the only replica, off etcd until it loses its lease with an
    acknowledged append, and ends.

    With ``reset``, broker b has begun at its offsets before.
    """
    await pause_with_content(cluster, tmp_path)
    if reset:
        cluster.assign(JOURNAL, "b")
        assert (await append(cluster["b"], offset=5)).ending is Ending.COMMITTED
        assert (await append(cluster["b"], b"of b")).ending is Ending.COMMITTED
    else:
        cluster.assign(JOURNAL)
    cluster.etcd.silent = True
    cluster["a"].catch_up()
    await cluster["a"].context.resolver.wait_torn_down(10.0)
    await cluster["a"].context.persister.finish(0.5)


def aside(cluster: FixedCluster, tmp_path: Path) -> list[str]:
    return [one.name for one in stored(tmp_path) if ".unconfirmed-" in one.name]


async def test_a_broker_that_cannot_ask_etcd_hides_nothing_of_a_later_one(
    cluster: FixedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may hold the only copy, or bytes at offsets that were given out again: it stores them aside."""
    await cut_off(cluster, tmp_path, reset=True)
    assert cluster["a"].context.persister.unpersisted == 1
    names = [one.name for one in stored(tmp_path)]
    assert names[0] == name_of(0, b"first")
    assert len(names) == 2
    assert names[1].startswith(name_of(5, b"held by a") + ".unconfirmed-")
    assert "is stored aside: etcd did not answer" in caplog.text
    cluster.etcd.silent = False
    replica = cluster["b"].replica(JOURNAL)
    replica.list_now()
    await until(lambda: "is not made part of a/journal" in caplog.text)
    assert [one.name for one in stored(tmp_path)] == names
    assert replica.index.end_offset == 9
    cluster.assign(JOURNAL)
    await until(lambda: len(stored(tmp_path)) == 3)
    assert stored(tmp_path)[1].name == name_of(5, b"of b")


@pytest.mark.parametrize("reset", [True, False])
async def test_what_was_uploaded_and_could_not_be_confirmed_is_judged_by_the_next_listing(
    cluster: FixedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, reset: bool
) -> None:
    """It is there under its own name, too: other replicas may have found it, and let their bytes go."""
    await cut_off(cluster, tmp_path, reset=reset)
    (path,) = (one for one in stored(tmp_path) if ".unconfirmed-" in one.name)
    uploaded = path.with_name(name_of(5, b"held by a"))
    shutil.copy(path, uploaded)
    cluster.etcd.silent = False
    if not reset:
        cluster.assign(JOURNAL, "b")
    replica = cluster["b"].replica(JOURNAL)
    replica.list_now()
    if reset:
        await until(lambda: "is not made part of a/journal" in caplog.text)
        assert replica.index.end_offset == 9
        assert replica.index.local
        cluster.assign(JOURNAL)
        await until(lambda: len(stored(tmp_path)) == 4)
        cluster.assign(JOURNAL, "c")
        index = cluster["c"].replica(JOURNAL).index
        await until(lambda: index.first_refresh.is_set)
        assert [(one.begin, one.end) for one in index.fragments()] == [(0, 5), (5, 9)]
    else:
        await until(lambda: replica.index.first_refresh.is_set)
        assert not aside(cluster, tmp_path)
        assert replica.index.end_offset == 14
        assert uploaded.exists()


async def test_what_was_set_aside_becomes_a_fragment_where_etcd_knows_of_no_later_primary(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """As when all of etcd was away until the broker ended."""
    await cut_off(cluster, tmp_path, reset=False)
    assert len(aside(cluster, tmp_path)) == 1
    cluster.etcd.silent = False
    cluster.assign(JOURNAL, "b")
    replica = cluster["b"].replica(JOURNAL)
    await until(lambda: replica.index.first_refresh.is_set)
    assert replica.index.end_offset == 14
    assert [one.name for one in stored(tmp_path)] == [
        name_of(0, b"first"),
        name_of(5, b"held by a"),
    ]


@pytest.mark.parametrize("again", [True, False])
async def test_what_was_set_aside_stays_if_its_journal_was_deleted(
    cluster: FixedCluster, tmp_path: Path, again: bool
) -> None:
    """Its known head is gone with it: nothing says any more that a later primary had begun there.

    Simulated seed 707972: a broker whose watch lags listed the stores of the former journal.
    """
    await cut_off(cluster, tmp_path, reset=True)
    names = [one.name for one in stored(tmp_path)]
    cluster.etcd.silent = False
    replica, cluster["b"].lagging = cluster["b"].replica(JOURNAL), []
    await until(lambda: replica.refresh_error is None)
    cluster.etcd.change({}, [item_key(ROOT, JOURNAL), KEY])
    if again:
        cluster.put_spec(journal_spec(JOURNAL))
    replica.list_now()
    await until(lambda: replica.refresh_error is not None)
    assert [one.name for one in stored(tmp_path)] == names


@pytest.mark.parametrize("what", ["etcd", "store", "store, and a later primary"])
async def test_a_fragment_whose_making_fails_in_the_middle_is_judged_again(
    cluster: FixedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It stays beside the object aside, which marks it: only where etcd knows of no later primary is it used.

    Simulated seed 748911: a store put it late, and then failed.
    """
    await cut_off(cluster, tmp_path, reset=False)
    aside_only = [one.name for one in stored(tmp_path)]
    place = SetAside.place

    def failing(aside: SetAside, store: BlobStore) -> bool:
        assert place(aside, store)
        if what == "etcd":
            cluster.etcd.silent = True
            return True
        if "later" in what:
            head = known(cluster)
            assert head is not None
            cluster.etcd.change({KEY: head.begun(1 << 40, 5, 5).encode()})
        raise Unavailable("the connection was reset")

    monkeypatch.setattr(SetAside, "place", failing)
    cluster.etcd.silent = False
    cluster.assign(JOURNAL, "b")
    replica = cluster["b"].replica(JOURNAL)
    await until(lambda: replica.refresh_error is not None or replica.index.first_refresh.is_set)
    names = [one.name for one in stored(tmp_path)]
    assert names == sorted([*aside_only, name_of(5, b"held by a")])
    monkeypatch.setattr(SetAside, "place", place)
    cluster.etcd.silent = False
    replica.list_now()
    await until(lambda: replica.index.first_refresh.is_set)
    assert replica.index.end_offset == (5 if "later" in what else 14)
    assert len(aside(cluster, tmp_path)) == ("later" in what)


async def test_a_key_that_cannot_be_read_refuses_appends_and_keeps_what_is_not_uploaded(
    cluster: FixedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it would forbid is not known."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first")
    await until(lambda: stored(tmp_path) and not cluster["a"].context.persister.unpersisted)
    await append(cluster["a"], b"second")
    cluster.etcd.change({KEY: b"of another version"})
    cluster.assign(JOURNAL, "b")
    await until(lambda: "is not uploaded yet (will ask again)" in caplog.text)
    assert "the known head of a journal cannot be read" in caplog.text
    outcome = await append(cluster["b"], b"third")
    assert isinstance(outcome.error, Conflict)
    assert "cannot be read" in str(outcome.error)
    await cluster["a"].context.persister.finish(0.5)
    assert len(aside(cluster, tmp_path)) == 1


@pytest.mark.parametrize("replicas", ["a", "ab"])
async def test_a_journal_whose_brokers_left_in_good_order_goes_on_without_being_asked(
    cluster: FixedCluster, tmp_path: Path, replicas: str
) -> None:
    """Nothing was acknowledged beyond what is stored. Its registers are those of before."""
    cluster.create(journal_spec(JOURNAL, replication=len(replicas)), *replicas)
    await append(cluster["a"], b"first")
    await append(cluster["a"], b"second", union_registers=LabelSet.of(("author", "7")))
    cluster.assign(JOURNAL)
    await until(lambda: sum(len(one.read_bytes()) for one in stored(tmp_path)) == 11)
    await until(lambda: (head := known(cluster)) is not None and head.closed is not None)
    head = known(cluster)
    assert head is not None
    assert head.offset == 11
    # Case: one that leads in between, and acknowledges nothing, changes nothing.
    cluster.assign(JOURNAL, *replicas)
    await append(cluster["a"])
    cluster.assign(JOURNAL)
    others = "c" if replicas == "a" else "cb"
    cluster.assign(JOURNAL, *others)
    mismatch = await append(cluster["c"], b"x", check_registers=LabelSelector.parse("author=8"))
    assert mismatch.status is Status.REGISTER_MISMATCH
    outcome = await append(cluster["c"], b"third")
    assert outcome.commit is not None
    assert outcome.commit.begin == 11
    head = known(cluster)
    assert head is not None
    assert (head.offset, head.closed) == (16, None)
    # Case: a death behind that is not in good order.
    await lose_all(cluster, "c")
    cluster.assign(JOURNAL, "a")
    cluster.put_spec(journal_spec(JOURNAL))
    assert (await append(cluster["a"], b"x")).status is Status.INDEX_HAS_GREATER_OFFSET


@pytest.mark.parametrize(("kept", "end"), [(0, 0), (1, 5)])
async def test_not_if_stores_end_before_what_was_acknowledged(
    cluster: FixedCluster, tmp_path: Path, kept: int, end: int
) -> None:
    """An empty store, or a stale one, though the last primary left in good order."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first")
    await until(lambda: stored(tmp_path))
    await append(cluster["a"], b"second")
    cluster.assign(JOURNAL)
    await until(lambda: len(stored(tmp_path)) == 2)
    await until(lambda: (head := known(cluster)) is not None and head.closed is not None)
    second = stored(tmp_path)[1]
    content = second.read_bytes()
    for path in stored(tmp_path)[kept:]:
        path.unlink()
    cluster.assign(JOURNAL, "b")
    outcome = await append(cluster["b"], b"x")
    assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    assert outcome.store_error == f"known head 11, stores end at {end}, spools at 0"
    if kept:
        # Case: the store has it after all, as one that was mounted late.
        second.write_bytes(content)
        replica = cluster["b"].replica(JOURNAL)
        replica.list_now()
        await until(lambda: replica.index.end_offset == 11)
        outcome = await append(cluster["b"], b"x")
        assert outcome.commit is not None
        assert outcome.commit.begin == 11


async def test_a_cluster_that_was_stopped_and_started_goes_on(etcd: Etcd, tmp_path: Path) -> None:
    """SIGTERM to the only broker, and another start."""
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(JOURNAL))
        for content in (b"first", b"second"):
            await broker.client.append(AppendParams(JOURNAL), content)
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        result = await broker.client.append(AppendParams(JOURNAL), b"third")
        assert result.commit.begin == 11


async def test_it_goes_with_its_journal(etcd: Etcd, tmp_path: Path) -> None:
    key = head_key("/gazette/cluster", JOURNAL)
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(JOURNAL))
        await broker.client.append(AppendParams(JOURNAL), b"content")
        assert await etcd.get(key) is not None
        await broker.client.apply_journals([JournalChange(delete=JOURNAL, expect_mod_revision=-1)])
        assert await etcd.get(key) is None


@pytest.mark.parametrize("resumed", [False, True], ids=["suspended", "resumed"])
async def test_a_suspended_journal_that_loses_its_replicas_keeps_its_registers(
    cluster: FixedCluster, tmp_path: Path, *, resumed: bool
) -> None:
    """All bytes are stored, and its specification says where to go on. No former writer may pass its fence.

    Once an append was acknowledged after the suspension, an operator has to confirm, as for any journal.
    """
    author = LabelSet.of(("author", "7"))
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first", union_registers=author)
    assert (await append(cluster["a"], suspend=SuspendControl.NOW)).status is Status.SUSPENDED
    if resumed:
        newer = LabelSet.of(("author", "8"))
        assert (await append(cluster["a"], b"more", union_registers=newer)).commit is not None
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    await lose_all(cluster, "a")
    cluster.assign(JOURNAL, "b")
    fenced = LabelSelector.parse("author=8")
    outcome = await append(cluster["b"], b"late", check_registers=fenced)
    if resumed:
        assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
        return
    assert outcome.status is Status.REGISTER_MISMATCH
    outcome = await append(cluster["b"], b"x", check_registers=LabelSelector.parse("author=7"))
    assert outcome.commit is not None
    assert (outcome.commit.begin, outcome.registers) == (5, author)


async def test_a_suspension_whose_registers_are_not_known_is_refused(
    cluster: FixedCluster,
) -> None:
    """As by an earlier version, which did not record them: they may have been set."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first", union_registers=LabelSet.of(("author", "7")))
    await append(cluster["a"], suspend=SuspendControl.NOW)
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    await lose_all(cluster, "a")
    head = known(cluster)
    assert head is not None
    cluster.etcd.change({KEY: replace(head, closed=None).encode()})
    cluster.assign(JOURNAL, "b")
    assert (await append(cluster["b"], b"x")).status is Status.INDEX_HAS_GREATER_OFFSET
    outcome = await append(cluster["b"], b"x", offset=5)
    assert outcome.commit is not None


@pytest.mark.parametrize("control", [SuspendControl.NOW, SuspendControl.IF_FLUSHED])
async def test_suspending_a_read_only_journal_changes_no_head_that_its_spool_has_not_reached(
    cluster: FixedCluster, tmp_path: Path, control: SuspendControl
) -> None:
    """Its new primary needs no bytes of former ones, as nothing is appended. They may still upload theirs."""
    author = LabelSet.of(("author", "7"))
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first", union_registers=author)
    cluster.assign(JOURNAL, "b")
    await until(lambda: (head := known(cluster)) is not None and head.closed is not None)
    await until(lambda: stored(tmp_path))
    cluster.put_spec(replace(journal_spec(JOURNAL), flags=JournalFlag.O_RDONLY))
    await append(cluster["b"], suspend=control)
    head = known(cluster)
    assert head is not None
    assert (head.offset, head.closed) == (5, author)
    # The former primary may upload all that it acknowledged.
    assert head.limit(head.tenures[0][0]) in (None, 5)


async def test_a_suspension_waits_for_the_answers_of_appends_before_it(
    cluster: FixedCluster,
) -> None:
    """Else its head would be ahead of what replicas have, and a later append would not open it again."""
    follower = cluster["b"]
    port = int(follower.endpoint.rpartition(":")[2])
    async with TcpProxy("127.0.0.1", port) as proxy, TaskScope("appends") as scope:
        spec = BrokerSpec(follower.id, f"http://127.0.0.1:{proxy.port}", 1024)
        member = member_key(ROOT, "zone", "broker-b")
        cluster.etcd.change({member: spec.to_pb().SerializeToString()})
        cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
        author = LabelSet.of(("author", "7"))
        assert (await append(cluster["a"], b"first", union_registers=author)).commit is not None
        proxy.hold_replies()
        late = scope.spawn(append(cluster["a"], b"late"), name="late")
        index = follower.replica(JOURNAL).index
        await until(lambda: index.end_offset == 9)
        pipeline = cluster["a"].replica(JOURNAL).pipeline
        await until(lambda: pipeline.free is not None)
        control = SuspendControl.NOW
        suspending = scope.spawn(append(cluster["a"], suspend=control), name="suspend")
        await until(lambda: pipeline.free is None)
        await turns()
        head = known(cluster)
        assert head is not None
        assert (head.closed, late.done()) == (None, False)
        proxy.release()
        assert (await late).commit is not None
        await until(lambda: (head := known(cluster)) is not None and head.closed == author)
        cluster.assign(JOURNAL, "a")
        assert (await suspending).status is Status.SUSPENDED
        # Case: the next append opens the head again.
        cluster.put_spec(journal_spec(JOURNAL))
        newer = LabelSet.of(("author", "8"))
        assert (await append(cluster["a"], b"more", union_registers=newer)).commit is not None
        head = known(cluster)
        assert head is not None
        assert (head.offset, head.closed) == (13, None)


async def test_a_read_only_journal_keeps_the_offset_at_which_it_resumes(
    cluster: FixedCluster,
) -> None:
    """Its head does not say its registers, as after a suspension by an earlier version."""
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first")
    await append(cluster["a"], suspend=SuspendControl.NOW)
    await until(lambda: not cluster["a"].context.persister.unpersisted)
    await lose_all(cluster, "a")
    head = known(cluster)
    assert head is not None
    cluster.etcd.change({KEY: replace(head, closed=None).encode()})
    suspended = Suspend(SuspendLevel.PARTIAL, 5)
    cluster.put_spec(replace(journal_spec(JOURNAL), flags=JournalFlag.O_RDONLY, suspend=suspended))
    cluster.assign(JOURNAL, "b")
    await append(cluster["b"])
    item = cluster["b"].context.state.item(JOURNAL)
    assert item is not None
    suspend = item.decoded.value.spec.suspend
    assert suspend is not None
    assert suspend.offset == 5
