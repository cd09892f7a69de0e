"""The entry point of the client library: one cluster, and what can be asked of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from gazette.client import journals
from gazette.client.access import BrokerAccess
from gazette.client.append import appender
from gazette.client.append.appender import AppendParams, AppendResult, Content
from gazette.client.journals import (
    FragmentsParams,
    JournalChange,
    JournalList,
    ListedJournal,
    StoredFragment,
)
from gazette.client.read.reader import Reader, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.protocol.route import Header


class Client(BrokerAccess):
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

    async def list_fragments(self, params: FragmentsParams) -> tuple[StoredFragment, ...]:
        return await journals.list_fragments(self, params)

    async def fragment_store_health(
        self, store: str, *, check_delete: bool = False, check_delete_prefix: str = ""
    ) -> str:
        return await journals.fragment_store_health(
            self, store, check_delete=check_delete, check_delete_prefix=check_delete_prefix
        )
