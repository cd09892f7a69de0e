"""The solver's problem, made from the state, and its solution, converted from indices to names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gazette.cluster.allocator.flow_network import FlowItem, FlowMember
from gazette.cluster.allocator.model import MemberId
from gazette.cluster.allocator.solver import Problem, Solution
from gazette.cluster.allocator.state import State


@dataclass(frozen=True, slots=True)
class SolverInput:
    """A ``Problem`` with the names of its items and members, and the demand from which it was made."""

    problem: Problem
    items: tuple[str, ...]
    members: tuple[MemberId, ...]
    idle_items: tuple[str, ...]
    """Items with a replication of zero."""
    network_hash: int
    item_slots: int
    member_slots: int

    @staticmethod
    def of(state: State) -> SolverInput:
        """Return the problem of the present members, items and assignments."""
        demand = state.demand
        members = tuple(member for member, limit in demand.limits.items() if limit > 0)
        zones = {zone: index for index, zone in enumerate(dict.fromkeys(z for z, _ in members))}
        index_of = {member: index for index, member in enumerate(members)}
        current: dict[str, set[int]] = {}
        for kv in state.assignments:
            index = index_of.get(kv.decoded.member_id)
            if index is not None:
                current.setdefault(kv.decoded.item_id, set()).add(index)
        kept: dict[str, set[int]] = {}
        for member, kept_items in demand.kept.items():  # A member without capacity keeps nothing.
            for item in kept_items if member in index_of else ():
                kept.setdefault(item, set()).add(index_of[member])
        items = tuple(item for item, wanted in demand.replication.items() if wanted > 0)
        problem = Problem(
            tuple(
                FlowMember(zones[member[0]], demand.limits[member], member in demand.kept)
                for member in members
            ),
            tuple(
                FlowItem(
                    demand.replication[item],
                    tuple(sorted(current.get(item, ()))),
                    tuple(sorted(kept.get(item, ()))),
                )
                for item in items
            ),
        )
        idle = tuple(item for item, wanted in demand.replication.items() if wanted <= 0)
        return SolverInput(
            problem,
            items,
            members,
            idle,
            demand.network_hash,
            demand.item_slots,
            demand.member_slots,
        )

    def answer(self, solution: Solution) -> Mapping[str, tuple[MemberId, ...]]:
        """Return the desired members of every item."""
        desired: dict[str, tuple[MemberId, ...]] = dict.fromkeys(self.idle_items, ())
        for item, members in zip(self.items, solution, strict=True):
            desired[item] = tuple(self.members[member] for member in members)
        return desired
