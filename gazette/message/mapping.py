"""Which journal a message goes to: partitions, and mappings of messages to them.

A mapping is a function from a message to a `Partition`. It reads the partitions anew each time, from
a function that gives an immutable snapshot, so that it may be used by any thread while a
`PartitionWatch` on the event loop keeps them current.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from gazette.errors import NotFound
from gazette.labels import CONTENT_TYPE
from gazette.protocol.ids import JournalName
from gazette.protocol.journal import JournalSpec

M = TypeVar("M")

_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193
_HASHES_KEPT: Final = 1 << 16
_CHOICES_KEPT: Final = 1 << 16


class Partition(NamedTuple):
    """A journal to publish to, and how messages are framed there."""

    journal: JournalName
    content_type: str


class Partitions:
    """A snapshot of the journals that messages are spread over, ordered by name. Immutable."""

    __slots__ = ("_hashes", "all")

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self.all = tuple(partitions)
        self._hashes: Any = None

    @classmethod
    def of_specs(cls, specs: Iterable[JournalSpec]) -> Partitions:
        """Journals as a broker lists them; their content type is that of their label."""
        return cls(
            Partition(spec.name, spec.labels.value_of(CONTENT_TYPE) or "")
            for spec in sorted(specs, key=lambda spec: spec.name)
        )

    def choose(self, key_hash: int) -> Partition:
        """The partition whose name, hashed, is greatest when combined with the key's."""
        if self._hashes is None:
            names = [fnv32a(partition.journal.encode()) for partition in self.all]
            self._hashes = np.array(names, dtype=np.uint32)
        return self.all[int((self._hashes ^ np.uint32(key_hash)).argmax())]


PartitionsFunc: TypeAlias = Callable[[], Partitions]
"""Gives the current partitions; thread-safe, and cheap."""

Mapping: TypeAlias = Callable[[M], Partition]
"""Where a message goes. Raises `NotFound` if there is no partition."""

Key: TypeAlias = Callable[[M], bytes | str]
"""The part of a message by which it is mapped: equal keys go to the same partition."""


@lru_cache(maxsize=_HASHES_KEPT)
def fnv32a(key: bytes) -> int:
    """The 32-bit FNV-1a hash. The hashes of recent keys are kept: the loop is slow in Python."""
    value = _FNV_OFFSET
    for byte in key:
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def fixed_mapping(journal: JournalName, content_type: str) -> Mapping[Any]:
    """Every message goes to one journal."""
    partition = Partition(journal, content_type)
    return lambda _message: partition


def random_mapping(partitions: PartitionsFunc, rng: random.Random) -> Mapping[Any]:
    """Messages are spread evenly, and without order among them."""

    def mapping(_message: Any) -> Partition:
        current = partitions().all
        if not current:
            raise no_partitions()
        return current[rng.randrange(len(current))]

    return mapping


def modulo_mapping(partitions: PartitionsFunc, key: Key[M]) -> Mapping[M]:
    """Messages of equal keys go to the same partition, until the number of partitions changes.

    Then nearly every key moves. A consumer of the journals relies on this by joining the n-th of
    several topics that have the same number of partitions.
    """

    def mapping(message: M) -> Partition:
        current = partitions().all
        if not current:
            raise no_partitions()
        value = key(message)
        key_hash = fnv32a(value.encode() if isinstance(value, str) else value)
        return current[key_hash % len(current)]

    return mapping


def rendezvous_mapping(partitions: PartitionsFunc, key: Key[M]) -> Mapping[M]:
    """Messages of equal keys go to the same partition; when one is added, as many keys move to it as
    it takes to be even, and no others move."""
    memo: tuple[Partitions, dict[int, Partition]] | None = None

    def mapping(message: M) -> Partition:
        nonlocal memo
        current, known = partitions(), memo
        if known is None or known[0] is not current or len(known[1]) > _CHOICES_KEPT:
            if not current.all:
                raise no_partitions()
            memo = known = (current, {})
        value = key(message)
        key_hash = fnv32a(value.encode() if isinstance(value, str) else value)
        partition = known[1].get(key_hash)
        if partition is None:
            known[1][key_hash] = partition = current.choose(key_hash)
        return partition

    return mapping


def no_partitions() -> NotFound:
    return NotFound(
        "there is no partition to map the message to",
        hint="Create journals that match the selector of the partitions (`gazctl journals apply`).",
    )


class _Listed(Protocol):
    @property
    def spec(self) -> JournalSpec: ...


class JournalSnapshot(Protocol):
    """What a watch of journals gives: `gazette.client.journals.JournalList`."""

    @property
    def journals(self) -> tuple[_Listed, ...]: ...


class PartitionWatch:
    """The journals that match a selector, kept current. A `PartitionsFunc` by being called.

    Made and run on the event loop; called from any thread. Give it a watch of the client::

        watch = PartitionWatch(watch_journals(client, LabelSelector.parse("…")))
        scope.daemon(watch.run(), name="partitions")
        await watch.ready()
    """

    def __init__(self, snapshots: AsyncIterator[JournalSnapshot]) -> None:
        self._snapshots = snapshots
        self._current = Partitions(())
        self._ready = asyncio.Event()

    def __call__(self) -> Partitions:
        """The partitions as last reported; none before `ready`."""
        return self._current

    async def run(self) -> None:
        """Keep current. A daemon: raises what the watch does. Cancellation: the last state stays."""
        async for snapshot in self._snapshots:
            partitions = Partitions.of_specs(listed.spec for listed in snapshot.journals)
            # What mappings have worked out for a snapshot stays good while nothing changed for them.
            if partitions.all != self._current.all:
                self._current = partitions
            self._ready.set()

    async def ready(self) -> None:
        """Wait for the first report. It may have been of no partitions."""
        await self._ready.wait()
