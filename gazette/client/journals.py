"""Specifications of journals and their fragments: list, watch, apply."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from gazette.auth import Capability, Claims
from gazette.client.append.appender import backoff_s
from gazette.client.rpc.credentials import (
    LONG_LIFETIME_S,
    SHORT_LIFETIME_S,
    apply_claims,
    journal_claims,
    list_claims,
)
from gazette.client.rpc.errors import END_OF_STREAM, answered, map_errors, status_error
from gazette.client.rpc.problems import BROKERS_KEY, PROBLEMS_ASKED, problems_in
from gazette.errors import Broken, GazetteError, Invalid, NotFound, Retryable, Unavailable
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset, Revision, split_journal_meta
from gazette.protocol.journal import JournalSpec
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header, Route
from gazette.protocol.rpc import (
    validate_apply_request,
    validate_apply_response,
    validate_fragments_request,
    validate_fragments_response,
    validate_health_request,
    validate_health_response,
    validate_list_request,
    validate_list_response,
    validate_list_response_journal,
)
from gazette.protocol.status import Status
from gazette.protocol.stored import listed_journal
from gazette.protocol.text import duration
from gazette.protocol.text.validation import INT32, require_fit, within
from gazette.runtime.numbers import is_digits

if TYPE_CHECKING:
    from gazette.client.access import BrokerAccess

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListedJournal:
    """A journal as a broker listed it. ``route`` may be old: a watch does not report a change of a route
    alone."""

    spec: JournalSpec
    mod_revision: Revision
    create_revision: Revision
    route: Route
    cluster_id: int = 0
    """Id of the etcd cluster that holds the specification."""

    @property
    def life(self) -> JournalLife:
        """The life of the journal. Offsets of one life mean nothing in another."""
        return JournalLife(self.cluster_id, self.create_revision)


@dataclass(frozen=True, slots=True)
class JournalList:
    """The journals that matched a selector at one revision, ordered by name."""

    header: Header
    journals: tuple[ListedJournal, ...]


@dataclass(frozen=True, slots=True)
class JournalChange:
    """A change of one journal: put the specification ``upsert``, or delete the journal named ``delete``.

    A broker makes the change only if the journal's modification revision is ``expect_mod_revision``: zero for
    a journal that must not exist, -1 for any revision.

    A put replaces the whole specification. A put without ``suspend`` resumes a suspended journal, and drops
    the offset at which the journal was to resume.
    """

    upsert: JournalSpec | None = None
    delete: str = ""
    expect_mod_revision: Revision = 0

    def to_pb(self) -> broker_pb2.ApplyRequest.Change:
        return broker_pb2.ApplyRequest.Change(
            expect_mod_revision=self.expect_mod_revision,
            upsert=None if self.upsert is None else self.upsert.to_pb(),
            delete=self.delete,
        )


_TTL_MAX_S: Final = 1e9
"""Upper bound of the seconds for which a signed URL can be asked: 31 years."""


@dataclass(frozen=True, slots=True)
class FragmentsParams:
    """The fragments to list. Times are Unix seconds and inclusive bounds; zero means no bound.

    With ``end_mod_time``, list only stored fragments. URLs are signed for ``signature_ttl_s``.
    """

    journal: str
    begin_mod_time: int = 0
    end_mod_time: int = 0
    begin_offset: Offset = 0
    page_limit: int = 0
    signature_ttl_s: float | None = None
    do_not_proxy: bool = False

    def validate(self) -> None:
        """Raise ``Invalid`` for a number that the request cannot hold. Brokers check the rest."""
        require_fit("BeginModTime", self.begin_mod_time)
        require_fit("EndModTime", self.end_mod_time)
        require_fit("NextPageToken", self.begin_offset)
        require_fit("PageLimit", self.page_limit, INT32)
        if self.signature_ttl_s is not None and not 0 < self.signature_ttl_s <= _TTL_MAX_S:
            raise Invalid(
                f"invalid SignatureTTL ({self.signature_ttl_s}; expected 0 < seconds <= {_TTL_MAX_S:g})"
            )

    def to_pb(self, page: Offset) -> broker_pb2.FragmentsRequest:
        ttl_s = self.signature_ttl_s
        return broker_pb2.FragmentsRequest(
            journal=self.journal,
            begin_mod_time=self.begin_mod_time,
            end_mod_time=self.end_mod_time,
            next_page_token=page,
            page_limit=self.page_limit,
            signatureTTL=None if ttl_s is None else duration.to_pb(int(ttl_s * 1e9)),
            do_not_proxy=self.do_not_proxy,
        )


CONFLICT_KEY: Final = "gazette-fragment-conflict"
"""Key in the trailing metadata of ListFragments: the names of two fragments that conflict."""
_NO_JOURNAL: Final = "gazette/probe"
"""A journal to ask for that need not exist: a broker answers with an empty list."""
APPLY_NOTE_KEY: Final = "gazette-apply-note"
"""Key in the trailing metadata of Apply: a note about a new journal, percent-encoded."""


@dataclass(frozen=True, slots=True)
class StoredFragment:
    """A fragment of the index. ``signed_url`` has a text if it was requested and the fragment is stored."""

    fragment: Fragment
    signed_url: str
    conflicts_with: tuple[str, ...] = ()
    """Names of fragments with the same begin and end, but other bytes. Brokers do not read them."""


_QUIET_ATTEMPTS: Final = 1
"""Number of retries that may fail without a warning: a broker may just have left the cluster."""


async def list_journals(client: BrokerAccess, selector: LabelSelector = EVERYTHING) -> JournalList:
    """Return all matching journals that the caller may list. Wait for a connection.

    Raise ``Invalid``, ``NotAllowed``, ``Unavailable`` or ``Broken``.
    """
    request = broker_pb2.ListRequest(selector=selector.to_pb())
    validate_list_request(request)
    header: Header | None = None
    journals: list[ListedJournal] = []
    async for page in _pages(client, request, selector):
        if header is None:
            header = _header(page)
        elif not page.journals:
            raise Broken("the broker sent an empty page of journals")
        journals.extend(_journals(page, header))
    if header is None:
        raise Broken("the broker ended a list before its first page")
    for journal in journals:
        client.observe_route(journal.spec.name, journal.route)
    return JournalList(header, tuple(journals))


async def watch_journals(
    client: BrokerAccess, selector: LabelSelector = EVERYTHING, *, resume: Header | None = None
) -> AsyncIterator[JournalList]:
    """Yield all matching journals, now and after each change of one of their specifications, without end.

    ``resume`` is the header of an earlier list: the first list is then newer than that. Begin the watch again
    after failures of brokers, and log their reason from the third failure on. Raise ``Invalid`` or
    ``NotAllowed`` if brokers refuse the watch, and ``Closed`` once the client is closed.
    """
    attempt = -1
    while True:
        request = broker_pb2.ListRequest(
            selector=selector.to_pb(),
            watch=True,
            watch_resume=None if resume is None else resume.to_pb(),
        )
        validate_list_request(request)
        try:
            async for snapshot in _snapshots(client, request, selector):
                if resume is not None and snapshot.header.etcd.revision <= resume.etcd.revision:
                    raise Broken("the broker answered a watch with a revision that is known")
                resume, attempt = snapshot.header, -1
                yield snapshot
        except (Retryable, Broken) as error:
            log.log(
                logging.WARNING if attempt >= _QUIET_ATTEMPTS else logging.DEBUG,
                "watch of journals failed and is retried: %(error)s",
                {"error": error},
                extra={"cause": f"watch {client.address}"},
            )
        attempt += 1
        await client.clock.sleep(backoff_s(attempt))


async def _snapshots(
    client: BrokerAccess, request: broker_pb2.ListRequest, selector: LabelSelector
) -> AsyncIterator[JournalList]:
    """Yield the lists of one watch. An empty page ends a list; the first page of each list has its header."""
    header: Header | None = None
    journals: list[ListedJournal] = []
    async for page in _pages(client, request, selector):
        if header is None:
            header = _header(page)
        elif not page.journals:
            yield JournalList(header, tuple(journals))
            header, journals = None, []
            continue
        journals.extend(_journals(page, header))


async def _pages(
    client: BrokerAccess, request: broker_pb2.ListRequest, selector: LabelSelector
) -> AsyncIterator[broker_pb2.ListResponse]:
    """Yield the pages of a list. If an address fails before its first page, ask another address.

    Raise ``NotAllowed`` or ``Broken``. Raise ``Unavailable`` if all addresses fail, or one after a page.
    """
    metadata = client.credentials.metadata(list_claims(selector), LONG_LIFETIME_S)
    wait_for_ready, started = client.addresses.wait_for_ready, False
    for attempts_left in reversed(range(client.addresses.attempts)):
        with map_errors("List", client.channels, endpoint=client.address):
            stub, endpoint = await client.connected()
            call: Any = stub.List(request, metadata=metadata, wait_for_ready=wait_for_ready)
        try:
            while True:
                with map_errors("List", client.channels, endpoint=endpoint):
                    page = await call.read()
                if page is END_OF_STREAM:
                    return
                started = True
                yield page
        except Unavailable:
            if started or not attempts_left:
                raise
        finally:
            call.cancel()


def _header(page: broker_pb2.ListResponse) -> Header:
    """Return the header of a first page. Raise the error of its status."""
    with answered("List"):
        validate_list_response(page)
    _require_ok(page.status)
    return Header.from_pb(page.header)


def _journals(page: broker_pb2.ListResponse, header: Header) -> tuple[ListedJournal, ...]:
    """Return the journals of a page that have a valid name. Raise ``Broken`` for a wrong revision or a wrong
    route."""
    with answered("List"):
        for index, journal in enumerate(page.journals):
            with within(f"Journals[{index}]"):
                validate_list_response_journal(journal)
    journals = []
    for journal in page.journals:
        spec = _understood(journal.spec)
        if spec is not None:
            journals.append(
                ListedJournal(
                    spec,
                    journal.mod_revision,
                    journal.create_revision,
                    Route.from_pb(journal.route),
                    header.etcd.cluster_id,
                )
            )
    return tuple(journals)


def _understood(pb: broker_pb2.JournalSpec) -> JournalSpec | None:
    """Return a journal's specification from a list; None if its name is invalid.

    Log a fault of one journal instead of raising it: callers list the other journals all the same.
    """
    try:
        with within("Spec"):
            spec, problem = listed_journal(pb)
    except Invalid as error:
        log.warning("a journal is left out of a list: %(error)s", {"error": error})
        return None
    if problem:
        log.warning(
            "the specification of journal %(journal)s is not valid here, and is listed all "
            "the same: %(problem)s",
            {"journal": pb.name, "problem": problem},
        )
    return spec


async def get_journal(client: BrokerAccess, name: str) -> ListedJournal:
    """Return one journal by its name (a metadata segment is ignored).

    Raise ``NotFound``, ``Invalid``, ``NotAllowed``, ``Unavailable`` or ``Broken``.
    """
    journal, _ = split_journal_meta(name)
    listed = await list_journals(client, LabelSelector.of(name=journal))
    if not listed.journals:
        raise NotFound("journal not found", journal=journal)
    return listed.journals[0]


async def apply_journals(
    client: BrokerAccess, changes: Sequence[JournalChange], *, batch_size: int = 0
) -> Header:
    """Change specifications: all of them, or none.

    A ``batch_size`` above zero splits the changes into transactions of that many. If a transaction fails, the
    earlier transactions stay. By default, etcd accepts 128 changes in a transaction. Return the header of the
    last transaction. Raise ``Conflict`` if a journal is not at the expected revision, ``Invalid``,
    ``NotAllowed``, ``Unavailable`` or ``Broken``. After a cancellation the changes may have been applied.

    Log a warning for a new journal if its stores already have fragments below its name.
    """
    size = batch_size or max(1, len(changes))
    header: Header | None = None
    for begin in range(0, max(1, len(changes)), size):
        header = await _apply(client, changes[begin : begin + size])
    assert header is not None
    return header


async def _apply(client: BrokerAccess, changes: Sequence[JournalChange]) -> Header:
    request = broker_pb2.ApplyRequest(changes=[change.to_pb() for change in changes])
    validate_apply_request(request)
    metadata = client.credentials.metadata(apply_claims(), SHORT_LIFETIME_S)
    with map_errors("Apply", client.channels, endpoint=client.address):
        stub, _ = await client.connected()
        wait = client.addresses.wait_for_ready
        call = stub.Apply(request, metadata=metadata, wait_for_ready=wait)
        response = await call
        trailing = await call.trailing_metadata()
    with answered("Apply"):
        validate_apply_response(response)
    _require_ok(response.status)
    for key, value in trailing:
        if key == APPLY_NOTE_KEY:
            log.warning("%(reason)s", {"reason": unquote(str(value))})
    return Header.from_pb(response.header)


async def list_fragments(
    client: BrokerAccess, params: FragmentsParams
) -> tuple[StoredFragment, ...]:
    """Return the fragments of a journal's index, by offset, over all pages.

    Raise ``Invalid`` for wrong parameters, ``NotFound``, ``NotAllowed`` (also for a suspended journal),
    ``Unavailable``, ``Moved`` or ``Broken``.
    """
    params.validate()
    fragments: list[StoredFragment] = []
    page = params.begin_offset
    while True:
        response, conflicts = await _fragments_page(client, params, page)
        for entry in response.fragments:
            fragment = Fragment.from_pb(entry.spec)
            hidden_names = tuple(conflicts.get(fragment.content_name(), ()))
            fragments.append(StoredFragment(fragment, entry.signed_url, hidden_names))
        if response.next_page_token == 0:
            return tuple(fragments)
        if response.next_page_token <= page:
            raise Broken("the broker answered a page of fragments with one before it", page=page)
        page = response.next_page_token


async def _fragments_page(
    client: BrokerAccess, params: FragmentsParams, page: Offset
) -> tuple[broker_pb2.FragmentsResponse, dict[str, list[str]]]:
    """Return a page, and for each fragment in it, by name, the names of fragments that it hides.

    Forget the route if the call fails.
    """
    request = params.to_pb(page)
    validate_fragments_request(request)
    endpoint = client.endpoint_of(params.journal)
    metadata = client.credentials.metadata(journal_claims(Capability.READ, params.journal))
    try:
        with map_errors(
            "ListFragments", client.channels, journal=params.journal, endpoint=endpoint
        ):
            call = client.channels.journal(endpoint).ListFragments(request, metadata=metadata)
            response: broker_pb2.FragmentsResponse = await call
            trailing = await call.trailing_metadata()
    except GazetteError:
        client.forget_route(params.journal)
        raise
    with answered("ListFragments"):
        validate_fragments_response(response)
    client.observe_route(params.journal, Route.from_pb(response.header.route))
    _require_ok(response.status, journal=params.journal)
    conflicts: dict[str, list[str]] = {}
    for key, value in trailing:
        if key == CONFLICT_KEY:
            kept_name, _, hidden_name = str(value).partition(" ")
            conflicts.setdefault(kept_name, []).append(hidden_name)
    return response, conflicts


async def journal_problems(
    client: BrokerAccess, endpoint: str, selector: LabelSelector = EVERYTHING
) -> dict[str, str]:
    """Return the problem of each matching journal, as one broker sees it, by name of the journal.

    Of many problems, the answer has only some. Raise ``NotAllowed``, ``Unavailable`` or ``Broken``.
    """
    return problems_in(await _asked(client, endpoint, selector))


async def broker_count(client: BrokerAccess) -> int | None:
    """Return the number of brokers of the cluster; None if a broker of another version does not report it.

    Raise ``NotAllowed``, ``Unavailable`` or ``Broken``.
    """
    _, endpoint = await client.connected()
    trailing = await _asked(client, endpoint, LabelSelector.of(name=_NO_JOURNAL))
    counts = [str(value) for key, value in trailing if key == BROKERS_KEY]
    return int(counts[0]) if counts and is_digits(counts[0]) else None


async def _asked(client: BrokerAccess, endpoint: str, selector: LabelSelector) -> Any:
    """Return the trailing metadata of a list that asks one broker for problems."""
    request = broker_pb2.ListRequest(selector=selector.to_pb())
    metadata = client.credentials.metadata(list_claims(selector), SHORT_LIFETIME_S)
    with map_errors("List", client.channels, endpoint=endpoint):
        stub = client.channels.journal(endpoint)
        call: Any = stub.List(request, metadata=(*metadata, *PROBLEMS_ASKED))
        try:
            while await call.read() is not END_OF_STREAM:
                pass  # A broker of another version does not know the question, and lists its journals.
            trailing = await call.trailing_metadata()
        finally:
            call.cancel()
    return trailing


async def fragment_store_health(
    client: BrokerAccess,
    store: str,
    *,
    check_delete: bool = False,
    check_delete_prefix: str = "",
    endpoint: str = "",
) -> str:
    """Return the problem that a broker has with a fragment store; empty if the store works.

    ``endpoint`` is the endpoint of the broker (default: any). ``check_delete`` also checks that objects below
    ``check_delete_prefix`` can be removed. Raise ``Invalid``, ``NotAllowed``, ``Unavailable`` or ``Broken``.
    """
    request = broker_pb2.FragmentStoreHealthRequest(
        fragment_store=store, check_delete=check_delete, check_delete_prefix=check_delete_prefix
    )
    validate_health_request(request)
    metadata = client.credentials.metadata(Claims(Capability.READ))
    with map_errors("FragmentStoreHealth", client.channels, endpoint=endpoint or client.address):
        stub = client.channels.journal(endpoint) if endpoint else (await client.connected())[0]
        wait = client.addresses.wait_for_ready
        response = await stub.FragmentStoreHealth(request, metadata=metadata, wait_for_ready=wait)
    with answered("FragmentStoreHealth"):
        validate_health_response(response)
    if response.status == Status.FRAGMENT_STORE_UNHEALTHY:
        return response.store_health_error or "the store is unhealthy"
    _require_ok(response.status)
    return ""


def _require_ok(value: int, **facts: Any) -> None:
    status = Status.from_pb(value)
    if status is not Status.OK:
        raise status_error(status, **facts)
