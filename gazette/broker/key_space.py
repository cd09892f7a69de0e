"""The keys of a broker cluster in etcd: journals, brokers, and assignments of journals to brokers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from google.protobuf.message import DecodeError

from gazette.cluster.allocator.model import Assignment, DecodedKV, Item, Member, allocator_decoder
from gazette.cluster.allocator.routes import route_of
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.values import KeyValue
from gazette.errors import Invalid
from gazette.protocol.ids import JournalName, ProcessId, Revision
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.process import BrokerSpec
from gazette.protocol.route import EMPTY_ROUTE, Route
from gazette.protocol.stored import noted, readable, stored_broker, stored_journal, stored_route

MISSING_ID: Final = ProcessId("local-BrokerSpec", "missing-from-Etcd")
"""Id of this broker while its own key is not in etcd: it can still proxy."""


@dataclass(frozen=True)
class JournalItem:
    """A journal, as an item of the allocator."""

    spec: JournalSpec
    max_replication: int

    @cached_property
    def labels(self) -> LabelSet:
        """The labels that selectors match."""
        return self.spec.labels_with_name()

    def desired_replication(self) -> int:
        return self.spec.desired_replication(self.max_replication)

    def least_replication(self) -> int:
        """Return the desired replication: with fewer replicas, content in no store yet is less durable."""
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
    """Return the decoder of a broker cluster's KeySpace. The decoder raises ``Invalid``."""

    def decode_item(journal: str, value: bytes) -> JournalItem:
        return JournalItem(decode_journal(journal, value), max_replication)

    return allocator_decoder(root, decode_item, _decode_member, _decode_assignment)


def decode_journal(journal: str, value: bytes) -> JournalSpec:
    """Return the stored specification of ``journal``. Replace invalid values: see `protocol.stored`.

    Raise ``Invalid`` for bytes that are no specification, and for the specification of another journal.
    """
    with readable("JournalSpec"):
        pb = broker_pb2.JournalSpec.FromString(value)
    if pb.name != journal:
        raise Invalid(f"JournalSpec.Name ({pb.name}) does not match its key ({journal})")
    return noted(f"the specification of journal {journal}", *stored_journal(pb))


def _decode_member(zone: str, suffix: str, value: bytes) -> BrokerMember:
    with readable("BrokerSpec"):
        pb = broker_pb2.BrokerSpec.FromString(value)
    spec = noted(f"the broker {zone}#{suffix}", *stored_broker(pb))
    if spec.id != ProcessId(zone, suffix):
        raise Invalid(f"BrokerSpec.Id ({spec.id}) does not match its key ({zone}#{suffix})")
    return BrokerMember(spec)


def _decode_assignment(journal: str, zone: str, suffix: str, slot: int, value: bytes) -> Route:
    """Return the Route that the primary advertised. A new assignment has an empty route.

    An assignment with a damaged value stays: without it, the allocator would assign the journal again.
    """
    if not value:
        return EMPTY_ROUTE
    return noted(f"the route of journal {journal} at {zone}#{suffix}#{slot}", *_route(value))


@lru_cache(maxsize=1024)
def _route(value: bytes) -> tuple[Route, str]:
    """Return the route that ``value`` encodes, and why it is invalid (empty: valid). Share equal routes."""
    try:
        return stored_route(broker_pb2.Route.FromString(value))
    except DecodeError as error:
        return EMPTY_ROUTE, str(error)


def local_id_of(state: State) -> ProcessId:
    """Return the id of this broker; `MISSING_ID` while its key is not in etcd."""
    member = state.local_member
    if member is None:
        return MISSING_ID
    return ProcessId(member.decoded.zone, member.decoded.suffix)


def spec_of(state: State, journal: JournalName, life: Revision) -> JournalSpec | None:
    """Return the specification of a journal that was created at revision ``life``; None if the journal is
    gone, even if its name belongs to a later journal.
    """
    item = state.item(journal)
    if item is None or item.raw.create_revision != life:
        return None
    spec: JournalSpec = item.decoded.value.spec
    return spec


def tenure_of(assignments: Sequence[DecodedKV]) -> Revision:
    """Return the creation revision of the primary's assignment; 0 if there is no primary."""
    return next((kv.raw.create_revision for kv in assignments if not kv.decoded.slot), 0)


def progress(assignment: DecodedKV) -> tuple[int, ...]:
    """Rank a broker of a journal whose replicas are not in step: higher if it may hold more content.

    A primary stores the route in each assignment before it answers the first append under that route. So a
    broker whose assignment has no route holds nothing that was acknowledged. Of two brokers with a route, the
    one with the older assignment has held acknowledged content for longer.
    """
    raw = assignment.raw
    return (1, -raw.create_revision) if raw.value else (0,)


def is_consistent(item: DecodedKV, assignment: DecodedKV, assignments: Sequence[DecodedKV]) -> bool:
    """Return True if the primary has synchronized exactly the replicas that a journal has now."""
    del item, assignment
    return are_in_step(assignments)


def are_in_step(assignments: Sequence[DecodedKV]) -> bool:
    """Return True if the value of each assignment of a journal is the route of all its assignments."""
    route = route_of(assignments)
    return all(kv.decoded.value.equivalent(route) for kv in assignments)
