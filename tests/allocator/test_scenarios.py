"""The allocator as a whole, on paper: etcd's keys before, and where they come to rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

C = "consistent"


def primaries(cluster: Any) -> Counter[str]:
    slots = (key.split("#") for key in cluster.assigned())
    return Counter(f"{zone}#{member}" for _, zone, member, slot in slots if slot == "0")


def check_slots(cluster: Any) -> None:
    """Check that each item's slots are 0, 1, 2 … without a gap."""
    slots: dict[str, list[int]] = {}
    for key in cluster.assigned():
        item, _, _, slot = key.split("#")
        slots.setdefault(item, []).append(int(slot))
    assert all(sorted(s) == list(range(len(s))) for s in slots.values())


def cluster_of(
    paper: Any, members: Mapping[str, int], items: Mapping[str, int | str], *assigned: str
) -> Any:
    return paper(
        [
            *((f"members/{member}", str(limit)) for member, limit in members.items()),
            *((f"items/{item}", str(replication)) for item, replication in items.items()),
            *((f"assign/{key}", C) for key in assigned),
        ]
    )


def many(count: int, replication: int) -> dict[str, int]:
    return {f"item-{n:03}": replication for n in range(count)}


def test_initial_allocation(paper: Any) -> None:
    cluster = cluster_of(
        paper, {"a#1": 2, "a#2": 1, "b#1": 3}, {"item-1": 2, "item-2": 2, "item-3": 2}
    )
    # Case: all is added in one round, and nothing is taken back later.
    assert cluster.round(consistent=False)
    assert not cluster.round()
    # With every slot needed and two zones for each, b#1 has all of the items.
    assert cluster.loads() == {"a#1": 2, "a#2": 1, "b#1": 3}
    assert set(cluster.zones().values()) == {2}
    assert primaries(cluster) == {"a#1": 1, "a#2": 1, "b#1": 1}
    check_slots(cluster)
    assert cluster.counts == {"added": 6, "removed": 0, "packed": 0, "promoted": 0}


def test_tight_limits_are_filled_without_giving_up_zones(paper: Any) -> None:
    """A greedy choice of members paints itself into a corner here."""
    members = {"a#1": 10, "b#1": 5, "b#2": 5, "c#1": 3, "c#2": 7}
    cluster = cluster_of(paper, members, many(10, 3)).settle()
    assert cluster.loads() == members
    assert all(zones >= 2 for zones in cluster.zones().values())


def test_a_member_is_replaced_when_the_others_are_consistent(paper: Any) -> None:
    cluster = cluster_of(
        paper,
        {"a#1": 0, "a#2": 9, "b#1": 9},
        {"item-1": 2},
        "item-1#a#1#0",
        "item-1#b#1#1",
    )
    # Case: the replacement comes first.
    cluster.round(consistent=False)
    assert cluster.assigned() == ["item-1#a#1#0", "item-1#a#2#2", "item-1#b#1#1"]
    # Case: nothing is removed until it is consistent.
    assert not cluster.round(consistent=False)
    # Case: then the primary goes, and a consistent replica is promoted in the same step.
    cluster.mark_consistent()
    cluster.round(consistent=False)
    assert cluster.assigned() == ["item-1#a#2#2", "item-1#b#1#0"]
    # Case: last, the gap in the slots is closed.
    cluster.round(consistent=False)
    assert cluster.assigned() == ["item-1#a#2#1", "item-1#b#1#0"]
    assert not cluster.round()


def test_a_member_is_not_replaced_while_the_item_is_not_consistent(paper: Any) -> None:
    cluster = cluster_of(paper, {"a#1": 0, "a#2": 9, "b#1": 9}, {"item-1": 2})
    cluster.put("assign/item-1#a#1#0", C)
    cluster.put("assign/item-1#b#1#1", "")
    cluster.settle(consistent=False)
    assert cluster.assigned() == ["item-1#a#1#0", "item-1#a#2#2", "item-1#b#1#1"]
    # Case: two are consistent, but one of them is the one to be removed.
    cluster.mark_consistent(lambda key: key.startswith("assign/item-1#a#2"))
    assert not cluster.round(consistent=False)
    cluster.mark_consistent()
    cluster.settle()
    assert cluster.assigned() == ["item-1#a#2#1", "item-1#b#1#0"]


def test_an_item_limit_is_lowered_and_raised(paper: Any) -> None:
    cluster = cluster_of(paper, {"a#1": 4, "a#2": 4, "b#1": 4, "b#2": 4}, many(4, 2)).settle()
    assert set(cluster.loads().values()) == {2}

    cluster.put("members/a#1", 1)
    cluster.settle()
    assert cluster.loads() == {"a#1": 1, "a#2": 3, "b#1": 2, "b#2": 2}
    check_slots(cluster)

    cluster.put("members/a#1", 4)
    cluster.reset_counts()
    cluster.settle()
    assert set(cluster.loads().values()) == {2}
    assert cluster.counts["added"] == cluster.counts["removed"] == 1


def test_replication_is_changed(paper: Any) -> None:
    cluster = cluster_of(paper, {"a#1": 9, "b#1": 9, "c#1": 9}, {"item-1": 2, "item-2": 1}).settle()
    before = cluster.placed()

    # Case: more.
    cluster.put("items/item-1", 3)
    cluster.settle()
    assert len(cluster.placed()["item-1"]) == 3
    assert cluster.placed()["item-2"] == before["item-2"]

    # Case: fewer; no member is added on the way.
    cluster.reset_counts()
    cluster.put("items/item-1", 1)
    cluster.settle()
    assert len(cluster.placed()["item-1"]) == 1
    assert cluster.counts["added"] == 0
    check_slots(cluster)

    # Case: none, whether consistent or not.
    cluster.put("items/item-1", 0)
    cluster.settle(consistent=False)
    assert "item-1" not in cluster.placed()

    # Case: and back.
    cluster.put("items/item-1", 2)
    cluster.settle()
    assert len(cluster.placed()["item-1"]) == 2


def test_scale_up_from_too_few_slots(paper: Any) -> None:
    cluster = cluster_of(paper, {"a#1": 2, "b#1": 2}, many(3, 2)).settle()
    # Case: four slots for six: every item has one, and the first one has both.
    assert cluster.loads() == {"a#1": 2, "b#1": 2}
    assert [len(cluster.placed()[item]) for item in many(3, 2)] == [2, 1, 1]

    cluster.put("members/b#2", 2)
    cluster.settle()
    assert cluster.loads() == {"a#1": 2, "b#1": 2, "b#2": 2}
    assert all(len(members) == 2 for members in cluster.placed().values())

    # Case: with room to spare, shares become equal.
    cluster.put("members/a#2", 2)
    cluster.settle()
    assert sorted(cluster.loads().values()) == [1, 1, 2, 2]
    assert set(cluster.zones().values()) == {2}


def test_scale_down_to_too_few_slots(paper: Any) -> None:
    cluster = cluster_of(paper, {"a#1": 2, "b#1": 2, "b#2": 2}, many(3, 2)).settle()
    assert cluster.loads() == {"a#1": 2, "b#1": 2, "b#2": 2}

    # Case: a limit is lowered below what is held: no replica is given up for that.
    cluster.put("members/a#1", 1)
    cluster.settle()
    assert sum(cluster.loads().values()) == 6

    # Case: a member is lost, and what it held cannot be placed.
    cluster.lose("b#2")
    cluster.settle()
    loads = cluster.loads()
    assert (loads["a#1"], loads["b#1"]) == (2, 2)
    assert all(cluster.placed().get(item) for item in many(3, 2))
    check_slots(cluster)


def test_from_one_zone_to_two_to_three_and_back(paper: Any) -> None:
    cluster = cluster_of(paper, {"a#1": 99, "a#2": 99, "a#3": 99}, many(12, 2)).settle()
    assert set(cluster.zones().values()) == {1}
    assert set(cluster.loads().values()) == {8}

    # Case: with a second zone, every item uses it, whatever the balance.
    cluster.put("members/b#1", 99)
    cluster.settle()
    assert set(cluster.zones().values()) == {2}
    assert cluster.loads()["b#1"] == 12

    # Case: a third one restores the balance as far as two zones for each allow.
    cluster.put("members/c#1", 99)
    cluster.settle()
    assert set(cluster.zones().values()) == {2}
    assert cluster.loads() == {"a#1": 4, "a#2": 4, "a#3": 4, "b#1": 6, "c#1": 6}

    # Case: back to two zones; the item's other replica never leaves.
    cluster.reset_counts()
    cluster.lose("c#1")
    cluster.settle()
    assert set(cluster.zones().values()) == {2}
    assert cluster.loads()["b#1"] == 12

    # Case: back to one.
    cluster.lose("b#1")
    cluster.settle()
    assert set(cluster.zones().values()) == {1}
    assert set(cluster.loads().values()) == {8}
    check_slots(cluster)


def test_three_replicas_over_three_zones_are_spread_evenly(paper: Any) -> None:
    members = {f"{zone}#{n}": 99 for zone in "abc" for n in (1, 2)}
    cluster = cluster_of(paper, members, many(20, 3)).settle()
    assert set(cluster.zones().values()) == {3}
    assert set(cluster.loads().values()) == {10}


def test_unequal_zones_are_rotated_through(paper: Any) -> None:
    """One zone has most of the members: every item uses the small one; in the large one, no member
    differs from another by more than a band of the share (which is 10 here)."""
    members = {"a#1": 99, **{f"b#{n}": 99 for n in range(5)}}
    cluster = cluster_of(paper, members, many(30, 2)).settle()
    loads = cluster.loads()
    assert loads.pop("a#1") == 30
    assert sum(loads.values()) == 30
    assert max(loads.values()) - min(loads.values()) <= 2


def test_recovery_from_lost_leases(paper: Any) -> None:
    members = {f"{zone}#{n}": 20 for zone in "ab" for n in (1, 2)}
    cluster = cluster_of(paper, members, many(10, 3)).settle()
    before = cluster.placed()
    assert sum(cluster.loads().values()) == 30

    # Case: one member: its items are added elsewhere, and nothing else moves.
    cluster.reset_counts()
    lost = cluster.loads()["a#1"]
    cluster.lose("a#1")
    cluster.settle()
    assert sum(cluster.loads().values()) == 30
    assert cluster.counts["added"] == lost
    assert cluster.counts["removed"] == 0
    assert all(before[i] - {"a#1"} <= cluster.placed()[i] for i in before)

    # Case: a whole zone: what is left serves all it can, now in one zone.
    cluster.lose("a#2")
    cluster.settle()
    assert cluster.loads() == {"b#1": 10, "b#2": 10}
    assert all(len(members) == 2 for members in cluster.placed().values())
    check_slots(cluster)

    # Case: the zone is back.
    cluster.put("members/a#1", 20)
    cluster.put("members/a#2", 20)
    cluster.settle()
    assert set(cluster.zones().values()) == {2}
    assert sum(cluster.loads().values()) == 30
    assert max(cluster.loads().values()) - min(cluster.loads().values()) <= 1


def test_a_single_zone_is_rebalanced(paper: Any) -> None:
    cluster = cluster_of(
        paper,
        {"a#1": 99, "a#2": 99, "a#3": 99},
        many(9, 1),
        *(f"item-{n:03}#a#1#0" for n in range(9)),
    )
    cluster.settle()
    assert cluster.loads() == {"a#1": 3, "a#2": 3, "a#3": 3}
    assert (cluster.counts["added"], cluster.counts["removed"]) == (6, 6)
    assert primaries(cluster) == {"a#1": 3, "a#2": 3, "a#3": 3}


def test_exiting_members_are_drained_one_by_one(paper: Any) -> None:
    members = {f"{zone}#{n}": 30 for zone in "ab" for n in (1, 2)}
    cluster = cluster_of(paper, members, many(10, 2)).settle()
    for leaving in ("b#1", "a#2"):
        cluster.put(f"members/{leaving}", "30 exiting")
        cluster.reset_counts()
        held = cluster.loads()[leaving]
        cluster.settle()
        assert cluster.loads()[leaving] == 0
        assert cluster.state(leaving).should_exit()
        assert cluster.counts["added"] == cluster.counts["removed"] == held
        cluster.lose(leaving)
        assert set(cluster.zones().values()) == {2}

    # Case: the last two cannot leave while items want two members each …
    cluster.put("members/a#1", "30 exiting")
    cluster.put("members/b#2", "30 exiting")
    cluster.reset_counts()
    cluster.settle()
    assert cluster.counts["added"] == cluster.counts["removed"] == 0
    assert not cluster.is_relieved("a#1")

    # Case: … until another one joins: then the older one can.
    cluster.put("members/c#1", 30)
    cluster.settle()
    assert cluster.loads() == {"a#1": 0, "b#2": 10, "c#1": 10}

    # Case: without items, everybody can.
    for item in many(10, 2):
        cluster.delete(f"items/{item}")
    cluster.settle()
    assert cluster.assigned() == []
    assert cluster.state("b#2").should_exit()


@pytest.mark.parametrize("per_network", [4, 10_000])
def test_items_that_need_everybody_do_not_keep_the_others(paper: Any, per_network: int) -> None:
    """Three members, and one of them leaves: it keeps what wants three replicas, and nothing else."""
    items = many(12, 2) | {"all-1": 3, "single": 1, "zz-all-2": 3}
    cluster = cluster_of(paper, {"a#1": 30, "b#1": 30, "b#2": 30}, items)
    cluster.items_per_network = per_network
    cluster.settle()
    cluster.put("members/b#1", "30 exiting")
    while cluster.round():
        for item, members in cluster.placed().items():
            assert len(members) >= items[item]
    placed = cluster.placed()
    kept = {item for item, members in placed.items() if "b#1" in members}
    assert kept == {"all-1", "zz-all-2"}
    assert not cluster.state("b#1").should_exit()

    # Case: a second one leaves. It waits with what wants two, the older one only with what wants three.
    cluster.put("members/b#2", "30 exiting")
    cluster.settle()
    assert cluster.loads() == {"a#1": 15, "b#1": 2, "b#2": 14}

    # Case: another one joins.
    cluster.put("members/c#1", 30)
    cluster.settle()
    assert cluster.state("b#1").should_exit()
    cluster.lose("b#1")
    cluster.put("members/c#2", 30)
    cluster.settle()
    assert cluster.state("b#2").should_exit()
    assert all(len(members) == items[item] for item, members in cluster.placed().items())


def test_a_member_that_leaves_gets_no_new_items(paper: Any) -> None:
    """Items are created all the time: those of any replication, with and without room elsewhere."""
    members = {"a#1": 30, "b#1": 30, "b#2": 30}
    cluster = cluster_of(paper, members, many(12, 2) | {"all": 3}).settle()
    held = {item for item, where in cluster.placed().items() if "a#1" in where}
    cluster.put("members/a#1", "30 exiting")
    for n in range(50):
        cluster.put(f"items/new-{n:02}", n % 4)
        cluster.round()
        assert {i for i, where in cluster.placed().items() if "a#1" in where} <= held
    # Only what no other member could hold is left, and it waits for another member.
    cluster.settle()
    assert {i for i, where in cluster.placed().items() if "a#1" in where} == {"all"}
    cluster.put("members/c#1", 90)
    cluster.settle()
    assert cluster.state("a#1").should_exit()
    assert cluster.placed()["new-03"] == {"b#1", "b#2", "c#1"}


def test_members_that_leave_together_hand_nothing_to_each_other(paper: Any) -> None:
    """A cluster is shut down: no member takes over what another one is about to lose, too."""
    cluster = cluster_of(paper, {"a#1": 30, "a#2": 30, "a#3": 30}, many(12, 2)).settle()
    for member in ("a#1", "a#2", "a#3"):
        cluster.put(f"members/{member}", "30 exiting")
    cluster.reset_counts()
    cluster.put("items/new", 1)
    cluster.settle()
    assert cluster.counts["added"] == cluster.counts["removed"] == 0


def test_exiting_members_are_drained_at_the_same_time(paper: Any) -> None:
    """A rolling replacement of all members, new ones first."""
    old = {f"{zone}#{n}": 30 for zone in "ab" for n in (1, 2)}
    cluster = cluster_of(paper, old, many(10, 2)).settle()
    for zone in "ab":
        for n in (3, 4):
            cluster.put(f"members/{zone}#{n}", 30)
    for member in old:
        cluster.put(f"members/{member}", "30 exiting")
    while cluster.round():
        assert all(len(members) >= 2 for members in cluster.placed().values())
    loads = cluster.loads()
    assert [loads.pop(member) for member in old] == [0, 0, 0, 0]
    assert set(loads.values()) == {5}
    assert set(cluster.zones().values()) == {2}
    check_slots(cluster)


def test_items_that_need_few_replicas_are_handed_over_without_a_replacement(paper: Any) -> None:
    """Two members, two replicas each: the one that leaves hands over what the other is ready for."""
    cluster = cluster_of(paper, {"a#1": 9, "a#2": 9}, {"x": "2 least 1", "y": "2 least 1"})
    cluster.settle(consistent=False)
    cluster.mark_consistent(lambda key: key.startswith("assign/x"))
    cluster.mark_consistent(lambda key: key.endswith("#0"))
    leaving, staying = ("a#1", "a#2") if "y#a#1#0" in cluster.assigned() else ("a#2", "a#1")
    cluster.put(f"members/{leaving}", "9 exiting")
    assert cluster.is_relieved(leaving)
    cluster.settle(consistent=False)
    # Case: what the other has ready is its own at once; no member lets go of the rest.
    assert set(cluster.assigned()) == {f"x#{staying}#0", f"y#{leaving}#0", f"y#{staying}#1"}
    cluster.mark_consistent()
    cluster.settle(consistent=False)
    assert cluster.assigned() == [f"x#{staying}#0", f"y#{staying}#0"]
    assert cluster.state(leaving).should_exit()

    # Case: with the next one, both have two replicas again, and the roles stay where they are.
    cluster.lose(leaving)
    cluster.put("members/a#3", 9)
    cluster.settle()
    assert cluster.placed() == {"x": {staying, "a#3"}, "y": {staying, "a#3"}}
    assert {f"x#{staying}#0", f"y#{staying}#0"} <= set(cluster.assigned())


def test_members_leave_with_fewer_replicas_if_the_others_have_no_room_for_all(paper: Any) -> None:
    items = {item: f"{n} least 1" for item, n in many(6, 2).items()}
    cluster = cluster_of(paper, {"a#1": 4, "a#2": 4, "a#3": 4}, items).settle()
    cluster.put("members/a#1", "4 exiting")
    cluster.settle()
    assert cluster.state("a#1").should_exit()
    assert all(members for members in cluster.placed().values())

    # Case: no member leaves, and as many as there is room for are there again.
    cluster.lose("a#1")
    cluster.settle()
    assert cluster.loads() == {"a#2": 4, "a#3": 4}


def test_an_overloaded_member_drains_as_far_as_the_others_have_room(paper: Any) -> None:
    cluster = cluster_of(paper, {"a#1": 10, "a#2": 6}, many(10, 1)).settle()
    cluster.put("members/a#1", "10 exiting")
    cluster.settle()
    assert cluster.loads() == {"a#1": 4, "a#2": 6}
    cluster.put("members/a#2", 12)
    cluster.settle()
    assert cluster.loads() == {"a#1": 0, "a#2": 10}


def test_the_leader_drains_itself_and_the_next_one_leads(paper: Any) -> None:
    cluster = cluster_of(paper, {"a#1": 9, "a#2": 9, "a#3": 9}, many(6, 2)).settle()
    cluster.put("members/a#1", "9 exiting")
    assert cluster.state("a#1").is_leader()
    cluster.settle()
    assert cluster.state("a#1").should_exit()
    assert cluster.state("a#1").is_leader()
    cluster.lose("a#1")
    assert cluster.state("a#2").is_leader()

    # Case: the new leader, which knows nothing of the old one's solution, moves nothing.
    cluster.solved, cluster.desired = None, {}
    cluster.reset_counts()
    assert not cluster.round()


def test_assignments_that_lack_their_item_or_member(paper: Any) -> None:
    cluster = cluster_of(
        paper,
        {"a#1": 9, "a#2": 9},
        {"item-2": 2, "item-4": 1},
        "item-1#a#1#0",
        "item-2#a#1#0",
        "item-2#z#gone#1",
        "item-3#z#gone#0",
        "item-4#z#gone#0",
    )
    cluster.settle()
    assert cluster.placed() == {"item-2": {"a#1", "a#2"}, "item-4": {"a#2"}}
    check_slots(cluster)


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_nothing_changes_when_nothing_changes(paper: Any, replication: int) -> None:
    members = {f"{zone}#{n}": 50 for zone in "abc" for n in (1, 2)}
    cluster = cluster_of(paper, members, many(25, replication)).settle()
    cluster.reset_counts()
    for _ in range(3):
        cluster.solved = None
        assert not cluster.round()


def test_a_cluster_survives_any_order_of_a_rolling_deployment(paper: Any) -> None:
    """Down first: each member leaves before its successor joins."""
    members = {f"{zone}#{n}": 40 for zone in "abc" for n in (1, 2)}
    cluster = cluster_of(paper, members, many(30, 3)).settle()
    for old, new in (("", "-2"), ("-2", "-3")):
        for zone in "abc":
            for n in (1, 2):
                leaving = f"{zone}#{n}{old}"
                cluster.put(f"members/{leaving}", "40 exiting")
                while cluster.round():
                    assert all(len(m) >= 3 for m in cluster.placed().values())
                assert cluster.state(leaving).should_exit()
                cluster.lose(leaving)
                cluster.put(f"members/{zone}#{n}{new}", 40)
                cluster.settle()
    assert set(cluster.loads().values()) == {15}
    assert set(cluster.zones().values()) == {3}
    check_slots(cluster)
