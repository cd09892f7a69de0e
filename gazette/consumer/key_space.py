"""Keys of a consumer cluster in etcd: shards, members, and assignments of shards to members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gazette.cluster.allocator.model import Assignment, DecodedKV, Item, Member, allocator_decoder
from gazette.cluster.etcd.values import KeyValue
from gazette.consumer.application_name import Owner
from gazette.consumer.prefix_owner import decode_owner, owner_key
from gazette.errors import Invalid
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.process import ConsumerSpec
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSpec
from gazette.protocol.stored import noted, readable, stored_consumer, stored_shard, stored_status


@dataclass(frozen=True, slots=True)
class ShardItem:
    """A shard, as an item of the allocator."""

    spec: ShardSpec
    max_hot_standbys: int

    def desired_replication(self) -> int:
        if self.spec.disable:
            return 0
        return 1 + min(self.spec.hot_standbys, self.max_hot_standbys)

    def least_replication(self) -> int:
        """Return 1, or 0 for a disabled shard. A primary without standbys suffices, since the recovery log or
        the remote store is durable."""
        return min(1, self.desired_replication())


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    """A consumer process, as a member of the allocator."""

    spec: ConsumerSpec

    def item_limit(self) -> int:
        return self.spec.shard_limit

    def exiting(self) -> bool:
        return self.spec.exiting


def consumer_decoder(
    root: str, max_hot_standbys: int
) -> Callable[[KeyValue], Item | Member | Assignment | Owner]:
    """Return the decoder of a consumer cluster's keys. The decoder raises ``Invalid`` for unknown keys."""

    def decode_item(shard_id: str, value: bytes) -> ShardItem:
        return ShardItem(decode_shard(shard_id, value), max_hot_standbys)

    decode = allocator_decoder(root, decode_item, _decode_member, _decode_assignment)
    key = owner_key(root).encode()

    def decode_any(raw: KeyValue) -> Item | Member | Assignment | Owner:
        return decode_owner(raw.value) if raw.key == key else decode(raw)

    return decode_any


def decode_shard(shard_id: str, value: bytes) -> ShardSpec:
    """Return the stored specification of the shard ``shard_id``. Log a fault, and correct it as far as
    possible.

    Raise ``Invalid`` for damaged bytes, for an invalid id, and for the specification of another shard.
    """
    with readable("ShardSpec"):
        pb = consumer_pb2.ShardSpec.FromString(value)
    if pb.id != shard_id:
        raise Invalid(f"ShardSpec.Id ({pb.id}) does not match its key ({shard_id})")
    return noted(f"the specification of shard {shard_id}", *stored_shard(pb))


def _decode_member(zone: str, suffix: str, value: bytes) -> ConsumerMember:
    with readable("ConsumerSpec"):
        pb = consumer_pb2.ConsumerSpec.FromString(value)
    spec = noted(f"the member {zone}#{suffix}", *stored_consumer(pb))
    if spec.id != ProcessId(zone, suffix):
        raise Invalid(f"ConsumerSpec.Id ({spec.id}) does not match its key ({zone}#{suffix})")
    return ConsumerMember(spec)


def _decode_assignment(
    shard_id: str, zone: str, suffix: str, slot: int, value: bytes
) -> ReplicaStatus:
    """Return the status that the assigned member advertised. A new assignment has an empty value, for idle.

    Return a status also for a damaged value. Without a status, the allocator would not see the assignment,
    and would make another assignment.
    """
    subject = f"the status of shard {shard_id} at {zone}#{suffix}#{slot}"
    try:
        pb = consumer_pb2.ReplicaStatus.FromString(value)
    except DecodeError as error:
        return noted(subject, ReplicaStatus(), str(error))
    return noted(subject, *stored_status(pb))


def progress(assignment: DecodedKV) -> tuple[int, ...]:
    """Return a key that is greater for a replica further in play-back, and least for a failed replica.

    The allocator uses this key if no replica can take over at once.
    """
    code: ReplicaCode = assignment.decoded.value.code
    return (-1,) if code is ReplicaCode.FAILED else (code.value,)


def is_consistent(item: DecodedKV, assignment: DecodedKV, assignments: Sequence[DecodedKV]) -> bool:
    """Return True if a replica can take over at once, or has failed like its primary.

    A failed replica counts only if the primary has failed as well. Otherwise the allocator would remove the
    primary while no other replica is ready.
    """
    del item
    code: ReplicaCode = assignment.decoded.value.code
    if code is ReplicaCode.FAILED:
        return any(
            kv.decoded.slot == 0 and kv.decoded.value.code is ReplicaCode.FAILED
            for kv in assignments
        )
    return code >= ReplicaCode.STANDBY
