"""Plans of assignments alone, as the leader's child process computes them."""

from __future__ import annotations

import time
from collections.abc import Collection

from gazette.cluster.allocator.flow_network import FlowItem, FlowMember
from gazette.cluster.allocator.solver import Problem, solve
from tools.scale.clusters import ZONES, Kind

Placed = list[tuple[int, ...]]


def plan(kind: Kind, items: int) -> dict[str, float]:
    """Return the processor time of each plan, in seconds."""
    count = kind.members(items)
    limit = -(-2 * items * kind.replication // count)
    zone = range(ZONES - 1, count, ZONES)
    seconds: dict[str, float] = {}

    def solved(name: str, before: Placed, gone: Collection[int] = ()) -> Placed:
        names = [member for member in range(count) if member not in gone]
        zones = {
            number: index for index, number in enumerate(dict.fromkeys(m % ZONES for m in names))
        }
        index_of = {member: index for index, member in enumerate(names)}
        problem = Problem(
            tuple(FlowMember(zones[member % ZONES], limit) for member in names),
            tuple(
                FlowItem(kind.replication, tuple(index_of[m] for m in members if m in index_of))
                for members in before
            ),
        )
        began = time.process_time()
        solution = solve(problem)
        seconds[f"plan, {name} [s]"] = time.process_time() - began
        return [tuple(names[index] for index in chosen) for chosen in solution]

    first = solved("from nothing", [()] * items)
    solved("nothing changed", first)
    solved(f"one {kind.member} lost", first, (count // 2,))
    without = solved("a zone lost", first, zone)
    solved("a zone added", without)
    return seconds
