"""What a broker cluster keeps in etcd: journals, brokers, and which broker has which journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gazette.allocator.model import Assignment, DecodedKV, Item, Member, allocator_decoder
from gazette.allocator.state import State
from gazette.errors import Invalid
from gazette.etcd.values import KeyValue
from gazette.protocol.ids import JournalName, ProcessId, Revision
from gazette.protocol.journal import JournalSpec
from gazette.protocol.pb import broker_pb2
from gazette.protocol.process import BrokerSpec
from gazette.protocol.route import EMPTY_ROUTE, Route
from gazette.protocol.stored import noted, stored_broker, stored_journal, stored_route


@dataclass(frozen=True, slots=True)
class JournalItem:
    """A journal, as an item of the allocator."""

    spec: JournalSpec
    max_replication: int

    def desired_replication(self) -> int:
        return self.spec.desired_replication(self.max_replication)

    def least_replication(self) -> int:
        """All of them: what is not persisted yet is only as durable as its replicas are many."""
        return self.desired_replication()


@dataclass(frozen=True, slots=True)
class BrokerMember:
    """A broker, as a member of the allocator."""

    spec: BrokerSpec

    def item_limit(self) -> int:
        return self.spec.journal_limit

    def exiting(self) -> bool:
        return self.spec.exiting


def broker_decoder(
    root: str, max_replication: int
) -> Callable[[KeyValue], Item | Member | Assignment]:
    """The decoder of a broker cluster's KeySpace. What it returns raises ``Invalid``."""

    def decode_item(journal: str, value: bytes) -> JournalItem:
        return JournalItem(decode_journal(journal, value), max_replication)

    return allocator_decoder(root, decode_item, _decode_member, _decode_assignment)


def decode_journal(journal: str, value: bytes) -> JournalSpec:
    """Return the specification that is stored under the name ``journal``, as far as it can be served.

    Raises ``Invalid`` for bytes that are none, and for that of another journal.
    """
    with _readable("JournalSpec"):
        pb = broker_pb2.JournalSpec.FromString(value)
    if pb.name != journal:
        raise Invalid(f"JournalSpec.Name ({pb.name}) does not match its key ({journal})")
    return noted(f"the specification of journal {journal}", *stored_journal(pb))


def _decode_member(zone: str, suffix: str, value: bytes) -> BrokerMember:
    with _readable("BrokerSpec"):
        pb = broker_pb2.BrokerSpec.FromString(value)
    spec = noted(f"the broker {zone}#{suffix}", *stored_broker(pb))
    if spec.id != ProcessId(zone, suffix):
        raise Invalid(f"BrokerSpec.Id ({spec.id}) does not match its key ({zone}#{suffix})")
    return BrokerMember(spec)


def _decode_assignment(journal: str, zone: str, suffix: str, slot: int, value: bytes) -> Route:
    """Return the Route that the primary advertised. A fresh assignment has none yet.

    An assignment that vanished would be made a second time: one whose value is damaged stays.
    """
    if not value:
        return EMPTY_ROUTE
    what = f"the route of journal {journal} at {zone}#{suffix}#{slot}"
    try:
        pb = broker_pb2.Route.FromString(value)
    except DecodeError as error:
        return noted(what, EMPTY_ROUTE, str(error))
    return noted(what, *stored_route(pb))


def spec_of(state: State, journal: JournalName, life: Revision) -> JournalSpec | None:
    """The specification of a journal that was created at revision ``life``; None if it is gone.

    A journal of the same name that was created later is another one.
    """
    item = state.item(journal)
    if item is None or item.raw.create_revision != life:
        return None
    spec: JournalSpec = item.decoded.value.spec
    return spec


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except DecodeError as error:
        raise Invalid(f"not a {what}: {error}") from error


def route_of(assignments: Sequence[DecodedKV]) -> Route:
    """The route that the keys of a journal's assignments (all of them, in key order) amount to."""
    members: list[ProcessId] = []
    primary: int | None = None
    for kv in assignments:
        assignment: Assignment = kv.decoded
        if assignment.slot == 0:
            primary = len(members)
        members.append(ProcessId(assignment.zone, assignment.suffix))
    return Route(tuple(members), primary)


def tenure_of(assignments: Sequence[DecodedKV]) -> Revision:
    """When the assignment of a journal's primary was created; 0 without a primary."""
    return next((kv.raw.create_revision for kv in assignments if not kv.decoded.slot), 0)


def progress(assignment: DecodedKV) -> tuple[int, ...]:
    """Rank brokers of a journal whose replicas are not in step: who holds more of it sorts higher.

    A primary stores the route in every assignment before the first append under it is answered. So an
    empty value means that the broker holds nothing which was acknowledged. Of the others, the older one
    holds what was acknowledged for longer.
    """
    raw = assignment.raw
    return (1, -raw.create_revision) if raw.value else (0,)


def is_consistent(item: DecodedKV, assignment: DecodedKV, assignments: Sequence[DecodedKV]) -> bool:
    """Whether the primary has synchronised exactly these replicas: all of a journal's, or none."""
    del item, assignment
    route = route_of(assignments)
    return all(kv.decoded.value.equivalent(route) for kv in assignments)
