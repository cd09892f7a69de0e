"""The plan of a chaos run follows from its seed; its bounds keep the promise that the judge holds it to."""

from __future__ import annotations

import itertools
import random

import pytest

from gazette.errors import Invalid
from tests.facts import raises
from tools.chaos.schedule import KINDS, Bounds, Effect, Planned, kinds_of, plan

LEASE_S = 10.0
STORE_S = 30.0


def planned(seed: int, seconds: float = 3600.0, names: tuple[str, ...] = ()) -> list[Planned]:
    return plan(seed, seconds, 3, LEASE_S, kinds_of(names))


def test_a_seed_makes_one_plan() -> None:
    assert planned(7) == planned(7)
    assert planned(7) != planned(8)


def test_a_plan_has_every_kind_and_every_broker() -> None:
    faults = planned(1)
    assert {one.kind.name for one in faults} == set(KINDS)
    assert {one.target for one in faults} == {0, 1, 2}
    assert [one.begin for one in faults] == sorted(one.begin for one in faults)
    for one in faults:
        assert one.kind.shortest * LEASE_S <= one.seconds <= one.kind.longest * LEASE_S


def test_faults_overlap_and_brokers_die_together_and_apart() -> None:
    faults = planned(1)
    overlapping = sum(
        later.begin < earlier.begin + earlier.seconds
        for earlier, later in itertools.pairwise(faults)
    )
    assert overlapping > len(faults) / 3
    gone = [one for one in faults if one.kind.effect is Effect.GONE]
    gaps = [later.begin - earlier.begin for earlier, later in itertools.pairwise(gone)]
    assert any(gap < 2.0 for gap in gaps)
    assert any(gap > 8.0 for gap in gaps)


def test_only_what_was_asked_for_is_planned() -> None:
    assert {one.kind.name for one in planned(1, names=("kill", "pause etcd"))} == {
        "kill",
        "pause etcd",
    }
    with raises(Invalid, path="--faults", says='"kil"'):
        kinds_of(["kil"])


def pass_time(bounds: Bounds, begin: float, end: float, *, impaired: bool = False) -> None:
    for tick in range(int(begin * 10), int(end * 10) + 1):
        bounds.tick(tick / 10, impaired=impaired, whole=True, away=())


def test_fewer_than_r_brokers_are_gone_at_a_time() -> None:
    bounds = Bounds(3, 3, STORE_S)
    pass_time(bounds, 0, 1)
    bounds.begin(Effect.GONE, "a")
    assert bounds.admits(Effect.GONE, "b")
    bounds.begin(Effect.GONE, "b")
    assert not bounds.admits(Effect.GONE, "c")
    # Case: one of them may be broken again.
    assert bounds.admits(Effect.GONE, "a")
    # Case: other faults may begin at any time, but not one that ends all brokers.
    assert bounds.admits(Effect.IMPAIRS, "c")
    assert bounds.admits(Effect.HARMLESS, "c")
    assert not bounds.admits(Effect.ALL, "c")
    pass_time(bounds, 1, 1 + STORE_S)
    assert not bounds.gone
    assert bounds.admits(Effect.GONE, "c")


def test_time_in_which_nothing_could_be_stored_does_not_count() -> None:
    bounds = Bounds(2, 3, STORE_S)
    bounds.begin(Effect.GONE, "a")
    pass_time(bounds, 0, 20)
    pass_time(bounds, 20, 100, impaired=True)
    assert not bounds.admits(Effect.GONE, "b")
    pass_time(bounds, 100, 109)
    assert not bounds.admits(Effect.GONE, "b")
    pass_time(bounds, 109, 112)
    assert bounds.admits(Effect.GONE, "b")


def test_a_broker_is_gone_until_it_is_back_and_journals_are_whole() -> None:
    bounds = Bounds(2, 3, STORE_S)
    bounds.begin(Effect.GONE, "a")
    for whole, away in ((True, {"a"}), (False, set())):
        bounds.tick(bounds.now + 100, impaired=False, whole=whole, away=away)
        assert set(bounds.gone) == {"a"}
    bounds.tick(bounds.now + 1, impaired=False, whole=True, away=())
    assert not bounds.gone


def test_after_the_end_of_all_brokers_none_is_broken_until_journals_are_whole() -> None:
    bounds = Bounds(3, 3, STORE_S)
    bounds.begin(Effect.ALL, "")
    bounds.tick(1.0, impaired=False, whole=True, away={"etcd"})
    assert not bounds.admits(Effect.GONE, "a")
    bounds.tick(2.0, impaired=False, whole=False, away=())
    assert not bounds.admits(Effect.ALL, "a")
    bounds.tick(3.0, impaired=False, whole=True, away=())
    assert bounds.admits(Effect.GONE, "a")
    assert bounds.admits(Effect.ALL, "a")


def test_of_single_replicas_fewer_than_half_are_gone() -> None:
    bounds = Bounds(1, 5, STORE_S)
    for broker in "ab":
        assert bounds.admits(Effect.GONE, broker)
        bounds.begin(Effect.GONE, broker)
    assert not bounds.admits(Effect.GONE, "c")
    assert not bounds.exceeded
    # Case: only for as long as they are broken.
    bounds.tick(1.0, impaired=True, whole=False, away={"b"})
    assert set(bounds.gone) == {"b"}
    assert bounds.admits(Effect.GONE, "c")
    assert Bounds(1, 1, STORE_S).admits(Effect.GONE, "a")
    # Case: with replicas, brokers that end for other reasons than those of the plan may be too many.
    bounds = Bounds(2, 3, STORE_S)
    bounds.begin(Effect.GONE, "a")
    assert not bounds.exceeded
    bounds.begin(Effect.GONE, "b")
    assert bounds.exceeded


@pytest.mark.parametrize("floor", [2, 3])
def test_no_plan_ever_breaks_the_bounds(floor: int) -> None:
    """Against a count of its own: brokers whose exposure is not over are never as many as replicas."""
    rng = random.Random(floor)
    for seed in range(20):
        bounds = Bounds(floor, 3, STORE_S)
        exposed: dict[str, float] = {}
        begun = 0
        faults = [one for one in planned(seed, 600.0) if one.kind.effect is Effect.GONE]
        for tick in range(6000):
            now = tick / 10
            impaired = rng.random() < 0.3
            bounds.tick(now, impaired=impaired, whole=True, away=())
            exposed = {name: clear + 0.1 * (not impaired) for name, clear in exposed.items()}
            exposed = {name: clear for name, clear in exposed.items() if clear < STORE_S - 0.2}
            while faults and faults[0].begin <= now:
                name = str(faults[0].target)
                if not bounds.admits(Effect.GONE, name):
                    break
                bounds.begin(Effect.GONE, name)
                exposed[name] = 0.0
                assert len(exposed) < floor
                begun += 1
                faults.pop(0)
        assert begun > 5
