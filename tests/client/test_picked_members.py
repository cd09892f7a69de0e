"""Which member of a route is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.client.rpc.channel import pick
from gazette.client.rpc.counted_channel import Health
from gazette.protocol.ids import ProcessId
from gazette.protocol.route import EMPTY_ROUTE, Route

ONE, TWO, THREE = (
    ProcessId(zone, name) for zone, name in (("a", "one"), ("b", "three"), ("b", "two"))
)
ROUTE = Route((ONE, TWO, THREE), 1, ("http://1", "http://2", "http://3"))


def ready(**states: Health) -> Callable[[str], Health]:
    return lambda endpoint: states.get("h" + endpoint[-1], Health.IDLE)


def test_an_explicit_member_is_picked_however_its_connection_is() -> None:
    assert pick(ROUTE, "a", ready(h3=Health.FAILING), process_id=THREE) == "http://3"
    assert pick(ROUTE, "a", ready(), process_id=ProcessId("c", "four")) is None


def test_appends_go_to_the_primary_or_to_the_default_address() -> None:
    assert pick(ROUTE, "a", ready(h1=Health.READY), primary=True) == "http://2"
    assert pick(ROUTE, "a", ready(h2=Health.FAILING), primary=True) is None
    assert pick(Route((ONE,), None, ("http://1",)), "a", ready(), primary=True) is None


@pytest.mark.parametrize(
    ("zone", "states", "picked"),
    [
        ("a", {}, "http://1"),
        ("b", {}, "http://2"),
        ("c", {}, "http://1"),
        ("c", {"h2": Health.CONNECTING}, "http://2"),
        ("c", {"h2": Health.CONNECTING, "h3": Health.READY}, "http://3"),
        ("a", {"h3": Health.READY}, "http://1"),
        ("a", {"h1": Health.FAILING, "h3": Health.READY}, "http://3"),
        ("a", {"h1": Health.FAILING, "h2": Health.FAILING, "h3": Health.FAILING}, None),
    ],
)
def test_reads_prefer_health_then_zone_then_connection(
    zone: str, states: dict[str, Health], picked: str | None
) -> None:
    assert pick(ROUTE, zone, ready(**states)) == picked


def test_members_without_endpoint_are_never_picked() -> None:
    """Their key is gone from etcd: the route says so by an empty endpoint, or by none at all."""
    route = Route((ONE, TWO), 0, ("", "http://2"))
    assert pick(route, "a", ready()) == "http://2"
    assert pick(route, "a", ready(), primary=True) is None
    assert pick(route, "a", ready(), process_id=ONE) is None
    assert pick(Route((ONE, TWO), 0), "a", ready()) is None
    assert pick(EMPTY_ROUTE, "a", ready()) is None


@given(
    zones=st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    states=st.lists(st.sampled_from(Health), min_size=5, max_size=5),
    zone=st.sampled_from("abcd"),
)
def test_no_member_is_better_than_the_one_picked(
    zones: list[str], states: list[Health], zone: str
) -> None:
    """Oracle: the maximum by (not failing, same zone, connection), the earliest of equals."""
    members = tuple(ProcessId(z, f"member-{i}") for i, z in enumerate(zones))
    endpoints = tuple(f"http://{i}" for i in range(len(zones)))
    health = dict(zip(endpoints, states, strict=False))
    picked = pick(Route(members, 0, endpoints), zone, health.__getitem__)
    usable = [i for i, endpoint in enumerate(endpoints) if health[endpoint] is not Health.FAILING]
    best = max(usable, key=lambda i: (members[i].zone == zone, states[i], -i), default=None)
    assert picked == (None if best is None else endpoints[best])
