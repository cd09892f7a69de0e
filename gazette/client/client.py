"""The client library's front: one cluster, its routes, channels and credentials."""

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
    """A client of one broker cluster. Loop-bound: made and used on one event loop.

    ``address`` is the endpoint of any broker, or of a balancer before them (``http://host:port``,
    ``https://…``, ``unix://…``), or several of them separated by commas, of which one that answers is
    used; whichever broker is reached proxies to those that serve a journal.
    With a route cache, calls go to these directly, preferring ``zone``. Set ``route_cache_size`` to
    zero where the endpoints that brokers advertise cannot be dialed from here.

    ``signer`` makes tokens where the cluster wants them. ``fragments`` says which stored fragments can
    be opened without a broker, by default those that have signed http(s) URLs; it is closed with the
    client. ``channels`` may be shared with others, and is then not.
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
        """Close the client's channels; calls in flight are cancelled, their callers see ``Closed``."""
        self.fragments.close()
        if self._own_channels:
            await self.channels.close()

    # Where calls go.

    @property
    def address(self) -> str:
        """The endpoint to call where no route says better: of those given, one that is not known to
        fail."""
        return self._addresses.pick()

    @property
    def credentials(self) -> Credentials:
        return self.channels.credentials

    def endpoint_of(self, journal: str, *, primary: bool = False) -> str:
        """Where a call about a journal goes now."""
        route = self._routes.get(split_journal_meta(journal)[0], self.clock.monotonic())
        picked = None if route is None else self.channels.pick(route, primary=primary)
        return self.address if picked is None else picked

    def byte_path(self, journal: str, *, primary: bool = False) -> tuple[str, BytePath]:
        """Where to append to or read a journal, and the calls for that."""
        endpoint = self.endpoint_of(journal, primary=primary)
        return endpoint, self.channels.byte_path(endpoint)

    def stub(self, route: Route | None = None, process_id: ProcessId | None = None) -> JournalStub:
        """The Journal service of the default address, of the best member of a route, or of exactly
        one member. Raises ``Unavailable`` if that member has no endpoint."""
        if route is None:
            return self.channels.journal(self.address)
        if process_id is not None:
            return self.channels.member(route, process_id)
        return self.channels.journal(self.channels.pick(route) or self.address)

    async def connected_stub(self) -> JournalStub:
        """Return the Journal service of an address, for a call that waits for a connection."""
        return self.channels.journal(await self._addresses.connected())

    def stub_of(self, journal: str) -> JournalStub:
        """The Journal service where calls about a journal go."""
        return self.channels.journal(self.endpoint_of(journal))

    def observe_route(self, journal: str, route: Route) -> None:
        """Remember the route that a broker answered with."""
        self._routes.put(split_journal_meta(journal)[0], route, self.clock.monotonic())

    def forget_route(self, journal: str) -> None:
        """Forget a route by which nobody could be reached."""
        self._routes.forget(split_journal_meta(journal)[0])

    # Bytes. Appends of many small pieces belong into an `AppendService`.

    async def append(
        self, params: AppendParams, content: Content | Callable[[], Content] = b""
    ) -> AppendResult:
        """See `appender.append`."""
        return await appender.append(self, params, content)

    def reader(self, params: ReadParams) -> Reader:
        """One Read RPC."""
        return Reader(self, params)

    def retry_reader(self, params: ReadParams) -> RetryReader:
        """A read that survives failures."""
        return RetryReader(self, params)

    # Specifications and fragments: see `journals`.

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
