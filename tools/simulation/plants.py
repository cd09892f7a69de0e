"""Defects of brokers and readers that a simulation plants, to show that its judge finds them.

Each is a function that patches the shipped code of this process. It brings back a fault that was repaired, or
makes a likely mistake. ``python -m tools.simulation --plants`` says at which seed each is found.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeAlias

from gazette.broker import known_head, replica, resolver, service, upload_limits
from gazette.broker.append import rules as append_rules
from gazette.broker.append.events import Ending, Outcome
from gazette.broker.append.fsm import AppendFSM
from gazette.broker.append.sessions import SessionLedger
from gazette.broker.closings import Closings
from gazette.broker.commit import driver as append_driver
from gazette.broker.commit import steady
from gazette.broker.commit.steady import AppendGroup
from gazette.broker.key_space import tenure_of
from gazette.broker.known_head import KnownHead
from gazette.broker.lease_guard import LeaseGuard
from gazette.broker.replication.pipeline import Pipeline
from gazette.broker.replication.spool_writer import SpoolWriter
from gazette.broker.replication.upload_gate import UploadGate
from gazette.broker.service import BrokerService
from gazette.broker.upload_limits import UploadLimits
from gazette.client.read import fragment_reader
from gazette.client.read.fragment_reader import FragmentStream
from gazette.client.read.reader import Reader
from gazette.client.read.retry_reader import RetryReader
from gazette.cluster.etcd.lease import Lease
from gazette.errors import GazetteError
from gazette.fragment.closing import Closing, ClosingName
from gazette.fragment.index import Index
from gazette.fragment.refusals import Refusals
from gazette.fragment.upload import Upload
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import JournalSpec
from gazette.protocol.route import Route
from gazette.protocol.status import Status
from gazette.runtime.latch import Latch
from gazette.runtime.tasks import await_future

Plant: TypeAlias = Callable[[], None]
_REGISTERS_WITHOUT_LIMIT: Final = 1 << 40


def survivor_waits() -> None:
    """Let a survivor follow a broker that has just joined, and wait for that broker to upload its bytes."""

    def spool_complete(self: UploadGate, spool: Any) -> None:
        if self.end is None:
            never = Latch()
            self._uploads.spool_complete(
                spool, life=self._life, tenure=self._tenure, reassigned=never
            )
        else:
            before(self, spool)

    before = UploadGate.spool_complete
    _replace(UploadGate, "spool_complete", spool_complete)
    # Otherwise a primary that lacks replicas would complete the survivor's fragment, and hide the defect.
    await_replicas = AppendFSM._await_desired_replicas

    def refuse(self: AppendFSM) -> Any:
        assert self.resolution is not None
        if len(self.resolution.route.members) < self.resolution.desired_replication:
            return self._refuse(Status.INSUFFICIENT_JOURNAL_BROKERS)
        return await_replicas(self)

    _replace(AppendFSM, "_await_desired_replicas", refuse)
    # Otherwise the survivor would lead, and upload its bytes.
    _replace(service, "progress", lambda assignment: 0)


def lives_by_name() -> None:
    """Let uploads take a journal that was deleted and created again for its former life."""

    def spec_of(state: Any, journal: str, life: int) -> Any:
        del life
        item = state.item(journal)
        return None if item is None else item.decoded.value.spec

    _replace(service, "spec_of", spec_of)


def head_unknown() -> None:
    """Forget the known heads: a journal ends where its stores and spools end."""

    async def load(self: KnownHead) -> int:
        self.loaded = True
        return 0

    async def write(self: KnownHead, tenure: int, *offsets: int) -> bool:
        self._tenure = tenure
        return True

    _replace(KnownHead, "load", load)
    _replace(KnownHead, "begin", write)
    _replace(KnownHead, "record_first_append", write)
    _replace(KnownHead, "note", lambda self, end: None)
    _replace(KnownHead, "close_later", lambda self, end, registers: None)


def lease_not_checked() -> None:
    """Let a broker that was paused beyond its lease acknowledge appends."""
    _replace(LeaseGuard, "holds", property(lambda self: True))


def uploads_not_cut() -> None:
    """Let a broker that comes back upload bytes at offsets that another broker has given out again."""

    async def of(self: UploadLimits, journal: str, life: int, tenure: int) -> None:
        return None

    _replace(UploadLimits, "of", of)


def registers_without_limit() -> None:
    """Propose registers of any size."""
    _replace(append_rules, "REGISTERS_BYTES_MAX", _REGISTERS_WITHOUT_LIMIT)


def assignments_by_name() -> None:
    """Let a broker that was demoted and promoted within one step of its key space see no change."""
    _replace(resolver, "_is_same", lambda before, now: True)


def lease_released_first() -> None:
    """Let a broker that leaves give its lease back before it has persisted its spools."""
    finish = BrokerService._finish

    async def finish_and_release(self: BrokerService) -> None:
        await self._release()
        await finish(self)

    _replace(BrokerService, "_finish", finish_and_release)


def hand_over_not_awaited() -> None:
    """Let a broker leave without waiting for its replicas to hand their spools over."""

    async def wait_torn_down(self: resolver.Resolver, timeout_s: float) -> None:
        pass

    _replace(resolver.Resolver, "wait_torn_down", wait_torn_down)


def lease_from_the_answer() -> None:
    """Count the end of a lease from the answer to its renewal, not from its sending."""
    renew = Lease.renew

    async def later(self: Lease) -> None:
        await renew(self)
        self.expires_at = self._clock.monotonic() + self.ttl_s

    _replace(Lease, "renew", later)


def followers_ask_nothing() -> None:
    """Let a follower upload without asking etcd while its key space names the primary that it knows."""

    def leads(self: UploadLimits, journal: str, tenure: int) -> bool:
        return tenure_of(self._state.assignments_of(journal)) == tenure

    _replace(UploadLimits, "_leads", leads)


def rolls_unacknowledged() -> None:
    """Let a primary complete fragments that not all replicas have acknowledged."""
    _replace(AppendFSM, "_completes", lambda self, proposal: False)


def deletion_unasked() -> None:
    """Let a broker take the missing head of a deleted journal for the head of a new journal."""
    read = known_head.read_head

    async def unasked(*args: Any) -> Any:
        _, kv = await read(*args)
        return True, kv

    for module in (known_head, upload_limits):
        _replace(module, "read_head", unasked)


def no_roll_back() -> None:
    """Keep pending bytes in a spool when its pipeline is torn down, or built, instead of a roll-back."""

    async def nothing(spool: Any, *, primary: bool) -> None:
        del spool, primary

    _replace(append_driver, "roll_back", nothing)
    _replace(replica, "roll_back", nothing)


def uploads_unnamed() -> None:
    """Let a primary upload its appends before the head in etcd names its tenure."""
    _replace(KnownHead, "names", lambda self, tenure: True)

    async def know_head(self: Any) -> None:
        begin, end = self._committing
        if end > begin:
            await self._hold.held_replica.head.record_first_append(
                self._resolved.tenure, begin, end
            )

    _replace(append_driver.AppendDriver, "_know_head", know_head)


def lost_followers_forgotten() -> None:
    """Let a survivor lead without asking what a lost follower has uploaded."""

    def must_begin(self: replica.Replica, route: Route) -> bool:
        return self.others.known is None and self.head.closed_registers is None

    _replace(replica.Replica, "must_begin", must_begin)


def shown_at_once() -> None:
    """Let a primary show readers bytes that perhaps no other replica has yet."""
    _replace(Index, "show", lambda self, end: None)


def unknown_session_admitted() -> None:
    """Let a primary admit an append whose session it has never heard of, whatever ledger it names."""
    _replace(SessionLedger, "_is_complete_since", lambda self, ledger, tenure: True)


def group_answered_ok() -> None:
    """Answer OK to the appends of a group although the outcome of the append that leads it is uncertain."""

    def fail(self: AppendGroup, error: GazetteError) -> None:
        begin = self._begin
        for small in self.small:
            end = begin + len(small.content)
            digest = hashlib.sha1(small.content, usedforsecurity=False).digest()
            commit = Fragment(self._commit.journal, begin, end, digest, Codec.NONE)
            if small is not self.small[0]:
                small.settle(Outcome(Ending.COMMITTED, commit=commit))
            begin = end
        before(self, error)

    before = AppendGroup._fail
    _replace(AppendGroup, "_fail", fail)


def journal_refused_for_its_store() -> None:
    """Take two failures of an upload for a refusal of its journal, though the store may be what fails."""

    def failed(self: Refusals, upload: Upload) -> None:
        if upload.failures >= 2:
            active = self._blob_stores.get(upload.first_store(upload.spec()))
            self.refuse(upload, active)

    _replace(Refusals, "failed", failed)


def steady_in_any_state() -> None:
    """Commit small appends at once while their replicas are in step, whatever else has to be done before."""
    _replace(
        steady,
        "_is_steady",
        lambda context, resolution, replica, pipeline, spool: resolution.takes_content,
    )


def answers_not_awaited() -> None:
    """Acknowledge small appends as soon as they were sent, before any peer has answered."""

    def take_acks(self: Pipeline) -> bool:
        peers, self._peers = self._peers, ()
        try:
            return before(self)
        finally:
            self._peers = peers

    before = Pipeline._take_acks
    _replace(Pipeline, "_take_acks", take_acks)


def any_proposal_taken() -> None:
    """Let a replica commit the content that has arrived at any proposal that follows, even at a roll-back."""

    def commit_now(self: SpoolWriter, encoded: bytes) -> Fragment | None:
        encode, self.encode = self.encode, lambda proposal, registers: encoded  # type: ignore[method-assign]
        try:
            return before(self, encoded)
        finally:
            self.encode = encode  # type: ignore[method-assign]

    before = SpoolWriter.commit_now
    _replace(SpoolWriter, "commit_now", commit_now)


def closing_too_early() -> None:
    """Let a primary store a closing when it records its first append, as if it had ended there."""
    before = replica.Replica.record_first_append

    async def record_first_append(self: replica.Replica, tenure: int, begin: int, end: int) -> None:
        await before(self, tenure, begin, end)
        closing = self.head.closing_without_etcd(end, self._upload_gate.registers)
        if closing is not None and self.spec is not None:
            active = self._context.blob_stores.get(self.spec.fragment.stores[0])
            content = io.BytesIO(closing.encode())
            active.calls.submit(active.store.put, closing.name.path, content)

    _replace(replica.Replica, "record_first_append", record_first_append)


def closing_of_another_tenure() -> None:
    """Let a primary take any closing of the journal for that of the last primary."""

    async def find(self: Closings, name: ClosingName, spec: JournalSpec) -> Closing | None:
        active = self._context.blob_stores.get(spec.fragment.stores[0])
        listed = await active.calls.run(active.store.list, f"{name.journal}/")
        names = [ClosingName.parse(name.journal, info.path) for info in listed]
        found = sorted((one.tenure, one) for one in names if one is not None)
        if not found:
            return None
        closing = await active.calls.run(Closing.read, found[-1][1], active.store)
        return replace(closing, name=name, end=max(closing.end, self._head.offset))

    _replace(Closings, "_find", find)


def fragment_opened_twice() -> None:
    """Let a read open a fragment at its store although a look-ahead opens it at the same moment."""
    before = Reader._next_received

    async def next_received(self: Reader) -> bytes | None:
        if self._should_open():
            await self._open_direct()
            return None
        return await before(self)

    _replace(Reader, "_next_received", next_received)


def closed_read_is_cancelled() -> None:
    """Let a read end as if it were cancelled, if its fragment is closed before a thread has begun with it."""
    _replace(fragment_reader, "_ended", await_future)


def look_ahead_taken_anywhere() -> None:
    """Go on with a fragment that was opened ahead although the one before it was not read to its end."""

    def current(self: RetryReader) -> Reader:
        if self._reader is None:
            self._reader, self._next = self._next or self._new_reader(self.offset), None
        return self._reader

    _replace(RetryReader, "_current", current)


def late_fragment_left_open() -> None:
    """Forget a fragment that a thread opens after its reader has given up."""
    _replace(fragment_reader, "_close_opened", lambda opening: None)


def closed_fragment_left_open() -> None:
    """Forget the file of a reader that is closed while a thread reads it."""
    before = FragmentStream.close

    def close(self: FragmentStream) -> None:
        if self._ahead is None or not self._ahead.running():
            before(self)

    _replace(FragmentStream, "close", close)


def end_left_to_brokers() -> None:
    """Give all bytes of a fragment that is read at its store, also those behind the end of the read."""
    before = Reader._next

    async def next_piece(self: Reader) -> bytes:
        if self.direct is None or self.offset >= self.params.end_offset > 0:
            return await before(self)
        return await self._next_direct() or b""

    _replace(Reader, "_next", next_piece)


# One mistake is only a part of `survivor_waits`, and no plant. If no replica is consistent, load decides
# which replica is promoted, and not the bytes that it has (`gazette.cluster.allocator.converge`). Alone this
# breaks no promise, so no judge of histories can find it:
#
# - A primary answers no append before every replica of its route has answered its synchronization. A primary
#   that has just joined goes on at the greatest end of these, with the registers of that replica.
# - By that proposal, a replica with other bytes completes its fragment. It uploads that at once: members of
#   the journal have changed since a primary proposed these bytes, so it leaves the upload to no other.
# - The survivor may die before its upload ends. It is then the last of R brokers that held the bytes, and all
#   of these are lost. That is permitted, and also happens to a survivor that leads and has not synchronized.
#
# The order of promotion saves bytes beyond the promise: a survivor that leads sends them to those that have
# joined. `tests/allocator/test_converge.py` demands the order.
PLANTS: Final[dict[str, Plant]] = {
    plant.__name__.replace("_", "-"): plant
    for plant in (
        survivor_waits,
        lives_by_name,
        followers_ask_nothing,
        head_unknown,
        lease_not_checked,
        uploads_not_cut,
        registers_without_limit,
        assignments_by_name,
        lease_released_first,
        hand_over_not_awaited,
        rolls_unacknowledged,
        deletion_unasked,
        lease_from_the_answer,
        no_roll_back,
        uploads_unnamed,
        lost_followers_forgotten,
        shown_at_once,
        unknown_session_admitted,
        group_answered_ok,
        steady_in_any_state,
        answers_not_awaited,
        any_proposal_taken,
        journal_refused_for_its_store,
        closing_too_early,
        closing_of_another_tenure,
        fragment_opened_twice,
        closed_read_is_cancelled,
        look_ahead_taken_anywhere,
        late_fragment_left_open,
        closed_fragment_left_open,
        end_left_to_brokers,
    )
}


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute. Fail if it does not exist any more: the plant would do nothing."""
    assert name in vars(owner), f"{owner} has no {name} any more"
    setattr(owner, name, value)
