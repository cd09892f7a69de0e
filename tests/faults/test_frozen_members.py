"""Members that stand still: stopped past their lease and woken up again, or busy in a callback.

A zombie is a primary that was stopped, has been replaced, and goes on where it was, in the middle of a
transaction. What it does then must have no effect, and it must end, with a clear error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gazette.run.dev.word_count import Member
from gazette.runtime.tasks import TaskScope, await_future
from tests.faults.databases import sql_environ
from tests.faults.fold_cluster import LOGGED, UP_S, FoldCluster, report, shard_of
from tests.support.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

KINDS = ("sqlite", "rocksdb", "json", "postgres")
STOPS = (
    # Of whatever transaction comes first; the point, of a shard with a log, and of one without.
    ("commit.finalized({shard})", "commit.finalized({shard})"),
    ("append.begin(recovery/fold/{shard})", "sql.committing(*/{shard})"),
    ("append.applied(recovery/fold/{shard})", "sql.committed(*/{shard})"),
    ("ack.appended(out/{shard}/a)", "ack.appended(out/{shard}/a)"),
)
LEASE_S = 3.0
NAP_S = float(os.environ.get("GAZETTE_NAP_S", 3 * LEASE_S))
PATIENT_LEASE_S = 60.0
"""The lease of members of a test in which none may be lost."""
STARTED_AGAIN = "is started again after it failed"
ANSWER_S = 3.0
"""Seconds within which a query is answered, also on a loaded machine: less than the callback takes."""


@pytest.fixture
def databases(tmp_path: Path) -> Iterator[dict[str, str]]:
    with sql_environ(tmp_path, [*KINDS, "sqlfile"]) as environ:
        yield environ


async def with_cluster(
    directory: Path,
    kinds: Any,
    test: Any,
    *,
    standbys: bool = True,
    lease_s: float = LEASE_S,
    **kwargs: Any,
) -> None:
    cluster = FoldCluster(directory, kinds, lease_s=lease_s, **kwargs)
    try:
        await cluster.start(standbys=standbys)
        async with TaskScope("load") as scope:
            load = scope.spawn(cluster.publish_forever(), name="publish")
            await test(cluster)
            load.cancel()
    finally:
        await cluster.stop()


def test_a_zombie_changes_nothing_and_ends(tmp_path: Path, databases: dict[str, str]) -> None:
    """With each kind of store, at points before, in and after its commit."""

    async def test(cluster: FoldCluster) -> None:
        for stop in STOPS:
            for kind in KINDS:
                point = stop[0 if kind in LOGGED else 1].format(shard=shard_of(kind))
                await be_zombie(cluster, point, shard_of(kind))

    asyncio.run(with_cluster(tmp_path, KINDS, test, environ=databases))


def test_a_zombie_with_a_file_of_sqlite(tmp_path: Path, databases: dict[str, str]) -> None:
    """It holds the file's lock until it wakes: no member takes over before, and all is exact after."""

    async def test(cluster: FoldCluster) -> None:
        for _, point in STOPS:
            shard_id = shard_of("sqlfile")
            await be_zombie(cluster, point.format(shard=shard_id), shard_id, locks=True)

    asyncio.run(with_cluster(tmp_path, ("sqlfile",), test, environ=databases))


async def be_zombie(
    cluster: FoldCluster, point: str, shard_id: str, *, locks: bool = False
) -> None:
    try:
        await _be_zombie(cluster, point, shard_id, locks=locks)
    except BaseException as error:
        error.add_note(f"a zombie at {point}")
        raise


async def _be_zombie(cluster: FoldCluster, point: str, shard_id: str, *, locks: bool) -> None:
    zombie = await cluster.primary_of(shard_id)
    began = cluster.clock.monotonic()
    await cluster.arm(zombie, f"{point}=stop@{cluster.rng.randint(1, 5)}")
    await cluster.await_frozen(zombie)
    if locks:
        await cluster.clock.sleep(3 * LEASE_S)
    else:
        await cluster.await_up(standbys=False)
    await cluster.clock.sleep(0.5)  # The new owner's transactions go on, while the old one stands.
    cluster.thaw(zombie)
    thawed = cluster.clock.monotonic()
    code = await cluster.await_death(zombie)
    ended = cluster.clock.monotonic()
    log = zombie.process.log_tail()
    assert code == 1, log
    assert "lease" in log, log
    assert "Traceback" not in log, log
    await cluster.start_member()
    await cluster.await_up(standbys=True)
    await cluster.check()
    what = "frozen for" if locks else "replaced in"
    report(f"{point}: {what} {thawed - began:.1f} s, ended {ended - thawed:.1f} s after it woke")


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_an_owner_that_is_fenced_by_a_late_one_starts_again_by_itself(
    tmp_path: Path, databases: dict[str, str], kind: str
) -> None:
    """Stop a member between the answer of etcd that it may set its fence, and the fence.

    Another member takes over. Then the stopped one continues. The test holds etcd's messages to it, so it
    does not learn of its successor. Its fence stops the rightful owner, which starts again without help.
    """
    shard_id = shard_of(kind)
    log = f"recovery/fold/{shard_id}"
    point = f"recovery.fencing({log})" if kind in LOGGED else f"promotion.fencing({shard_id})"

    async def test(cluster: FoldCluster) -> None:
        [first] = cluster.running  # It leads the allocation, so do not stop it.
        etcd = urlsplit(cluster.cluster.etcd.endpoint)
        assert etcd.hostname is not None
        assert etcd.port is not None
        async with TcpProxy(etcd.hostname, etcd.port) as proxy:
            late = await cluster.start_member(etcd=f"http://127.0.0.1:{proxy.port}")
            await cluster.await_up(standbys=True)
            await cluster.arm(late, f"{point}=stop")
            async with cluster.shards(first) as shards:
                await shards.unassign([shard_id])
            await cluster.await_frozen(late)
            proxy.hold_replies()
            async with cluster.shards(first) as shards:
                await shards.unassign([shard_id])
            # The new owner commits transactions, so its fence is set.
            await cluster.read_through_one(shard_id)
            assert await cluster.primary_of(shard_id) is first
            assert STARTED_AGAIN not in first.process.log_path.read_text()
            cluster.thaw(late)
            await await_text(cluster, first, STARTED_AGAIN)
            proxy.release()
            await cluster.await_up(standbys=True)
            await cluster.check()
            assert late.process.running, "a member that only lost a shard has ended"
        await late.process.kill()

    asyncio.run(
        with_cluster(
            tmp_path, (kind,), test, environ=databases, standbys=False, lease_s=PATIENT_LEASE_S
        )
    )


async def await_text(cluster: FoldCluster, member: Member, text: str) -> None:
    """Return when a member has logged this text. Raise ``TimeoutError`` with the end of its log if not."""
    try:
        async with asyncio.timeout(UP_S):
            while text not in member.process.log_path.read_text():
                await cluster.clock.sleep(0.05)
    except TimeoutError as error:
        error.add_note(f"{member.id} never logged {text!r}:\n{member.process.log_tail()}")
        raise


def test_a_slow_callback_costs_its_shard_time_and_nothing_else(tmp_path: Path) -> None:
    """Of two shards of one process, one stands in a callback for ``GAZETTE_NAP_S`` (three leases)."""

    async def test(cluster: FoldCluster) -> None:
        slow, other = cluster.shard_ids
        primary = await cluster.primary_of(slow)
        for member in cluster.running:
            if member is not primary:
                await member.process.kill()
        await cluster.await_up(standbys=False)
        lease = await cluster.lease_of(primary)
        began, longest, queries = cluster.clock.monotonic(), 0.0, 0
        await nap(cluster, slow, NAP_S, primary.id, greedy=False)
        async with TaskScope("slow") as scope:
            # Its own shard is through with what was published so far when the callback has returned.
            through = scope.spawn(cluster.read_through_one(slow), name=slow)
            while not through.done():
                asked = cluster.clock.monotonic()
                for shard_id in (slow, other):
                    answer = await cluster.http.get(
                        f"{primary.http_url}/state/{shard_id}", timeout=ANSWER_S
                    )
                    answer.raise_for_status()
                async with asyncio.timeout(ANSWER_S):
                    # All that was published to the other shard so far, through its transactions.
                    await cluster.read_through_one(other)
                queries += 1
                longest = max(longest, cluster.clock.monotonic() - asked)
                await cluster.clock.sleep(0.1)
        stood_s = cluster.clock.monotonic() - began
        assert stood_s >= NAP_S, "no callback was slow"
        assert queries >= NAP_S / (ANSWER_S + 0.1), "no query was sent meanwhile"
        assert primary.process.running
        assert await cluster.lease_of(primary) == lease, "its lease was lost"
        await cluster.check()
        assert await cluster.primary_of(slow) is primary, "it was replaced"
        report(
            f"a callback took {NAP_S:g} s: {queries} times queries of both shards and a read through"
            f" the other's transactions in {stood_s:.1f} s, none failed, the longest {longest:.2f} s"
        )

    asyncio.run(with_cluster(tmp_path, ("sqlite", "json"), test))


def test_a_callback_that_keeps_the_interpreter_costs_its_member_the_lease(tmp_path: Path) -> None:
    """One call into C that lets nothing else run for longer than the lease: others take over, and
    the member ends when it learns of it. Exactly once, all the same."""

    async def test(cluster: FoldCluster) -> None:
        shard_id = cluster.shard_ids[0]
        greedy = await cluster.primary_of(shard_id)
        await nap(cluster, shard_id, 3 * LEASE_S, greedy.id, greedy=True)
        assert await cluster.await_death(greedy) == 1
        assert "lease" in greedy.process.log_tail()
        await cluster.start_member()
        await cluster.await_up(standbys=True)
        await cluster.check()

    asyncio.run(with_cluster(tmp_path, ("sqlite",), test))


async def nap(
    cluster: FoldCluster, shard_id: str, seconds: float, member: str, *, greedy: bool
) -> None:
    """Have a callback of that member take so long. Returns once the message is in its source."""
    source = cluster.sources[shard_id]
    published = await cluster.publish(source, 1, nap_s=seconds, greedy=greedy, by=member)
    await await_future(published)
