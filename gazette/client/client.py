"""The entry point of the client library: a client of one cluster."""

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
    ``https://…``, ``unix://…``). For several endpoints separated by commas, the client calls one that
    answers. The called broker forwards calls to the brokers that serve a journal. With a route cache, the
    client calls the serving brokers directly, and prefers those in ``zone``. Set ``route_cache_size`` to zero
    if this process cannot dial the endpoints that brokers advertise.

    ``signer`` makes tokens for a cluster that asks for them. ``fragments`` opens stored fragments without a
    broker; by default those with signed http(s) URLs. ``close`` also closes ``fragments``. Several clients
    may share ``channels``, which then stays open.

    Calls raise ``Invalid`` for wrong arguments, and ``NotAllowed`` if a broker refuses the token. They raise
    ``NotFound`` if the journal does not exist, ``Moved`` if another broker serves it, ``Unavailable`` if no
    broker answers, and ``Broken`` if a call fails otherwise.
    """

    # Bytes. For appends of many small pieces use an `AppendService`.

    async def append(
        self, params: AppendParams, content: Content | Callable[[], Content] = b""
    ) -> AppendResult:
        """Append content to a journal. Retry while its brokers are unreachable or being replaced.

        A retry after an attempt with an unknown outcome may write the content twice. A function
        that returns new content at each call can be retried; an iterator cannot. After a
        cancellation the content may have been appended.

        Raise ``Fenced`` if the registers do not match, and ``Conflict`` if the head is at another offset.
        Raise ``Corrupt`` while an operator must confirm the head (an `AppendService` waits for the operator).
        Raise ``Unavailable`` also if a retry would need content that cannot be read again. An error after an
        attempt with an unknown outcome has the fact ``earlier_attempt``.
        """
        return await appender.append(self, params, content)

    def reader(self, params: ReadParams) -> Reader:
        """Return a reader that makes one Read RPC."""
        return Reader(self, params)

    def retry_reader(self, params: ReadParams) -> RetryReader:
        """Return a reader that reads on after failures of brokers."""
        return RetryReader(self, params)

    async def list_journals(self, selector: LabelSelector = EVERYTHING) -> JournalList:
        """Return all matching journals that the caller may list. Wait for a connection.

        Raise ``Invalid``, ``NotAllowed``, ``Unavailable`` or ``Broken``.
        """
        return await journals.list_journals(self, selector)

    def watch_journals(
        self, selector: LabelSelector = EVERYTHING, *, resume: Header | None = None
    ) -> AsyncIterator[JournalList]:
        """Yield all matching journals, now and after each change of a specification, without end.

        ``resume`` is the header of an earlier list: the first list is newer than that. Watch on after
        failures of brokers. Raise ``Invalid``, ``NotAllowed``, or ``Closed`` once the client is closed.
        """
        return journals.watch_journals(self, selector, resume=resume)

    async def get_journal(self, name: str) -> ListedJournal:
        """Return one journal by its name.

        Raise ``NotFound``, ``Invalid``, ``NotAllowed``, ``Unavailable`` or ``Broken``.
        """
        return await journals.get_journal(self, name)

    async def apply_journals(
        self, changes: Sequence[JournalChange], *, batch_size: int = 0
    ) -> Header:
        """Change specifications: all of them, or none.

        A ``batch_size`` above zero splits the changes into transactions of that many. If a transaction
        fails, the earlier transactions stay. By default, etcd accepts 128 changes in a transaction. Return
        the header of the last transaction. After a cancellation the changes may have been applied.

        Raise ``Conflict`` if a journal is not at the expected revision, ``Invalid``, ``NotAllowed``,
        ``Unavailable`` or ``Broken``.
        """
        return await journals.apply_journals(self, changes, batch_size=batch_size)

    async def list_fragments(self, params: FragmentsParams) -> tuple[StoredFragment, ...]:
        """Return the fragments of a journal's index, by offset.

        Raise ``Invalid`` for wrong parameters, ``NotFound``, ``NotAllowed`` (also for a suspended journal),
        ``Unavailable``, ``Moved`` or ``Broken``.
        """
        return await journals.list_fragments(self, params)

    async def fragment_store_health(
        self, store: str, *, check_delete: bool = False, check_delete_prefix: str = ""
    ) -> str:
        """Return the problem that a broker has with a fragment store; empty if the store works.

        ``check_delete`` also checks that objects below ``check_delete_prefix`` can be removed. Raise
        ``Invalid``, ``NotAllowed``, ``Unavailable`` or ``Broken``.
        """
        return await journals.fragment_store_health(
            self, store, check_delete=check_delete, check_delete_prefix=check_delete_prefix
        )
