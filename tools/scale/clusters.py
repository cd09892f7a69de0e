"""Clusters of brokers and of members, as keys of a `PaperEtcd`, and what all members but the leader write."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from gazette.broker import key_space as broker_keys
from gazette.cluster.allocator.model import (
    ASSIGNMENTS,
    IsConsistent,
    Progress,
    assignment_key,
    item_key,
    member_key,
)
from gazette.cluster.keyspace.key_values import Decoder
from gazette.consumer import key_space as consumer_keys
from gazette.protocol.fragment import Codec
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.process import BrokerSpec, ConsumerSpec
from gazette.protocol.route import Route
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSource, ShardSpec
from tools.scale.paper_etcd import PaperEtcd, item_prefix

ROOT: Final = "/scale/cluster"
ZONES: Final = 3
_SECOND: Final = 1_000_000_000
_TEAMS: Final = 100


@dataclass(frozen=True)
class Kind:
    """A kind of cluster: of brokers, or of members of an application. Names are like those of users."""

    name: str
    item: str
    member: str
    replication: int
    items_per_member: int
    sizes: tuple[int, ...]
    decoder: Decoder
    is_consistent: IsConsistent
    progress: Progress

    def members(self, items: int) -> int:
        return max(2 * ZONES, items // self.items_per_member)

    def item_id(self, index: int) -> str:
        return f"scale/team-{index % _TEAMS:02}/events-{index:06}/part-000"

    def item_value(self, index: int) -> bytes:
        labels = LabelSet.of(
            ("app.gazette.dev/message-type", "scale.Event"),
            ("app.gazette.dev/region", "eu-central-1"),
            ("content-type", "application/x-ndjson"),
            ("team", f"team-{index % _TEAMS:02}"),
        )
        name = self.item_id(index)
        if self.name == "brokers":
            stores = ("s3://scale-fragments/cluster/?region=eu-central-1",)
            fragment = FragmentSpec(1 << 29, Codec.GZIP, stores, 300 * _SECOND)
            journal = JournalSpec(name, self.replication, labels, fragment)
            return journal.to_pb().SerializeToString()
        shard = ShardSpec(
            name,
            (ShardSource(f"scale/inputs/{name}"),),
            "recovery/scale",
            "/scale/hints",
            2,
            _SECOND,
            hot_standbys=self.replication - 1,
            labels=labels,
        )
        return shard.to_pb().SerializeToString()

    def member_value(self, member: ProcessId, limit: int) -> bytes:
        endpoint = f"http://{member.suffix}.{member.zone}.scale.example:8080"
        spec = BrokerSpec if self.name == "brokers" else ConsumerSpec
        return spec(member, endpoint, limit).to_pb().SerializeToString()


BROKERS: Final = Kind(
    "brokers",
    "journal",
    "broker",
    3,
    1_000,
    (1_000, 3_000, 10_000, 30_000, 100_000),
    broker_keys.broker_decoder(ROOT, 9),
    broker_keys.is_consistent,
    broker_keys.progress,
)
MEMBERS: Final = Kind(
    "members",
    "shard",
    "member",
    2,
    50,
    (500, 1_500, 5_000, 15_000, 50_000),
    consumer_keys.consumer_decoder(ROOT, 3),
    consumer_keys.is_consistent,
    consumer_keys.progress,
)
KINDS: Final = {kind.name: kind for kind in (BROKERS, MEMBERS)}


class PaperCluster:
    """The keys of a cluster. Primaries and standbys report as soon as their watch has the change.

    Member ``m`` has the lease ``m + 1``. Each member may have twice its share of the items.
    """

    def __init__(self, kind: Kind, items: int, etcd: PaperEtcd) -> None:
        self.kind = kind
        self.etcd = etcd
        self.items = items
        self.member_count = kind.members(items)
        limit = -(-2 * items * kind.replication // self.member_count)
        self._limit = limit
        etcd.fill((self.item_key(index), kind.item_value(index), 0) for index in range(items))
        etcd.fill(map(self.member_put, range(self.member_count)))
        etcd.on_change = self._look

    def id_of(self, member: int) -> ProcessId:
        return ProcessId(f"zone-{member % ZONES}", f"{self.kind.member}-{member:04}")

    def key_of(self, member: int) -> str:
        return member_key(ROOT, *_parts(self.id_of(member)))

    def item_key(self, index: int) -> bytes:
        return item_key(ROOT, self.kind.item_id(index)).encode()

    def member_put(self, member: int) -> tuple[bytes, bytes, int]:
        value = self.kind.member_value(self.id_of(member), self._limit)
        return self.key_of(member).encode(), value, member + 1

    def assign(self) -> None:
        """Give each item its members, in turn, as a converged cluster has them."""
        zone_of = [range(zone, self.member_count, ZONES) for zone in range(ZONES)]

        def puts() -> Iterable[tuple[bytes, bytes, int]]:
            for index in range(self.items):
                chosen = [
                    members[(index // ZONES) % len(members)]
                    for slot in range(self.kind.replication)
                    for members in (zone_of[(index + slot) % ZONES],)
                ]
                ids = [self.id_of(member) for member in chosen]
                for slot, member in enumerate(chosen):
                    key = assignment_key(
                        ROOT, self.kind.item_id(index), *_parts(self.id_of(member)), slot
                    )
                    yield key.encode(), self._value(ids, slot), member + 1

        self.etcd.fill(puts())

    def missing(self) -> int:
        """Return the number of items that lack replicas, or whose replicas are not all in step."""
        return sum(
            not self._is_settled(self.etcd.item(self._prefix(index))) for index in range(self.items)
        )

    def _prefix(self, index: int) -> bytes:
        return f"{ROOT}{ASSIGNMENTS}{self.kind.item_id(index)}#".encode()

    def _is_settled(self, assignments: dict[bytes, Any]) -> bool:
        slots = sorted(int(key.rpartition(b"#")[2]) for key in assignments)
        return slots == list(range(self.kind.replication)) and not self._stale(assignments)

    def _look(self, events: Iterable[Any]) -> None:
        """Let replicas of assignments that have changed report, once their watch has them."""
        prefixes = {prefix for event in events if (prefix := item_prefix(event.kv.key))}
        if stale := [p for p in prefixes if self._stale(self.etcd.item(p))]:
            asyncio.get_running_loop().call_later(2 * self.etcd.latency_s, self._report, stale)

    def _report(self, prefixes: Iterable[bytes]) -> None:
        for prefix in prefixes:
            puts = self._stale(self.etcd.item(prefix))
            # The primary of a journal writes all of its routes. Each replica of a shard writes its status.
            for group in [puts] if self.kind is BROKERS else [[put] for put in puts]:
                if group:
                    self.etcd.put(group)

    def _stale(self, assignments: dict[bytes, Any]) -> list[tuple[bytes, bytes, int]]:
        """Return the puts that bring an item's assignments in step, if it has a primary."""
        parts = {key: key.decode().split("#")[1:] for key in sorted(assignments)}
        ids = [ProcessId(zone, suffix) for zone, suffix, _ in parts.values()]
        slots = [int(slot) for _, _, slot in parts.values()]
        if self.kind is BROKERS and 0 not in slots:
            return []
        primary = slots.index(0) if 0 in slots else None
        stale = []
        for (key, kv), slot in zip(sorted(assignments.items()), slots, strict=True):
            value = self._encoded(ids, primary, slot)
            if kv.value != value:
                stale.append((key, value, kv.lease))
        return stale

    def _value(self, ids: list[ProcessId], slot: int) -> bytes:
        in_order = sorted(ids, key=_parts)
        return self._encoded(in_order, in_order.index(ids[0]), slot)

    def _encoded(self, ids: list[ProcessId], primary: int | None, slot: int) -> bytes:
        if self.kind is BROKERS:
            return Route(tuple(ids), primary).to_pb().SerializeToString()
        code = ReplicaCode.STANDBY if slot else ReplicaCode.PRIMARY
        return ReplicaStatus(code).to_pb().SerializeToString()


def _parts(member: ProcessId) -> tuple[str, str]:
    return member.zone, member.suffix
