from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.cluster.allocator.state import LocalItem, State
from gazette.cluster.etcd.values import KeyValue, ResponseHeader, WatchEvent, WatchResponse
from gazette.cluster.keyspace.key_space import KeySpace
from tests.allocator.conftest import PaperCluster


def limits(state: Any) -> dict[str, int]:
    return {"#".join(member): limit for member, limit in state.demand.limits.items()}


@pytest.fixture
def cluster(paper: Any) -> Any:
    return paper(
        [
            ("members/b#2", "30"),
            ("members/a#1", "10"),
            ("members/a#3", "0"),
            ("items/x", "2"),
            ("items/x/y", "1"),
            ("items/z", "0"),
            ("assign/x#a#1#1", "consistent"),
            ("assign/x#b#2#0", "consistent"),
            ("assign/x/y#b#2#0", ""),
            ("assign/gone#b#2#0", ""),
        ]
    )


def test_slots_and_zones_are_counted(cluster: Any) -> None:
    demand = cluster.state().demand
    assert demand.item_slots == 3
    assert demand.member_slots == 40
    # Members without capacity do not make a zone.
    assert demand.zone_slots == {"a": 10, "b": 30}
    assert demand.replication == {"x": 2, "x/y": 1, "z": 0}


def test_local_items_have_all_assignments_of_the_item(cluster: Any) -> None:
    # Case: the member holds one of two.
    (local,) = cluster.state("a#1").local_items
    assert local.item.decoded.id == "x"
    assert [kv.key for kv in local.assignments] == [
        "/root/assign/x#a#1#1",
        "/root/assign/x#b#2#0",
    ]
    assert (local.index, local.assignment.decoded.slot) == (0, 1)

    # Case: an item whose name begins another's, and an assignment whose item is gone.
    state = cluster.state("b#2")
    assert [(i.item.decoded.id, i.index, len(i.assignments)) for i in state.local_items] == [
        ("x", 1, 2),
        ("x/y", 0, 1),
    ]
    assert state.local_count == 3

    # Case: nothing is ours.
    assert cluster.state("a#3").local_items == []


def test_lookups(cluster: Any) -> None:
    state = cluster.state()
    assert state.item("x").decoded.id == "x"
    assert state.item("x/") is None
    assert state.member("b", "2").decoded.value.limit == 30
    assert state.member("b", "1") is None
    assert [kv.key for kv in state.assignments_of("x")] == [
        "/root/assign/x#a#1#1",
        "/root/assign/x#b#2#0",
    ]
    assert list(state.assignments_of("z")) == []


def test_the_oldest_member_leads(cluster: Any) -> None:
    assert cluster.state("b#2").is_leader()
    assert not cluster.state("a#1").is_leader()

    # Case: an update of its value does not make a member younger.
    cluster.put("members/b#2", "30 exiting")
    assert cluster.state("b#2").is_leader()

    # Case: it leaves, and returns as the youngest.
    cluster.lose("b#2")
    cluster.put("members/b#2", "30")
    assert cluster.state("a#1").is_leader()
    assert not cluster.state("b#2").is_leader()

    # Case: no member, and no leader.
    empty = type(cluster)()
    assert empty.state("a#1").leader is None
    assert not empty.state("a#1").is_leader()


def test_a_member_may_exit_when_it_is_exiting_and_holds_nothing(cluster: Any) -> None:
    assert not cluster.state("a#1").should_exit()
    cluster.put("members/a#1", "10 exiting")
    assert not cluster.state("a#1").should_exit()
    cluster.delete("assign/x#a#1#1")
    assert cluster.state("a#1").should_exit()
    cluster.put("members/a#1", "10")
    assert not cluster.state("a#1").should_exit()

    # Case: an assignment counts even if its item is gone.
    cluster.put("members/b#2", "30 exiting")
    cluster.delete("assign/x#b#2#0")
    cluster.delete("assign/x/y#b#2#0")
    assert not cluster.state("b#2").should_exit()
    cluster.delete("assign/gone#b#2#0")
    assert cluster.state("b#2").should_exit()

    # Case: a member without a key cannot tell.
    cluster.lose("b#2")
    assert not cluster.state("b#2").should_exit()


def test_the_network_hash_is_of_demand_only(cluster: Any) -> None:
    before = cluster.state().network_hash

    # Case: assignments, consistency and the leader do not count.
    cluster.mark_consistent()
    cluster.delete("assign/x#a#1#1")
    assert cluster.state("a#1").network_hash == before

    # Case: items, members, their numbers, and shedding do.
    changes: tuple[Callable[[], Any], ...] = (
        lambda: cluster.put("items/x", 3),
        lambda: cluster.put("items/new", 1),
        lambda: cluster.put("items/new", 0),
        lambda: cluster.delete("items/new"),
        lambda: cluster.put("members/a#1", 11),
        lambda: cluster.put("items/x", 2),
        lambda: cluster.put("members/a#3", 30),
        lambda: cluster.put("members/a#3", "30 exiting"),
        lambda: cluster.lose("a#3"),
    )
    for change in changes:
        change()
        after = cluster.state().network_hash
        assert after != before
        before = after


def exiting(paper: Any, items: dict[str, str], *members: str) -> Any:
    """Return the state of ``items``, each with its replication and the members that hold it."""
    cluster = paper((f"members/{m.split()[0]}", m.split(maxsplit=1)[1]) for m in members)
    for item, text in items.items():
        wanted, *holders = text.split()
        cluster.put(f"items/{item}", wanted)
        for slot, holder in enumerate(holders):
            cluster.put(f"assign/{item}#z#{holder}#{slot}", "consistent")
    return cluster.state()


def test_shedding_all_at_once(paper: Any) -> None:
    """What the others can absorb need not be offered any more."""
    state = exiting(paper, {"x": "1 a", "y": "1 c"}, "z#a 5 exiting", "z#b 5", "z#c 5 exiting")
    assert limits(state) == {"z#a": 0, "z#b": 5, "z#c": 0}
    assert state.demand.member_slots == 5


def test_shedding_is_bounded_by_replication(paper: Any) -> None:
    """R distinct members must be left: the oldest of the exiting ones go first."""
    members = ("z#c 5 exiting", "z#a 5 exiting", "z#b 5", "z#d 5")
    state = exiting(paper, {"x": "3 c a b", "y": "1 a"}, *members)
    assert limits(state) == {"z#a": 1, "z#b": 5, "z#c": 0, "z#d": 5}
    assert state.demand.needed == {("z", "c"): frozenset(), ("z", "a"): frozenset({"x"})}
    # Case: the younger one does not hold the item, and gets nothing, so the older one stays.
    state = exiting(paper, {"x": "3 c b d", "y": "1 a"}, *members)
    assert limits(state) == {"z#a": 0, "z#b": 5, "z#c": 1, "z#d": 5}
    # Case: no member can leave while R members are needed, but they offer no more than that.
    for wanted in (4, 5):
        items = {"x": f"{wanted} a b c d", "y": "1 a", "z": f"{wanted} a b c d"}
        state = exiting(paper, items, *members)
        assert limits(state) == {"z#a": 2, "z#b": 5, "z#c": 2, "z#d": 5}
    # Case: members without capacity do not count as left.
    gone = ("z#a 0 exiting", "z#b 5", "z#c 5", "z#d 5 exiting")
    state = exiting(paper, {"x": "3 b c d", "y": "1 d"}, *gone)
    assert limits(state) == {"z#a": 0, "z#b": 5, "z#c": 5, "z#d": 1}


def test_new_items_do_not_keep_a_member_that_leaves(paper: Any) -> None:
    """They go to the others, although those are too few, or full."""
    items = {"x": "1 a", **{f"new{n}": "3" for n in range(9)}}
    state = exiting(paper, items, "z#a 50 exiting", "z#b 50", "z#c 50")
    assert limits(state) == {"z#a": 0, "z#b": 50, "z#c": 50}
    items = {"x": "1 a", "y": "1 a", **{f"new{n}": "1" for n in range(9)}}
    state = exiting(paper, items, "z#a 50 exiting", "z#b 5")
    assert limits(state) == {"z#a": 2, "z#b": 5}
    assert state.demand.crowded == {("z", "a"): 2}


def test_shedding_is_bounded_by_excess_capacity(paper: Any) -> None:
    """A member may have to keep a part of what it has."""
    items = {f"i{n}": f"1 {'abc'[n % 3]}" for n in range(7)}
    state = exiting(paper, items, "z#a 5 exiting", "z#b 5", "z#c 5 exiting")
    assert limits(state) == {"z#a": 0, "z#b": 5, "z#c": 2}
    assert state.demand.crowded == {("z", "c"): 2}
    # Case: one of those that stay could hold more replicas than there are items.
    items = {f"i{n}": "2 a b" for n in range(9)}
    state = exiting(paper, items, "z#a 20 exiting", "z#b 90", "z#c 1")
    assert limits(state) == {"z#a": 8, "z#b": 90, "z#c": 1}
    assert state.demand.crowded == {("z", "a"): 8}


def test_nothing_is_shed_while_overloaded(paper: Any) -> None:
    items = {f"i{n}": f"1 {'abc'[n % 3]}" for n in range(16)}
    state = exiting(paper, items, "z#a 5 exiting", "z#b 5", "z#c 5 exiting")
    assert limits(state) == {"z#a": 5, "z#b": 5, "z#c": 5}
    assert state.demand.crowded == {("z", "a"): 5, ("z", "c"): 5}


def test_nothing_is_shed_by_members_that_stay(paper: Any) -> None:
    state = exiting(paper, {"x": "1 a"}, "z#a 5", "z#b 5")
    assert limits(state) == {"z#a": 5, "z#b": 5}


def test_a_member_is_relieved_once_the_others_can_do_without_it(paper: Any) -> None:
    cluster = paper(
        [("members/z#a", "5 exiting"), ("items/x", "1"), ("assign/x#z#a#0", "consistent")]
    )
    assert not cluster.is_relieved("z#a")
    cluster.put("members/z#b", 5)
    assert cluster.is_relieved("z#a")
    assert not cluster.is_relieved("z#b")
    assert not cluster.is_relieved("z#gone")


def test_loads_know_ratios_and_members_that_are_gone(cluster: Any) -> None:
    cluster.put("assign/x#c#9#2", "")
    loads = cluster.state().loads()
    assert loads.total(("b", "2")) == 3
    assert loads.primaries(("b", "2")) == 3
    assert loads.total_ratio(("b", "2")) == pytest.approx(0.1)
    assert loads.primary_ratio(("a", "1")) == 0
    assert loads.total_ratio(("c", "9")) == float("inf")
    assert not loads.has_room(("c", "9"))
    assert not loads.has_room(("a", "3"))
    assert loads.has_room(("a", "1"))


KEYS = [
    "members/a#1",
    *(f"items/{item}" for item in ("x", "x/y", "z")),
    *(
        f"assign/{item}#{member}#{slot}"
        for item in ("x", "x/y", "z", "gone")
        for member in ("a#1", "b#2")
        for slot in (0, 1)
    ),
]


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), min_size=1, max_size=9)))
def test_a_state_that_follows_equals_a_new_one(steps: list[list[tuple[str, bool]]]) -> None:
    """Assignments without an item, two of one member, and items without assignments too."""
    ks = KeySpace(PaperCluster.root, PaperCluster.decoder)
    key = f"{ks.root}/members/a#1"
    state = State(ks, key, PaperCluster.is_consistent)
    ks.observers.append(state.observe)
    present: dict[str, KeyValue] = {}
    for revision, step in enumerate(steps, 1):
        events = []
        former = state.assigned, dict(state.assigned), {id(one) for one in state.local_items}
        for name in dict.fromkeys(name for name, _ in step):
            full = f"{ks.root}/{name}".encode()
            is_put = dict(step)[name]
            before = present.pop(name, None)
            if is_put:
                created, version = (
                    (before.create_revision, before.version + 1) if before else (revision, 1)
                )
                value = b"consistent" if name.startswith("assign") else b"1"
                kv = present[name] = KeyValue(full, value, created, revision, version)
                events.append(WatchEvent(kv))
            elif before is not None:
                events.append(WatchEvent(KeyValue(full, b"", 0, revision, 0), deleted=True))
        ks.apply([WatchResponse(ResponseHeader(1, 2, revision, 3), tuple(events))])
        other = State(ks, key, PaperCluster.is_consistent)
        assert facts(state) == facts(other)
        # What others hold does not change, and an item that has not changed is the same object.
        assert former[0] == former[1]
        touched = {name.split("/", 1)[1].split("#")[0] for name, _ in step}
        assert all(
            id(local) in former[2] or local.item.decoded.id in touched
            for local in state.local_items
        )


def facts(state: State) -> tuple[Any, ...]:
    locals_: list[LocalItem] = state.local_items
    ids = ("x", "x/y", "z", "gone")
    return (
        list(state.items),
        list(state.members),
        list(state.assignments),
        locals_,
        state.local_count,
        state.local_member,
        state.assigned,
        [state.item(item_id) for item_id in ids],
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=6),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5),
)
def test_replication_while_members_leave_is_the_greatest_that_fits(
    members: list[tuple[int, bool]], items: list[tuple[int, int]]
) -> None:
    keys = [
        *(
            (f"members/a#{n}", f"{limit} exiting" if leaves else str(limit))
            for n, (limit, leaves) in enumerate(members)
        ),
        *((f"items/{n}", f"{wanted} least {least}") for n, (wanted, least) in enumerate(items)),
    ]
    staying = [limit for limit, leaves in members if limit and not leaves]

    def at_most(cap: int) -> list[int]:
        return [min(wanted, max(least, cap)) for wanted, least in items]

    caps = range(len(staying), 0, -1)
    fitting = next((cap for cap in caps if sum(at_most(cap)) <= sum(staying)), 1)
    is_anyone_leaving = any(leaves for _, leaves in members)
    expected = at_most(fitting) if is_anyone_leaving else [wanted for wanted, _ in items]
    assert list(PaperCluster(keys).state().demand.replication.values()) == expected
