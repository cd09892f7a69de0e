"""A journal's replica at this broker: its spool, pipeline and index. Spool and pipeline are handed from
owner to owner. Listings and pulses keep the replica in step with blob stores and peers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from gazette.broker.append.flow_control import RateBalance
from gazette.broker.append.line import Line
from gazette.broker.append.sessions import SessionLedger
from gazette.broker.closings import Closings
from gazette.broker.deleted_journals import deleted_below
from gazette.broker.head_readers import HeadReaders
from gazette.broker.key_space import are_in_step, local_id_of, spec_of
from gazette.broker.known_head import KnownHead
from gazette.broker.replication.other_followers import Incarnation, OtherFollowers
from gazette.broker.replication.pipeline import Pipeline, roll_back
from gazette.broker.replication.upload_gate import UploadGate
from gazette.cluster.allocator.model import item_key
from gazette.cluster.allocator.routes import route_of
from gazette.errors import Closed, Conflict, GazetteError, Unavailable
from gazette.fragment import metrics
from gazette.fragment.completed_spool import CompletedSpool
from gazette.fragment.conflicts import FragmentCover
from gazette.fragment.emptied_stores import EmptiedStore, EmptiedStores
from gazette.fragment.index import Index
from gazette.fragment.listing import list_fragments
from gazette.fragment.local_file import LocalFragment
from gazette.fragment.set_aside import SetAside
from gazette.fragment.spool import Proposal
from gazette.fragment.spool_file import Spool
from gazette.fragment.unexplained import NONE, Unexplained
from gazette.protocol.fragment import ZERO_SUM, Fragment
from gazette.protocol.fragment_owner import Attribution, FragmentOwner
from gazette.protocol.ids import JournalName, Offset, Revision
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.route import Route
from gazette.runtime.latch import Latch
from gazette.runtime.mutex import Mutex
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.blobs.registry import ActiveStore
    from gazette.broker.replica_context import ReplicaContext

log = logging.getLogger(__name__)

_REFRESH_FIRST_MAX_S: Final = 4.0
"""Longest time between listings until one has succeeded, in seconds."""
_REFRESH_HOLE_S: Final = 10.0
"""Longest time between listings while the index has a hole or undecided fragments, in seconds."""
_HEAD_WRITE_S: Final = 2.0
"""Seconds for which a replica that shuts down waits for etcd. After that, it leaves a closing in a store."""
_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _SpoolEvents:
    """Gives commits to the index, and completed spools to the upload gate."""

    index: Index
    upload_gate: UploadGate
    on_first: Callable[[], None]
    """Called when this replica, as primary, commits content to the first fragment of the journal."""

    def spool_commit(self, local: LocalFragment) -> None:
        self.index.spool_commit(local)
        if self.upload_gate.end is not None and local.begin == self.index.begin_offset:
            self.on_first()

    def spool_complete(self, spool: CompletedSpool, *, primary: bool) -> None:
        del primary  # The gate knows whether this replica leads.
        self.upload_gate.spool_complete(spool)


class Replica:
    """One assigned journal. Loop-bound; made by the resolver, started once, shut down once.

    The replica is of the journal that was created at revision ``life``, and of no later journal of that name.

    A pipeline of this broker, or a Replicate call of the primary, takes ``spool`` from its mutex.
    ``pipeline`` holds None unless one is built. Its owner gives back the pipeline, its successor, or None.
    """

    def __init__(self, journal: JournalName, life: Revision, context: ReplicaContext) -> None:
        self.journal = journal
        self.life = life
        self.index = Index(journal, context.clock)
        self.index.on_hole = self.list_now
        self.head_readers = HeadReaders(
            self.index, context.lease, context.settings.read_chunk_bytes
        )
        self.rate = RateBalance()
        self.line = Line()
        self.sessions = SessionLedger(life)
        self.refused_to: Offset = -1
        """End of the spool whose bytes a peer refused, because the peer had other bytes."""
        self.refresh_error: str | None = None
        """Why the last listing of the blob stores failed; None if it succeeded."""
        self.emptied_stores: list[EmptiedStore] = []
        """Stores that the last listing found without any of their former fragments."""
        self._former = EmptiedStores(context.clock)
        self._context = context
        self.head = KnownHead(context, journal, life)
        self.closings = Closings(context, self.head, self.index)
        self._upload_gate = UploadGate(context.persister, life, self.head.note)
        self.others = OtherFollowers()
        self._seems_new = False
        """True if no append to the journal is known: then no listing is due soon."""
        self._listing = asyncio.Lock()
        """Held by the one listing that runs: an older listing must not replace a newer one."""
        self._gathering: set[asyncio.Future[None]] = set()
        """The last turns of pipelines that were torn down and still wait for answers."""
        spool = Spool(
            journal,
            _SpoolEvents(
                self.index, self._upload_gate, partial(context.pulser.first_committed, self)
            ),
            clock=context.clock,
            pool=context.pools.spools,
            disk=context.disk,
            memory=context.spool_memory,
        )
        self.spool: Mutex[Spool] = Mutex(f"spool of {journal}", spool)
        self.pipeline: Mutex[Pipeline | None] = Mutex(f"pipeline of {journal}", None)

    @property
    def spec(self) -> JournalSpec | None:
        """The journal's specification; None if it was deleted, even if it was created again."""
        return spec_of(self._context.state, self.journal, self.life)

    async def load_head(self, *, lives: bool = False) -> None:
        """Read the known head. Raise ``Unavailable`` if etcd fails, ``Conflict`` if the journal is gone."""
        await self.head.load(lives=lives)
        self._adopt_head()

    def reload_head(self) -> None:
        """Forget the known head, so that the next append reads it from etcd."""
        self.head.loaded = False

    async def confirm(self, tenure: Revision, head: Offset) -> None:
        """Record that the journal goes on at ``head``, and that missing bytes before ``head`` are lost.

        Raise ``Conflict`` if a later primary has begun. After other errors, or a cancellation, etcd may have
        been written.
        """
        try:
            await self.head.confirm(tenure, self.index.holes(head))
        finally:
            self._adopt_head()

    async def adopt_closing(self, tenure: Revision) -> None:
        """Close the known head if the last primary has left a closing, and stores have all that it
        acknowledged. Raise ``Conflict`` if a later primary has begun."""
        if self.spec is not None:
            await self.closings.adopt(self.spec, tenure)
            self._adopt_head()

    def _adopt_head(self) -> None:
        self.index.adopt_head(self.head.offset, self.head.lost)

    def other_followers(self, route: Route) -> frozenset[Incarnation]:
        """Return the followers of ``route`` without this broker."""
        state = self._context.state
        local_id = local_id_of(state)
        follower_ids = (id for id in route.members if id not in (route.primary_id, local_id))
        members = {id: state.member(id.zone, id.suffix) for id in follower_ids}
        return frozenset(
            (id, 0 if member is None else member.raw.create_revision)
            for id, member in members.items()
        )

    def must_begin(self, route: Route) -> bool:
        """Return True if a store may hold bytes after the end of the spool that this primary never received.

        If so, call ``begin`` before the next append.
        """
        return self.others.known != frozenset() and self.others.any_gone(
            self.other_followers(route)
        )

    async def begin(self, tenure: Revision, end: Offset) -> None:
        """Begin at ``end`` as the primary of ``tenure``.

        Call this if other brokers may have bytes after ``end`` that this replica never received. Call it
        also if the spool was rolled to ``end`` without the bytes before.

        A former primary or follower may upload until it learns of ``end`` from etcd. So etcd is written
        first, and then stores are listed again. The listing shows all earlier uploads. If a broker uploads
        bytes later, that broker removes them again.

        No effect on etcd if the known head is beyond ``end`` by now: the caller looks at the head again.
        Raise ``Conflict`` if a later primary has begun. Raise ``Unavailable`` if etcd or a store does not
        answer, or the listing takes too long. After an error or a cancellation, etcd may have been written.
        """
        try:
            has_begun = await self.head.begin(tenure, end)
        finally:
            self._adopt_head()
        timeout_s = self._context.settings.listing_timeout_s
        if self._listing.locked():
            self.list_now()  # End the listing that runs, which may hang.
        try:
            async with timeout(timeout_s):
                if self.spec is not None:
                    await self._list(self.spec)
        except TimeoutError:
            raise Unavailable(
                "the second listing of the journal's fragment stores did not end in time",
                hint="Check the stores: `gazctl journals store-health`.",
                journal=self.journal,
                timeout_s=timeout_s,
            ) from None
        if has_begun:
            self.others.clear()

    async def record_first_append(self, tenure: Revision, begin: Offset, end: Offset) -> None:
        """Return once the primary of ``tenure`` may answer an append of ``[begin, end)``, which all replicas
        have. See `KnownHead.record_first_append`, also for errors. Afterwards, no other broker can have other
        bytes, and all that was acknowledged is agreed."""
        try:
            await self.head.record_first_append(tenure, begin, end)
        finally:
            self._adopt_head()
        self.others.clear()
        # Do not call `all_acknowledged`: etcd has this head, so its bytes are uploaded even without a lease.
        self._upload_gate.agree_acknowledged()
        self.index.show(end)

    @property
    def leads(self) -> bool:
        """True once this replica has led the journal as its primary."""
        return self._upload_gate.end is not None

    def lead(self, end: Offset, registers: LabelSet, tenure: Revision) -> None:
        """Lead the journal from now on, with a spool that ends at ``end``. See ``UploadGate.become_primary``.

        Readers see a commit of this primary once all replicas have acknowledged the commit. No effect if
        the replica leads already.
        """
        if not self.leads:
            self._upload_gate.become_primary(end, registers, tenure)
            self.index.show(end)
            self._note_end(end)

    def follow(self, fragment: Fragment, reassigned: Latch, tenure: Revision) -> None:
        """Record that this replica has the bytes that its primary proposed. See ``UploadGate.confirm``."""
        self._upload_gate.confirm(fragment, reassigned, tenure)
        self._note_end(fragment.begin)  # The bytes after this offset are in the local spool.

    def _note_end(self, end: Offset) -> None:
        """List soon if the journal seemed new, but reaches ``end``: a former owner may upload its bytes."""
        if self._seems_new and end > self.index.end_offset:
            self._seems_new = False
            self.list_now()

    def has_unagreed(self, fragment: Fragment) -> bool:
        """Return True if peers may lack the end of ``fragment``, the spool of this primary.

        Either not all peers have acknowledged the end, or this replica begins to lead.
        """
        agreed = self._upload_gate.end
        if not fragment.length or fragment.end == self.refused_to:
            return False
        return agreed is None or agreed < fragment.end

    def all_acknowledged(self, end: Offset, registers: LabelSet) -> None:
        """Record that all replicas have acknowledged everything before ``end``, with ``registers`` there.

        Until the known head names this tenure, no bytes of the tenure are uploaded or shown to readers. Else
        the next primary might begin before these bytes: neither a listing nor the head would show them.

        Raise ``Unavailable`` unless the broker's lease is known to hold now: another broker may lead the
        journal, and have begun at an earlier offset.
        """
        self._context.lease.check()
        if self.head.names(self._upload_gate.tenure):
            self._upload_gate.agree(end, registers)
            self.index.show(end)
        else:
            self._upload_gate.note_acknowledged(end, registers)

    def relies_on(self, fragment: Fragment) -> bool:
        """Return True if this replica has, or may have, exactly ``fragment`` at its offsets."""
        return self.index.has(fragment)

    def stored(self, fragment: Fragment) -> None:
        """Keep the local file of ``fragment``, which a store has, within the limit of kept files."""
        self._former.note(fragment)
        self._context.kept_files.keep(lambda: self.index.stored(fragment))

    async def wait_listed(self, timeout_s: float) -> None:
        """Return once the blob stores were listed. Before that, the index has only local appends.

        Raise ``Unavailable`` with the reason after ``timeout_s``, ``Closed`` if the replica stops.
        Cancellation: no effect.
        """
        if self.index.first_refresh.is_set:
            return
        try:
            async with timeout(timeout_s):
                await self.index.wait_first_refresh()
        except TimeoutError:
            raise Unavailable(
                f"the journal's fragment stores have not been listed yet: {self.unlisted_reason}",
                hint="Check the stores: `gazctl journals store-health`.",
                journal=self.journal,
            ) from None

    def start(self) -> None:
        """Start the pulses and the listings."""
        self._context.refresher.add(self)
        self._context.pulser.add(self)

    def route_changed(self) -> None:
        """Pulse now: the journal has another route, or other stores."""
        self._context.pulser.route_changed(self)

    @property
    def in_step(self) -> bool:
        """Whether all replicas are connected and in step, as etcd records it, and lack no bytes."""
        pipeline, state = self.pipeline.free, self._context.state
        item = state.item(self.journal)
        if item is None or pipeline is None:
            return False
        assignments, end = state.assignments_of(self.journal), pipeline.spool.fragment.end
        return (
            pipeline.is_idle(self._context.clock.monotonic())
            and len(assignments) == item.decoded.value.desired_replication()
            and pipeline.route.equivalent(route_of(assignments))
            and are_in_step(assignments)
            and self.head.loaded
            and end >= max(self.index.end_offset, self.head.offset)
        )

    @property
    def rests(self) -> bool:
        """Whether a pulse would have no effect: the replicas are in step, the spool is empty, and no problem
        is known."""
        pipeline = self.pipeline.free
        is_empty = pipeline is not None and not pipeline.spool.fragment.length
        return is_empty and self.in_step and not self.problem

    def stop_daemons(self) -> None:
        """End pulses and listings, and begin no more."""
        self._context.refresher.remove(self)
        self._context.pulser.remove(self)

    async def give_back_spool(self, spool: Spool, *, primary: bool) -> None:
        """Give the spool back, without its pending content. Cancellation: the spool is given back."""
        try:
            await roll_back(spool, primary=primary)
        finally:
            self.spool.give(spool)

    async def tear_down(self, pipeline: Pipeline) -> None:
        """Give back the spool of a pipeline that the caller holds. Close the pipeline in the background.

        The caller still has to give the pipeline's successor, or None, to the mutex. Cancellation: the spool
        is given back, and the pipeline is broken.
        """
        spool = pipeline.spool
        try:
            await pipeline.release_spool()
            await roll_back(spool, primary=True)
        except asyncio.CancelledError:
            pipeline.fail(Closed("the broker is torn down"))
            raise
        finally:
            self.spool.give(spool)
        if pipeline.last_turn is not None and not pipeline.last_turn.done():
            self._gathering.add(pipeline.last_turn)
            pipeline.last_turn.add_done_callback(self._gathering.discard)
        self._context.scope.spawn(pipeline.close(), name=f"close pipeline {self.journal}")

    async def reap(self, broken: Pipeline) -> None:
        """Tear a broken pipeline down, unless another owner did so first."""
        try:
            pipeline = await self.pipeline.take()
        except Closed:
            return
        if pipeline is broken:
            await self.tear_down(broken)
            pipeline = None
        self.pipeline.give(pipeline)

    async def shut_down(self) -> None:
        """Stop serving: wait for the pipeline and the spool, and hand the spool to the persister.

        Other tasks that wait for the pipeline or the spool get ``Closed``. Peers get their time to answer.
        Then a primary's spool is uploaded at once, up to the agreed end, so that its successor can read it.
        A follower's spool is uploaded at once, too: the primary may never have had its bytes.

        Wait without bound for the present holders: their appends and streams end, as the route has changed.
        Cancellation: the spool may not have been handed over.
        """
        self.stop_daemons()
        pipeline = await self.pipeline.take()
        self.pipeline.close()
        if pipeline is not None:
            await self.tear_down(pipeline)
        spool = await self.spool.take()
        self.spool.close()
        if self._gathering:
            # Late answers must settle their appends before the spool is completed.
            await asyncio.wait(self._gathering)
        was_primary = self.leads
        await roll_back(spool, primary=was_primary)
        await spool.apply(Proposal(_rolled(spool.fragment), spool.registers), primary=was_primary)
        self._upload_gate.finish()
        if self.spec is not None:
            await self._close_head()
        await spool.close()
        self.index.close()

    async def _close_head(self) -> None:
        """Write to etcd where this primary ends. If etcd does not answer, have the persister put a closing.

        No append may be answered afterwards. A follower may still upload bytes after the agreed end: no
        client got an answer for them.
        """
        end, registers = self._upload_gate.end, self._upload_gate.registers
        if end is None:
            return
        self.head.close_later(end, registers)
        await self.head.settle(_HEAD_WRITE_S)
        closing = self.head.closing_without_etcd(end, registers)
        if closing is not None:
            self._context.persister.close(closing, self.head.settled)

    def list_now(self) -> None:
        """List the blob stores now: the stores have changed, or may have new fragments. Cancel a running
        listing: its store may hang, and may have been replaced for that reason."""
        self._context.refresher.list_now(self)

    @property
    def is_listed(self) -> bool:
        """True once the blob stores were listed."""
        return self.index.first_refresh.is_set

    def refresh_interval_s(self, soon_s: float) -> float:
        """Return the seconds until the next listing: at most ``soon_s``, which is short for a new replica.

        Readers of a new replica wait for bytes that a former owner has just uploaded, or will upload soon. A
        journal without any append had no such owner: ``soon_s`` does not count for it. Readers also wait
        while the index has a hole. Appends wait for the first listing that succeeds.
        """
        ends = (self.index.end_offset, self.head.offset, self._upload_gate.end or 0)
        self._seems_new = self.is_listed and not any(ends)
        interval_s = math.inf if self._seems_new else soon_s
        spec = self.spec
        if spec is not None:
            interval_s = min(interval_s, spec.fragment.refresh_interval_ns / _SECOND_NS)
            if self.index.has_hole or self.index.undecided():
                interval_s = min(interval_s, _REFRESH_HOLE_S)
        return interval_s if self.is_listed else min(interval_s, _REFRESH_FIRST_MAX_S)

    def unhealthy_stores(self) -> list[ActiveStore]:
        """Return the stores for whose recovery a failed listing waits; none after a successful listing."""
        spec = self.spec if self.refresh_error else None
        stores = () if spec is None else spec.fragment.stores
        return [
            active for active in map(self._context.blob_stores.get, stores) if active.health.error
        ]

    @property
    def unlisted_reason(self) -> str:
        """Why the blob stores have not been listed yet; empty after their first listing."""
        if self.is_listed:
            return ""
        if self.refresh_error:
            return self.refresh_error
        for url in () if self.spec is None else self.spec.fragment.stores:
            health = self._context.blob_stores.get(url).health
            if health.error and health.checks:  # A store without checks has an error, too.
                return f"{health.error} (store={url})"
        return "the first listing of the journal's fragment stores is not done yet"

    @property
    def problem(self) -> str:
        """Why the journal cannot be written or read as it should; empty if it can."""
        stores = () if self.spec is None else self.spec.fragment.stores
        for active in map(self._context.blob_stores.get, stores):
            if reason := active.refusals.get((self.journal, self.life)):
                return reason
            if active.health.error and active.health.checks:
                return f"{active.health.error} (store={active.url})"
        if self.emptied_stores:
            emptied = self.emptied_stores[0]
            return (
                f"store {emptied.url} lists none of the {emptied.fragments} fragments that it had"
            )
        return self.refresh_error or self.undecided_reason

    async def refresh(self) -> None:
        """List the blob stores once. A failed listing is noted, and keeps the previous index."""
        spec = self.spec
        if spec is None:
            return
        try:
            if self.index.has_hole or not self.head.loaded:
                # An operator may have confirmed that missing bytes are lost.
                await self.load_head()
            await self._list(spec)
        except GazetteError as error:
            self.refresh_error = str(error)
            stores = " ".join(spec.fragment.stores)
            log.warning(
                "fragments of %(journal)s could not be listed: %(error)s",
                {"journal": self.journal, "error": error},
                # All journals of a store have this cause: while the store fails, each of their listings
                # fails.
                extra={"cause": f"listing {stores}: {type(error).__name__}"},
            )
        else:
            self.refresh_error = None

    async def _list(self, spec: JournalSpec) -> None:
        """List the stores of ``spec``, and adopt the listing, once no other listing of this replica runs.

        Raise the error of a store or of etcd. Then the index stays as it was.
        """
        async with self._listing:
            await self._list_alone(spec)

    async def _list_alone(self, spec: JournalSpec) -> None:
        """List the stores of ``spec``, decide about bytes that were stored aside, and adopt the listing."""
        listed_at = self._context.clock.now()
        nested = self._nested()
        cover = await list_fragments(self._context.blob_stores, spec, nested)
        refuted: list[Fragment] = []
        for aside in cover.set_aside:
            if aside.life != self.life:
                continue
            if await self._confirm(aside):
                cover.add(aside.fragment)
            else:
                refuted.append(aside.fragment)
        if refuted:
            cover = cover.without(refuted, self.index.local)
        retention_ns = spec.fragment.retention_ns
        self.emptied_stores = self._former.restore(
            cover, spec.fragment.stores, retention_ns, refuted
        )
        for emptied in self.emptied_stores:
            log.warning(
                "store %(store)s lists none of the %(count)d fragments of %(journal)s that it listed before: "
                "check that it is mounted and the right one; their offsets are kept for 6 h",
                {"store": emptied.url, "count": emptied.fragments, "journal": self.journal},
                # One cause for all journals of the store.
                extra={"cause": f"emptied store {emptied.url}"},
            )
        known_conflicts = set(self.index.conflicts)
        unexplained = await self._unexplained(spec, cover, nested)
        self.index.replace_remote(
            cover, cover.conflicts, unexplained=unexplained, listed_at=listed_at
        )
        await self.closings.remove_passed(cover.closings)
        self._warn_of_undecided()
        for conflict in self.index.conflicts:
            if conflict not in known_conflicts:
                metrics.CONFLICTS.inc()
                log.warning(
                    "fragments of %(journal)s are in conflict, the same offsets hold different bytes: "
                    "%(conflict)s",
                    {"journal": self.journal, "conflict": conflict},
                )

    async def _unexplained(
        self, spec: JournalSpec, cover: FragmentCover, others: Sequence[JournalName]
    ) -> Unexplained:
        """Return the unexplained fragments at offsets that no other listed fragment covers.

        Look for journals again: a journal may have been created during the listing. Ask etcd for deleted
        journals. Raise ``Unavailable`` if etcd does not answer.
        """
        if not cover.unexplained:
            return NONE
        run = self._context.pools.spools.run
        unexplained = await run(Unexplained.beside, cover, cover.unexplained)
        if not unexplained.end:
            return NONE
        root = self._context.settings.root
        deleted = await deleted_below(self._context.etcd, root, self.journal)
        owner = FragmentOwner(spec, [*others, *self._nested(), *deleted])

        def left() -> Unexplained:
            candidates = (
                fragment
                for fragment in cover.unexplained
                if owner.of(fragment.path_postfix) is not Attribution.OTHER
            )
            return Unexplained.beside(cover, candidates)

        return await run(left)

    @property
    def undecided_reason(self) -> str:
        """Why some offsets are neither given out nor passed over; empty if there are no such offsets."""
        try:
            self.index.require_explained()
        except Unavailable as error:
            return str(error)
        return ""

    def _warn_of_undecided(self) -> None:
        if reason := self.undecided_reason:
            log.warning(
                "offsets of %(journal)s are neither given out nor passed over: %(reason)s",
                {"journal": self.journal, "reason": reason},
                extra={"cause": f"unexplained {self.journal}"},
            )

    async def _confirm(self, aside: SetAside) -> bool:
        """Make a fragment of bytes that a broker stored aside because it could not ask etcd.

        Return False if a later primary has given their offsets out again. Raise ``Unavailable`` if etcd or
        the store fails, ``Conflict`` if the journal was deleted. Then the object aside stays. The object
        tells brokers that a copy at the fragment's place, if there is one, is not confirmed.
        """
        active = self._context.blob_stores.get(aside.fragment.backing_store)
        if await self._is_confirmed(aside) and await self._place(aside, active):
            await active.calls.run(active.store.remove, aside.path)
            return True
        log.error(
            "%(path)s in %(store)s is not made part of %(journal)s: its broker set it aside at exit, and "
            "a later primary gave its offsets to other bytes. "
            "Acknowledged appends, if any, are only in that object",
            {"journal": self.journal, "path": aside.path, "store": active.url},
            extra={"cause": f"set aside {self.journal}"},
        )
        return False

    async def _place(self, aside: SetAside, active: ActiveStore) -> bool:
        """Copy the object to the place of its fragment. Return False if a later primary has begun meanwhile.

        In that case remove the copy, if this call has surely made it. A later primary may have made a
        fragment of the very same bytes, which must stay. Raise ``Unavailable`` if etcd or the store fails,
        ``Conflict`` if the journal was deleted. Then the copy may stay: while the object aside exists,
        brokers ask etcd before they use the copy.
        """
        placed, failure = False, None
        try:
            placed = await active.calls.run(aside.place, active.store)
        except GazetteError as error:
            failure = error
        deleted: Conflict | None = None
        try:
            confirmed = await self._is_confirmed(aside)
        except Conflict as error:  # The journal was deleted.
            confirmed, deleted = False, error
        # Remove nothing while etcd is silent: another replica may have confirmed the object.
        if placed and not confirmed and not self.relies_on(aside.fragment):
            await active.calls.run(active.store.remove, aside.fragment.content_path())
        if deleted is not None:
            raise deleted
        if confirmed and failure is not None:  # If not confirmed, no copy is needed.
            raise failure
        return confirmed

    async def _is_confirmed(self, aside: SetAside) -> bool:
        """Return True if no later primary has given the offsets of the bytes out again, as etcd says now."""
        await self.load_head(lives=True)
        limit = self.head.limit(aside.tenure)
        return limit is None or limit >= aside.fragment.end

    def _nested(self) -> list[JournalName]:
        """Return the journals below this one: their fragments are below its directory, too."""
        prefix = item_key(self._context.settings.root, f"{self.journal}/")
        root = prefix.removesuffix(f"{self.journal}/")
        return [kv.key.removeprefix(root) for kv in self._context.key_space.prefixed(prefix)]


def _rolled(fragment: Fragment) -> Fragment:
    return Fragment(
        journal=fragment.journal,
        begin=fragment.end,
        end=fragment.end,
        sum=ZERO_SUM,
        codec=fragment.codec,
    )
