"""Routes of shards to the members that serve them, and the shards that this member serves.

The resolver observes the key space right after the allocator's `State`. So routes and local shards change in
the same step of the event loop as their keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gazette.auth import Claims
from gazette.cluster.allocator.model import DecodedKV
from gazette.cluster.allocator.routes import etcd_header, route_of, with_endpoints
from gazette.cluster.allocator.state import LocalItem, State
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.consumer.application import Store
from gazette.consumer.key_space import ShardItem
from gazette.consumer.shard.restarts import ANNOUNCED
from gazette.consumer.shard.shard import Shard
from gazette.errors import Closed, Invalid, Unavailable
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header, Route
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSpec
from gazette.protocol.status import ShardStatus
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

MISSING_ID: Final = ProcessId("local-ConsumerSpec", "missing-from-Etcd")
"""Id of this member while its own key is not in etcd: the member can still forward calls."""

STOPPED: Final = "resolver has stopped serving local shards"


@dataclass(frozen=True, slots=True)
class Resolution:
    """The members that serve a shard, at one revision of the key space.

    With status OK, ``header.process_id`` is the primary. If this member is the primary, ``shard`` and
    ``store`` are set, and the shard has read through the requested offsets.
    """

    status: ShardStatus
    header: Header
    shard_id: str
    spec: ShardSpec | None
    """None if the shard does not exist, or if the caller's claims do not cover it."""
    shard: Shard | None
    store: Store | None
    local_id: ProcessId

    @property
    def is_local(self) -> bool:
        return self.shard is not None


@dataclass(slots=True)
class _LocalShard:
    """A local shard, and the revisions of its keys: after a change, `Resolver` may have to start it again."""

    shard: Shard
    create_revision: int
    item_revision: int
    slot: int


class Resolver:
    """Owner of this member's shards: it creates, starts, promotes and stops them as assignments change."""

    def __init__(
        self,
        key_space: KeySpace,
        state: State,
        scope: TaskScope,
        new_shard: Callable[[DecodedKV, DecodedKV], Shard],
    ) -> None:
        self._ks = key_space
        self._state = state
        self._scope = scope
        self._new_shard = new_shard
        self._local: dict[str, _LocalShard] = {}
        self._by_source: dict[str, list[ShardSpec]] | None = None
        """Shards by the journals that they read. None after a change of the key space."""
        self._stops: dict[asyncio.Task[None], str] = {}
        """Tasks that stop shards, with the ids of the shards."""
        self._changed = asyncio.Event()
        self.stopped = asyncio.Event()

    @property
    def local_id(self) -> ProcessId:
        member = self._state.local_member
        if member is None:
            return MISSING_ID
        return ProcessId(member.decoded.zone, member.decoded.suffix)

    @property
    def local_shards(self) -> Mapping[str, Shard]:
        """The shards of this member, primaries and standbys, by their ids. For any thread."""
        return {shard_id: local.shard for shard_id, local in self._local.items()}

    def shards_with_source(self, journal: str) -> tuple[ShardSpec, ...]:
        """Return the specifications of shards that read a journal, also of disabled ones, in order of ids."""
        if self._by_source is None:
            by_source: defaultdict[str, list[ShardSpec]] = defaultdict(list)
            for kv in self._state.items:
                spec: ShardSpec = kv.decoded.value.spec
                for source in spec.sources:
                    by_source[source.journal].append(spec)
            self._by_source = dict(by_source)
        return tuple(self._by_source.get(journal, ()))

    def shards(self, selector: LabelSelector) -> tuple[ShardSpec, ...]:
        """Return the specifications of shards that match, in order of ids."""
        specs: list[ShardSpec] = [kv.decoded.value.spec for kv in self._state.items]
        return tuple(spec for spec in specs if selector.matches(spec.labels_with_id()))

    def etcd_header(self) -> EtcdHeader:
        return etcd_header(self._ks)

    def unrouted_header(self) -> Header:
        """Return the header of responses that are not about one shard."""
        local_id = self.local_id
        return Header(None if local_id is MISSING_ID else local_id, EMPTY_ROUTE, self.etcd_header())

    def with_endpoints(self, route: Route) -> Route:
        """Return the route with the endpoints of its members; ``""`` for a member whose key is gone."""
        return with_endpoints(route, self._state)

    async def resolve(
        self,
        shard_id: str,
        *,
        claims: Claims,
        may_proxy: bool,
        proxy_header: Header | None = None,
        read_through: Mapping[str, int] | None = None,
        on_wait: Callable[[Callable[[], str]], None] = lambda describe: None,
    ) -> Resolution:
        """Resolve a shard to its primary. First wait for the revision of ``proxy_header``.

        If this member is the primary, wait until the store is open and the shard has read through the given
        offsets. Ignore offsets of journals that are not its sources. The caller bounds the wait. Before a
        wait, call ``on_wait`` with a function that describes the wait.

        Raise ``Invalid`` if ``proxy_header`` is meant for another cluster or member. Raise
        ``Closed`` if this member is the primary and has stopped serving.
        """
        if proxy_header is not None:
            self._check_proxy_header(proxy_header)
            if proxy_header.etcd.revision > self._ks.header.revision:
                await self._ks.wait_for_revision(proxy_header.etcd.revision)
        resolution = self._resolve_now(shard_id, claims, may_proxy)
        if resolution.status is not ShardStatus.OK:
            return resolution
        if resolution.header.process_id != resolution.local_id:
            return resolution
        return await self._await_local(resolution, read_through or {}, on_wait)

    def _check_proxy_header(self, header: Header) -> None:
        """Raise ``Invalid`` for a header that is meant for another cluster, or for another member."""
        own_id = self._ks.header.cluster_id
        if header.etcd.cluster_id != own_id:
            raise Invalid(
                f"request Etcd ClusterId doesn't match our own ({header.etcd.cluster_id} vs {own_id})",
                hint="The caller belongs to another cluster: check its address.",
            )
        if header.process_id is not None and header.process_id != self.local_id:
            raise Invalid(
                f"request ProcessId doesn't match our own ({header.process_id} vs {self.local_id})",
                hint="No action: another member took the endpoint over; resolve again.",
            )

    def _resolve_now(self, shard_id: str, claims: Claims, may_proxy: bool) -> Resolution:
        """Return the resolution by the present key space; do not set ``shard`` and ``store``."""
        local_id = self.local_id
        item = self._state.item(shard_id)
        spec: ShardSpec | None = None
        route = EMPTY_ROUTE
        if item is not None:
            value: ShardItem = item.decoded.value
            # To the caller, a shard that its claims do not cover does not exist.
            if claims.selector.matches(value.spec.labels_with_id()):
                spec = value.spec
                route = self.with_endpoints(route_of(self._state.assignments_of(shard_id)))
        primary = route.primary_id
        status = ShardStatus.OK
        if spec is None:
            status = ShardStatus.SHARD_NOT_FOUND
        elif primary is None:
            status = ShardStatus.NO_SHARD_PRIMARY
        elif not may_proxy and primary != local_id:
            status = ShardStatus.NOT_SHARD_PRIMARY
        process_id = primary if status is ShardStatus.OK else local_id
        header = Header(process_id, route, self.etcd_header())
        return Resolution(status, header, shard_id, spec, None, None, local_id)

    async def _await_local(
        self,
        resolution: Resolution,
        read_through: Mapping[str, int],
        on_wait: Callable[[Callable[[], str]], None],
    ) -> Resolution:
        """Wait until the local shard can answer, and add the shard and its store to the resolution.

        If there is no local shard, or it ends, the status is SHARD_STOPPED. See `resolve`, also for the
        errors.
        """
        if self.stopped.is_set():
            raise Closed(STOPPED, shard=resolution.shard_id)
        local = self._local.get(resolution.shard_id)
        stopped = replace(resolution, status=ShardStatus.SHARD_STOPPED)
        if local is None:
            return stopped
        shard = local.shard
        on_wait(lambda: "its store is not open yet")
        await shard.store_ready.wait()
        if shard.ended.is_set() or shard.store is None:
            return stopped
        wanted = shard.awaited(read_through)
        if not shard.progress.has(wanted):
            on_wait(lambda: shard.progress.describe(wanted))
            async with TaskScope(f"read through {shard.id}") as scope:
                reached = scope.spawn(shard.progress.wait(wanted), name="reached")
                ended = scope.spawn(shard.ended.wait(), name="ended")
                await asyncio.wait({reached, ended}, return_when=asyncio.FIRST_COMPLETED)
                scope.cancel()
            if shard.ended.is_set():
                return stopped
        return replace(resolution, shard=shard, store=shard.store)

    def standby(self, shard_id: str, claims: Claims) -> Shard | None:
        """Return the local replica if it is a standby that plays its log, and ``claims`` cover the shard."""
        local = self._local.get(shard_id)
        if local is None or local.shard.reads is None or not self._covers(shard_id, claims):
            return None
        return local.shard

    def standby_headers(self, shard_id: str, claims: Claims) -> tuple[Header, ...]:
        """Return a header for each other member that is a ready standby of a shard, for a call to it."""
        if not self._covers(shard_id, claims):
            return ()
        assignments = self._state.assignments_of(shard_id)
        route = self.with_endpoints(route_of(assignments))
        ready = [
            ProcessId(kv.decoded.zone, kv.decoded.suffix)
            for kv in assignments
            if kv.decoded.slot and kv.decoded.value.code is ReplicaCode.STANDBY
        ]
        return tuple(
            Header(member, route, self.etcd_header()) for member in ready if member != self.local_id
        )

    def _covers(self, shard_id: str, claims: Claims) -> bool:
        item = self._state.item(shard_id)
        return item is not None and claims.selector.matches(
            item.decoded.value.spec.labels_with_id()
        )

    def primary_of(self, shard_id: str) -> ProcessId | None:
        """Return the member that is now assigned as primary of a shard; None if there is no primary."""
        return route_of(self._state.assignments_of(shard_id)).primary_id

    def failure_of(self, shard_id: str) -> str:
        """Return the error of a primary that has failed and will not be restarted; otherwise ``""``."""
        for kv in self._state.assignments_of(shard_id):
            status: ReplicaStatus = kv.decoded.value
            if kv.decoded.slot == 0 and status.code is ReplicaCode.FAILED:
                text = "\n".join(status.errors)
                return "" if ANNOUNCED in text else text
        return ""

    async def next_change(self) -> None:
        """Return after the next change of the key space. The caller bounds the wait."""
        await self._changed.wait()

    def update(self) -> None:
        """Follow the key space, as its observer. Call it after ``State.observe``."""
        self._by_source = None
        self._changed.set()  # Wake all waiters. Later waits are for the next change.
        self._changed = asyncio.Event()
        if self.stopped.is_set():
            return
        former, present = dict(self._local), {}
        for local_item in self._state.local_items:
            shard_id: str = local_item.item.decoded.id
            present[shard_id] = self._follow_assignment(former.pop(shard_id, None), local_item)
        # Replace the mapping and never change it, since the thread that collects metrics reads it.
        self._local = present
        for shard_id, stopped in former.items():
            self._stop(shard_id, stopped)

    def _follow_assignment(
        self, local_shard: _LocalShard | None, local_item: LocalItem
    ) -> _LocalShard:
        """Start, promote or restart a local shard, and return it. ``local_shard`` is the present one, if any.

        A promotion moves the assignment to another key, with another creation revision. Any other change of
        that revision means that the assignment was deleted meanwhile: start the shard again. Start the shard
        again also if its specification was deleted and written again.
        """
        assignment = local_item.assignment
        slot: int = assignment.decoded.slot
        create_revision = assignment.raw.create_revision
        item_revision = local_item.item.raw.create_revision
        if local_shard is not None:
            moved_up = slot < local_shard.slot
            is_same = moved_up or create_revision == local_shard.create_revision
            if moved_up and local_shard.shard.failure is not None:
                # A promotion keeps the status. So a status without a failure shows a new assignment: the
                # failed assignment was deleted, or could not report its failure.
                is_same = assignment.decoded.value.code is ReplicaCode.FAILED
            if not is_same or item_revision != local_shard.item_revision:
                self._stop(local_item.item.decoded.id, local_shard)
                local_shard = None
        if local_shard is None:
            shard = self._new_shard(local_item.item, assignment)
            shard.start(primary=slot == 0)
            return _LocalShard(shard, create_revision, item_revision, slot)
        local_shard.shard.assignment, local_shard.shard.spec = (
            assignment,
            local_item.item.decoded.value.spec,
        )
        if slot == 0 and local_shard.slot != 0:
            local_shard.shard.promote(assignment)
        local_shard.create_revision, local_shard.slot = create_revision, slot
        return local_shard

    def _stop(self, shard_id: str, local_shard: _LocalShard) -> None:
        task = self._scope.spawn(local_shard.shard.stop(), name=f"stop {shard_id}")
        self._stops[task] = shard_id
        task.add_done_callback(lambda ended_task: self._stops.pop(ended_task, None))

    def stop_serving(self) -> None:
        """Stop all local shards, for good."""
        self.stopped.set()
        former, self._local = self._local, {}
        for shard_id, stopped in former.items():
            self._stop(shard_id, stopped)

    async def wait_stopped(self, timeout_s: float) -> None:
        """Wait until every stopped shard has ended. Raise ``Unavailable`` with the names of the others."""
        if not self._stops:
            return
        _, pending = await asyncio.wait(set(self._stops), timeout=timeout_s)
        if pending:
            names = sorted(self._stops[task] for task in pending if task in self._stops)
            raise Unavailable(
                "shards did not stop in time",
                hint="A callback of the application does not return.",
                shards=", ".join(names),
                timeout_s=timeout_s,
            )
