"""Counts of the work for clusters of two sizes: none grows faster than the cluster.

`python -m tools.scale` measures the same for large clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gazette.cluster.allocator.converge import Round, converge
from gazette.cluster.allocator.demand import Demand
from gazette.cluster.allocator.desired import SolverInput
from gazette.cluster.allocator.model import Assignment, Item, Member
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.values import KeyValue
from gazette.cluster.keyspace.key_values import prefixed
from tools.scale.allocation import converge as converge_on_paper
from tools.scale.clusters import BROKERS, MEMBERS, Kind

ROOT = "/root"
SMALL, LARGE = 120, 480
GROWTH_MAX = 8
"""For four times the items: linear growth gives 4, quadratic growth 16."""


@dataclass
class Counter:
    looks: int = 0


class Entry:
    """A key of a mirror that counts how often it is looked at."""

    def __init__(self, counter: Counter, key: str, decoded: Any, revision: int = 1) -> None:
        self._counter = counter
        self._key = key
        self.raw = KeyValue(key.encode(), b"", revision, revision, 1)
        self._decoded = decoded

    @property
    def key(self) -> str:
        self._counter.looks += 1
        return self._key

    @property
    def decoded(self) -> Any:
        self._counter.looks += 1
        return self._decoded


@dataclass
class Value:
    """The value of an item, or of a member."""

    counter: Counter
    replication: int = 2
    leaves: bool = False

    def desired_replication(self) -> int:
        self.counter.looks += 1
        return self.replication

    def least_replication(self) -> int:
        self.counter.looks += 1
        return self.replication

    def item_limit(self) -> int:
        return 20

    def exiting(self) -> bool:
        return self.leaves


class Mirror:
    root = ROOT

    def __init__(self, count: int) -> None:
        self.counter = Counter()
        members = [("a", f"{n:03}") for n in range(count // 10)]
        value = Value(self.counter)
        self.kvs = [self.entry(f"items/{n:06}", Item(f"{n:06}", value)) for n in range(count)]
        self.kvs += [self.entry(f"members/{z}#{s}", Member(z, s, value)) for z, s in members]
        for n in range(count):
            for slot in range(2):
                zone, suffix = members[(n + slot) % len(members)]
                assignment = Assignment(f"{n:06}", zone, suffix, slot, "")
                self.kvs.append(self.entry(f"assign/{n:06}#{zone}#{suffix}#{slot}", assignment))
        self.kvs.sort(key=lambda kv: kv.key)

    def entry(self, key: str, decoded: Any, revision: int = 1) -> Entry:
        return Entry(self.counter, f"{ROOT}/{key}", decoded, revision)

    def prefixed(self, prefix: str) -> Sequence[Any]:
        return prefixed(self.kvs, prefix)  # type: ignore[arg-type]

    def change(self, index: int) -> None:
        """Write one assignment again."""
        before = self.kvs[index]
        self.kvs = [*self.kvs]
        self.kvs[index] = self.entry(before.key.removeprefix(f"{ROOT}/"), before.decoded, 2)


def looks(count: int, work: Callable[[Mirror, State], object]) -> int:
    """Return how often ``work`` looks at keys and values of a cluster with ``count`` items."""
    mirror = Mirror(count)
    state = State(mirror, f"{ROOT}/members/a#001", lambda *_: True)
    mirror.counter.looks = 0
    work(mirror, state)
    return mirror.counter.looks


def one_change(mirror: Mirror, state: State) -> None:
    mirror.change(len(mirror.kvs) // 3)
    state.observe()


def a_round(mirror: Mirror, state: State) -> None:
    members = state.members_by_id()
    replication = state.demand.replication
    desired = {
        item_id: [kv.decoded.member_id for kv in kvs] for item_id, kvs in state.assigned.items()
    }
    round_ = Round(ROOT, state.items, state.assignments, members, lambda *_: True, replication)
    assert not any(converge(round_, desired, state.loads()))


def test_a_change_takes_looks_at_what_has_changed() -> None:
    """Beside it, only the bisection for the tables of keys, and what is assigned to this member."""
    small, large = (looks(count, one_change) for count in (SMALL, LARGE))
    assert large <= small + 60


@pytest.mark.parametrize(
    "work",
    [
        a_round,
        lambda mirror, state: SolverInput.of(state),
        lambda mirror, state: Demand(state.members, state.items, state.assignments).network_hash,
    ],
)
def test_a_round_takes_looks_in_proportion(work: Callable[[Mirror, State], object]) -> None:
    small, large = (looks(count, work) for count in (SMALL, LARGE))
    assert small < large < GROWTH_MAX * small


@pytest.mark.parametrize("kind", [BROKERS, MEMBERS])
def test_convergence_takes_transactions_in_proportion(kind: Kind) -> None:
    small, large = (
        converge_on_paper(kind, count, 0.005, work_is_free=True) for count in (SMALL, LARGE)
    )
    for few, many in zip(small, large, strict=True):
        assert not few.missing, few
        assert not many.missing, many
        assert many.events <= GROWTH_MAX * few.events, (few, many)
    # How often transactions are repeated depends on moments that meet: at latencies of 4 to 6 ms, the loss of
    # one broker takes 18 to 31 transactions. So count those of all events together.
    for count in ("transactions", "operations"):
        totals = [sum(getattr(event, count) for event in events) for events in (small, large)]
        assert totals[1] <= GROWTH_MAX * totals[0], (count, totals, small, large)
