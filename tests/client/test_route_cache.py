"""Routes are kept for some journals, for some time."""

from __future__ import annotations

from gazette.client.access import RouteCache
from gazette.protocol.ids import ProcessId
from gazette.protocol.route import EMPTY_ROUTE, Route

ROUTE = Route((ProcessId("zone", "broker"),), 0, ("http://broker",))


def test_a_route_is_kept_for_its_time() -> None:
    cache = RouteCache(2, 60.0)
    cache.put("a", ROUTE, 100.0)
    assert cache.get("a", 159.0) == ROUTE
    assert cache.get("a", 160.0) is None
    assert len(cache) == 0


def test_the_journal_that_was_not_used_goes_first() -> None:
    cache = RouteCache(2, 60.0)
    for name in "ab":
        cache.put(name, ROUTE, 0.0)
    assert cache.get("a", 1.0) == ROUTE
    cache.put("c", ROUTE, 1.0)
    assert cache.get("b", 1.0) is None
    assert cache.get("a", 1.0) == ROUTE


def test_an_empty_route_and_a_failure_forget() -> None:
    cache = RouteCache(2, 60.0)
    cache.put("a", ROUTE, 0.0)
    cache.put("a", EMPTY_ROUTE, 0.0)
    assert cache.get("a", 0.0) is None
    cache.put("a", ROUTE, 0.0)
    cache.forget("a")
    cache.forget("b")
    assert cache.get("a", 0.0) is None


def test_size_zero_keeps_nothing() -> None:
    cache = RouteCache(0, 60.0)
    cache.put("a", ROUTE, 0.0)
    assert cache.get("a", 0.0) is None
