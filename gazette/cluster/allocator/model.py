"""Items, members and assignments: their keys in etcd, and the values that the allocator reads.

Keys under a root. ``#`` sorts below every character of names, so the order of keys is the order of (item,
zone, suffix):

    <root>/items/<item>                            item to be served; no lease
    <root>/members/<zone>#<suffix>                 member; under its session lease
    <root>/assign/<item>#<zone>#<suffix>#<slot>    assignment; under the assigned member's lease

Items are journals (brokers) or shards (consumers). Slot 0 is the primary. Other numbers have no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gazette.cluster.etcd.values import KeyValue
from gazette.errors import Invalid
from gazette.runtime.numbers import is_digits

SEPARATOR = "#"
ITEMS = "/items/"
MEMBERS = "/members/"
ASSIGNMENTS = "/assign/"

MemberId = tuple[str, str]
"""Zone and suffix of a member."""


class ItemValue(Protocol):
    """The facts that the allocator reads from an item's specification."""

    def desired_replication(self) -> int:
        """Return the number of distinct members to serve the item. Zero means none."""
        ...

    def least_replication(self) -> int:
        """Return the number of replicas to keep when members leave and too few stay.

        The number is at most ``desired_replication``. An item that is durable only by its replicas keeps all
        of them, and the leaving member waits for a replacement. An item that is durable without its replicas
        returns one: it is handed over at once.
        """
        ...


class MemberValue(Protocol):
    """The facts that the allocator reads from a member's specification."""

    def item_limit(self) -> int:
        """Return the greatest number of assignments that the member may hold, over all slots."""
        ...

    def exiting(self) -> bool:
        """Return True if the member asks to hand over all its items."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    id: str
    value: ItemValue


@dataclass(frozen=True, slots=True)
class Member:
    zone: str
    suffix: str
    value: MemberValue

    @property
    def id(self) -> MemberId:
        return (self.zone, self.suffix)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of an item to a member. ``value`` is a Route, or the ReplicaStatus of a shard."""

    item_id: str
    zone: str
    suffix: str
    slot: int
    value: Any

    @property
    def member_id(self) -> MemberId:
        return (self.zone, self.suffix)


class DecodedKV(Protocol):
    """A key of the mirror with its decoded value, implemented in ``gazette.cluster.keyspace``."""

    @property
    def key(self) -> str: ...
    @property
    def raw(self) -> KeyValue: ...
    @property
    def decoded(self) -> Any: ...


IsConsistent = Callable[[DecodedKV, DecodedKV, Sequence[DecodedKV]], bool]
"""``is_consistent(item, assignment, all assignments of the item)``: True if the replica is consistent."""

Progress = Callable[[DecodedKV], tuple[int, ...]]
"""``progress(assignment)``: a key that sorts higher if the member holds more of its item."""


def unknown_progress(assignment: DecodedKV) -> tuple[int, ...]:
    """Return an equal ``Progress`` for all assignments."""
    del assignment
    return ()


def item_key(root: str, item_id: str) -> str:
    """Return the key of an item. Raise ``Invalid`` for an id that would break the order of keys."""
    return f"{root}{ITEMS}{_component(item_id, 'item')}"


def member_key(root: str, zone: str, suffix: str) -> str:
    """Return the key of a member. Raise ``Invalid`` for parts that would break the order of keys."""
    return f"{root}{MEMBERS}{_component(zone, 'zone')}{SEPARATOR}{_component(suffix, 'suffix')}"


def assignment_key(root: str, item_id: str, zone: str, suffix: str, slot: int) -> str:
    """Return the key of an assignment. Raise ``Invalid`` for parts that would break the order of keys."""
    parts = (
        _component(item_id, "item"),
        _component(zone, "zone"),
        _component(suffix, "suffix"),
        str(slot),
    )
    if slot < 0:
        raise Invalid(f"invalid slot ({slot}; expected >= 0)", path="slot")
    return f"{root}{ASSIGNMENTS}{SEPARATOR.join(parts)}"


def item_assignments_prefix(root: str, item_id: str) -> str:
    """Return the common prefix of the keys of all assignments of one item, and of no other item."""
    return f"{root}{ASSIGNMENTS}{_component(item_id, 'item')}{SEPARATOR}"


def _component(value: str, path: str) -> str:
    if not value:
        raise Invalid("must not be empty", path=path)
    if any(char <= SEPARATOR for char in value):
        raise Invalid(f"holds a character that sorts at or below '#' ({value!r})", path=path)
    return value


def allocator_decoder(
    root: str,
    decode_item: Callable[[str, bytes], ItemValue],
    decode_member: Callable[[str, str, bytes], MemberValue],
    decode_assignment: Callable[[str, str, str, int, bytes], Any],
) -> Callable[[KeyValue], Item | Member | Assignment]:
    """Return the decoder of a KeySpace that holds an allocator's keys.

    ``decode_item(id, value)``, ``decode_member(zone, suffix, value)`` and ``decode_assignment(item, zone,
    suffix, slot, value)`` check that the value agrees with its key. If not, they raise ``Invalid``. The value
    of a new assignment is empty. The decoder raises ``Invalid`` for every other key.
    """

    def decode(raw: KeyValue) -> Item | Member | Assignment:
        try:
            key = raw.key.decode()
        except UnicodeDecodeError as error:
            raise Invalid(f"key is not UTF-8 ({raw.key!r})") from error
        if (item_id := _tail(key, root, ITEMS)) is not None:
            (name,) = _split(key, item_id, 1)
            return Item(name, decode_item(name, raw.value))
        if (ids := _tail(key, root, MEMBERS)) is not None:
            zone, suffix = _split(key, ids, 2)
            return Member(zone, suffix, decode_member(zone, suffix, raw.value))
        if (ids := _tail(key, root, ASSIGNMENTS)) is not None:
            item_id, zone, suffix, slot_text = _split(key, ids, 4)
            slot = _parse_slot(key, slot_text)
            value = decode_assignment(item_id, zone, suffix, slot, raw.value)
            return Assignment(item_id, zone, suffix, slot, value)
        raise Invalid(f"unexpected key prefix ({key})")

    return decode


def _tail(key: str, root: str, table: str) -> str | None:
    prefix = root + table
    return key[len(prefix) :] if key.startswith(prefix) else None


def _split(key: str, rest: str, count: int) -> list[str]:
    parts = rest.split(SEPARATOR)
    if len(parts) != count or not all(parts):
        raise Invalid(f"expected {count} non-empty parts separated by '#' ({key})")
    if min(rest) < SEPARATOR:  # No assignment can name such a part: see `_component`.
        raise Invalid(f"holds a character that sorts below '#' ({key!r})")
    return parts


def _parse_slot(key: str, text: str) -> int:
    if not is_digits(text):
        raise Invalid(f"expected an integer slot ({key})")
    return int(text)
