"""The routes of journals, and the replicas that this broker serves.

The resolver observes the key space after the allocator's `State`. It changes routes and local replicas in the
same step of the loop as the keys behind them. So each task sees both, or neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from gazette.auth import Claims
from gazette.broker.append.events import Resolved
from gazette.broker.append.rules import resume_offset
from gazette.broker.key_space import MISSING_ID, JournalItem, local_id_of, tenure_of
from gazette.cluster.allocator.model import DecodedKV
from gazette.cluster.allocator.routes import etcd_header, route_of, with_endpoints
from gazette.cluster.allocator.state import LocalItem, State
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Closed, Invalid, Unavailable
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset, ProcessId, Revision, split_journal_meta
from gazette.protocol.journal import JournalSpec, SuspendLevel
from gazette.protocol.label_set import EVERYTHING, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header, Route
from gazette.protocol.status import Status
from gazette.runtime.latch import Latch
from gazette.runtime.long_lived import LongLived
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.broker.replica import Replica

STOPPED: Final = "resolver has stopped serving local replicas"


@dataclass(frozen=True)
class Resolution:
    """Which broker serves a journal, as of one revision of the key space.

    With a status that is not OK, the header names this broker. With OK, ``header.process_id`` names the
    broker that should serve the request: this broker if it equals ``local_id``, any member if it is None.
    ``invalidated`` is set once an assignment was written, the stores have changed, or the local replica has
    ended. Without a local replica, neither ``invalidated`` nor ``reassigned`` is ever set.
    """

    status: Status
    header: Header
    journal: str
    """The journal's name, without a metadata segment."""
    spec: JournalSpec | None
    """None if the journal does not exist, or if the caller's claims do not cover it."""
    item_kv: DecodedKV | None
    assignments: tuple[DecodedKV, ...]
    """All assignments of the journal, in key order."""
    replica: Replica | None
    """The local replica, even if another broker should serve this request."""
    invalidated: Latch
    reassigned: Latch
    """Set once the replica has another primary or other members than in this resolution, or has ended."""
    local_id: ProcessId
    desired_replication: int
    seen_revision: Revision
    """Revision up to which all changes are known. To wait for a change, resolve at the next revision. The
    revision in ``header`` may be older."""

    @cached_property
    def as_event(self) -> Resolved:
        """The resolution as an event for an append that holds no pipeline."""
        return Resolved(
            status=self.status,
            route=self.header.route,
            revision=self.seen_revision,
            is_primary=self.is_local,
            spec=self.spec,
            stored_routes=tuple(kv.decoded.value for kv in self.assignments),
            desired_replication=self.desired_replication,
        )

    @cached_property
    def tenure(self) -> Revision:
        """Creation revision of the primary's assignment; 0 if there is no primary."""
        return tenure_of(self.assignments)

    @cached_property
    def header_pb(self) -> broker_pb2.Header:
        """The header, encoded once for all responses with it. Do not change it."""
        return self.header.to_pb()

    @cached_property
    def append_header(self) -> bytes:
        """The header as a field of an encoded ``AppendResponse``."""
        return broker_pb2.AppendResponse(header=self.header_pb).SerializeToString()

    @cached_property
    def takes_content(self) -> bool:
        """Whether this broker leads the journal, and all replicas are in step, as etcd records it.

        False for a journal that is suspended or read-only, or whose rate is limited.
        """
        spec, route = self.spec, self.header.route
        return (
            self.is_local
            and self.status is Status.OK
            and spec is not None
            and spec.may_write
            and spec.suspend_level is SuspendLevel.NONE
            and not spec.max_append_rate
            and len(route.members) == self.desired_replication == len(self.assignments)
            and all(kv.decoded.value.equivalent(route) for kv in self.assignments)
        )

    @cached_property
    def resume_at(self) -> Offset:
        """The offset from which the journal goes on, as its specification says; 0 for no specification."""
        return 0 if self.spec is None else resume_offset(self.spec)

    @property
    def local_replica(self) -> Replica:
        """The local replica, which must exist."""
        assert self.replica is not None
        return self.replica

    @property
    def is_local(self) -> bool:
        return self.header.process_id == self.local_id

    @property
    def awaits_assignment(self) -> bool:
        """True if the call needs the primary, and the journal has no brokers now, but is to get some."""
        without_primary = self.status is Status.NO_JOURNAL_PRIMARY_BROKER
        return without_primary and not self.assignments and self.desired_replication > 0


@dataclass(slots=True)
class _ReplicaEntry:
    """A local replica, and the assignments with which it was last resolved."""

    replica: Replica
    local: LocalItem
    invalidated: Latch = field(default_factory=Latch)
    reassigned: Latch = field(default_factory=Latch)


@dataclass(slots=True)
class _CachedJournal:
    """A journal as the key space had it at ``seen_revision``."""

    seen_revision: Revision
    item: DecodedKV
    value: JournalItem
    labels: LabelSet
    assignments: tuple[DecodedKV, ...]
    route: Route
    resolutions: dict[tuple[bool, bool], Resolution] = field(default_factory=dict)
    """Resolutions by ``may_proxy`` and ``require_primary``, for callers whose claims cover the journal."""


class Resolver:
    """Owns this broker's replicas: makes, starts and shuts them down as assignments come and go.

    ``new_replica`` makes a replica of a journal that was created at the given revision. ``open_store`` is
    called with each store of a journal that this broker gets: then the store's health is known early. Both
    functions must neither block nor raise.

    If a journal has no brokers, a call for its primary waits ``assignment_wait_s`` seconds for them. A
    journal that was just applied gets its brokers soon.
    """

    def __init__(
        self,
        key_space: KeySpace,
        state: State,
        scope: TaskScope,
        new_replica: Callable[[str, Revision], Replica],
        open_store: Callable[[str], object],
        *,
        assignment_wait_s: float = 0.0,
    ) -> None:
        self._assignment_wait_s = assignment_wait_s
        self._ks = key_space
        self._state = state
        self._scope = scope
        self._new_replica = new_replica
        self._open_store = open_store
        self._entries: dict[str, _ReplicaEntry] = {}
        self._etcd_header = key_space.header, etcd_header(key_space)
        self._long_lived = LongLived()
        self._cached: dict[str, _CachedJournal] = {}
        """Journals as they were last resolved, by name."""
        self._members: Sequence[DecodedKV] = ()
        """The members whose endpoints are in ``_cached``."""
        self._torn_down: dict[asyncio.Task[None], str] = {}
        """Replicas that shut down now: the journal of each by its task."""
        self.stopped = asyncio.Event()
        """Set once local replicas are no longer served: proxied streams then end, too."""

    @property
    def local_id(self) -> ProcessId:
        return local_id_of(self._state)

    @property
    def journals(self) -> tuple[str, ...]:
        """The journals of which this broker holds a replica."""
        return tuple(self._entries)

    @property
    def replicas(self) -> Iterator[Replica]:
        """The replicas that this broker holds."""
        return (entry.replica for entry in self._entries.values())

    def etcd_header(self) -> EtcdHeader:
        if self._etcd_header[0] is not self._ks.header:
            self._etcd_header = self._ks.header, etcd_header(self._ks)
        return self._etcd_header[1]

    def unrouted_header(self) -> Header:
        """Return the header of responses that are not about a single journal."""
        local_id = self.local_id
        return Header(None if local_id is MISSING_ID else local_id, EMPTY_ROUTE, self.etcd_header())

    async def resolve(
        self,
        journal: str,
        *,
        claims: Claims,
        may_proxy: bool,
        require_primary: bool,
        min_etcd_revision: int = 0,
        proxy_header: Header | None = None,
    ) -> Resolution:
        """Resolve ``journal`` (a metadata segment is ignored) at the revisions asked for, or later.

        Raise ``Invalid`` if ``proxy_header`` is meant for another cluster or broker. Raise ``Closed`` if
        this broker has the journal and has stopped serving. If a revision does not arrive, wait without
        bound: the deadline of the call ends the wait.
        """
        revision = min_etcd_revision
        if proxy_header is not None:
            self._check_proxy_header(proxy_header)
            revision = max(revision, proxy_header.etcd.revision)
        if revision > self._ks.header.revision:
            await self._ks.wait_for_revision(revision)
        name = split_journal_meta(journal)[0]
        resolution = self._resolved(name, claims, may_proxy, require_primary)
        if self._may_appear(resolution):
            with suppress(TimeoutError):
                async with timeout(self._assignment_wait_s):
                    await self._ks.next_change()
            resolution = self._resolved(name, claims, may_proxy, require_primary)
        if not resolution.awaits_assignment:
            return resolution
        # The journal may be new. Wait until the allocator has assigned brokers to it.
        with suppress(TimeoutError):
            async with timeout(self._assignment_wait_s):
                while not self.stopped.is_set():
                    await self._ks.next_change()
                    resolution = self._resolved(name, claims, may_proxy, require_primary)
                    if not resolution.awaits_assignment:
                        break
        return resolution

    def resolve_now(
        self, journal: str, *, claims: Claims, may_proxy: bool, min_etcd_revision: int = 0
    ) -> Resolution | None:
        """Resolve the primary of ``journal`` without a wait. Return None if the call must wait.

        Raise ``Closed`` if this broker has the journal and has stopped serving. Until the key space changes,
        return the same resolution.
        """
        if min_etcd_revision > self._ks.header.revision:
            return None
        name = split_journal_meta(journal)[0]
        resolution = self._resolved(name, claims, may_proxy, require_primary=True)
        waits = resolution.awaits_assignment or self._may_appear(resolution)
        return None if waits else resolution

    def is_present(self, resolution: Resolution) -> bool:
        """Return True if ``resolve_now``, which has returned ``resolution``, would return it again now."""
        return resolution.seen_revision == self._ks.seen_revision and not self.stopped.is_set()

    def _may_appear(self, resolution: Resolution) -> bool:
        """Return True if the journal is missing, but changes of etcd that are not applied yet may create it.

        Another broker may have applied these changes, and its answer may have reached the caller. This broker
        applies them within a second, if its watch delay is no longer.
        """
        return resolution.status is Status.JOURNAL_NOT_FOUND and self._ks.has_pending

    def _check_proxy_header(self, header: Header) -> None:
        own_id = self._ks.header.cluster_id
        if header.etcd.cluster_id != own_id:
            raise Invalid(
                f"request Etcd ClusterId doesn't match our own ({header.etcd.cluster_id} vs {own_id})",
                hint="The caller belongs to another cluster: check its broker address.",
            )
        if header.process_id is not None and header.process_id != self.local_id:
            raise Invalid(
                f"request ProcessId doesn't match our own ({header.process_id} vs {self.local_id})",
                hint="No action: another broker has taken over the endpoint that the caller asked. The "
                "caller resolves the journal again.",
            )

    def _resolved(
        self, journal: str, claims: Claims, may_proxy: bool, require_primary: bool
    ) -> Resolution:
        """Resolve a journal as of now, from a cache until the key space changes.

        Raise ``Closed`` if this broker should serve the journal, and has stopped serving.
        """
        cached, seen_revision = self._cached.get(journal), self._ks.seen_revision
        if cached is None or cached.seen_revision != seen_revision:
            cached = self._find(journal)
        if cached is None or not (
            claims.selector is EVERYTHING or claims.selector.matches(cached.labels)
        ):
            # If the claims do not cover a journal, it must look like one that does not exist.
            return self._resolution(journal, None, may_proxy, require_primary)
        key = may_proxy, require_primary
        resolution = cached.resolutions.get(key)
        if resolution is None or resolution.seen_revision != seen_revision:
            resolution = self._resolution(journal, cached, may_proxy, require_primary)
            cached.resolutions[key] = resolution
        return resolution

    def _resolution(
        self, journal: str, cached: _CachedJournal | None, may_proxy: bool, require_primary: bool
    ) -> Resolution:
        """Return a new resolution. ``cached`` is None if the journal is missing, or hidden from the caller.

        Raise ``Closed`` if this broker should serve the journal, and has stopped serving.
        """
        local_id = self.local_id
        route = EMPTY_ROUTE if cached is None else cached.route
        process_id = local_id if local_id in route.members else None
        if require_primary:
            process_id = route.primary_id
        status = _status(cached, process_id, local_id, may_proxy, require_primary)
        if status is not Status.OK:
            process_id = local_id

        entry = None if cached is None else self._entries.get(journal)
        if entry is None and status is Status.OK and process_id == local_id:
            raise Closed(STOPPED, journal=journal)
        return Resolution(
            status=status,
            header=Header(process_id, route, self.etcd_header()),
            journal=journal,
            spec=None if cached is None else cached.value.spec,
            item_kv=None if cached is None else cached.item,
            assignments=() if cached is None else cached.assignments,
            replica=None if entry is None else entry.replica,
            invalidated=Latch() if entry is None else entry.invalidated,
            reassigned=Latch() if entry is None else entry.reassigned,
            local_id=local_id,
            desired_replication=0 if cached is None else cached.value.desired_replication(),
            seen_revision=self._ks.seen_revision,
        )

    def _find(self, journal: str) -> _CachedJournal | None:
        """Return the journal in the key space, from a cache until it changes; None if it does not exist."""
        item = self._state.item(journal)
        if item is None:
            return None
        assignments = self._state.assignments_of(journal)
        cached, seen_revision = self._cached.get(journal), self._ks.seen_revision
        if cached is not None and cached.item is item and cached.assignments is assignments:
            cached.seen_revision = seen_revision
            return cached
        value: JournalItem = item.decoded.value
        route = self.with_endpoints(route_of(assignments))
        cached = _CachedJournal(seen_revision, item, value, value.labels, assignments, route)
        self._cached[journal] = cached
        return cached

    def with_endpoints(self, route: Route) -> Route:
        """Return the route with the endpoints of its members; ``""`` for a member without a key."""
        return with_endpoints(route, self._state)

    def update(self) -> None:
        """Update routes and replicas from the key space: an observer that follows ``State.observe``."""
        if self._members != self._state.members or len(self._cached) > len(self._state.items):
            self._members = self._state.members
            self._cached.clear()  # Endpoints may have changed, or journals were deleted.
        if self.stopped.is_set():
            return
        before, self._entries = self._entries, {}
        for local in self._state.local_items:
            journal: str = local.item.decoded.id
            entry = before.pop(journal, None)
            if entry is None or entry.local is not local:  # Usually, nothing has changed.
                entry = self._updated(journal, entry, local)
            self._entries[journal] = entry
        for journal, entry in before.items():
            self._tear_down(journal, entry)

    def _updated(
        self, journal: str, entry: _ReplicaEntry | None, local: LocalItem
    ) -> _ReplicaEntry:
        """Return the replica to hold for a journal. ``entry`` is the present replica.

        A replica serves one life of a journal: after a deletion and creation, the journal gets another
        replica. A replica also serves one assignment. Before the next assignment, the journal may have been
        assigned to brokers that never saw the replica's bytes. A demoted primary is replaced. A promoted
        replica stays.
        """
        if entry is not None and not _is_continued(entry.local, local):
            self._tear_down(journal, entry)
            entry = None
        stores = _stores(local)
        if entry is None or _stores(entry.local) != stores:
            for url in stores:
                self._open_store(url)
        if entry is None:
            replica = self._new_replica(journal, local.item.raw.create_revision)
            self._long_lived.add()
            replica.start()
            return _ReplicaEntry(replica, local)
        before, entry.local = entry.local, local
        if _stores(before) != stores:
            entry.replica.list_now()
        if _writes(before) != _writes(local) or _stores(before) != stores:
            entry.invalidated.set()
            entry.invalidated = Latch()
            entry.replica.route_changed()
        if _members(before) != _members(local):
            entry.reassigned.set()
            entry.reassigned = Latch()
        return entry

    def is_primary(self, journal: str) -> bool:
        """Return True if this broker is the primary of ``journal``, and serves it."""
        entry = self._entries.get(journal)
        return entry is not None and entry.local.assignment.decoded.slot == 0

    def relies_on(self, fragment: Fragment) -> bool:
        """Return True if the journal, as it exists now, may rely on a stored object of exactly ``fragment``.

        Only a replica knows this. Without a replica here, return True for any journal that exists.
        """
        entry = self._entries.get(fragment.journal)
        if entry is not None:
            return entry.replica.relies_on(fragment)
        return self._state.item(fragment.journal) is not None

    def stored(self, fragment: Fragment) -> None:
        """Record at the journal's replica, if one is here, that a store has ``fragment``."""
        entry = self._entries.get(fragment.journal)
        if entry is not None:
            entry.replica.stored(fragment)

    def _tear_down(self, journal: str, entry: _ReplicaEntry) -> None:
        self._cached.pop(journal, None)  # Cached resolutions refer to the replica.
        entry.invalidated.set()
        entry.reassigned.set()
        task = self._scope.spawn(entry.replica.shut_down(), name=f"shut-down {journal}")
        self._torn_down[task] = journal
        task.add_done_callback(lambda done: self._torn_down.pop(done, None))

    def stop_serving(self) -> None:
        """Give up all local replicas, for good. Each hands over its spool once the spool is free."""
        self.stopped.set()
        self._cached.clear()
        former, self._entries = self._entries, {}
        for journal, entry in former.items():
            self._tear_down(journal, entry)

    async def wait_torn_down(self, timeout_s: float) -> None:
        """Return when each replica that was given up has handed its spool to the persister.

        After ``timeout_s``, raise ``Unavailable`` with the journals of the other replicas.
        """
        if not self._torn_down:
            return
        _, pending = await asyncio.wait(set(self._torn_down), timeout=timeout_s)
        if pending:
            journals = sorted(self._torn_down[task] for task in pending if task in self._torn_down)
            raise Unavailable(
                "replicas did not shut down in time",
                hint="Find the peer or client that holds their spools, whose content may not be stored yet.",
                journals=", ".join(journals),
                timeout_s=timeout_s,
            )


def _is_continued(before: LocalItem, now: LocalItem) -> bool:
    """Return True if a replica that was made for ``before`` may serve ``now``."""
    if before.item.raw.create_revision != now.item.raw.create_revision:
        return False
    # A replica that has led never follows: a new replica follows in its place.
    if before.assignment.decoded.slot == 0 and now.assignment.decoded.slot != 0:
        return False
    # With another revision, the assignment was removed, and added again under the same key.
    if before.assignment.key == now.assignment.key:
        return before.assignment.raw.create_revision == now.assignment.raw.create_revision
    # A move to another slot keeps the value. An empty value says: added just now, or never advertised.
    return bool(now.assignment.raw.value)


def _stores(local: LocalItem) -> tuple[str, ...]:
    stores: tuple[str, ...] = local.item.decoded.value.spec.fragment.stores
    return stores


def _writes(local: LocalItem) -> list[tuple[str, Revision]]:
    """Return the keys of all assignments, each with the revision of its last write."""
    return [(kv.key, kv.raw.mod_revision) for kv in local.assignments]


def _members(local: LocalItem) -> set[tuple[str, Revision]]:
    """Return the keys of all assignments, each with its creation revision. These pairs identify the replicas
    that were in step."""
    return {(kv.key, kv.raw.create_revision) for kv in local.assignments}


def _status(
    cached: _CachedJournal | None,
    process_id: ProcessId | None,
    local_id: ProcessId,
    may_proxy: bool,
    require_primary: bool,
) -> Status:
    """Return the status of a resolution. The first rule that applies decides."""
    if cached is None:
        return Status.JOURNAL_NOT_FOUND
    if cached.value.spec.suspend_level is SuspendLevel.FULL:
        return Status.SUSPENDED
    if require_primary and cached.route.primary is None:
        return Status.NO_JOURNAL_PRIMARY_BROKER
    if not cached.route.members:
        return Status.INSUFFICIENT_JOURNAL_BROKERS
    if not may_proxy and process_id != local_id:
        return Status.NOT_JOURNAL_PRIMARY_BROKER if require_primary else Status.NOT_JOURNAL_BROKER
    return Status.OK
