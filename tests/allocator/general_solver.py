"""The allocator's network for a general solver of minimum-cost flows, as the oracle of our own solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

from gazette.cluster.allocator.flow_network import FlowItem, FlowMember, Weights

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Arcs:
    """Arcs as parallel columns. ``choice`` lists the arcs of (item, member), in that order."""

    tail: Ints
    head: Ints
    capacity: Ints
    cost: Ints
    choice: slice
    supply: Ints
    """Supply of each node. The last node is the sink."""


class FlowNetwork:
    """Network of some items over all members.

    ``bounds[m]`` are ``share_bounds`` less what earlier networks gave to member ``m``. The last bound is the
    most that the member may hold. ``ranked`` makes early items win if not all can be served.
    """

    def __init__(
        self,
        members: tuple[FlowMember, ...],
        items: tuple[FlowItem, ...],
        bounds: list[list[int]],
        *,
        ranked: bool,
    ) -> None:
        self.members = members
        self.items = items
        self._zones = max((member.zone for member in members), default=0) + 1
        # An item cannot have more replicas than members. Asking for more only costs time.
        self._wanted = np.array([min(i.replication, len(members)) for i in items], dtype=np.int64)
        self._ranked = ranked
        self._weights = Weights.of(
            len(members), int(self._wanted.max(initial=1)), len(items) if ranked else 0
        )
        layers = 1 if self._zones == 1 else 1 + self._zones
        self._first_member = len(items) * layers
        self._sink = self._first_member + len(members)
        self._bounds = bounds

    @property
    def wanted(self) -> int:
        return int(self._wanted.sum())

    def arcs(self) -> Arcs:
        blocks = [self._choices()]
        if self._zones > 1:
            blocks.append(self._zone_arcs())
        blocks += [self._shares(), self._not_assigned()]
        tail, head, capacity, cost = (
            np.concatenate(column) for column in zip(*blocks, strict=True)
        )
        supply = np.zeros(self._sink + 1, dtype=np.int64)
        supply[: len(self.items)] = self._wanted
        supply[self._sink] = -self.wanted
        choice = slice(0, len(self.items) * len(self.members))
        return Arcs(tail, head, capacity, cost, choice, supply)

    def _choices(self) -> tuple[Ints, Ints, Ints, Ints]:
        items, members = len(self.items), len(self.members)
        cost = np.full((items, members), self._weights.move, dtype=np.int64)
        rows = [row for row, item in enumerate(self.items) for _ in item.current]
        columns = [member for item in self.items for member in item.current]
        cost[rows, columns] = 0
        if self._zones == 1:
            tail = np.repeat(np.arange(items, dtype=np.int64), members)
        else:
            zones = np.array([member.zone for member in self.members], dtype=np.int64)
            tail = (self._zone_nodes()[:, None] + zones[None, :]).ravel()
        head = np.tile(np.arange(members, dtype=np.int64) + self._first_member, items)
        allowed = np.zeros((items, members), dtype=np.int64)
        for column, member in enumerate(self.members):
            for row, item in enumerate(self.items):
                allowed[row, column] = not member.leaves or column in item.kept
        return tail, head, allowed.ravel(), cost.ravel()

    def _zone_nodes(self) -> Ints:
        """Return the node of zone 0 of each item."""
        items = len(self.items)
        return items + self._zones * np.arange(items, dtype=np.int64)

    def _zone_arcs(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the arcs to zones. The j-th replica in one zone costs more with
        j, and the last one much more.
        """
        blocks = []
        nodes = self._zone_nodes()
        for wanted in np.unique(self._wanted):
            rows = np.flatnonzero(self._wanted == wanted)
            for nth in range(1, int(wanted) + 1):
                is_last = nth == wanted and wanted > 1
                price = self._weights.zone if is_last else self._weights.spread * (nth - 1)
                tail = np.repeat(rows, self._zones)
                head = (nodes[rows][:, None] + np.arange(self._zones)[None, :]).ravel()
                blocks.append((tail, head, np.ones_like(tail), np.full_like(tail, price)))
        tail, head, capacity, cost = (
            np.concatenate(column) for column in zip(*blocks, strict=True)
        )
        return tail, head, capacity, cost

    def _shares(self) -> tuple[Ints, Ints, Ints, Ints]:
        rows = [
            (self._first_member + index, self._sink, high - low, self._weights.fairness * step)
            for index, bounds in enumerate(self._bounds)
            for step, (low, high) in enumerate(pairwise([0, *bounds]))
            if high > low
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return columns[0], columns[1], columns[2], columns[3]

    def _not_assigned(self) -> tuple[Ints, Ints, Ints, Ints]:
        items = np.arange(len(self.items), dtype=np.int64)
        rank = items[::-1] if self._ranked else np.zeros_like(items)
        short = self._weights.short + rank
        tail = np.concatenate([items, items])
        capacity = np.concatenate([self._wanted - 1, np.ones_like(items)])
        cost = np.concatenate([short, short + self._weights.unserved])
        return tail, np.full_like(tail, self._sink), capacity, cost

    def cheapest(self, within: Sequence[Sequence[int]] | None = None) -> int:
        """Return the cost of the cheapest flow. ``within`` names the only members that each item may have."""
        arcs = self.arcs()
        capacity = arcs.capacity.copy()
        if within is not None:
            grid = np.zeros((len(self.items), len(self.members)), dtype=np.int64)
            for row, columns in enumerate(within):
                grid[row, list(columns)] = 1
            capacity[arcs.choice] = np.minimum(capacity[arcs.choice], grid.ravel())
        flow = SimpleMinCostFlow()
        flow.add_arcs_with_capacity_and_unit_cost(
            arcs.tail.astype(np.int32), arcs.head.astype(np.int32), capacity, arcs.cost
        )
        flow.set_nodes_supplies(np.arange(len(arcs.supply), dtype=np.int32), arcs.supply)
        assert flow.solve() == flow.OPTIMAL
        return int(flow.optimal_cost())
