"""Items, members and assignments: their keys in etcd and what the allocator needs to know of them.

Keys under a root (broker.md §2.1; ``#`` sorts below every character that a name may hold, so the
order of keys is the order of (item, zone, suffix))::

    <root>/items/<item>                            what is to be served; no lease
    <root>/members/<zone>#<suffix>                 who serves; under the member's session lease
    <root>/assign/<item>#<zone>#<suffix>#<slot>    who serves what; under the assigned member's lease

The broker's items are journals, the consumer's are shards. Slot 0 is the primary; other slots carry
no meaning of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gazette.errors import Invalid
from gazette.etcd_values import KeyValue
from gazette.protocol.numbers import is_digits

SEPARATOR = "#"
ITEMS = "/items/"
MEMBERS = "/members/"
ASSIGNMENTS = "/assign/"

MemberId = tuple[str, str]
"""(zone, suffix)."""


class ItemValue(Protocol):
    """What an item's specification tells the allocator."""

    def desired_replication(self) -> int:
        """How many distinct members shall serve the item; zero for none."""
        ...

    def least_replication(self) -> int:
        """How many of them it must keep when members leave and too few stay, at most the former.

        An item whose replicas are what makes it durable keeps them all, and the leaving member waits
        for a replacement. One that is durable without them asks for one: it is handed over at once.
        """
        ...


class MemberValue(Protocol):
    """What a member's specification tells the allocator."""

    def item_limit(self) -> int:
        """The most assignments that the member may hold, over all slots."""
        ...

    def exiting(self) -> bool:
        """Whether the member wants to be relieved of all it holds."""
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
    """``value`` is whatever the application decodes: a Route (broker), a ReplicaStatus (consumer)."""

    item_id: str
    zone: str
    suffix: str
    slot: int
    value: Any

    @property
    def member_id(self) -> MemberId:
        return (self.zone, self.suffix)


class DecodedKV(Protocol):
    """A key of the mirror with its decoded value (``gazette.keyspace`` has it)."""

    @property
    def key(self) -> str: ...
    @property
    def raw(self) -> KeyValue: ...
    @property
    def decoded(self) -> Any: ...


IsConsistent = Callable[[DecodedKV, DecodedKV, Sequence[DecodedKV]], bool]
"""``is_consistent(item, assignment, all assignments of the item)``: whether that replica is up to date."""

Progress = Callable[[DecodedKV], tuple[int, ...]]
"""``progress(assignment)``: sorts higher the more of its item that member is known to hold."""


def unknown_progress(assignment: DecodedKV) -> tuple[int, ...]:
    """A ``Progress`` by which all assignments are equal."""
    del assignment
    return ()


def item_key(root: str, item_id: str) -> str:
    """Raises ``Invalid`` for an id that would break the order of keys."""
    return f"{root}{ITEMS}{_component(item_id, 'item')}"


def member_key(root: str, zone: str, suffix: str) -> str:
    """Raises ``Invalid`` for parts that would break the order of keys."""
    return f"{root}{MEMBERS}{_component(zone, 'zone')}{SEPARATOR}{_component(suffix, 'suffix')}"


def assignment_key(root: str, item_id: str, zone: str, suffix: str, slot: int) -> str:
    """Raises ``Invalid`` for parts that would break the order of keys."""
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
    """The common prefix of the keys of all assignments of one item, and of no other item."""
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
    """The decoder of a KeySpace that holds an allocator's keys.

    ``decode_item(id, value)``, ``decode_member(zone, suffix, value)`` and
    ``decode_assignment(item, zone, suffix, slot, value)`` check that the value agrees with its key and
    raise ``Invalid`` if not. The value of a fresh assignment is empty.

    The returned function raises ``Invalid`` for every key that is none of the three.
    """

    def decode(raw: KeyValue) -> Item | Member | Assignment:
        try:
            key = raw.key.decode()
        except UnicodeDecodeError as error:
            raise Invalid(f"key is not UTF-8 ({raw.key!r})") from error
        if (item_id := _tail(key, root, ITEMS)) is not None:
            (part,) = _split(key, item_id, 1)
            return Item(part, decode_item(part, raw.value))
        if (rest := _tail(key, root, MEMBERS)) is not None:
            zone, suffix = _split(key, rest, 2)
            return Member(zone, suffix, decode_member(zone, suffix, raw.value))
        if (rest := _tail(key, root, ASSIGNMENTS)) is not None:
            item_id, zone, suffix, slot_text = _split(key, rest, 4)
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
    return parts


def _parse_slot(key: str, text: str) -> int:
    if not is_digits(text):
        raise Invalid(f"expected an integer slot ({key})")
    return int(text)
