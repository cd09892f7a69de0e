from __future__ import annotations

from typing import Any

import pytest

from gazette.cluster.allocator.converge import ItemStep, Round, converge
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.values import Compare, Op, Target

MEMBERS = [(f"members/{m}", "10") for m in ("a#1", "b#2", "c#3", "d#4")]
C = "consistent"


def step_of(cluster: Any, desired: str, state: State | None = None) -> ItemStep | None:
    """Return the step of the only item, ``x``, towards these members."""
    cluster.desired = {"x": tuple(tuple(m.split("#")) for m in desired.split())}
    cluster.solved = cluster.state().network_hash
    steps = cluster.steps(state)
    assert len(steps) <= 1
    return steps[0] if steps else None


def operations(step: ItemStep | None) -> list[str]:
    if step is None:
        return []
    return [
        f"{'put' if hasattr(op, 'value') else 'delete'} {op.key.decode().removeprefix('/root/assign/')}"
        for op in step.operations
    ]


def cluster_of(paper: Any, replication: int, *assigned: str) -> Any:
    """Build a cluster from texts such as ``a#1#0``, or ``a#1#0=`` with an inconsistent second assignment."""
    keys = [(f"assign/x#{a.rstrip('=')}", "" if a.endswith("=") else C) for a in assigned]
    return paper([*MEMBERS, ("items/x", str(replication)), *keys])


def nothing_newer(revision: int) -> Compare:
    """Return the condition of a step that ``x`` got no assignment after this revision."""
    return Compare(
        Target.CREATE_REVISION, b"/root/assign/x#", "<", revision + 1, b"/root/assign/x$"
    )


def test_nothing_to_do(paper: Any) -> None:
    assert step_of(cluster_of(paper, 1, "a#1#0"), "a#1") is None
    assert step_of(cluster_of(paper, 2, "a#1#1=", "b#2#0"), "b#2 a#1") is None
    assert step_of(cluster_of(paper, 0), "") is None


def test_fresh_assignments_are_empty_and_under_their_members_leases(paper: Any) -> None:
    cluster = cluster_of(paper, 2)
    step = step_of(cluster, "a#1 c#3")
    lease = {m: cluster.kvs[f"/root/members/{m}"].lease for m in ("a#1", "c#3")}
    revision = {m: cluster.kvs[f"/root/members/{m}"].mod_revision for m in ("a#1", "c#3")}
    assert step == ItemStep(
        "x",
        (
            Compare.mod_revision("/root/members/a#1", "=", revision["a#1"]),
            Compare.mod_revision("/root/members/c#3", "=", revision["c#3"]),
            nothing_newer(0),
        ),
        (
            Op.put("/root/assign/x#a#1#0", b"", lease=lease["a#1"]),
            Op.put("/root/assign/x#c#3#1", b"", lease=lease["c#3"]),
        ),
        added=2,
    )


def test_the_first_primary_goes_where_there_are_fewest(paper: Any) -> None:
    cluster = cluster_of(paper, 2)
    cluster.put("items/w", 1)
    cluster.put("assign/w#a#1#0", C)
    cluster.desired = {"x": (("a", "1"), ("b", "2"))}
    cluster.solved = cluster.state().network_hash
    (step,) = cluster.steps()
    assert operations(step) == ["put x#b#2#0", "put x#a#1#1"]


def test_new_slots_are_above_all_present_ones(paper: Any) -> None:
    assert operations(step_of(cluster_of(paper, 3, "a#1#0", "b#2#5"), "a#1 b#2 c#3")) == [
        "put x#c#3#6"
    ]
    # Case: also above those which are removed at the same time.
    cluster = cluster_of(paper, 1, "a#1#0", "b#2#7")
    assert operations(step_of(cluster, "a#1 c#3")) == ["delete x#b#2#7", "put x#c#3#8"]


def test_members_without_room_are_not_added(paper: Any) -> None:
    cluster = cluster_of(paper, 2)
    cluster.put("members/a#1", "0")
    assert operations(step_of(cluster, "a#1 b#2")) == ["put x#b#2#0"]

    # Case: room that one item takes is not there for the next.
    cluster = paper([("members/a#1", "1"), ("items/x", "1"), ("items/y", "1")])
    cluster.desired = {"x": (("a", "1"),), "y": (("a", "1"),)}
    cluster.solved = cluster.state().network_hash
    (step,) = cluster.steps()
    assert step.item_id == "x"

    # Case: a member that is gone.
    cluster = cluster_of(paper, 1)
    assert step_of(cluster, "z#9") is None


@pytest.mark.parametrize(
    ("replication", "assigned", "desired", "expect"),
    [
        # Case: enough consistent ones remain.
        (1, "a#1#0 b#2#1", "a#1", ["delete x#b#2#1"]),
        (2, "a#1#0 b#2#1 c#3#2", "a#1 b#2", ["delete x#c#3#2"]),
        # Case: the new one is not consistent yet.
        (1, "a#1#0 b#2#1=", "b#2", []),
        (2, "a#1#0 b#2#1 c#3#2=", "a#1 c#3", []),
        # Case: the unwanted one is not consistent: only the others count.
        (1, "a#1#0 b#2#1=", "a#1", ["delete x#b#2#1"]),
        (2, "a#1#0= b#2#1 c#3#2", "b#2 c#3", ["delete x#a#1#0", "delete x#b#2#1", "put x#b#2#0"]),
        # Case: too few consistent ones: nothing goes, not even what is inconsistent.
        (2, "a#1#0 b#2#1= c#3#2=", "a#1 b#2", []),
        (1, "a#1#0= b#2#1=", "a#1", []),
        # Case: one of two may go.
        (1, "a#1#0 b#2#1 c#3#2=", "c#3", ["delete x#a#1#0", "delete x#b#2#1", "put x#b#2#0"]),
        # Case: nothing is wanted: everything goes, consistent or not.
        (0, "a#1#0 b#2#1=", "", ["delete x#a#1#0", "delete x#b#2#1"]),
    ],
)
def test_removal_is_gated_by_consistency(
    paper: Any, replication: int, assigned: str, desired: str, expect: list[str]
) -> None:
    cluster = cluster_of(paper, replication, *assigned.split())
    assert operations(step_of(cluster, desired)) == expect


def test_the_most_loaded_member_is_relieved_first(paper: Any) -> None:
    cluster = cluster_of(paper, 1, "a#1#0", "b#2#1")
    cluster.put("members/b#2", "5")
    assert operations(step_of(cluster, "c#3")) == ["delete x#b#2#1", "put x#c#3#2"]
    # Case: a member whose key is gone is loaded above all.
    cluster = cluster_of(paper, 1, "a#1#0", "z#9#1")
    assert operations(step_of(cluster, "c#3")) == ["delete x#z#9#1", "put x#c#3#2"]


def test_a_removal_compares_all_that_it_relies_on(paper: Any) -> None:
    """Among others the replicas that remain: their leases may end at this moment."""
    cluster = cluster_of(paper, 1, "a#1#0", "b#2#1", "c#3#2=")
    step = step_of(cluster, "a#1 c#3")
    kvs = cluster.kvs
    assert step is not None
    assert step.operations == (Op.delete("/root/assign/x#b#2#1"),)
    assert set(step.compares) == {
        Compare.mod_revision(key, "=", kvs[key].mod_revision)
        for key in ("/root/items/x", "/root/assign/x#a#1#0", "/root/assign/x#b#2#1")
    }
    # Case: the remaining one went away since.
    stale = cluster.state()
    cluster.delete("assign/x#a#1#0")
    step = step_of(cluster, "a#1 c#3", stale)
    assert step is not None
    assert not cluster.txn(step.compares, step.operations)


@pytest.mark.parametrize(
    ("assigned", "desired", "expect"),
    [
        # Case: consistent beats everything.
        ("a#1#1= b#2#2", "a#1 b#2", "b#2"),
        ("a#1#1 b#2#2=", "b#2 c#3", "a#1"),
        # Case: of two consistent ones, the one that will stay.
        ("a#1#1 b#2#2", "b#2 c#3", "b#2"),
        # Case: then the one with fewer primaries (w has its primary at a#1).
        ("a#1#1 b#2#2", "a#1 b#2", "b#2"),
        # Case: then the lower slot.
        ("b#2#2 c#3#1", "b#2 c#3", "c#3"),
    ],
)
def test_who_is_promoted(paper: Any, assigned: str, desired: str, expect: str) -> None:
    cluster = cluster_of(paper, 2, *assigned.split())
    cluster.put("items/w", 1)
    cluster.put("assign/w#a#1#0", C)
    step = step_of(cluster, desired)
    assert step is not None
    assert f"put x#{expect}#0" in operations(step)
    assert step.promoted == 1


@pytest.mark.parametrize("survivor", ["a#1", "b#2", "c#3"])
def test_a_member_with_data_is_promoted_before_one_that_has_just_joined(
    paper: Any, survivor: str
) -> None:
    """Whatever its load: the survivor of three has another primary, and those that join have none."""
    joiners = [member for member in ("a#1", "b#2", "c#3") if member != survivor]
    cluster = cluster_of(paper, 3, f"{joiners[0]}#1=", f"{joiners[1]}#3=")
    cluster.put(f"assign/x#{survivor}#2", "earlier")
    cluster.put("items/w", 1)
    cluster.put(f"assign/w#{survivor}#0", C)
    step = step_of(cluster, "a#1 b#2 c#3")
    assert f"put x#{survivor}#0" in operations(step)
    # Case: of two survivors, the one that has been there for longer.
    cluster.put(f"assign/x#{joiners[0]}#1", "earlier")
    step = step_of(cluster, "a#1 b#2 c#3")
    assert f"put x#{joiners[0]}#0" in operations(step)


def test_a_promotion_carries_value_and_lease(paper: Any) -> None:
    cluster = cluster_of(paper, 2, "a#1#1", "b#2#2=")
    before = cluster.kvs["/root/assign/x#a#1#1"]
    step = step_of(cluster, "a#1 b#2")
    assert step == ItemStep(
        "x",
        (
            Compare.mod_revision("/root/assign/x#a#1#1", "=", before.mod_revision),
            nothing_newer(cluster.kvs["/root/assign/x#b#2#2"].create_revision),
        ),
        (
            Op.delete("/root/assign/x#a#1#1"),
            Op.put("/root/assign/x#a#1#0", b"consistent", lease=before.lease),
        ),
        promoted=1,
    )


def test_the_primary_is_removed_and_replaced_in_one_step(paper: Any) -> None:
    cluster = cluster_of(paper, 2, "a#1#0", "b#2#1", "c#3#2")
    step = step_of(cluster, "b#2 c#3")
    assert operations(step) == ["delete x#a#1#0", "delete x#b#2#1", "put x#b#2#0"]
    assert step is not None
    # No assignment is compared twice, though one is relied upon and moved. And nothing newer may be there.
    assert len(step.compares) == len(set(step.compares)) == 5


def test_packing_closes_one_gap_at_a_time(paper: Any) -> None:
    cluster = cluster_of(paper, 3, "a#1#0", "b#2#5", "c#3#3")
    desired = "a#1 b#2 c#3"
    step = step_of(cluster, desired)
    assert operations(step) == ["delete x#c#3#3", "put x#c#3#1"]
    assert step is not None
    assert step.packed == 1
    assert cluster.txn(step.compares, step.operations)
    step = step_of(cluster, desired)
    assert operations(step) == ["delete x#b#2#5", "put x#b#2#2"]
    assert step is not None
    assert cluster.txn(step.compares, step.operations)
    assert step_of(cluster, desired) is None


def test_packing_waits_for_adds_and_removes(paper: Any) -> None:
    assert operations(step_of(cluster_of(paper, 3, "a#1#0", "b#2#5"), "a#1 b#2 c#3")) == [
        "put x#c#3#6"
    ]
    assert operations(step_of(cluster_of(paper, 1, "a#1#0", "b#2#1", "c#3#5"), "a#1 c#3")) == [
        "delete x#b#2#1"
    ]
    # Case: adds and removes that cannot be done yet do not hold it up.
    cluster = cluster_of(paper, 2, "a#1#0=", "b#2#5=")
    cluster.put("members/c#3", "0")
    assert operations(step_of(cluster, "a#1 c#3")) == ["delete x#b#2#5", "put x#b#2#1"]


def test_two_members_in_one_slot_are_distinguished(paper: Any) -> None:
    cluster = cluster_of(paper, 2, "a#1#0", "b#2#0")
    assert operations(step_of(cluster, "a#1 b#2")) == ["delete x#b#2#0", "put x#b#2#1"]


def test_a_member_with_two_slots_gives_one_up(paper: Any) -> None:
    cluster = cluster_of(paper, 1, "a#1#0", "a#1#1")
    assert operations(step_of(cluster, "a#1")) == ["delete x#a#1#1"]
    # Case: as many assignments as members wanted, but not by as many members.
    cluster = cluster_of(paper, 2, "a#1#0", "a#1#1")
    assert operations(step_of(cluster, "a#1 b#2")) == ["delete x#a#1#1", "put x#b#2#2"]
    # Case: nothing is consistent, and nothing could become so before it is gone.
    cluster = cluster_of(paper, 2, "a#1#0=", "a#1#2=", "b#2#1=")
    step = step_of(cluster, "a#1 b#2")
    assert operations(step) == ["delete x#a#1#2"]
    assert step is not None
    # Its other slot must still be there.
    cluster.delete("assign/x#a#1#0")
    assert not cluster.txn(step.compares, step.operations)


def test_a_step_that_is_applied_late_makes_no_second_slot(paper: Any) -> None:
    cluster = cluster_of(paper, 3, "a#1#0", "c#3#1")
    late = step_of(cluster, "a#1 b#2 c#3")
    assert operations(late) == ["put x#b#2#2"]
    assert late is not None
    # Meanwhile another assignment went, and the same member was added in another slot.
    cluster.delete("assign/x#c#3#1")
    step = step_of(cluster, "a#1 b#2")
    assert operations(step) == ["put x#b#2#1"]
    assert step is not None
    assert cluster.txn(step.compares, step.operations)
    assert not cluster.txn(late.compares, late.operations)


def test_a_promotion_that_is_applied_late_makes_no_second_primary(paper: Any) -> None:
    cluster = cluster_of(paper, 2, "a#1#1", "b#2#2")
    late = step_of(cluster, "a#1 b#2")
    assert operations(late) == ["delete x#a#1#1", "put x#a#1#0"]
    assert late is not None
    # Meanwhile the other one was promoted, because another leader prefers it.
    kv = cluster.kvs["/root/assign/x#b#2#2"]
    assert cluster.txn(
        (), (Op.delete(kv.key), Op.put("/root/assign/x#b#2#0", kv.value, lease=kv.lease))
    )
    assert not cluster.txn(late.compares, late.operations)


def test_assignments_without_an_item_are_removed_if_it_stays_away(paper: Any) -> None:
    cluster = cluster_of(paper, 1, "a#1#0")
    for dead in ("u", "x/y", "z"):
        cluster.put(f"assign/{dead}#a#1#0", C)
        cluster.put(f"assign/{dead}#b#2#1")
    cluster.desired = {"x": (("a", "1"),)}
    cluster.solved = cluster.state().network_hash
    steps = cluster.steps()
    assert [(step.item_id, operations(step)) for step in steps] == [
        (dead, [f"delete {dead}#a#1#0", f"delete {dead}#b#2#1"]) for dead in ("u", "x/y", "z")
    ]
    assert steps[0].compares[0] == Compare.create_revision("/root/items/u", "=", 0)
    assert len(steps[0].compares) == 3

    # Case: the item is back.
    cluster.put("items/u", 1)
    assert not cluster.txn(steps[0].compares, steps[0].operations)
    assert cluster.txn(steps[1].compares, steps[1].operations)


def test_many_dead_assignments_fit_into_transactions(paper: Any) -> None:
    cluster = paper([(f"assign/x#z#{n:03}#{n}", "") for n in range(100)])
    steps = cluster.steps()
    assert sum(step.removed for step in steps) == 100
    assert all(len(step.compares) <= 128 for step in steps)
    cluster.settle()
    assert cluster.assigned() == []


def test_items_that_were_not_solved_for_keep_their_members(paper: Any) -> None:
    cluster = cluster_of(paper, 1, "a#1#1", "b#2#2")
    cluster.solved = cluster.state().network_hash
    (step,) = cluster.steps()
    assert operations(step) == ["delete x#a#1#1", "put x#a#1#0"]


def test_stale_items_are_left_alone(paper: Any) -> None:
    cluster = paper([*MEMBERS, ("items/x", "1"), ("items/y", "1"), ("assign/u#a#1#0", "")])
    state = cluster.state()
    round_ = Round(
        "/root",
        state.items,
        state.assignments,
        state.members_by_id(),
        cluster.is_consistent,
        state.demand.replication,
        frozenset({"x", "u"}),
    )
    desired = {"x": (("a", "1"),), "y": (("a", "1"),)}
    steps = list(converge(round_, desired, state.loads()))
    assert [step and step.item_id for step in steps] == [None, None, "y"]
