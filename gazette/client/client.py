"""The entry point of the client library: one cluster, its routes, channels and credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Self

from gazette.auth import Signer
from gazette.client import journals
from gazette.client.append import appender
from gazette.client.append.appender import AppendParams, AppendResult, Content
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.read.reader import Reader, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.addresses import Addresses
from gazette.client.rpc.channel import BytePath, Channels, ChannelSettings, TlsSettings
from gazette.client.rpc.credentials import Credentials
from gazette.client.rpc.route_cache import RouteCache
from gazette.protocol.ids import ProcessId, split_journal_meta
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.route import Header, Route
from gazette.runtime.clock import Clock, SystemClock

if TYPE_CHECKING:
    from gazette.client.journals import (
        FragmentsParams,
        JournalChange,
        JournalList,
        ListedJournal,
        StoredFragment,
    )


class Client:
    """A client of one broker cluster. Loop-bound: created and used on one event loop.

    ``address`` is the endpoint of any broker, or of a balancer before them (``http://host:port``,
    ``https://…``, ``unix://…``). It may be several endpoints separated by commas, of which one that
    answers is used. The broker that is reached proxies to those that serve a journal. With a route
    cache, calls go to these directly, preferring ``zone``. Set ``route_cache_size`` to zero if this
    process cannot dial the endpoints that brokers advertise.

    ``signer`` makes tokens where the cluster needs them. ``fragments`` says which stored fragments
    can be opened without a broker. By default these are fragments with signed http(s) URLs. It is
    closed with the client. ``channels`` may be shared with other clients, and then stays open.
    """

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
        self.clock: Clock = SystemClock() if clock is None else clock
        self._own_channels = channels is None
        self.channels = (
            Channels(zone, tls, signer, clock=self.clock, settings=channel_settings)
            if channels is None
            else channels
        )
        self._addresses = Addresses(address, self.channels)
        self.fragments = FragmentAccess() if fragments is None else fragments
        self._routes = RouteCache(route_cache_size, route_ttl_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client's channels. Calls in flight are cancelled; their callers get ``Closed``."""
        self.fragments.close()
        if self._own_channels:
            await self.channels.close()

    @property
    def address(self) -> str:
        """The endpoint to call without a route: of the given ones, one that is not known to fail."""
        return self._addresses.pick()

    @property
    def credentials(self) -> Credentials:
        return self.channels.credentials

    def endpoint_of(self, journal: str, *, primary: bool = False) -> str:
        """Return the endpoint of the next call about a journal."""
        route = self._routes.get(split_journal_meta(journal)[0], self.clock.monotonic())
        picked = None if route is None else self.channels.pick(route, primary=primary)
        return self.address if picked is None else picked

    def byte_path(self, journal: str, *, primary: bool = False) -> tuple[str, BytePath]:
        """Return the endpoint at which to append to or read a journal, and its calls."""
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

    async def connected_stub(self) -> JournalStub:
        """Return the Journal service of an address, for a call that waits for a connection."""
        return self.channels.journal(await self._addresses.connected())

    def stub_of(self, journal: str) -> JournalStub:
        """Return the Journal service for calls about a journal."""
        return self.channels.journal(self.endpoint_of(journal))

    def observe_route(self, journal: str, route: Route) -> None:
        """Remember the route that a broker answered with."""
        self._routes.put(split_journal_meta(journal)[0], route, self.clock.monotonic())

    def forget_route(self, journal: str) -> None:
        """Forget a route none of whose members could be reached."""
        self._routes.forget(split_journal_meta(journal)[0])

    # Bytes. For appends of many small pieces use an `AppendService`.

    async def append(
        self, params: AppendParams, content: Content | Callable[[], Content] = b""
    ) -> AppendResult:
        """Append content to a journal; see `appender.append`."""
        return await appender.append(self, params, content)

    def reader(self, params: ReadParams) -> Reader:
        """Return a reader that makes one Read RPC."""
        return Reader(self, params)

    def retry_reader(self, params: ReadParams) -> RetryReader:
        """Return a reader that survives failures."""
        return RetryReader(self, params)

    async def list_journals(self, selector: LabelSelector = EVERYTHING) -> JournalList:
        return await journals.list_journals(self, selector)

    def watch_journals(
        self, selector: LabelSelector = EVERYTHING, *, resume: Header | None = None
    ) -> AsyncIterator[JournalList]:
        return journals.watch_journals(self, selector, resume=resume)

    async def get_journal(self, name: str) -> ListedJournal:
        return await journals.get_journal(self, name)

    async def apply_journals(
        self, changes: Sequence[JournalChange], *, batch_size: int = 0
    ) -> Header:
        return await journals.apply_journals(self, changes, batch_size=batch_size)

    async def list_fragments(self, params: FragmentsParams) -> Collection[StoredFragment]:
        return await journals.list_fragments(self, params)

    async def fragment_store_health(
        self, store: str, *, check_delete: bool = False, check_delete_prefix: str = ""
    ) -> str:
        return await journals.fragment_store_health(
            self, store, check_delete=check_delete, check_delete_prefix=check_delete_prefix
        )
