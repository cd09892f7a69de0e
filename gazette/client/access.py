"""Access to the members of one cluster: their addresses, routes, channels and credentials."""

from __future__ import annotations

from collections import OrderedDict
from typing import Self

from gazette.auth import Signer
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.rpc.addresses import Addresses
from gazette.client.rpc.channel import Channels, ChannelSettings, TlsSettings
from gazette.client.rpc.counted_channel import BytePath
from gazette.client.rpc.credentials import Credentials
from gazette.client.waits import Waits
from gazette.protocol.ids import ProcessId, split_journal_meta
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.route import Route
from gazette.runtime.clock import Clock, SystemClock


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
        """Return the route of ``name``; None if it is not known, or too old at ``now`` (monotonic
        seconds)."""
        entry = self._routes.get(name)
        if entry is None:
            return None
        expires, route = entry
        if now >= expires:
            del self._routes[name]
            return None
        self._routes.move_to_end(name)
        return route

    def put(self, name: str, route: Route, now: float) -> None:
        """Remember a route. A route without members makes the cache forget the former route."""
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
        """Drop the route of ``name``, since a call to one of its members failed."""
        self._routes.pop(name, None)


class ClusterAccess:
    """Access to the members of one cluster. Loop-bound. See `Client` for the arguments."""

    def __init__(
        self,
        address: str,
        *,
        zone: str = "",
        tls: TlsSettings | None = None,
        signer: Signer | None = None,
        route_cache_size: int = 1024,
        route_ttl_s: float = 60.0,
        channels: Channels | None = None,
        channel_settings: ChannelSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock: Clock = SystemClock() if clock is None else clock
        self._own_channels = channels is None
        self.channels = (
            Channels(
                zone,
                tls,
                signer,
                clock=self.clock,
                settings=channel_settings,
                owner=f"a {type(self).__name__} of {address}",
            )
            if channels is None
            else channels
        )
        self.addresses = Addresses(address, self.channels)
        """The given endpoints, and the choice of the one to call."""
        self._routes = RouteCache(route_cache_size, route_ttl_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channels, unless the caller of the constructor gave them. Calls in flight are cancelled:
        their callers get ``Closed``."""
        if self._own_channels:
            await self.channels.close()

    @property
    def address(self) -> str:
        """The endpoint to call if no route is known: a given endpoint that is not known to fail. If all are
        known to fail, each use takes the next endpoint."""
        return self.addresses.pick()


class BrokerAccess(ClusterAccess):
    """Access that readers, appenders and lists share. `Client` adds methods that append, read and list."""

    def __init__(
        self,
        address: str,
        *,
        zone: str = "",
        tls: TlsSettings | None = None,
        signer: Signer | None = None,
        route_cache_size: int = 1024,
        route_ttl_s: float = 60.0,
        fragments: FragmentAccess | None = None,
        channels: Channels | None = None,
        channel_settings: ChannelSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            address,
            zone=zone,
            tls=tls,
            signer=signer,
            route_cache_size=route_cache_size,
            route_ttl_s=route_ttl_s,
            channels=channels,
            channel_settings=channel_settings,
            clock=clock,
        )
        self.fragments = FragmentAccess() if fragments is None else fragments
        self.waits = Waits()
        """The calls that are being repeated, each with the last answer of a broker."""

    async def close(self) -> None:
        """Close ``fragments``, even if the caller gave it; then the channels: see `ClusterAccess.close`."""
        self.fragments.close()
        await super().close()

    @property
    def credentials(self) -> Credentials:
        return self.channels.credentials

    def endpoint_of(self, journal: str, *, primary: bool = False) -> str:
        """Return the endpoint to call next about a journal."""
        route = self._routes.get(split_journal_meta(journal)[0], self.clock.monotonic())
        endpoint = None if route is None else self.channels.pick(route, primary=primary)
        return self.address if endpoint is None else endpoint

    def byte_path(self, journal: str, *, primary: bool = False) -> tuple[str, BytePath]:
        """Return the endpoint at which to append to or read a journal, and the stubs of these calls there."""
        endpoint = self.endpoint_of(journal, primary=primary)
        return endpoint, self.channels.byte_path(endpoint)

    def stub(self, route: Route | None = None, process_id: ProcessId | None = None) -> JournalStub:
        """Return the Journal service of the default address, of a route's best member, or of one member.

        Raise ``Unavailable`` if that member has no endpoint.
        """
        if route is None:
            return self.channels.journal(self.address)
        if process_id is not None:
            return self.channels.member(route, process_id)
        return self.channels.journal(self.channels.pick(route) or self.address)

    async def connected(self) -> tuple[JournalStub, str]:
        """Wait until one of several addresses is connected. Return its Journal service and its endpoint.

        With a single address, return at once. Pass ``addresses.wait_for_ready`` to the call, which waits.
        """
        endpoint = await self.addresses.connected()
        return self.channels.journal(endpoint), endpoint

    def observe_route(self, journal: str, route: Route) -> None:
        """Remember the route in a broker's answer."""
        self._routes.put(split_journal_meta(journal)[0], route, self.clock.monotonic())

    def forget_route(self, journal: str) -> None:
        """Forget the route of a journal after a failed call: the next call goes to the default address."""
        self._routes.forget(split_journal_meta(journal)[0])
