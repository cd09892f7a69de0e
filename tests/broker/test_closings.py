"""A journal goes on without an operator where the store proves what was acknowledged, and only there."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gazette.broker.append.events import Ending
from gazette.broker.known_head import Head
from gazette.fragment.closing import Closing, ClosingName
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.status import Status
from gazette.testing.broker import journal_spec
from tests.broker.test_known_head import JOURNAL, KEY, append, until
from tests.facts import logged
from tests.support.fixed_cluster import FixedCluster

AUTHOR = LabelSet.of(("author", "7"))


def known(cluster: FixedCluster) -> Head:
    return Head.decode(cluster.etcd.kvs[KEY.encode()].value)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FixedCluster]:
    async with await FixedCluster.start(4, tmp_path) as cluster:
        yield cluster


class Journal:
    """The journal of a cluster, and its objects in the store."""

    def __init__(self, cluster: FixedCluster, tmp_path: Path) -> None:
        self.cluster = cluster
        self.directory = tmp_path / "root" / "fragments" / JOURNAL

    def names(self, word: str) -> list[str]:
        found = self.directory.iterdir() if self.directory.exists() else ()
        return sorted(path.name for path in found if word in path.name)

    @property
    def closings(self) -> list[str]:
        return self.names("closed-")

    @property
    def awaited(self) -> ClosingName:
        """The closing of the last primary that etcd names."""
        head = known(self.cluster)
        return ClosingName(JOURNAL, head.life, head.tenures[-1][0], head.lease)

    def path(self, name: ClosingName) -> Path:
        return self.directory / name.path.removeprefix(f"{JOURNAL}/")

    def read(self) -> Closing:
        return Closing.decode(self.awaited, self.path(self.awaited).read_bytes())

    async def silence(self, *brokers: str) -> None:
        """Let etcd be away until the leases of brokers have ended, and so have they."""
        etcd = self.cluster.etcd
        etcd.silent, etcd.failing = True, KEY
        for name in brokers:
            self.cluster[name].lease.remaining_s = 0.0
            self.cluster[name].context.resolver.stop_serving()
        for name in brokers:
            await self.cluster[name].context.resolver.wait_torn_down(30.0)
            await self.cluster[name].context.persister.finish(30.0)

    def start_at(self, *brokers: str) -> None:
        """Let etcd be there again, and others have the journal."""
        self.cluster.etcd.silent, self.cluster.etcd.failing = False, ""
        self.cluster.assign(JOURNAL)
        self.cluster.assign(JOURNAL, *brokers)


@pytest.fixture
async def journal(cluster: FixedCluster, tmp_path: Path) -> Journal:
    """Create a journal at broker a, which alone holds ``[5, 11)`` and the registers."""
    journal = Journal(cluster, tmp_path)
    cluster.create(journal_spec(JOURNAL), "a")
    await append(cluster["a"], b"first")
    await until(lambda: journal.names(".raw") and not cluster["a"].context.persister.unpersisted)
    await append(cluster["a"], b"second", union_registers=AUTHOR)
    return journal


async def test_a_journal_goes_on_after_etcd_was_away_beyond_its_lease(
    cluster: FixedCluster, journal: Journal
) -> None:
    """It has its bytes, and its registers."""
    await journal.silence("a")
    assert len(journal.names(".unconfirmed-")) == 1
    closing = journal.read()
    assert (closing.begin, closing.end, closing.registers) == (5, 11, AUTHOR)
    journal.start_at("b")
    mismatch = await append(cluster["b"], b"x", check_registers=LabelSelector.parse("author=8"))
    assert mismatch.status is Status.REGISTER_MISMATCH
    # Now the head is closed in etcd, as if the last primary had written that.
    assert (known(cluster).offset, known(cluster).closed) == (11, AUTHOR)
    outcome = await append(cluster["b"], b"third")
    assert outcome.commit is not None
    assert (outcome.commit.begin, outcome.registers) == (11, AUTHOR)
    # Case: the closing of a primary that is over goes with the next listing.
    cluster["b"].replica(JOURNAL).list_now()
    await until(lambda: not journal.closings)


async def test_three_replicas_end_and_others_go_on(cluster: FixedCluster, tmp_path: Path) -> None:
    journal = Journal(cluster, tmp_path)
    cluster.create(journal_spec(JOURNAL, replication=3), "a", "b", "c")
    await append(cluster["a"], b"first", union_registers=AUTHOR)
    await until(lambda: journal.names(".raw"))
    await append(cluster["a"], b"second")
    await journal.silence("a", "b", "c")
    assert journal.read().end == 11
    assert len(journal.closings) == 1  # Only a primary knows what was acknowledged.
    cluster.put_spec(journal_spec(JOURNAL))
    journal.start_at("d")
    outcome = await append(cluster["d"], b"third")
    assert outcome.commit is not None
    assert (outcome.commit.begin, outcome.registers) == (11, AUTHOR)


async def test_an_append_that_had_no_answer_is_not_waited_for(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    """A peer has lost its lease. The primary has bytes without an acknowledgement, and a register."""
    journal = Journal(cluster, tmp_path)
    cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
    await append(cluster["a"], b"first", union_registers=AUTHOR)
    await until(lambda: journal.names(".raw"))
    cluster["a"].replica(JOURNAL).stop_daemons()
    cluster["b"].lease.remaining_s = 0.0
    failed = await append(cluster["a"], b"uncertain", union_registers=LabelSet.of(("author", "9")))
    assert failed.ending is Ending.FAILED
    assert failed.uncertain
    await journal.silence("a", "b")
    closing = journal.read()
    assert (closing.end, closing.registers) == (5, AUTHOR)


async def test_a_primary_that_was_killed_proves_nothing(
    cluster: FixedCluster, journal: Journal
) -> None:
    """The reason names the object that is missing, and an operator confirms as before."""
    await cluster["a"].stop()
    cluster.forget("a")
    journal.start_at("b")
    outcome = await append(cluster["b"], b"x")
    assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    assert journal.awaited.path in outcome.store_error
    confirmed = await append(cluster["b"], b"x", offset=5)
    assert confirmed.ending is Ending.COMMITTED


@pytest.mark.parametrize("damage", ["torn", "changed", "of another lease", "of another tenure"])
async def test_a_closing_that_is_not_the_last_primarys_proves_nothing(
    cluster: FixedCluster, journal: Journal, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    await journal.silence("a")
    path, name, closing = journal.path(journal.awaited), journal.awaited, journal.read()
    match damage:
        case "torn":
            path.write_bytes(path.read_bytes()[:40])
        case "changed":
            path.write_bytes(path.read_bytes().replace(b'"end": 11', b'"end": 12'))
        case "of another lease":
            path.write_bytes(replace(closing, name=replace(name, lease=name.lease + 1)).encode())
        case _:
            path.rename(journal.path(replace(name, tenure=name.tenure - 1)))
    journal.start_at("b")
    outcome = await append(cluster["b"], b"x")
    assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    assert name.path in outcome.store_error
    assert known(cluster).closed is None
    if damage != "of another tenure":
        assert "damaged" in outcome.store_error
        logged(caplog, path=name.path)


async def test_it_waits_while_stores_lack_bytes_and_goes_on_when_they_have_them(
    cluster: FixedCluster, journal: Journal
) -> None:
    """The end of the journal is listed late. Then a part in the middle is missing."""
    await journal.silence("a")
    (aside,) = (journal.directory / name for name in journal.names(".unconfirmed-"))
    content = aside.read_bytes()
    aside.unlink()
    journal.start_at("b")
    outcome = await append(cluster["b"], b"x")
    assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    assert "[5, 11)" in outcome.store_error
    assert known(cluster).closed is None
    aside.write_bytes(content)
    replica = cluster["b"].replica(JOURNAL)
    replica.list_now()
    await until(lambda: replica.index.end_offset == 11)
    outcome = await append(cluster["b"], b"third")
    assert outcome.commit is not None
    assert (outcome.commit.begin, outcome.registers) == (11, AUTHOR)


async def test_a_part_in_the_middle_is_not_passed_over(
    cluster: FixedCluster, tmp_path: Path
) -> None:
    journal = Journal(cluster, tmp_path)
    cluster.create(journal_spec(JOURNAL, length=1024), "a")
    await append(cluster["a"], b"first")
    await until(lambda: journal.names(".raw") and not cluster["a"].context.persister.unpersisted)
    cluster["a"].replica(JOURNAL).stop_daemons()
    for content in (bytes(1025), b"third"):
        await append(cluster["a"], content)
    await journal.silence("a")
    assert (journal.read().begin, journal.read().end) == (5, 1035)
    (middle,) = (one for one in journal.directory.iterdir() if one.name.startswith(f"{5:016x}-"))
    content = middle.read_bytes()
    middle.unlink()
    journal.start_at("b")
    outcome = await append(cluster["b"], b"x")
    assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    assert "[5, 1030)" in outcome.store_error
    middle.write_bytes(content)
    replica = cluster["b"].replica(JOURNAL)
    replica.list_now()
    await until(lambda: not replica.index.lacks(5, 1035))
    assert (await append(cluster["b"], b"x")).ending is Ending.COMMITTED


async def test_a_later_primary_is_not_judged_by_the_closing_of_a_former_one(
    cluster: FixedCluster, journal: Journal
) -> None:
    """It has acknowledged more, and was killed. The closing may still be there."""
    await journal.silence("a")
    content, path = journal.path(journal.awaited).read_bytes(), journal.path(journal.awaited)
    journal.start_at("b")
    await append(cluster["b"], b"third")
    await until(lambda: not cluster["b"].context.persister.unpersisted)
    await cluster["b"].stop()
    cluster.forget("b")
    path.write_bytes(content)
    journal.start_at("c")
    outcome = await append(cluster["c"], b"x")
    assert outcome.status is Status.INDEX_HAS_GREATER_OFFSET
    assert journal.awaited.path in outcome.store_error
    assert journal.path(journal.awaited) != path


async def test_a_primary_that_closes_the_head_in_etcd_leaves_no_object(
    cluster: FixedCluster, journal: Journal
) -> None:
    cluster.assign(JOURNAL)
    await cluster["a"].context.resolver.wait_torn_down(30.0)
    await until(lambda: known(cluster).closed is not None)
    await cluster["a"].context.persister.finish(30.0)
    assert journal.closings == []


async def test_one_that_was_put_while_another_primary_leads_has_no_effect(
    cluster: FixedCluster, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """It was paused beyond its lease. An operator went on meanwhile, and then etcd was away from it."""
    cluster["a"].lagging, cluster["a"].lease.remaining_s = [], 0.0
    cluster.assign(JOURNAL, "b")
    assert (await append(cluster["b"], b"of b", offset=5)).ending is Ending.COMMITTED
    with caplog.at_level(logging.INFO):
        await journal.silence("a")
    assert len(journal.closings) == 1
    cluster.etcd.silent, cluster.etcd.failing = False, ""
    assert (await append(cluster["b"], b"more")).ending is Ending.COMMITTED
    cluster["b"].replica(JOURNAL).list_now()
    await until(lambda: not journal.closings)
    assert cluster["b"].replica(JOURNAL).index.end_offset == 13
