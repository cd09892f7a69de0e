"""Items, zones and members as a network whose cheapest flow is the desired assignment.

::

    item ──► zone of the item ──► member ──► sink
      └───────── not assigned ───────────────►┘

Every item sends one unit for each replica it wants. An arc from an item to a member has capacity
one, so replicas are on distinct members. With a single zone, the second column is left out. Costs
express the wishes, and each cost outweighs all that follow:

1. as many assignments as possible, then as many items as possible with at least one;

2. two zones for every item that has two or more replicas;

3. a fair share for every member, in proportion to its limit;

4. present assignments stay;

5. an even spread over zones.

A member's limit is a capacity. *How much* must a cost be to outweigh the rest? Two flows differ by
a set of simple cycles, which pass every item and member at most once. So a cost level must exceed
the gain of one such cycle in all lower levels. That gain depends on the number of members, not of
items. Then the cheapest flow is the best one by each level in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

# Bands of a member's fair share: from each bound to the next, one unit costs one step more. Within
# a band, moving an item gains nothing. So assignments stay where a perfect balance is out of reach.
# Around the share, each band is a single unit.
_BELOW_SHARE = 8
_ABOVE_SHARE = ((9, 8), (5, 4), (3, 2), (2, 1), (4, 1))
FAIRNESS_STEPS = _BELOW_SHARE + 1 + len(_ABOVE_SHARE)


@dataclass(frozen=True, slots=True)
class FlowMember:
    """A member of the network. ``zone`` counts from zero, without gaps. ``limit`` > 0.

    Items that want fewer than ``needed_from`` replicas do not use this member.
    """

    zone: int
    limit: int
    needed_from: int = 0


@dataclass(frozen=True, slots=True)
class FlowItem:
    """An item of the network. ``current`` are distinct indices into the members."""

    replication: int
    current: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Price of one unit, per level."""

    spread: int
    move: int
    fairness: int
    zone: int
    unserved: int
    short: int

    @staticmethod
    def of(members: int, replication_max: int, ranks: int) -> Weights:
        """Return the prices for a network. ``ranks`` is the number of steps in the
        order of items, or 0 without order.
        """
        visits = (
            members + 1
        )  # items that a simple cycle visits: it passes a member between two items
        below = visits * max(replication_max - 1, 1) + ranks
        move = below + 1
        below += 2 * members * move
        fairness = below + 1
        below += FAIRNESS_STEPS * fairness
        zone = below + 1
        below += 2 * visits * zone
        unserved = below + 1
        below += unserved
        return Weights(1, move, fairness, zone, unserved, below + 1)


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


def share_bounds(limit: int, demand: int, capacity: int) -> list[int]:
    """Return the counts of items at which the price rises, for a member with the share
    limit·demand/capacity.

    They ascend, with one bound for each step of the price. The last one is ``limit``.
    """
    share = limit * demand
    bounds = [-(-share * k // (capacity * _BELOW_SHARE)) for k in range(1, _BELOW_SHARE)]
    bounds += [share // capacity, -(-share // capacity)]
    bounds += [-(-share * num // (capacity * den)) for num, den in _ABOVE_SHARE]
    bounds.append(limit)
    ascending: list[int] = []
    for bound in bounds:
        low = ascending[-1] if ascending else 0
        ascending.append(min(max(bound, low), limit))
    return ascending


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
        replication = np.array([item.replication for item in self.items], dtype=np.int64)
        needed_from = np.array([member.needed_from for member in self.members], dtype=np.int64)
        allowed = (replication[:, None] >= needed_from[None, :]).astype(np.int64)
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

    def chosen(self, flows: NDArray[Any]) -> list[tuple[int, ...]]:
        """Return the members of each item, ascending, from the flows of the choice arcs."""
        grid = flows.reshape(len(self.items), len(self.members))
        chosen: list[list[int]] = [[] for _ in self.items]
        for row, column in zip(*(axis.tolist() for axis in np.nonzero(grid)), strict=True):
            chosen[row].append(column)
        return [tuple(columns) for columns in chosen]
