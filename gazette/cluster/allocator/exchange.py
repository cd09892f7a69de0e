"""Cheapest flow of a network, by exchanges that begin at the present assignment.

The nodes are the members and a sink. An *arc* moves one unit of load, at a cost:

    member a ──► member b      an item leaves a for b
    sink     ──► member b      an item that is short is served by b
    member a ──► sink          an item gives up a and is short
    sink     ──► member a      the load of a shrinks
    member a ──► sink          the load of a grows

A cycle of arcs changes the assignment and keeps it feasible. An assignment is the cheapest one exactly
if no cycle has a negative cost. So negative cycles are applied until none is left, to many items at a
time. If the present assignment is the best one already, nothing moves.

*Why no general solver of flows?* It would see an arc for each item and member. Here the network has few
nodes, because each arc stands for the cheapest of many items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gazette.cluster.allocator.flow_network import FlowItem, FlowMember, Weights
from gazette.errors import Broken

Ints: TypeAlias = NDArray[np.int64]

_NEVER: Final = 1 << 61
_PATH_COST_MAX: Final = 1 << 60  # sums with ``_NEVER`` stay within 64 bits


@dataclass(frozen=True, slots=True)
class _Moves:
    """Items that an arc can move, with the cost of each."""

    source: int
    target: int
    items: Ints
    deltas: Ints

    def pick(self, index: Any) -> _Moves:
        return _Moves(self.source, self.target, self.items[index], self.deltas[index])


class Exchange:
    """Assignment of some items to all members. ``improve`` makes it the cheapest one.

    ``bounds[m]`` are ``share_bounds``, less the items that earlier networks gave to member ``m``. The last
    bound is the most that the member may hold. ``ranked``: if not all items can be served, earlier items win.
    ``chosen`` lists the members of each item to begin with. Replicas beyond a limit are left out.

    Raise ``Broken`` if the network is too large for its costs.
    """

    def __init__(
        self,
        members: Sequence[FlowMember],
        items: Sequence[FlowItem],
        bounds: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[int]],
        *,
        ranked: bool,
    ) -> None:
        size, count = len(members), len(items)
        replication = np.array([item.replication for item in items], dtype=np.int64)
        # An item cannot have more replicas than members.
        self._wanted = np.minimum(replication, size)
        ranks = count if ranked else 0
        weights = Weights.of(size, int(self._wanted.max(initial=1)), ranks)
        if (weights.short + weights.unserved + ranks) * (size + 2) > _PATH_COST_MAX:
            raise Broken(
                "too large to plan: the costs of so many members and items overflow",
                members=size,
                items=count,
            )
        self._weights = weights
        self._sink = size
        self._ranks = ranks
        # If items are ranked, a missing replica of an earlier item costs more.
        self._short = weights.short + np.arange(count, dtype=np.int64)[::-1] * ranked

        self._zone = np.array([member.zone for member in members], dtype=np.int64)
        zones = int(self._zone.max(initial=0)) + 1
        self._in_zone = (np.arange(zones)[:, None] == self._zone).astype(np.int64)
        self._bounds = np.array(bounds, dtype=np.int64)
        self._allowed = np.ones((size, count), dtype=np.bool_)
        self._allowed[[member.leaves for member in members]] = False
        self._allowed[_cells(item.kept for item in items)] = True
        self._move = np.full((size, count), weights.move, dtype=np.int64)
        self._move[_cells(item.current for item in items)] = 0

        self._chosen = np.zeros((size, count), dtype=np.bool_)
        self._chosen[_cells(chosen)] = True
        self._chosen &= self._allowed
        self._chosen &= np.cumsum(self._chosen, axis=1) <= self._bounds[:, -1:]
        self._chosen &= np.cumsum(self._chosen, axis=0) <= self._wanted

        # Derived from the choice. Replicas of each item. By zone and item: the price of one more replica, and
        # of the last one. By member: its items, the price of one more, and the (negative) price of one less.
        self._served = np.zeros(count, dtype=np.int64)
        self._enter = np.zeros((zones, count), dtype=np.int64)
        self._leave = np.zeros((zones, count), dtype=np.int64)
        self._load = np.zeros(size, dtype=np.int64)
        self._grow = np.zeros(size, dtype=np.int64)
        self._shrink = np.zeros(size, dtype=np.int64)
        # The cheapest cost by source and target.
        # In the order of targets, since each search looks for the nearest source of each target.
        self._cost = np.full((size + 1, size + 1), _NEVER, dtype=np.int64, order="F")
        self._reached = np.empty_like(self._cost)
        """Memory for `_search`, which would otherwise allocate it in each round."""
        self._update(np.arange(count), range(size))

    @property
    def missing(self) -> int:
        """Number of replicas that are wanted and not assigned."""
        return int((self._wanted - self._served).sum())

    def improve(self) -> int:
        """Apply negative cycles until none is left. Return the number of cycles."""
        cycles = 0
        while cycle := self._negative_cycle():
            self._apply(cycle)
            cycles += 1
        return cycles

    def solution(self) -> list[tuple[int, ...]]:
        """Return the members of each item, as ascending indices."""
        solution: list[list[int]] = [[] for _ in self._served]
        cells = np.nonzero(self._chosen.T)
        for item, member in zip(*(axis.tolist() for axis in cells), strict=True):
            solution[item].append(member)
        return [tuple(members) for members in solution]

    # Costs

    def _move_costs(self, sources: Ints, items: Ints, targets: Ints) -> Ints:
        """Return the cost of moving ``items[p]`` from ``sources[p]`` to each of ``targets``."""
        zones = self._zone[sources]
        costs = (self._enter[:, items] - self._leave[zones, items])[self._zone[targets]]
        costs[self._zone[targets][:, None] == zones] = 0
        costs += self._move[targets[:, None], items] - self._move[sources, items]
        costs[self._is_barred(items, targets)] = _NEVER
        return costs

    def _drop_costs(self, sources: Ints, items: Ints) -> Ints:
        """Return the cost of taking ``items[p]`` from ``sources[p]``. Then the item is short of a replica."""
        saved = self._leave[self._zone[sources], items] + self._move[sources, items]
        return self._short_cost(items, self._served[items] == 1) - saved

    def _serve_costs(self, items: Ints, targets: Ints) -> Ints:
        """Return the cost of assigning ``items``, which are short, to each of ``targets``."""
        costs = self._enter[:, items][self._zone[targets]] + self._move[targets[:, None], items]
        costs -= self._short_cost(items, self._served[items] == 0)
        costs[self._is_barred(items, targets)] = _NEVER
        return costs

    def _is_barred(self, items: Ints, targets: Ints) -> NDArray[np.bool_]:
        cells = targets[:, None], items
        return self._chosen[cells] | ~self._allowed[cells]

    def _short_cost(self, items: Ints, is_last: NDArray[np.bool_]) -> Ints:
        return self._short[items] + self._weights.unserved * is_last

    def _candidates(self, source: int, target: int) -> _Moves:
        """Return the cheapest items of an arc. If items are ranked, order them by cost.

        Ranks make costs differ by at most ``_ranks``: such differences count as equal.
        """
        items, targets = self._movable(source), np.array([target])
        if source == self._sink:
            costs = self._serve_costs(items, targets)[0]
        elif target == self._sink:
            costs = self._drop_costs(np.full(len(items), source), items)
        else:
            costs = self._move_costs(np.full(len(items), source), items, targets)[0]
        # With this initial value, the bound stays below `_NEVER`: moves that are impossible are left out.
        best = np.flatnonzero(costs <= costs.min(initial=_NEVER - self._ranks - 1) + self._ranks)
        if self._ranks:
            best = best[np.argsort(costs[best], kind="stable")]
        return _Moves(source, target, items[best], costs[best])

    def _movable(self, source: int) -> Ints:
        """Return the items that an arc from ``source`` can move."""
        if source == self._sink:
            return np.flatnonzero(self._served < self._wanted)
        return np.flatnonzero(self._chosen[source])

    def _lower(self, sources: Ints, items: Ints) -> None:
        """Lower the costs of arcs to those of moving ``items[p]`` from ``sources[p]``. Sources ascend."""
        if not len(items):
            return
        members = np.arange(self._sink)
        costs = np.vstack(
            [self._move_costs(sources, items, members), self._drop_costs(sources, items)]
        )
        begins = np.flatnonzero(np.diff(sources, prepend=-1))
        rows = sources[begins]
        cheapest = np.minimum.reduceat(costs, begins, axis=1).T
        self._cost[rows] = np.minimum(self._cost[rows], cheapest)

    def _lower_to_serve(self, items: Ints) -> None:
        """Lower the costs of arcs to those of serving ``items`` that are short."""
        costs = self._serve_costs(items, np.arange(self._sink)).min(axis=1, initial=_NEVER)
        self._cost[-1, :-1] = np.minimum(self._cost[-1, :-1], costs)

    def _correct(self, source: int) -> None:
        """Compute the costs of all arcs from ``source`` again. See `_update`."""
        self._cost[source] = _NEVER
        items = self._movable(source)
        if source == self._sink:
            self._lower_to_serve(items)
        else:
            self._lower(np.full(len(items), source), items)

    def _update(self, items: Ints, members: Sequence[int]) -> None:
        """Update derived values after a change. Costs may stay too low until `_apply` corrects them."""
        counts = self._in_zone @ self._chosen[:, items]
        self._served[items] = counts.sum(axis=0)
        if len(counts) > 1:
            self._enter[:, items] = self._zone_price(counts + 1, self._wanted[items])
            self._leave[:, items] = self._zone_price(counts, self._wanted[items])
        sources, columns = np.nonzero(self._chosen[:, items])
        self._lower(sources, items[columns])
        self._lower_to_serve(items[self._served[items] < self._wanted[items]])
        for member in members:
            load = self._load[member] = int(self._chosen[member].sum())
            self._grow[member] = self._share_price(member, load + 1)
            self._shrink[member] = -self._share_price(member, load) if load else _NEVER

    def _zone_price(self, nth: Ints, wanted: Ints) -> Ints:
        """Return the price of the nth replica of an item in one zone. The last of several wanted replicas
        costs much more: all would be in this zone."""
        is_last = (nth == wanted) & (wanted > 1)
        return np.where(is_last, self._weights.zone, self._weights.spread * (nth - 1))

    def _share_price(self, member: int, nth: int) -> int:
        """Return the price of the nth item of a member; `_NEVER` above its limit."""
        bounds = self._bounds[member]
        step = int(np.searchsorted(bounds, nth))
        return self._weights.fairness * step if step < len(bounds) else _NEVER

    def _room(self, member: int, *, grow: bool) -> int:
        """Return how many units the load can grow, or shrink, at the present price."""
        load, bounds = int(self._load[member]), self._bounds[member]
        step = int(np.searchsorted(bounds, load + grow))  # ``grow`` counts as 1 or 0.
        if grow:
            return int(bounds[step]) - load
        return load - (int(bounds[step - 1]) if step else 0)

    # Cycles

    def _negative_cycle(self) -> list[int]:
        """Return the nodes of a negative cycle in order, or nothing. Raise ``Broken`` if the search does not
        end."""
        sink = self._sink
        from_sink = np.minimum(self._cost[sink, :sink], self._shrink)
        to_sink = np.minimum(self._cost[:sink, sink], self._grow)
        # Usually a cycle only assigns one more item. To find such a cycle, a look at each member is enough.
        cheapest = int(np.argmin(from_sink + to_sink))
        if from_sink[cheapest] + to_sink[cheapest] < 0:
            return [sink, cheapest]
        # Costs of loads are in the matrix during the search only.
        without_loads = self._cost[sink, :sink].copy(), self._cost[:sink, sink].copy()
        self._cost[sink, :sink], self._cost[:sink, sink] = from_sink, to_sink
        try:
            return self._search()
        finally:
            self._cost[sink, :sink], self._cost[:sink, sink] = without_loads

    def _search(self) -> list[int]:
        """Return a cycle as `_negative_cycle` does: Bellman-Ford, from all nodes at once."""
        nodes = np.arange(self._sink + 1)
        distance, parent = np.zeros_like(nodes), np.full_like(nodes, -1)
        reached = self._cost
        for _ in range(self._sink + 2):
            nearest = reached.argmin(axis=0)
            through = reached[nearest, nodes]
            shorter = through < distance
            if not shorter.any():
                return []
            parent[shorter] = nearest[shorter]
            distance[shorter] = through[shorter]
            if cycle := _cycle(parent.tolist()):
                return cycle
            reached = np.add(self._cost, distance[:, None], out=self._reached)
        raise Broken("found no cycle after a round for each node", nodes=self._sink + 1)

    def _apply(self, cycle: list[int]) -> None:
        """Apply a negative cycle as often as its costs hold. If a cost was too low, only correct that cost.
        Raise ``Broken`` if no part of the cycle makes the assignment cheaper."""
        arcs: list[_Moves] = []
        # The price of each unit by which loads change, and the greatest number of units at that price.
        loads, units = 0, self._chosen.size
        for source, target in pairwise([*cycle, cycle[0]]):
            bound = self._cost[source, target]
            if source == self._sink and self._shrink[target] <= bound:
                loads += int(self._shrink[target])
                units = min(units, self._room(target, grow=False))
            elif target == self._sink and self._grow[source] <= bound:
                loads += int(self._grow[source])
                units = min(units, self._room(source, grow=True))
            else:
                arc = self._candidates(source, target)
                if not len(arc.items) or arc.deltas[0] > bound:
                    self._correct(source)
                    return
                arcs.append(arc)
        picked = self._disjoint(arcs, units)
        negative = sum((arc.deltas for arc in picked), np.array(loads)) < 0
        if negative.any():
            self._carry_out([arc.pick(negative) for arc in picked], cycle)
        elif not self._apply_once([arc.pick(slice(1)) for arc in arcs]):
            raise Broken("no part of a negative cycle is cheaper", nodes=cycle)

    def _disjoint(self, arcs: list[_Moves], units: int) -> list[_Moves]:
        """Return at most ``units`` items of each arc, no item twice. Return none if too few are distinct."""
        units = max(1, min(units, *(len(arc.items) // len(arcs) for arc in arcs)))
        used = np.zeros_like(self._served, dtype=np.bool_)
        picked: list[_Moves] = []
        for arc in arcs:
            free = np.flatnonzero(~used[arc.items])
            if len(free) < units:
                return [arc.pick(slice(0)) for arc in arcs]
            # Of equally good items, pick some from everywhere, so that two members do not share all items.
            picks = np.arange(units) if self._ranks else np.arange(units) * len(free) // units
            picked.append(arc.pick(free[picks]))
            used[picked[-1].items] = True
        return picked

    def _carry_out(self, arcs: Sequence[_Moves], nodes: Sequence[int]) -> None:
        self._flip(arcs)
        items = np.unique(np.concatenate([arc.items for arc in arcs]))
        self._update(items, [node for node in nodes if node < self._sink])

    def _flip(self, arcs: Sequence[_Moves]) -> None:
        """Change the choice by the moves of arcs, and no derived value."""
        for arc in arcs:
            if arc.source < self._sink:
                self._chosen[arc.source, arc.items] = False
            if arc.target < self._sink:
                self._chosen[arc.target, arc.items] = True

    # A cycle that needs the same item twice

    def _apply_once(self, arcs: list[_Moves]) -> bool:
        """Move one item on each arc, if that is cheaper. Else try the two parts that a repeated item joins.

        Costs of arcs hold for one move of an item. If an item moves twice, the cost may exceed the sum of its
        arcs. Then the cycle crosses itself, and one of its two parts has a negative cost.
        """
        items = np.unique(np.concatenate([arc.items for arc in arcs])).tolist()
        nodes = {node for arc in arcs for node in (arc.source, arc.target)} - {self._sink}
        former_cost = self._total(items, nodes)
        self._flip(arcs)
        if self._total(items, nodes) < former_cost:
            self._update(np.array(items), sorted(nodes))
            return True
        # That is not cheaper: undo it.
        self._flip([_Moves(arc.target, arc.source, arc.items, arc.deltas) for arc in arcs[::-1]])
        for low, high in combinations(range(len(arcs)), 2):
            first, second = arcs[low], arcs[high]
            if first.items[0] == second.items[0]:
                inner = [*arcs[low + 1 : high], replace(second, target=first.target)]
                outer = [*arcs[:low], replace(first, target=second.target), *arcs[high + 1 :]]
                parts = [
                    [arc for arc in part if arc.source != arc.target] for part in (inner, outer)
                ]
                return any(part and self._apply_once(part) for part in parts)
        return False

    def _total(self, items: Sequence[int], members: Iterable[int]) -> int:
        """Return the cost of the present choice, for these items and members."""
        total = 0
        for item in items:
            chosen, wanted = self._chosen[:, item], int(self._wanted[item])
            served = int(chosen.sum())
            total += int(self._move[chosen, item].sum())
            total += int(self._short[item]) * (wanted - served)
            total += self._weights.unserved * (wanted > served == 0)
            for count in (self._in_zone @ chosen).tolist() if len(self._in_zone) > 1 else ():
                nth = np.arange(1, count + 1)
                total += int(self._zone_price(nth, np.full(count, wanted)).sum())
        for member in members:
            load = int(self._chosen[member].sum())
            total += sum(self._share_price(member, nth) for nth in range(1, load + 1))
        return total


def _cells(columns: Any) -> tuple[list[int], list[int]]:
    """Return the rows, and the columns, of cells that are listed by column."""
    cells = [(row, column) for column, rows in enumerate(columns) for row in rows]
    return [row for row, _ in cells], [column for _, column in cells]


def _cycle(parent: list[int]) -> list[int]:
    """Return a cycle in a graph where each node has one parent or -1, from parent to child, or nothing."""
    visited_from = [-1] * len(parent)
    for start in range(len(parent)):
        node = start
        while node >= 0 and visited_from[node] < 0:
            visited_from[node] = start
            node = parent[node]
        if node >= 0 and visited_from[node] == start:
            cycle = [node]
            while (previous := parent[cycle[-1]]) != node:
                cycle.append(previous)
            return cycle[::-1]
    return []
