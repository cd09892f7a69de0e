"""The allocator's solver against a general solver of minimum-cost flows."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gazette.cluster.allocator.exchange import Exchange
from gazette.cluster.allocator.flow_network import FlowItem, FlowMember, share_bounds
from gazette.errors import Broken
from tests.allocator.general_solver import FlowNetwork
from tests.facts import raises

Network = tuple[tuple[FlowMember, ...], tuple[FlowItem, ...], list[list[int]]]


def network_of(members: Sequence[FlowMember], items: Sequence[FlowItem]) -> Network:
    capacity = sum(member.limit for member in members)
    demand = min(capacity, sum(min(item.replication, len(members)) for item in items))
    bounds = [share_bounds(member.limit, demand, capacity) for member in members]
    return tuple(members), tuple(items), bounds


@st.composite
def networks(draw: st.DrawFn) -> Network:
    zones = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    gapless = {zone: index for index, zone in enumerate(sorted(set(zones)))}
    limit = draw(st.integers(1, 12))
    members = [
        FlowMember(
            gapless[zone], draw(st.integers(1, limit)), draw(st.sampled_from([False, False, True]))
        )
        for zone in zones
    ]
    current = st.sets(st.sampled_from(range(len(members)))).map(sorted).map(tuple)
    replication = st.integers(1, draw(st.integers(1, 5)))
    items = draw(
        st.lists(st.builds(FlowItem, replication, current, current), min_size=1, max_size=30)
    )
    return network_of(members, items)


def crossing(zones: str, members: Sequence[tuple[int, int]], items: Sequence[FlowItem]) -> Network:
    """Make a network in which a negative cycle needs the same item twice.

    ``members`` are pairs of a limit, and the least replication of the items that may use the member.
    """
    kept = [
        tuple(m for m, (_, least) in enumerate(members) if item.replication >= least)
        for item in items
    ]
    return network_of(
        [
            FlowMember(int(z), limit, least > 0)
            for z, (limit, least) in zip(zones, members, strict=True)
        ],
        [FlowItem(i.replication, i.current, k) for i, k in zip(items, kept, strict=True)],
    )


@settings(max_examples=200, deadline=None)
@given(networks(), st.booleans(), st.booleans())
@example(
    crossing(
        "01200",
        [(2, 0), (3, 2), (2, 0), (1, 0), (4, 0)],
        [FlowItem(4, (1, 3, 4)), FlowItem(2, (0, 1, 2, 3, 4))],
    ),
    False,
    True,
)
@example(
    crossing(
        "01110",
        [(2, 2), (3, 2), (1, 3), (1, 0), (2, 0)],
        [FlowItem(3), FlowItem(2, (0, 1, 2, 3)), FlowItem(1, (0, 1, 2, 4))],
    ),
    False,
    True,
)
def test_solutions_cost_as_much_as_those_of_a_general_solver(
    network: Network, ranked: bool, present: bool
) -> None:
    """From the present assignment and from none, and if some go short."""
    members, items, bounds = network
    begin = [item.current if present else () for item in items]
    exchange = Exchange(members, items, bounds, begin, ranked=ranked)
    exchange.improve()
    oracle = FlowNetwork(members, items, bounds, ranked=ranked)
    assert oracle.cheapest(exchange.solution()) == oracle.cheapest()
    assert exchange.improve() == 0


def test_present_assignments_beyond_a_limit_are_left_out() -> None:
    members = [FlowMember(0, 2), FlowMember(0, 9, leaves=True)]
    items = [FlowItem(1, (0,)), FlowItem(1, (0, 1)), FlowItem(1, (0,)), FlowItem(2, (0, 1), (1,))]
    network = network_of(members, items)
    exchange = Exchange(*network, [item.current for item in items], ranked=False)
    assert exchange.solution() == [(0,), (0,), (), (1,)]
    assert exchange.missing == 2


def test_ten_thousand_items_take_few_cycles() -> None:
    """A step moves many items at once. So time does not grow with the number of items."""
    members = [FlowMember(index % 3, 3_000) for index in range(20)]
    exchange = Exchange(*network_of(members, [FlowItem(3)] * 10_000), [()] * 10_000, ranked=False)
    assert exchange.improve() < 1_000
    solution = exchange.solution()
    again = [FlowItem(3, chosen) for chosen in solution]
    assert Exchange(*network_of(members, again), solution, ranked=False).improve() == 0
    # A broker that joins takes its share of each other one, in one step for each price and broker.
    joined = network_of([*members, FlowMember(2, 3_000)], again)
    exchange = Exchange(*joined, solution, ranked=False)
    assert exchange.improve() < 500
    moved = sum(20 in chosen for chosen in exchange.solution())
    assert moved in (30_000 // 21, 30_000 // 21 + 1)


def test_members_do_not_share_all_their_items() -> None:
    """If one fails, several others take over."""
    members = [FlowMember(0, 100) for _ in range(10)]
    exchange = Exchange(*network_of(members, [FlowItem(2)] * 100), [()] * 100, ranked=False)
    exchange.improve()
    for member in range(10):
        partners = {other for chosen in exchange.solution() if member in chosen for other in chosen}
        assert len(partners) >= 4


def test_costs_beyond_64_bits_are_refused() -> None:
    members = [FlowMember(0, 1)] * 50_000
    bounds = [[1]] * 50_000
    with raises(Broken, members=50_000, items=1):
        Exchange(members, [FlowItem(50_000)], bounds, [()], ranked=False)
