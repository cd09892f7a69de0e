"""The leader's loop on a real etcd, with members that have no work to do."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from gazette.cluster.allocator import allocate as allocate_module
from gazette.cluster.allocator import metrics
from gazette.cluster.allocator.allocate import MAX_TXN_OPS, allocate
from gazette.cluster.allocator.model import member_key
from gazette.cluster.allocator.session import MemberSession
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Compare, Etcd, Op, TxnResult
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Broken, Unavailable
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.tasks import BlockingPool, Pool, TaskScope
from tests.facts import is_advised, logged, raises
from tests.support.instant_clock import InstantClock
from tests.support.metrics import value_of

ROOT = "/root"


@pytest.fixture
async def pool() -> AsyncIterator[BlockingPool]:
    pool = BlockingPool("solver", 1)
    yield pool
    pool.close()


class Recorded:
    """An etcd client that keeps the transactions it was asked for, and may refuse them."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self.txns: list[tuple[Any, Any]] = []
        self.results: list[TxnResult] = []
        self.failures: list[Exception] = []

    async def txn(self, compares: Any, success: Any, failure: Any = ()) -> TxnResult:
        if self.failures:
            raise self.failures.pop()
        # The mirror may learn of it before the answer is here.
        self.txns.append((compares, success))
        self.results.append(await self._etcd.txn(compares, success, failure))
        return self.results[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._etcd, name)


class PaperProcess:
    """A member with a session, a mirror and the loop; it synchronises what it is the primary of."""

    def __init__(self, paper: Any, etcd: Any, member: str, scope: TaskScope) -> None:
        self.etcd = etcd
        self.member = member
        self.scope = scope
        self.ks = KeySpace(ROOT, paper.decoder, apply_delay_s=0.001)
        self.state = State(self.ks, member_key(ROOT, *member.split("#")), paper.is_consistent)
        self.ks.observers.append(self.state.observe)
        self.session: MemberSession
        self.allocating: asyncio.Task[None]

    async def start(
        self, limit: int, pool: BlockingPool, *, syncs: bool = True, retries: Clock | None = None
    ) -> None:
        """Start it. ``retries`` is the clock by which the loop waits before it tries again."""
        clock = SystemClock()
        self.session = await MemberSession.start(
            self.etcd, self.ks, self.state.local_key, str(limit).encode(), 30, clock=clock
        )
        self.scope.daemon(self.session.run(), name="lease")
        self.scope.daemon(self.ks.watch(self.etcd), name="watch")
        if syncs:
            self.scope.daemon(self.synchronise(), name="sync")
        self.allocating = self.scope.spawn(
            allocate(self.etcd, self.ks, self.state, clock=retries or clock, pool=pool),
            name=f"allocate {self.member}",
        )

    async def synchronise(self) -> None:
        while True:
            revision = self.ks.header.revision
            for local in self.state.local_items:
                if local.assignment.decoded.slot == 0:
                    for kv in local.assignments:
                        await self.mark(kv)
            await self.ks.wait_for_revision(revision + 1)

    async def mark(self, kv: Any) -> None:
        if kv.raw.value != b"consistent":
            await self.etcd.txn(
                (Compare.mod_revision(kv.key, "=", kv.raw.mod_revision),),
                (Op.put(kv.key, b"consistent", ignore_lease=True),),
            )

    async def leave(self, limit: int) -> None:
        """Drain, and end the session."""
        await self.session.set_exiting(f"{limit} exiting".encode())
        await self.allocating
        await self.session.close()

    async def until(self, holds: Callable[[State], bool]) -> State:
        async with asyncio.timeout(45):
            while not holds(self.state):
                await self.ks.next_change()
        return self.state


def placed(state: State) -> dict[str, list[str]]:
    """Return the members of each item, in order of slots; with a ``?`` if they are not consistent."""
    slots: dict[str, list[tuple[int, str]]] = {}
    for kv in state.assignments:
        a = kv.decoded
        name = f"{a.zone}#{a.suffix}" + ("" if a.value else "?")
        slots.setdefault(a.item_id, []).append((a.slot, name))
    return {item: [name for _, name in sorted(pairs)] for item, pairs in slots.items()}


def at_rest(replication: int, items: int) -> Callable[[State], bool]:
    def holds(state: State) -> bool:
        assigned = placed(state)
        return len(assigned) == items and all(
            len(members) == replication and not any("?" in m for m in members)
            for members in assigned.values()
        )

    return holds


def loads(state: State) -> dict[str, int]:
    return dict(Counter(f"{k.decoded.zone}#{k.decoded.suffix}" for k in state.assignments))


@asynccontextmanager
async def cluster(
    paper: Any,
    etcd: Any,
    pool: BlockingPool,
    members: dict[str, int],
    *,
    syncs: bool = True,
    retries: Clock | None = None,
) -> AsyncIterator[dict[str, PaperProcess]]:
    async with TaskScope("cluster") as scope:
        processes = {}
        for member, limit in members.items():
            processes[member] = PaperProcess(paper, etcd, member, scope)
            await processes[member].start(limit, pool, syncs=syncs, retries=retries)
        yield processes
        scope.cancel()


async def put_items(etcd: Etcd, count: int, replication: int) -> None:
    for begin in range(0, count, 100):
        await etcd.txn(
            (),
            tuple(
                Op.put(f"{ROOT}/items/item-{n:04}", str(replication).encode())
                for n in range(begin, min(begin + 100, count))
            ),
        )


async def test_a_cluster_from_first_to_last_member(
    paper: Any, etcd: Etcd, pool: BlockingPool
) -> None:
    """Items are allocated, spread when a member joins, drained when members leave, and never lost."""
    await put_items(etcd, 60, 2)
    added = value_of(metrics.ADDED)
    async with cluster(paper, etcd, pool, {"a#1": 200, "b#1": 200}) as processes:
        a1, b1 = processes["a#1"], processes["b#1"]
        # Case: initial allocation.
        await b1.until(at_rest(2, 60))
        assert a1.state.is_leader()
        assert not b1.state.is_leader()
        assert loads(b1.state) == {"a#1": 60, "b#1": 60}
        assert value_of(metrics.ADDED) - added == 120

        # Case: a member joins.
        a2 = processes["a#2"] = PaperProcess(paper, etcd, "a#2", a1.scope)
        await a2.start(200, pool)
        state = await a2.until(
            lambda s: at_rest(2, 60)(s) and loads(s).get("a#2", 0) == loads(s)["a#1"]
        )
        assert loads(state) == {"a#1": 30, "a#2": 30, "b#1": 60}
        assert value_of(metrics.ADDED) - added == 150

        # Case: the leader drains itself, and leaves; the next one leads.
        async with asyncio.timeout(45):
            await a1.leave(200)
        state = await b1.until(lambda s: len(s.members) == 2 and at_rest(2, 60)(s))
        assert loads(state) == {"a#2": 60, "b#1": 60}
        assert state.is_leader()

        # Case: the last ones leave once there is nothing to serve.
        await etcd.delete_prefix(f"{ROOT}/items/")
        async with asyncio.timeout(45):
            await a2.leave(200)
            await b1.leave(200)
    assert (await etcd.range(ROOT)).kvs == ()


async def test_transactions_are_full_but_not_too_full(
    paper: Any, etcd: Etcd, pool: BlockingPool
) -> None:
    recorded = Recorded(etcd)
    await put_items(etcd, 200, 1)
    members = {"a#1": 0, "b#1": 500}
    async with cluster(paper, recorded, pool, members, syncs=False) as processes:
        await processes["a#1"].until(lambda s: len(s.assignments) == 200)
        leader = processes["a#1"].state.leader
        assert leader is not None
    mine = [(c, ops) for c, ops in recorded.txns if len(ops) > 1]
    assert [len(ops) for _, ops in mine] == [126, 74]
    assert max(len(c) for c, _ in mine) == MAX_TXN_OPS
    # Case: all of them stand and fall with the leader's key.
    fixed = Compare.mod_revision(f"{ROOT}/members/a#1", "=", leader.raw.mod_revision)
    assert all(c[0] == fixed for c, _ in mine)


async def test_a_converged_cluster_writes_nothing(
    paper: Any, etcd: Etcd, pool: BlockingPool
) -> None:
    recorded = Recorded(etcd)
    await put_items(etcd, 5, 1)
    async with cluster(paper, recorded, pool, {"a#1": 9, "a#2": 9}) as processes:
        await processes["a#2"].until(at_rest(1, 5))
        rounds = value_of(metrics.CONVERGE)
        written = len(recorded.txns)
        # Case: something unrelated changes; the leader looks, and does nothing.
        await etcd.put(f"{ROOT}/items/item-0000", b"1")
        item = await etcd.get(f"{ROOT}/items/item-0000")
        assert item is not None
        revision = item.mod_revision
        for process in processes.values():
            await process.ks.wait_for_revision(revision)
        async with asyncio.timeout(45):
            while value_of(metrics.CONVERGE) == rounds:
                await SystemClock().sleep(0)
        assert len(recorded.txns) == written


async def test_deleted_assignments_return_without_solving_again(
    paper: Any, etcd: Etcd, pool: BlockingPool
) -> None:
    await put_items(etcd, 5, 2)
    async with cluster(paper, etcd, pool, {"a#1": 9, "b#1": 9}) as processes:
        a1 = processes["a#1"]
        await a1.until(at_rest(2, 5))
        solved = solve_count()
        victim = a1.state.assignments[0].key
        await etcd.delete(victim)
        await a1.until(lambda s: len(s.assignments) == 9)
        await a1.until(at_rest(2, 5))
        assert solve_count() == solved

        # Case: another item is another problem.
        await etcd.put(f"{ROOT}/items/new", b"2")
        await a1.until(at_rest(2, 6))
        assert solve_count() == solved + 1


def solve_count() -> float:
    (metric,) = metrics.MAX_FLOW_SECONDS.collect()
    return next(s.value for s in metric.samples if s.name.endswith("_count"))


async def test_too_few_slots_are_warned_of(
    paper: Any, etcd: Etcd, pool: BlockingPool, caplog: pytest.LogCaptureFixture
) -> None:
    await put_items(etcd, 3, 2)
    with caplog.at_level(logging.WARNING):
        async with cluster(paper, etcd, pool, {"a#1": 2, "b#1": 2}) as processes:
            await processes["a#1"].until(lambda s: len(s.assignments) == 4)
    logged(caplog, assigned=4, desired=6, member_slots=4, members=2)


async def test_an_item_that_the_mirror_cannot_follow_does_not_hold_up_others(
    paper: Any, etcd: Etcd, pool: BlockingPool
) -> None:
    """A specification that does not decode leaves its older one in the mirror, at its old revision."""
    await put_items(etcd, 3, 2)
    async with cluster(paper, etcd, pool, {"a#1": 9, "b#1": 9}) as processes:
        a1 = processes["a#1"]
        await a1.until(at_rest(2, 3))
        await etcd.put(f"{ROOT}/items/item-0001", b"what?")
        # Case: all three are to give up a replica, which compares the revision of the item.
        c1 = PaperProcess(paper, etcd, "c#1", a1.scope)
        await c1.start(9, pool)
        await etcd.txn(
            (),
            (
                Op.put(f"{ROOT}/members/b#1", b"0", ignore_lease=True),
                Op.put(f"{ROOT}/items/item-0004", b"2"),
            ),
        )
        state = await a1.until(
            lambda s: (
                sorted(placed(s)) == ["item-0000", "item-0001", "item-0002", "item-0004"]
                and all(
                    sorted(members) == ["a#1", "c#1"]
                    for item, members in placed(s).items()
                    if item != "item-0001"
                )
            )
        )
        assert sorted(placed(state)["item-0001"])[:2] == ["a#1", "b#1"]

        # Case: it is corrected, and is allocated as the others are.
        await etcd.put(f"{ROOT}/items/item-0001", b"2")
        await a1.until(lambda s: all(sorted(m) == ["a#1", "c#1"] for m in placed(s).values()))


async def test_a_member_that_no_assignment_can_name_does_not_hold_up_others(
    paper: Any, etcd: Etcd, pool: BlockingPool
) -> None:
    """Any client can write such a key."""
    await etcd.put(f"{ROOT}/members/b#my pod", b"9")
    await put_items(etcd, 3, 1)
    async with cluster(paper, etcd, pool, {"a#1": 9}) as processes:
        state = await processes["a#1"].until(at_rest(1, 3))
        assert loads(state) == {"a#1": 3}


async def test_failures_of_etcd_are_ridden_out(paper: Any, etcd: Etcd, pool: BlockingPool) -> None:
    recorded, clock = Recorded(etcd), InstantClock()
    async with cluster(paper, recorded, pool, {"a#1": 9}, syncs=False, retries=clock) as processes:
        recorded.failures = [Broken("of some kind"), Unavailable("not now")]
        await put_items(etcd, 3, 1)
        await processes["a#1"].until(lambda s: len(s.assignments) == 3)
        assert recorded.failures == []
        assert len(clock.slept) == 2


async def test_a_leader_that_was_replaced_changes_nothing(
    paper: Any, etcd: Etcd, pool: BlockingPool
) -> None:
    """Its mirror does not know yet; its transactions fail on its own member key."""
    recorded = Recorded(etcd)
    async with TaskScope("test") as scope:
        process = PaperProcess(paper, recorded, "a#1", scope)
        key = process.state.local_key
        await etcd.put(key, b"9")
        await put_items(etcd, 1, 1)
        await process.ks.load(etcd)
        assert process.state.is_leader()
        await etcd.delete(key)
        await etcd.put(key, b"9")
        running = scope.spawn(
            allocate(
                cast("Etcd", recorded), process.ks, process.state, clock=SystemClock(), pool=pool
            ),
            name="allocate",
        )
        async with asyncio.timeout(45):
            while not recorded.results:
                await SystemClock().sleep(0)
        assert not recorded.results[0].succeeded
        assert not running.done()
        scope.cancel()
    assert (await etcd.range(f"{ROOT}/assign/")).kvs == ()


async def test_a_member_whose_key_is_gone_ends(paper: Any, etcd: Etcd, pool: BlockingPool) -> None:
    with raises(Broken, "revision", key="/root/members/a#1") as raised:
        async with cluster(paper, etcd, pool, {"a#1": 9, "a#2": 9}) as processes:
            await processes["a#2"].until(lambda s: len(s.members) == 2)
            await processes["a#1"].session.lease.revoke()
            async with asyncio.timeout(45):
                await processes["a#1"].allocating
    assert raised.value.facts["key"] == f"{ROOT}/members/a#1"
    assert is_advised(raised.value)


async def test_large_problems_are_solved_beside_the_loop(
    paper: Any, etcd: Etcd, pool: BlockingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocate_module, "_INLINE_CHOICES", 10)
    monkeypatch.setattr(allocate_module, "solve", None)
    await put_items(etcd, 20, 2)
    async with cluster(paper, etcd, pool, {"a#1": 30, "b#1": 30}) as processes:
        state = await processes["b#1"].until(at_rest(2, 20))
        assert loads(state) == {"a#1": 20, "b#1": 20}


async def test_a_leader_that_is_replaced_while_it_solves_writes_nothing(
    paper: Any, etcd: Etcd
) -> None:
    solving, go_on = asyncio.Event(), asyncio.Event()

    class GatedPool:
        async def run(self, fn: Any, *args: Any) -> Any:
            solving.set()
            await go_on.wait()
            return fn(*args)

    recorded = Recorded(etcd)
    process = PaperProcess(paper, recorded, "a#1", TaskScope("unused"))
    key = process.state.local_key
    await etcd.put(key, b"9")
    # So much to choose from is solved beside the loop.
    others = (Op.put(f"{ROOT}/members/b#{n}", b"9") for n in range(100))
    await etcd.txn((), tuple(others))
    await put_items(etcd, 300, 1)
    await process.ks.load(etcd)
    assert process.state.is_leader()
    with raises(Broken, "revision", key="/root/members/a#1"):
        async with TaskScope("test") as scope, asyncio.timeout(45):
            running = scope.spawn(
                allocate(
                    cast("Etcd", recorded),
                    process.ks,
                    process.state,
                    clock=SystemClock(),
                    pool=cast("Pool", GatedPool()),
                ),
                name="allocate",
            )
            await solving.wait()
            await etcd.delete(key)
            await process.ks.load(etcd)
            go_on.set()
            await running
    assert recorded.txns == []
