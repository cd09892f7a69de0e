"""Desired assignments by minimum-cost flow.

The solver holds the interpreter lock most of the time. 10,000 items × 100 members × 3 replicas take about a
second. So a large problem is solved in a child process: see ``solver_process``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gazette.cluster.allocator.flow_network import FlowItem, FlowMember, share_bounds

ITEMS_PER_NETWORK = 10_000
ARCS_PER_NETWORK = 3_000_000
"""Greatest number of pairs of an item and a member in one network, which bounds its memory."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Members with a limit above zero, and items with a replication above zero, in key order."""

    members: tuple[FlowMember, ...]
    items: tuple[FlowItem, ...]

    @property
    def choices(self) -> int:
        """Size of the problem: the number of pairs of an item and a member."""
        return len(self.members) * len(self.items)


Solution = list[tuple[int, ...]]
"""Members of each item of the problem, as ascending indices."""


def solve(problem: Problem, items_per_network: int = ITEMS_PER_NETWORK) -> Solution:
    """Return the desired members of every item, as a pure function of the problem.

    Many items are solved in several networks, in order. A member's share grows with the demand so far, so
    each network leaves a part of every member for the next. Raise ``Broken`` if the problem is too large.
    """
    if not problem.members:
        return [() for _ in problem.items]
    per_network = max(1, min(items_per_network, ARCS_PER_NETWORK // len(problem.members)))
    solution: Solution = []
    used = [0] * len(problem.members)
    for begin in range(0, len(problem.items), per_network):
        items = problem.items[begin : begin + per_network]
        bounds = _budgets(problem, begin + len(items), used)
        chosen = _solve_network(problem.members, items, bounds)
        for members in chosen:
            for member in members:
                used[member] += 1
        solution += chosen
    return solution


def _budgets(problem: Problem, end: int, used: Sequence[int]) -> list[list[int]]:
    """Return the bounds of each member's share after the items before ``end``, without the part ``used``."""
    member_count = len(problem.members)
    demand = sum(min(item.replication, member_count) for item in problem.items[:end])
    capacity = sum(member.limit for member in problem.members)
    bounds = []
    for member, load in zip(problem.members, used, strict=True):
        shares = share_bounds(member.limit, min(demand, capacity), capacity)
        bounds.append([max(0, bound - load) for bound in shares])
    return bounds


def _solve_network(
    members: tuple[FlowMember, ...], items: tuple[FlowItem, ...], bounds: list[list[int]]
) -> Solution:
    # Only a member that leads needs numpy.
    from gazette.cluster.allocator.exchange import Exchange

    current = [item.current for item in items]
    exchange = Exchange(members, items, bounds, current, ranked=False)
    exchange.improve()
    if exchange.missing:
        # Capacity is too small: serve the first items in full, and leave the last ones short.
        exchange = Exchange(members, items, bounds, exchange.solution(), ranked=True)
        exchange.improve()
    return exchange.solution()
