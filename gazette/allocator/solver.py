"""Desired assignments by minimum-cost flow.

``SimpleMinCostFlow`` holds the interpreter lock while it works. 10,000 items × 100 members × 3 replicas take
about a second. So a large problem is solved in a child process: see ``solver_process``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

from gazette.allocator.flow_network import FlowItem, FlowMember, FlowNetwork, share_bounds
from gazette.errors import Broken

ITEMS_PER_NETWORK = 10_000
ARCS_PER_NETWORK = 3_000_000
"""Bound on the memory of a solve, which is about 150 bytes for each (item, member)."""

_COST_MAX = 1 << 62  # the solver multiplies costs by the number of nodes


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
    that each network leaves a part of every member to the next. Raise ``Broken`` if the solver fails.
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
    """Return the bounds of each member's share once the items before ``end``
    are served, less what is used.
    """
    most = len(problem.members)
    seen = sum(min(item.replication, most) for item in problem.items[:end])
    capacity = sum(member.limit for member in problem.members)
    bounds = []
    for member, given in zip(problem.members, used, strict=True):
        shares = share_bounds(member.limit, min(seen, capacity), capacity)
        bounds.append([max(0, bound - given) for bound in shares])
    return bounds


def _solve_network(
    members: tuple[FlowMember, ...], items: tuple[FlowItem, ...], bounds: list[list[int]]
) -> Solution:
    network = FlowNetwork(members, items, bounds, ranked=False)
    chosen = _cheapest_flow(network)
    if sum(map(len, chosen)) < network.wanted:
        # Capacity is too small. Leave the last items short, and serve the others in full.
        network = FlowNetwork(members, items, bounds, ranked=True)
        chosen = _cheapest_flow(network)
    return chosen


def _cheapest_flow(network: FlowNetwork) -> Solution:
    arcs = network.arcs()
    nodes = len(arcs.supply)
    if int(arcs.cost.max()) * (nodes + 1) > _COST_MAX:
        raise Broken("the network is too large for its costs", nodes=nodes, arcs=len(arcs.cost))
    flow = SimpleMinCostFlow()
    indices = flow.add_arcs_with_capacity_and_unit_cost(
        arcs.tail.astype(np.int32), arcs.head.astype(np.int32), arcs.capacity, arcs.cost
    )
    flow.set_nodes_supplies(np.arange(nodes, dtype=np.int32), arcs.supply)
    status = flow.solve()
    if status != flow.OPTIMAL:
        # "Not assigned" can take every unit, so a flow always exists. Do not raise ``Bug``: it would
        # end the leader, and then each member that becomes the leader.
        raise Broken("the solver found no flow", status=status, nodes=nodes, arcs=len(arcs.cost))
    return network.chosen(flow.flows(indices[arcs.choice]))
