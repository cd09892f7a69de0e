"""The needs and the capacity of a cluster, and the items that its leaving members keep.

A leaving member gets no new item. It keeps an item while the members that stay cannot hold all replicas of
that item, or have no room for it. Of two members, the one that joined first is the older:

    item of a leaving member     replicas wanted   members that stay    the member
    no other member needed       w                 w or more            hands it over
    too few members stay         w                 s, fewer than w      keeps it, if it is one of the
                                                                        w - s youngest leaving holders
    the others are full          w                 w or more, no room   keeps it, if the items of older
                                                                        leaving members fill the room
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from gazette.cluster.allocator.model import DecodedKV, MemberId


class Demand:
    """Capacity and demand of one snapshot. Costs O(members + items), and O(assignments) while members leave.

    ``limits`` are effective: the limit of a leaving member is the number of items that it keeps.
    """

    def __init__(
        self,
        members: Sequence[DecodedKV],
        items: Sequence[DecodedKV],
        assignments: Sequence[DecodedKV],
    ) -> None:
        self.replication = _replication(members, items)
        """Number of replicas of every item: the desired number, or fewer while members leave."""
        self.item_slots = sum(self.replication.values())
        self.limits: dict[MemberId, int] = {
            kv.decoded.id: max(0, kv.decoded.value.item_limit()) for kv in members
        }
        self.needed: dict[MemberId, Collection[str]] = {}
        """By leaving member, the items that have too few other members."""
        self.crowded: dict[MemberId, int] = {}
        """By leaving member, the number of further items that it keeps because all other members are full."""
        self.kept: dict[MemberId, Collection[str]] = {}
        """By leaving member, the items that it may keep. `limits` says how many of them the member keeps."""
        leaving = [
            kv for kv in members if kv.decoded.value.exiting() and self.limits[kv.decoded.id] > 0
        ]
        if leaving:
            leaving.sort(key=lambda kv: kv.raw.create_revision)
            self._relieve([kv.decoded.id for kv in leaving], assignments)
        self.member_slots = sum(self.limits.values())
        self.zone_slots: dict[str, int] = {}
        for (zone, _), limit in sorted(self.limits.items()):
            if limit > 0:
                self.zone_slots[zone] = self.zone_slots.get(zone, 0) + limit

    def _relieve(self, leaving: Sequence[MemberId], assignments: Sequence[DecodedKV]) -> None:
        """Lower the limit of each ``leaving`` member, the oldest first, to the number of items it keeps."""
        items_of = self._held(leaving, assignments)
        staying = [m for m, limit in self.limits.items() if limit > 0 and m not in items_of]
        holders: dict[str, list[MemberId]] = {}  # Leaving members by item, the youngest first.
        for member in reversed(leaving):
            self.limits[member] = min(self.limits[member], len(items_of[member]))
            for item in items_of[member]:
                holders.setdefault(item, []).append(member)
        # Each staying member can have one replica of an item. The youngest leaving holders keep the others.
        self.needed = {
            member: frozenset(
                item
                for item in items_of[member]
                if member in holders[item][: max(0, self.replication[item] - len(staying))]
            )
            for member in leaving
        }
        # Hand over at most the slots in excess. A replica that no member could hold needs no slot.
        slots = sum(
            min(wanted, len(staying) + len(holders.get(item, ())))
            for item, wanted in self.replication.items()
        )
        item_count = sum(wanted > 0 for wanted in self.replication.values())
        room = sum(min(self.limits[member], item_count) for member in staying)
        excess = room + sum(self.limits[member] for member in leaving) - slots
        for member in leaving:
            spare = max(0, self.limits[member] - len(self.needed[member]))
            handed_over = max(0, min(spare, excess))
            excess -= handed_over
            self.limits[member] -= handed_over
            self.kept[member] = self.needed[member]
            if handed_over < spare:  # The solver decides which of its items stay.
                self.crowded[member] = spare - handed_over
                self.kept[member] = items_of[member]

    def _held(
        self, leaving: Sequence[MemberId], assignments: Sequence[DecodedKV]
    ) -> Mapping[MemberId, set[str]]:
        """Return the items of each leaving member, without items of which no replica is wanted."""
        items_of: dict[MemberId, set[str]] = {member: set() for member in leaving}
        for kv in assignments:
            items = items_of.get(kv.decoded.member_id)
            if items is not None and self.replication.get(kv.decoded.item_id, 0) > 0:
                items.add(kv.decoded.item_id)
        return items_of

    @cached_property
    def network_hash(self) -> int:
        """Hash of limits, replication, and the numbers of items that need each leaving member.

        The items that a leaving member hands over do not count.
        """
        digest = hashlib.blake2b(digest_size=8)
        needed = {member: len(items) for member, items in self.needed.items()}
        for table in (self.limits, self.replication, needed):
            parts = (f"{key}\0{number}" for key, number in table.items())
            digest.update("\0".join(parts).encode())
            digest.update(b"\1")
        return int.from_bytes(digest.digest(), "big")


def _replication(members: Sequence[DecodedKV], items: Sequence[DecodedKV]) -> dict[str, int]:
    """Return the number of replicas of each item.

    While members leave, items may have as few replicas as ``least_replication`` allows, if the
    members that stay cannot hold more. So a hand-off need not wait for a replacement to start.
    """
    desired = {kv.decoded.id: max(0, kv.decoded.value.desired_replication()) for kv in items}
    if not any(kv.decoded.value.exiting() for kv in members):
        return desired
    least = {kv.decoded.id: max(0, kv.decoded.value.least_replication()) for kv in items}
    staying_limits = [
        limit
        for kv in members
        if not kv.decoded.value.exiting() and (limit := max(0, kv.decoded.value.item_limit()))
    ]
    room = sum(staying_limits)
    # Find the greatest cap for which there is room. A cap above the greatest replication changes nothing.
    for cap in range(min(len(staying_limits), max(desired.values(), default=0)), 0, -1):
        reduced = {item: min(wanted, max(least[item], cap)) for item, wanted in desired.items()}
        if sum(reduced.values()) <= room:
            return reduced
    return {item: min(wanted, max(least[item], 1)) for item, wanted in desired.items()}
