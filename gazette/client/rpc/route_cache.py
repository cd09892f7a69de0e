"""The last known routes of journals. Pure: time is passed in."""

from __future__ import annotations

from collections import OrderedDict

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
