"""The costs of the leader of a large cluster until all items have their members again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from gazette.cluster.allocator.allocate import allocate
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.runtime.tasks import TaskScope
from tools.scale.clusters import ROOT, ZONES, Kind, PaperCluster
from tools.scale.paper_etcd import PaperEtcd
from tools.scale.paper_loop import PaperClock, PaperLoop, PaperPool, sleep

log = logging.getLogger(__name__)

_QUIET_S: Final = 200.0
"""Seconds without a change after which nothing more is expected: longer than a plan may take."""


@dataclass(frozen=True, slots=True)
class Convergence:
    """The costs of one change of a cluster for its leader. Times are seconds."""

    event: str
    cpu_s: float
    planned_s: float
    """Processor time of the child processes that compute plans."""
    converged_s: float
    """From the change until the last write: processor time of the leader, and latencies of etcd."""
    turn_s: float
    """Longest turn of the leader's event loop."""
    transactions: int
    operations: int
    events: int
    """Changes of keys that each member of the cluster gets."""
    event_bytes: int
    missing: int
    """Items without their replicas at the end: 0 if the cluster has converged."""


def converge(
    kind: Kind, items: int, latency_s: float, events: int = 6, *, work_is_free: bool = False
) -> list[Convergence]:
    """Let a cluster converge after each of the first ``events`` changes: its start from nothing is the first.

    With ``work_is_free``, only waits take time, and each run has the same transactions.
    """
    loop = PaperLoop(work_is_free=work_is_free)
    try:
        return loop.run_until_complete(_converge(loop, kind, items, latency_s, events))
    finally:
        loop.close()


async def _converge(
    loop: PaperLoop, kind: Kind, items: int, latency_s: float, events: int
) -> list[Convergence]:
    paper = PaperEtcd(loop, latency_s)
    cluster = PaperCluster(kind, items, paper)
    clock, pool = PaperClock(loop), PaperPool(loop)
    etcd = await Etcd.connect(EtcdSettings(("http://paper:2379",)), clock, transport=paper)  # type: ignore[arg-type]
    ks = KeySpace(ROOT, kind.decoder)
    state = State(ks, cluster.key_of(0), kind.is_consistent, kind.progress)
    ks.observers.append(state.observe)
    results = []
    async with TaskScope("scale") as scope:
        for name, change in islice(_events(cluster), events):
            counts = paper.transactions, paper.operations, paper.events, paper.event_bytes
            cpu_s, child_s, began = loop.cpu_s, pool.child_s, loop.time()
            loop.longest_s = 0.0
            change()
            if name == FIRST:
                await ks.load(etcd)
                loop.longest_s = 0.0  # `views` has the load.
                scope.daemon(ks.watch(etcd), name="watch")
                scope.daemon(allocate(etcd, ks, state, clock=clock, pool=pool), name="allocate")  # type: ignore[arg-type]
            while loop.time() - paper.changed_at < _QUIET_S:
                await sleep(_QUIET_S)
            with loop.free():
                missing = cluster.missing()
            log.info("%(event)s: converged", {"event": name})
            results.append(
                Convergence(
                    name,
                    loop.cpu_s - cpu_s,
                    pool.child_s - child_s,
                    paper.changed_at - began,
                    loop.longest_s,
                    paper.transactions - counts[0],
                    paper.operations - counts[1],
                    paper.events - counts[2],
                    paper.event_bytes - counts[3],
                    missing,
                )
            )
        scope.cancel()
    return results


FIRST: Final = "from nothing"


def _events(cluster: PaperCluster) -> Iterator[tuple[str, Callable[[], None]]]:
    etcd, items = cluster.etcd, cluster.items

    def create() -> None:
        cluster.items += 1
        etcd.put([(cluster.item_key(items), cluster.kind.item_value(items), 0)])

    gone = cluster.member_count // 2
    zone = [member for member in range(cluster.member_count) if member % ZONES == ZONES - 1]

    def lose_zone() -> None:
        for number in zone:
            etcd.end_lease(number + 1)

    def add_zone() -> None:
        for number in zone:
            etcd.put([cluster.member_put(number)])

    item, member = cluster.kind.item, cluster.kind.member
    yield FIRST, lambda: None
    yield f"one {item} created", create
    yield f"one {member} lost", lambda: etcd.end_lease(gone + 1)
    yield f"one {member} added", lambda: etcd.put([cluster.member_put(gone)])
    yield "a zone lost", lose_zone
    yield "a zone added", add_zone
