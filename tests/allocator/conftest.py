"""An allocator's cluster on paper: the keys of etcd as text, and the allocator's steps on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gazette.broker.key_space import progress
from gazette.cluster.allocator.converge import ItemStep, Round, converge
from gazette.cluster.allocator.desired import SolverInput
from gazette.cluster.allocator.model import allocator_decoder, member_key
from gazette.cluster.allocator.solver import ITEMS_PER_NETWORK, solve
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.values import Compare, DeleteOp, KeyValue, PutOp, Target
from gazette.cluster.keyspace import fold
from gazette.cluster.keyspace.key_values import prefixed
from gazette.errors import Invalid

ROOT = "/root"


@dataclass(frozen=True)
class PaperItem:
    replication: int
    least: int

    def desired_replication(self) -> int:
        return self.replication

    def least_replication(self) -> int:
        return self.least


@dataclass(frozen=True)
class PaperMember:
    limit: int
    is_exiting: bool

    def item_limit(self) -> int:
        return self.limit

    def exiting(self) -> bool:
        return self.is_exiting


def decode_member(zone: str, suffix: str, value: bytes) -> PaperMember:
    limit, _, flag = value.decode().partition(" ")
    if not limit.isdecimal():
        raise Invalid("not a member", zone=zone, suffix=suffix)
    return PaperMember(int(limit), flag == "exiting")


def decode_item(item: str, value: bytes) -> PaperItem:
    wanted, _, least = value.decode(errors="replace").partition(" least ")
    if not wanted.isdecimal():
        raise Invalid("not an item", item=item)
    return PaperItem(int(wanted), int(least or wanted))


def decode_assignment(item: str, zone: str, suffix: str, slot: int, value: bytes) -> str:
    if value not in (b"", b"earlier", b"consistent"):
        raise Invalid("not an assignment", item=item)
    return value.decode()


paper_decoder = allocator_decoder(ROOT, decode_item, decode_member, decode_assignment)


def is_consistent(item: Any, assignment: Any, assignments: Sequence[Any]) -> bool:
    return bool(assignment.decoded.value == "consistent")


class PaperCluster:
    """etcd, its mirror and the leader, without any of the three.

    Keys are written as in ``"assign/item#zone#member#0"``. A member's value is its limit, and maybe
    `` exiting``; an item's is its replication, and maybe `` least `` and how much of it must stay while
    members leave; an assignment's is empty, ``earlier`` (it was consistent once) or ``consistent``.
    """

    root = ROOT
    decoder = staticmethod(paper_decoder)
    is_consistent = staticmethod(is_consistent)

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self.revision = 100
        self.kvs: dict[str, KeyValue] = {}
        self.desired: dict[str, tuple[Any, ...]] = {}
        self.solved: int | None = None
        self.items_per_network = ITEMS_PER_NETWORK
        self.counts = {"added": 0, "removed": 0, "packed": 0, "promoted": 0}
        for key, value in keys:
            self.put(key, value)

    def put(self, key: str, value: str | int = "", lease: int = 0) -> None:
        """Write one key, at a revision of its own."""
        self.revision += 1
        self._put(f"{ROOT}/{key}".encode(), str(value).encode(), lease or self._lease_of(key))

    def _lease_of(self, key: str) -> int:
        """Return the number of a member's lease, a function of its name."""
        if key.startswith("items/"):
            return 0
        parts = key.split("/", 1)[1].split("#")
        zone, suffix = parts if key.startswith("members/") else parts[1:3]
        return sum((zone + suffix).encode())

    def _put(self, key: bytes, value: bytes, lease: int) -> None:
        name = key.decode()
        old = self.kvs.get(name)
        created, version = (old.create_revision, old.version + 1) if old else (self.revision, 1)
        self.kvs[name] = KeyValue(key, value, created, self.revision, version, lease)

    def delete(self, key: str) -> None:
        self.revision += 1
        del self.kvs[f"{ROOT}/{key}"]

    def lose(self, member: str) -> None:
        """End the member's lease: all its keys go at once."""
        self.revision += 1
        self.kvs = {
            key: kv
            for key, kv in self.kvs.items()
            if key != f"{ROOT}/members/{member}" and f"#{member}#" not in key
        }

    def txn(self, compares: Iterable[Compare], operations: Iterable[PutOp | DeleteOp]) -> bool:
        operations = tuple(operations)
        touched = [op.key for op in operations]
        assert len(touched) == len(set(touched)), "etcd takes no key twice"
        if not all(map(self._holds, compares)):
            return False
        self.revision += 1
        for op in operations:
            if isinstance(op, PutOp):
                self._put(op.key, op.value, op.lease)
            else:
                del self.kvs[op.key.decode()]
        return True

    def _holds(self, compare: Compare) -> bool:
        begin, end = compare.key.decode(), compare.range_end.decode()
        if end:
            assert compare.relation == "<"
            assert compare.target is Target.CREATE_REVISION
            assert isinstance(compare.operand, int)
            found = [kv for key, kv in self.kvs.items() if begin <= key < end]
            return all(kv.create_revision < compare.operand for kv in found)
        assert compare.relation == "="
        kv = self.kvs.get(begin)
        is_create = compare.target is Target.CREATE_REVISION
        actual = (kv.create_revision if is_create else kv.mod_revision) if kv else 0
        return actual == compare.operand

    def mark_consistent(self, only: Callable[[str], bool] = lambda key: True) -> None:
        """Mark these assignments as synchronised by the application."""
        for name, kv in list(self.kvs.items()):
            key = name.removeprefix(ROOT + "/")
            if key.startswith("assign/") and kv.value != b"consistent" and only(key):
                self.revision += 1
                self._put(kv.key, b"consistent", kv.lease)

    def state(self, local: str = "none#none") -> State:
        """Return the present state, as a member sees it."""
        kvs = sorted(self.kvs.values(), key=lambda kv: kv.key)
        return State(
            _Mirror(fold.load(kvs, paper_decoder).key_values), _local(local), is_consistent
        )

    def is_relieved(self, member: str) -> bool:
        """Return True if the others can take over all that a member holds, by their room."""
        state = self.state(member)
        local = state.local_member
        return local is not None and state.demand.limits[local.decoded.id] == 0

    def steps(self, state: State | None = None) -> list[ItemStep]:
        """Return what the leader would do now, or would have done on an older state."""
        state = state or self.state()
        if state.network_hash != self.solved:
            solver_input = SolverInput.of(state)
            self.desired = dict(
                solver_input.answer(solve(solver_input.problem, self.items_per_network))
            )
            self.solved = solver_input.network_hash
        members = state.members_by_id()
        round_ = Round(
            ROOT,
            state.items,
            state.assignments,
            members,
            is_consistent,
            state.demand.replication,
            progress=progress,
        )
        return [step for step in converge(round_, self.desired, state.loads()) if step is not None]

    def round(self, *, consistent: bool = True) -> bool:
        """Run one round of the leader, then synchronise. Return True if anything was done."""
        steps = self.steps()
        for step in steps:
            assert self.txn(step.compares, step.operations)
            for name in self.counts:
                self.counts[name] += getattr(step, name)
        if consistent:
            self.mark_consistent()
        return bool(steps)

    def settle(self, *, consistent: bool = True) -> PaperCluster:
        """Run rounds until nothing is left to do."""
        for _ in range(100):
            if not self.round(consistent=consistent):
                return self
        raise AssertionError("the allocator does not come to rest")

    def reset_counts(self) -> None:
        self.counts = dict.fromkeys(self.counts, 0)

    def assigned(self) -> list[str]:
        """Return ``item#zone#member#slot`` of all assignments, in key order."""
        prefix = f"{ROOT}/assign/"
        return sorted(key.removeprefix(prefix) for key in self.kvs if key.startswith(prefix))

    def placed(self) -> dict[str, set[str]]:
        """Return the ``zone#member`` of each item."""
        placed: dict[str, set[str]] = {}
        for key in self.assigned():
            item, zone, member, _ = key.split("#")
            placed.setdefault(item, set()).add(f"{zone}#{member}")
        return placed

    def loads(self) -> dict[str, int]:
        """Return the number of assignments of each ``zone#member``."""
        loads = {
            key.removeprefix(f"{ROOT}/members/"): 0
            for key in sorted(self.kvs)
            if key.startswith(f"{ROOT}/members/")
        }
        for members in self.placed().values():
            for member in members:
                loads[member] = loads.get(member, 0) + 1
        return loads

    def zones(self) -> dict[str, int]:
        """Return the number of zones of each item."""
        return {
            item: len({member.split("#")[0] for member in members})
            for item, members in self.placed().items()
        }


class _Mirror:
    root = ROOT

    def __init__(self, key_values: Sequence[Any]) -> None:
        self.key_values = key_values

    def prefixed(self, prefix: str) -> Sequence[Any]:
        return prefixed(self.key_values, prefix)


def _local(member: str) -> str:
    return member_key(ROOT, *member.split("#"))


@pytest.fixture(scope="session")
def paper() -> type[PaperCluster]:
    """Return the class of clusters on paper."""
    return PaperCluster
