"""`gazette bench allocator`: the assignment of 10,000 journals, without a cluster.

No process and no network: only the decision, as the leader of a cluster makes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final

from gazette.cluster.allocator.flow_network import FlowItem, FlowMember
from gazette.cluster.allocator.solver import Problem, Solution, solve
from gazette.cluster.allocator.solver_process import solve_in_child
from tools.bench.cluster import Bench
from tools.bench.report import Figure, value_at_most

JOURNALS: Final = 10_000
BROKERS: Final = 20
ZONES: Final = 3
REPLICATION: Final = 3
ITEM_LIMIT: Final = 3_000
_SOLVE_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The members of each journal, and measures of this assignment. ``names`` are the indices of
    members in the first problem: some may have left since.
    """

    placed: tuple[frozenset[int], ...]
    zone_of: tuple[int, ...]

    @staticmethod
    def of(solution: Solution, names: tuple[int, ...], zone_of: tuple[int, ...]) -> Plan:
        return Plan(tuple(frozenset(names[m] for m in one) for one in solution), zone_of)

    @property
    def short(self) -> int:
        """Number of missing replicas."""
        return sum(REPLICATION - len(one) for one in self.placed)

    @property
    def in_one_zone(self) -> int:
        """Number of journals that the loss of one zone would take away."""
        return sum(len({self.zone_of[m] for m in one}) < 2 for one in self.placed)

    @property
    def loads(self) -> Counter[int]:
        return Counter(member for one in self.placed for member in one)

    def moves(self, before: Plan) -> int:
        """Return the number of replicas that some member has to begin to serve."""
        pairs = zip(self.placed, before.placed, strict=True)
        return sum(len(now - then) for now, then in pairs)


def problem_of(names: tuple[int, ...], zone_of: tuple[int, ...], before: Plan | None) -> Problem:
    """Return the problem with members ``names``, and journals where ``before`` has them, if anywhere."""
    index_of = {name: index for index, name in enumerate(names)}
    zones = {zone: index for index, zone in enumerate(dict.fromkeys(zone_of[m] for m in names))}
    placed = before.placed if before is not None else (frozenset[int](),) * JOURNALS
    return Problem(
        tuple(FlowMember(zones[zone_of[name]], ITEM_LIMIT) for name in names),
        tuple(
            FlowItem(REPLICATION, tuple(sorted(index_of[m] for m in one if m in index_of)))
            for one in placed
        ),
    )


async def allocator(bench: Bench) -> list[Figure]:
    """Plan from nothing, again, without one broker, and with that broker back."""
    zone_of = tuple(broker % ZONES for broker in range(BROKERS))
    everybody = tuple(range(BROKERS))
    gone = 7
    others = tuple(name for name in everybody if name != gone)
    plans: list[Plan] = []
    seconds: list[list[float]] = []
    for names in (everybody, everybody, others, everybody):
        problem = problem_of(names, zone_of, plans[-1] if plans else None)
        taken: list[float] = []
        solution: Solution = []
        for _ in range(bench.settings.rounds):
            began = bench.clock.monotonic()
            # As a leader does it: in a child process, so that the loop goes on.
            solution = await asyncio.to_thread(solve_in_child, problem, _SOLVE_TIMEOUT_S)
            taken.append(bench.clock.monotonic() - began)
        assert solution == solve(problem), "a plan is a function of its problem"
        plans.append(Plan.of(solution, names, zone_of))
        seconds.append(taken)
    cold, again, without, back = plans
    served = cold.loads[gone]
    size = f"{JOURNALS} journals, R={REPLICATION}, {BROKERS} brokers in {ZONES} zones"
    names_of = ("from nothing", "nothing changed", "one broker leaves", "it comes back")
    times = [
        Figure("allocator", f"plan, {name}", "s", tuple(taken), note=size)
        for name, taken in zip(names_of, seconds, strict=True)
    ]
    loads = [plan.loads for plan in plans]
    spread = max(max(one.values()) - min(one.values()) for one in loads[:2])
    return [
        *times,
        _count("moves, nothing changed", again.moves(cold), 0),
        _count("moves, one broker leaves", without.moves(again), served),
        _count("moves, it comes back", back.moves(without), -(-JOURNALS * REPLICATION // BROKERS)),
        _count("replicas missing, in all plans", sum(plan.short for plan in plans), 0),
        _count("journals in one zone, in all plans", sum(p.in_one_zone for p in plans), 0),
        _count("replicas of the fullest broker, less those of the emptiest", spread, 1),
    ]


def _count(name: str, value: int, bound: int) -> Figure:
    return Figure("allocator", name, "", (float(value),), target=value_at_most(bound, ""))
