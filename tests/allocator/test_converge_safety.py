"""Whatever happens, and however stale the leader's view: consistent replicas are never given away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ITEMS = ("x", "y")
NAMES = ("a#1", "a#2", "b#1", "b#2", "c#1")


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[tuple[str, Any]]]:
    """Draw (keys to begin with, what happens next)."""
    keys = [(f"members/{m}", str(draw(st.integers(0, 2)))) for m in NAMES]
    keys += [(f"items/{item}", str(draw(st.integers(0, 3)))) for item in ITEMS]
    for item in (*ITEMS, "gone"):
        members = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
        slots = draw(st.permutations(range(6)))
        for member, slot in zip(members, slots, strict=False):
            value = draw(st.sampled_from(["", "consistent"]))
            keys.append((f"assign/{item}#{member}#{slot}", value))
    happening = st.one_of(
        st.tuples(st.just("look"), st.none()),
        st.tuples(st.just("act"), st.none()),
        st.tuples(st.just("synced"), st.integers(0, 10)),
        st.tuples(st.just("unsynced"), st.integers(0, 10)),
        st.tuples(st.just("lost"), st.sampled_from(NAMES)),
        st.tuples(st.just("limit"), st.tuples(st.sampled_from(NAMES), st.integers(0, 2))),
        st.tuples(st.just("exiting"), st.sampled_from(NAMES)),
        st.tuples(st.just("wanted"), st.tuples(st.sampled_from(ITEMS), st.integers(0, 3))),
    )
    return keys, draw(st.lists(happening, max_size=25))


def consistent(cluster: Any, item: str) -> int:
    prefix = f"/root/assign/{item}#"
    return sum(
        key.startswith(prefix) and kv.value == b"consistent" for key, kv in cluster.kvs.items()
    )


def replication(cluster: Any, item: str) -> int | None:
    kv = cluster.kvs.get(f"/root/items/{item}")
    return None if kv is None else int(kv.value)


def act(cluster: Any, steps: Sequence[Any]) -> None:
    """Apply what the leader planned, some time ago perhaps, and check each step alone."""
    for step in steps:
        before = consistent(cluster, step.item_id)
        wanted = replication(cluster, step.item_id)
        primaries = primary_count(cluster, step.item_id)
        had = cluster.placed().get(step.item_id, set())
        if not cluster.txn(step.compares, step.operations):
            continue
        after = consistent(cluster, step.item_id)
        for member in cluster.placed().get(step.item_id, set()) - had:
            kv = cluster.kvs[f"/root/members/{member}"]
            assert b"exiting" not in kv.value, "a member that leaves got a new item"
        if wanted is not None:
            assert after >= min(before, wanted), "a consistent replica was given away"
            if step.removed:
                assert after >= wanted
            if primaries:
                assert wanted == 0 or primary_count(cluster, step.item_id), "the primary is gone"


def primary_count(cluster: Any, item: str) -> int:
    return sum(key.startswith(f"{item}#") and key.endswith("#0") for key in cluster.assigned())


def happen(cluster: Any, name: str, what: Any, planned: list[Any]) -> list[Any]:
    assigned = cluster.assigned()
    match name:
        case "look":
            return list(cluster.steps())
        case "act":
            act(cluster, planned)
            return []
        case "synced" | "unsynced" if assigned:
            key = assigned[what % len(assigned)]
            cluster.put(f"assign/{key}", "consistent" if name == "synced" else "")
        case "lost":
            if f"/root/members/{what}" in cluster.kvs:
                cluster.lose(what)
        case "limit":
            cluster.put(f"members/{what[0]}", what[1])
        case "exiting":
            cluster.put(f"members/{what}", "2 exiting")
        case "wanted":
            cluster.put(f"items/{what[0]}", what[1])
    return planned


@settings(max_examples=250, deadline=None)
@given(story=stories())
def test_consistent_replicas_are_never_given_away(story: Any, paper: Any) -> None:
    """And once nothing else happens, the cluster comes to rest where it is wanted to be."""
    keys, happenings = story
    cluster = paper(keys)
    planned: list[Any] = []
    for name, what in happenings:
        planned = happen(cluster, name, what, planned)

    for _ in range(60):
        cluster.mark_consistent()
        steps = cluster.steps()
        if not steps:
            break
        act(cluster, steps)
    else:
        pytest.fail("the allocator does not come to rest")
    check_at_rest(cluster)


def check_at_rest(cluster: Any) -> None:
    state = cluster.state()
    limits = {"#".join(m): limit for m, limit in state.demand.limits.items()}
    loads = cluster.loads()
    placed = cluster.placed()
    assert "gone" not in placed
    for item in ITEMS:
        desired = {"#".join(member) for member in cluster.desired[item]}
        wanted = replication(cluster, item)
        assert wanted is not None
        have = placed.get(item, set())
        slots = sorted(int(k.rsplit("#", 1)[1]) for k in cluster.assigned() if k.startswith(item))
        assert slots == list(range(len(slots)))
        # What is desired and not there has no room, because others may not let go.
        assert all(loads[member] >= limits[member] for member in desired - have)
        if len(have) > wanted:
            pytest.fail("there are more replicas than wanted, and all are consistent")
        if len(desired) == wanted and desired <= have:
            assert have == desired
