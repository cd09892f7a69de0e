from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gazette.cluster.allocator.flow_network import FlowItem, FlowMember, Weights, share_bounds
from gazette.cluster.allocator.solver import Problem, Solution, solve
from gazette.cluster.allocator.solver_process import solve_in_child
from gazette.errors import Unavailable
from tests.facts import raises


def problem_of(members: str, items: Sequence[tuple[int, Sequence[int]]]) -> Problem:
    """Build a problem from ``members`` such as ``"A3 A3 B1"``: zone and limit."""
    names = sorted({m[0] for m in members.split()})
    return Problem(
        tuple(FlowMember(names.index(m[0]), int(m[1:])) for m in members.split()),
        tuple(FlowItem(replication, tuple(current)) for replication, current in items),
    )


def load(problem: Problem, solution: Solution) -> list[int]:
    counts = Counter(member for members in solution for member in members)
    return [counts[index] for index in range(len(problem.members))]


def quality(problem: Problem, solution: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return what the solver minimises, level by level, computed in another way."""
    members, items = problem.members, problem.items
    wanted = [min(item.replication, len(members)) for item in items]
    zones = len({member.zone for member in members})
    capacity = sum(member.limit for member in members)
    demand = min(sum(wanted), capacity)

    missing = [want - len(chosen) for want, chosen in zip(wanted, solution, strict=True)]
    unserved = sum(not chosen for chosen in solution)
    single_zone = sum(
        want > 1
        and zones > 1
        and len(chosen) == want
        and len({members[m].zone for m in chosen}) == 1
        for want, chosen in zip(wanted, solution, strict=True)
    )
    unfair = 0
    for member, count in zip(members, load(problem, list(map(tuple, solution))), strict=True):
        bounds = share_bounds(member.limit, demand, capacity)
        unfair += sum(sum(nth > bound for bound in bounds) for nth in range(1, count + 1))
    moves = sum(
        len(set(chosen) - set(item.current)) for item, chosen in zip(items, solution, strict=True)
    )
    # The order of items counts when an item goes short, the spread over zones otherwise too.
    ties = 0
    if sum(missing) > 0:
        ties += sum(miss * (len(items) - 1 - n) for n, miss in enumerate(missing))
    for want, chosen in zip(wanted, solution, strict=True):
        for count in Counter(members[m].zone for m in chosen).values() if zones > 1 else ():
            ties += sum(nth - 1 for nth in range(1, count + 1) if nth < want or want == 1)
    return (sum(missing), unserved, single_zone, unfair, moves, ties)


def is_feasible(problem: Problem, solution: Sequence[Sequence[int]]) -> bool:
    return all(
        len(set(chosen)) == len(chosen) <= item.replication
        for item, chosen in zip(problem.items, solution, strict=True)
    ) and all(
        count <= member.limit
        for count, member in zip(
            load(problem, list(map(tuple, solution))), problem.members, strict=True
        )
    )


def best(problem: Problem) -> tuple[int, ...]:
    """Return the best quality of all feasible solutions, by trying them all."""
    indices = range(len(problem.members))
    choices = [
        [
            chosen
            for size in range(min(item.replication, len(problem.members)) + 1)
            for chosen in itertools.combinations(indices, size)
        ]
        for item in problem.items
    ]
    return min(
        quality(problem, solution)
        for solution in itertools.product(*choices)
        if is_feasible(problem, solution)
    )


@st.composite
def problems(draw: st.DrawFn, members_max: int = 4, items_max: int = 3) -> Problem:
    zones = sorted(draw(st.lists(st.integers(0, 2), min_size=1, max_size=members_max)))
    gapless = {zone: index for index, zone in enumerate(sorted(set(zones)))}
    members = tuple(FlowMember(gapless[zone], draw(st.integers(1, 3))) for zone in zones)
    current = st.sets(st.sampled_from(range(len(members)))).map(sorted).map(tuple)
    items = draw(st.lists(st.builds(FlowItem, st.integers(1, 4), current), max_size=items_max))
    return Problem(members, tuple(items))


@settings(max_examples=200, deadline=None)
@given(problems())
@example(problem_of("A1 B1", [(2, (0,)), (1, (1,)), (1, ())]))
@example(problem_of("A3 A3 B3", [(3, (0, 1)), (2, (0, 1)), (2, (0, 1))]))
def test_solutions_are_as_good_as_the_best_of_all(problem: Problem) -> None:
    """Limits hold, replicas are distinct, and no other choice is better at any level in turn."""
    solution = solve(problem)
    assert is_feasible(problem, solution)
    assert quality(problem, solution) == best(problem)


@settings(max_examples=100, deadline=None)
@given(problems(members_max=8, items_max=12))
def test_solving_again_moves_nothing(problem: Problem) -> None:
    """A solution is its own best successor, and the same problem has the same solution."""
    solution = solve(problem)
    assert solve(problem) == solution
    items = tuple(
        FlowItem(item.replication, chosen)
        for item, chosen in zip(problem.items, solution, strict=True)
    )
    assert solve(Problem(problem.members, items)) == solution


@settings(max_examples=100, deadline=None)
@given(problems(members_max=6, items_max=12), st.integers(1, 5))
def test_several_networks_share_the_limits(problem: Problem, items_per_network: int) -> None:
    solution = solve(problem, items_per_network)
    assert is_feasible(problem, solution)
    # Case: where every item wants one, and there is room for all, all are served.
    singles = tuple(FlowItem(1, item.current) for item in problem.items)
    capacity = sum(member.limit for member in problem.members)
    served = solve(Problem(problem.members, singles), items_per_network)
    assert sum(map(len, served)) == min(len(singles), capacity)


def test_several_networks_are_as_fair_as_one() -> None:
    problem = problem_of("A90 B90 C90 D30", [(2, ())] * 100)
    one, many = solve(problem), solve(problem, 7)
    assert load(problem, one) == [60, 60, 60, 20]
    assert load(problem, many) == [60, 60, 60, 20]
    assert all(len({problem.members[m].zone for m in chosen}) == 2 for chosen in many)


@pytest.mark.parametrize("members", ["A9 A9 A9", "A9 B9 C9", "A9 A9 A9 A9 A9 A9 A9"])
def test_equal_members_get_equal_shares(members: str) -> None:
    problem = problem_of(members, [(1, ())] * 10)
    loads = load(problem, solve(problem))
    assert max(loads) - min(loads) <= 1
    assert sum(loads) == 10


def test_shares_are_in_proportion_to_limits() -> None:
    problem = problem_of("A10 A20 A30", [(1, ())] * 30)
    assert load(problem, solve(problem)) == [5, 10, 15]


def test_a_new_member_gets_its_share_and_nothing_else_moves() -> None:
    problem = problem_of("A99 B99 C99", [(2, ())] * 60)
    items = tuple(FlowItem(2, chosen) for chosen in solve(problem))
    larger = problem_of("A99 B99 C99 C99", [])
    larger = Problem(larger.members, items)
    solution = solve(larger)
    assert load(larger, solution) == [30, 30, 30, 30]
    moves = sum(len(set(s) - set(i.current)) for s, i in zip(solution, items, strict=True))
    assert moves == 30


def test_small_changes_move_little_where_balance_is_out_of_reach() -> None:
    """Every item needs a replica in zone A, with its only member; zone B has slack within bands."""
    problem = problem_of("A999 B999 B999 B999", [(2, ())] * 90)
    solution = solve(problem)
    loads = load(problem, solution)
    assert loads[0] == 90
    assert max(loads[1:]) - min(loads[1:]) <= 6  # an eighth of a share of 45
    items = (*(FlowItem(2, chosen) for chosen in solution), FlowItem(2))
    again = solve(Problem(problem.members, items))
    assert again[:-1] == solution


def test_who_goes_short_is_last_but_everybody_gets_one_first() -> None:
    # Case: five for six: everybody has one, then the first ones have all.
    problem = problem_of("A2 B2 C1", [(2, ())] * 3)
    assert [len(chosen) for chosen in solve(problem)] == [2, 2, 1]
    # Case: three for four items.
    problem = problem_of("A1 B1 C1", [(1, ())] * 4)
    assert [len(chosen) for chosen in solve(problem)] == [1, 1, 1, 0]
    # Case: the member that has it keeps it.
    problem = problem_of("A1 B1 C1", [(1, ()), (1, (2,)), (1, (0,)), (1, (1,))])
    assert solve(problem) == [(), (2,), (0,), (1,)]
    # Case: more replicas than members.
    assert solve(problem_of("A9 B9", [(5, ())])) == [(0, 1)]
    # Case: no member.
    assert solve(Problem((), (FlowItem(2),))) == [()]
    assert solve(problem_of("A1", [])) == []


@given(st.integers(1, 5_000), st.integers(0, 100_000), st.integers(1, 200_000))
def test_bounds_of_a_share_ascend_to_the_limit(limit: int, demand: int, others: int) -> None:
    capacity = limit + others
    bounds = share_bounds(limit, min(demand, capacity), capacity)
    assert bounds == sorted(bounds)
    assert bounds[-1] == limit
    share = limit * min(demand, capacity) / capacity
    # Below the share by one at most, nothing is as dear as above it.
    assert bounds[7] >= int(share)
    assert bounds[8] <= share + 1


def test_each_level_outweighs_what_is_below_it() -> None:
    for members, replication, ranks in ((1, 1, 0), (3, 3, 0), (100, 5, 10_000), (2_000, 3, 1_500)):
        w = Weights.of(members, replication, ranks)
        assert 0 < w.spread < w.move < w.fairness < w.zone < w.unserved < w.short
        # What the solver computes with: costs times nodes, in 64 bits.
        assert (w.short + w.unserved) * (4 * max(ranks, 1) + members) < 2**62


def test_a_child_process_finds_the_same() -> None:
    problem = problem_of("A9 A9 B9 C9", [(3, (0, 1, 2)), (2, ()), (1, (3,))])
    assert solve_in_child(problem, timeout_s=30.0) == solve(problem)


def test_a_child_process_that_takes_too_long_is_given_up() -> None:
    with raises(Unavailable, "choices", timeout_s=0.001):
        solve_in_child(problem_of("A1", [(1, ())]), timeout_s=1e-3)


@pytest.mark.parametrize("per_network", [100, 10_000])
def test_a_member_that_leaves_keeps_its_room_for_items_that_need_it(per_network: int) -> None:
    """Its last slots are not taken by items of an earlier network which could go elsewhere."""
    members = (FlowMember(0, 100), FlowMember(1, 100), FlowMember(0, 20, leaves=True))
    single = [FlowItem(1, (2,)) for _ in range(20)] + [FlowItem(1) for _ in range(80)]
    needing = [FlowItem(3, (0, 1, 2), (2,)) for _ in range(20)]
    solution = solve(Problem(members, tuple(single + needing)), per_network)
    assert all(2 not in chosen for chosen in solution[:100])
    assert solution[100:] == [(0, 1, 2)] * 20
