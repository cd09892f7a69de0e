"""The last known routes of journals, and the choice of a member of one. Pure: the caller gives time and
connectivity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum

from gazette.protocol.ids import ProcessId
from gazette.protocol.route import Route


class RouteCache:
    """The routes of the ``size`` journals (or shards) used last, each for at most ``ttl_s`` seconds.

    With size zero no route is kept: every call goes to the default address.
    """

    def __init__(self, size: int, ttl_s: float) -> None:
        self._size = size
        self._ttl_s = ttl_s
        self._routes: OrderedDict[str, tuple[float, Route]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._routes)

    def get(self, name: str, now: float) -> Route | None:
        """Return the route of ``name`` if it is known and not too old; ``now`` is monotonic seconds."""
        found = self._routes.get(name)
        if found is None:
            return None
        expires, route = found
        if now >= expires:
            del self._routes[name]
            return None
        self._routes.move_to_end(name)
        return route

    def put(self, name: str, route: Route, now: float) -> None:
        """Remember a route. A route without members makes the cache forget the former one."""
        if not route.members:
            self.forget(name)
            return
        if self._size <= 0:
            return
        self._routes[name] = (now + self._ttl_s, route)
        self._routes.move_to_end(name)
        while len(self._routes) > self._size:
            self._routes.popitem(last=False)

    def forget(self, name: str) -> None:
        """Drop the route of ``name``: a call by it failed."""
        self._routes.pop(name, None)


class Health(IntEnum):
    """State of the connection to an endpoint; greater is better."""

    FAILING = 0
    """The last attempt failed, and no later one succeeded."""
    IDLE = 1
    """The state is unknown: not connected, or never tried."""
    CONNECTING = 2
    READY = 3


def pick(
    route: Route,
    zone: str,
    health: Callable[[str], Health],
    *,
    process_id: ProcessId | None = None,
    primary: bool = False,
) -> str | None:
    """Return the endpoint to call, or None to call the default address, whose process proxies.

    - ``process_id``: exactly that member, whatever its connection. None if the route lacks the member
      or its endpoint.
    - ``primary`` (appends): the primary, unless its connection is failing.
    - Otherwise the best member. A connection that does not fail counts most, then our ``zone``, then the
      better connection, then the order of the route. If all connections fail, return None: the default
      address may still reach the members.

    A member without an endpoint (its key is gone from etcd) is never picked.
    """
    if process_id is not None:
        return _endpoint(route, _index(route, process_id))
    if primary:
        endpoint = _endpoint(route, route.primary)
        if endpoint is None or health(endpoint) is Health.FAILING:
            return None
        return endpoint
    best: tuple[bool, Health] | None = None
    picked: str | None = None
    for index, member in enumerate(route.members):
        endpoint = _endpoint(route, index)
        if endpoint is None or (state := health(endpoint)) is Health.FAILING:
            continue
        rank = (member.zone == zone, state)
        if best is None or rank > best:
            best, picked = rank, endpoint
    return picked


def _index(route: Route, process_id: ProcessId) -> int | None:
    for index, member in enumerate(route.members):
        if member == process_id:
            return index
    return None


def _endpoint(route: Route, index: int | None) -> str | None:
    if index is None or index >= len(route.endpoints):
        return None
    return route.endpoints[index] or None
