"""Mappings of messages to journals, and the partitions that mappings choose from.

A mapping is a function from a message to a `Partition`. Each call reads an immutable snapshot of the
partitions. So any thread may use a mapping, while a `PartitionWatch` on the event loop makes new snapshots.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from gazette.errors import Invalid, NotFound
from gazette.labels import CONTENT_TYPE, MESSAGE_KEY, MESSAGE_TIME, MESSAGE_UUID
from gazette.lazy_numpy import numpy as np
from gazette.message.key_hash import fnv32a, hash_of_key
from gazette.message.key_rule import LabelledKeys, one_rule
from gazette.message.keys import ANY, CanonicalKey, KeyEncoding
from gazette.message.labelled_time import labelled_time
from gazette.message.message_time import MessageTime
from gazette.protocol.ids import JournalName
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.text.validation import within

M = TypeVar("M")

_CHOICES_KEPT: Final = 1 << 16


class Partition(NamedTuple):
    """A journal to publish to, and the framing of its messages."""

    journal: JournalName
    content_type: str
    message_types: tuple[type, ...] = ()
    """Types of its messages that a declaration permits. Empty if any type is permitted."""
    uuid: str = ""
    """Place of the UUID in its messages. If empty, the place that their type names, or else ``uuid``."""
    time: MessageTime | str = ""
    """Time of its messages: as declared, or the text of the journal's label. If empty, publishers' clocks."""

    @property
    def message_time(self) -> MessageTime | None:
        """Time of its messages. Raises ``Invalid`` for a label that is no time."""
        if not isinstance(self.time, str):
            return self.time
        with within(self.journal):
            return labelled_time(self.time) if self.time else None

    def require_type(self, kind: type) -> None:
        """Raise ``Invalid`` unless messages of a type may be in this journal.

        A subclass of a declared type is refused: readers would decode the declared type, and lose the fields
        of the subclass. Only a declared type that supplies its own codec permits subclasses.
        """
        types = self.message_types
        if not types or kind in types or issubclass(kind, self._with_own_codec()):
            return
        names = " or ".join(declared_type.__qualname__ for declared_type in types)
        raise Invalid(
            f"journal {self.journal} holds messages of type {names}, not {kind.__qualname__}",
            path="message",
            hint=f"Publish a {names}, or declare the type of this message."
            + (" Readers would drop the fields of a subclass." if issubclass(kind, types) else ""),
        )

    def with_uuid(self, place: str) -> Partition:
        """Return the partition with ``place`` as its place of UUIDs; if ``place`` is empty, the partition
        itself. Raise ``Invalid`` if the partition has another place."""
        if self.uuid and place and self.uuid != place:
            raise Invalid(
                f"journal {self.journal} has the UUIDs of messages in {self.uuid}, and not in {place}",
                path="uuid",
                hint=f"Go by the label {MESSAGE_UUID} of the journal, or correct it.",
            )
        return self._replace(uuid=place or self.uuid)

    def _with_own_codec(self) -> tuple[type, ...]:
        return tuple(kind for kind in self.message_types if hasattr(kind, "gazette_codec"))


def _partition_of(spec: JournalSpec) -> Partition:
    labels = spec.labels
    return Partition(
        spec.name,
        labels.value_of(CONTENT_TYPE) or "",
        uuid=labels.value_of(MESSAGE_UUID) or "",
        time=labels.value_of(MESSAGE_TIME) or "",
    )


class Partitions:
    """An immutable snapshot of partitions. Give them in the order of their names, since a key chooses a
    partition by its position."""

    __slots__ = ("_hashes", "_keys", "all", "is_keyed", "labels")

    def __init__(self, partitions: Iterable[Partition], labels: Iterable[LabelSet] = ()) -> None:
        self.all = tuple(partitions)
        self.labels = tuple(labels)
        """Labels of each partition; empty if the labels are not known."""
        self.is_keyed = any(label_set.values_of(MESSAGE_KEY) for label_set in self.labels)
        """True if labels name the key by which messages are mapped."""
        self._hashes: Any = None
        """Hashes of the journals' names, computed by the first `choose`."""
        self._keys: LabelledKeys | None = None

    @classmethod
    def of_specs(cls, specs: Iterable[JournalSpec]) -> Partitions:
        """Return the partitions of specifications. Labels give content type, place of the UUID, and time."""
        ordered = sorted(specs, key=lambda spec: spec.name)
        return cls((_partition_of(spec) for spec in ordered), [spec.labels for spec in ordered])

    def keys(self) -> LabelledKeys | None:
        """Return the keys of messages as the labels say; None if no label names a key.

        Raise ``Invalid`` unless the partitions are all the partitions of one declaration.
        """
        if self._keys is None and self.is_keyed:
            journals = [partition.journal for partition in self.all]
            self._keys = LabelledKeys(one_rule(journals, self.labels))
        return self._keys

    def of_key(self, key: CanonicalKey) -> Partition:
        """Return the partition of a key. Raise ``NotFound`` if there are no partitions."""
        if not self.all:
            raise no_partitions()
        return self.at(hash_of_key(key))

    def at(self, key_hash: int) -> Partition:
        """Return the partition whose index is the hash of the key, modulo the number of partitions."""
        return self.all[key_hash % len(self.all)]

    def choose(self, key_hash: int) -> Partition:
        """Return the partition with the greatest XOR of the hash of its name and the hash of the key."""
        if self._hashes is None:
            name_hashes = [fnv32a(partition.journal.encode()) for partition in self.all]
            self._hashes = np.array(name_hashes, dtype=np.uint32)
        return self.all[int((self._hashes ^ np.uint32(key_hash)).argmax())]


PartitionsFunc: TypeAlias = Callable[[], Partitions]
"""Function that returns the current partitions. Thread-safe and fast."""

Mapping: TypeAlias = Callable[[M], Partition]
"""Function from a message to its partition. Raises `NotFound` if there is no partition."""

Key: TypeAlias = Callable[[M], Any]
"""Function from a message to its key. Messages with equal keys go to the same partition.

`gazette.message.keys` says which values are keys, and which bytes of each value are hashed.
"""


class _Choices(dict[CanonicalKey, Partition]):
    """Partitions of recent keys, all of one snapshot. Any thread may use it.

    Look up a text or bytes directly; encode any other value first. So values that are equal in Python, such
    as 1 and True, never get each other's partition.
    """

    __slots__ = ("_choose", "_encoding", "partitions")

    def __init__(
        self,
        partitions: Partitions,
        choose: Callable[[Partitions, int], Partition],
        encoding: KeyEncoding,
    ) -> None:
        self.partitions = partitions
        self._choose = choose
        self._encoding = encoding

    def __missing__(self, value: Any) -> Partition:
        if not isinstance(value, CanonicalKey):
            return self[self._encoding.encode(value)]
        if not self.partitions.all:
            raise no_partitions()
        key = ANY.encode(value)
        if len(self) >= _CHOICES_KEPT:
            self.clear()
        self[key] = partition = self._choose(self.partitions, hash_of_key(key))
        return partition

    def of_value(self, value: Any) -> Partition:
        """Return the partition of a value that cannot be a key of a dict, such as a bytearray."""
        return self[self._encoding.encode(value)]


def _check_labels(partitions: Partitions, choose: Callable[[Partitions, int], Partition]) -> None:
    """Raise ``Invalid`` if labels say that messages are mapped otherwise than by ``choose``."""
    keys = partitions.keys()
    if keys is not None and choose is not Partitions.at:
        raise Invalid(
            f"messages of these journals are mapped by {keys.rule}, modulo the number of partitions",
            path="mapping",
            hint="Use modulo_mapping, or the mapping() of the Source or Output.",
            journal=partitions.all[0].journal,
        )


def _mapping_by_key(
    partitions: PartitionsFunc,
    key: Key[M],
    encoding: KeyEncoding,
    choose: Callable[[Partitions, int], Partition],
) -> Mapping[M]:
    """Return a mapping by ``key`` that remembers the partitions of recent keys, until partitions change."""
    choices = _Choices(Partitions(()), choose, encoding)

    def mapping(message: M) -> Partition:
        nonlocal choices
        cached, current = choices, partitions()
        if cached.partitions is not current:
            _check_labels(current, choose)
            choices = cached = _Choices(current, choose, encoding)
        value = key(message)
        try:
            return cached[value]
        except TypeError:  # The value cannot be a key of a dict.
            return cached.of_value(value)

    return mapping


def fixed_mapping(
    journal: JournalName,
    content_type: str,
    message_types: tuple[type, ...] = (),
    uuid: str = "",
    time: MessageTime | str = "",
) -> Mapping[Any]:
    """Map every message to one journal. ``time`` is the time of its messages, or the text of its label."""
    partition = Partition(journal, content_type, message_types, uuid, time)
    return lambda _message: partition


def random_mapping(partitions: PartitionsFunc, rng: random.Random) -> Mapping[Any]:
    """Spread messages evenly over the partitions, without order among them.

    The mapping raises ``Invalid`` if labels of several partitions say that messages are mapped by a key.
    """

    def mapping(_message: Any) -> Partition:
        current = partitions()
        candidates = current.all
        if not candidates:
            raise no_partitions()
        if current.is_keyed and len(candidates) > 1:
            raise _needs_key(current)
        return candidates[rng.randrange(len(candidates))]

    return mapping


def modulo_mapping(
    partitions: PartitionsFunc, key: Key[M], encoding: KeyEncoding = ANY
) -> Mapping[M]:
    """Map messages with equal keys to the same partition, until the number of partitions changes.

    When the number changes, at least half of the keys move. Use this mapping if an application joins the
    n-th partitions of several sources that have the same number of partitions.

    ``encoding`` encodes those values of ``key`` that are neither text nor bytes. The mapping raises
    ``Invalid`` for a value that cannot be a key.
    """
    return _mapping_by_key(partitions, key, encoding, Partitions.at)


def rendezvous_mapping(partitions: PartitionsFunc, key: Key[M]) -> Mapping[M]:
    """Map messages with equal keys to the same partition. A new partition takes over some keys; all other
    keys stay where they are. Partitions may get unequal shares of the keys. The mapping raises ``Invalid``
    for a value that cannot be a key."""
    return _mapping_by_key(partitions, key, ANY, Partitions.choose)


def _needs_key(partitions: Partitions) -> Invalid:
    journal = partitions.all[0].journal
    return Invalid(
        "messages of these journals are mapped by a key, and not at random",
        path="mapping",
        hint="Use the mapping() of the Source or Output that declares them, or modulo_mapping.",
        journal=journal,
    )


def no_partitions() -> NotFound:
    return NotFound(
        "cannot map the message: no journal matches the selector of the partitions",
        hint="Create journals that match the selector (`gazctl journals apply`).",
    )


class _Listed(Protocol):
    @property
    def spec(self) -> JournalSpec: ...


class JournalSnapshot(Protocol):
    """One result of a watch of journals, such as `gazette.client.journals.JournalList`."""

    @property
    def journals(self) -> tuple[_Listed, ...]: ...


class PartitionWatch:
    """A current snapshot of the journals that match a selector. The watch is a `PartitionsFunc`.

    Make and run it on the event loop. Call it from any thread. Give it a watch of the client:

        watch = PartitionWatch(watch_journals(client, LabelSelector.parse("…")))
        scope.daemon(watch.run(), name="partitions")
        await watch.ready()
    """

    def __init__(self, snapshots: AsyncIterator[JournalSnapshot]) -> None:
        self._snapshots = snapshots
        self._current = Partitions(())
        self._ready = asyncio.Event()

    def __call__(self) -> Partitions:
        """Return the partitions as last reported. Before the first report, return no partitions."""
        return self._current

    async def run(self) -> None:
        """Keep the partitions current. Run this as a daemon.

        An error of the watch reaches the caller. Cancellation leaves the last snapshot in place.
        """
        async for snapshot in self._snapshots:
            partitions = Partitions.of_specs(listed.spec for listed in snapshot.journals)
            # Keep the same object if nothing changed: mappings cache their choices for each snapshot.
            former = self._current
            if partitions.all != former.all or partitions.labels != former.labels:
                self._current = partitions
            self._ready.set()

    async def ready(self) -> None:
        """Wait for the first report. Even that report may have no partitions."""
        await self._ready.wait()
