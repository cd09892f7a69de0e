"""Folds loaded keys and watched events into the next sorted, decoded key/values.

One bad key must not stop the mirror of all others. So the fold tolerates a value that cannot be decoded, and
a version that was skipped. It returns each such case as an ``Anomaly``.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gazette.cluster.etcd.values import KeyValue, WatchEvent
from gazette.cluster.keyspace.key_values import DecodedKeyValue, Decoder
from gazette.errors import Bug


@dataclass(frozen=True, slots=True)
class Anomaly:
    """An unexpected write of a key. ``applied`` is True if it took effect in the mirror anyway."""

    key: str
    mod_revision: int
    problem: str
    applied: bool


@dataclass(frozen=True, slots=True)
class Folded:
    key_values: list[DecodedKeyValue]
    anomalies: tuple[Anomaly, ...]


def load(
    kvs: Iterable[KeyValue],
    decoder: Decoder,
    previous: Sequence[DecodedKeyValue] = (),
    after: DecodedKeyValue | None = None,
) -> Folded:
    """Decode all keys of a range, in order, or the part of these keys that comes ``after`` an entry.

    Leave out a value that cannot be decoded. But if ``previous``, the former mirror, has an entry of the key
    with the same CreateRevision, keep that entry, as ``fold`` does. Raise ``Bug`` if keys do not ascend.
    """
    folding = _Folding(decoder)
    loaded: list[DecodedKeyValue] = []
    for kv in kvs:
        text = _text(kv.key)
        if after is not None and not after.raw.key < kv.key:
            raise Bug("keys of a range are out of order", key=text, after=after.key)
        former = _at(previous, _index_of(previous, kv.key), kv.key)
        if former is not None and former.raw.create_revision != kv.create_revision:
            former = None
        entry = folding.decode(text, kv, former)
        if entry is not None:
            loaded.append(entry)
            after = entry
    return Folded(loaded, tuple(folding.anomalies))


def fold(
    current: Sequence[DecodedKeyValue],
    responses: Sequence[Sequence[WatchEvent]],
    decoder: Decoder,
) -> Folded:
    """Apply the events of ``responses`` to ``current``. Neither is changed.

    ``current`` ascends, as ``load`` and ``fold`` return it. Each response has its events in order of
    revision. Merge the events by (key, ModRevision). One pass over them builds the result, and copies
    unchanged runs of keys.
    """
    folding = _Folding(decoder)
    folded: list[DecodedKeyValue] = []
    copied = 0
    for key, events in _by_key(responses):
        index = _index_of(current, key, copied)
        folded += current[copied:index]
        entry = _at(current, index, key)
        copied = index if entry is None else index + 1
        text = _text(key)
        for event in events:
            entry = folding.apply(text, entry, event)
        if entry is not None:
            folded.append(entry)
    folded += current[copied:]
    return Folded(folded, tuple(folding.anomalies))


def _by_key(
    responses: Sequence[Sequence[WatchEvent]],
) -> Iterator[tuple[bytes, Iterator[WatchEvent]]]:
    # The sort is stable, so that events of one key in a response keep their order.
    runs = [sorted(events, key=lambda event: event.kv.key) for events in responses]
    merged = heapq.merge(*runs, key=lambda event: (event.kv.key, event.kv.mod_revision))
    return groupby(merged, key=lambda event: event.kv.key)


def _index_of(kvs: Sequence[DecodedKeyValue], key: bytes, begin: int = 0) -> int:
    # Compare bytes, not text: the key of an event may not be valid UTF-8.
    return bisect.bisect_left(kvs, key, lo=begin, key=lambda entry: entry.raw.key)


def _at(kvs: Sequence[DecodedKeyValue], index: int, key: bytes) -> DecodedKeyValue | None:
    return kvs[index] if index < len(kvs) and kvs[index].raw.key == key else None


def _text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


class _Folding:
    """Rules for single events, and the anomalies seen so far."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.anomalies: list[Anomaly] = []

    def apply(
        self, key: str, entry: DecodedKeyValue | None, event: WatchEvent
    ) -> DecodedKeyValue | None:
        """Return the key's entry after ``event``. ``entry`` is its entry before, or None if it was absent."""
        kv = event.kv
        if event.deleted:
            if entry is None:
                self._note(key, kv, "deletion of an unknown key", applied=False)
            return None
        if entry is None:
            decoded = self.decode(key, kv, None)
            if decoded is not None and (kv.version != 1 or kv.create_revision != kv.mod_revision):
                self._note(key, kv, "first seen after its creation", applied=True)
            return decoded
        former = entry.raw
        if kv.mod_revision <= former.mod_revision:
            self._note(key, kv, f"not newer than revision {former.mod_revision}", applied=False)
            return entry
        decoded = self.decode(key, kv, entry)
        if decoded is entry:
            return entry
        if kv.create_revision != former.create_revision:
            self._note(key, kv, "created again without a deletion", applied=True)
        elif kv.version != former.version + 1:
            self._note(key, kv, f"version {kv.version} follows {former.version}", applied=True)
        return decoded

    def decode(
        self, key: str, kv: KeyValue, otherwise: DecodedKeyValue | None
    ) -> DecodedKeyValue | None:
        """Return the decoded entry. If it cannot be decoded, return ``otherwise``, with its old revision."""
        try:
            if not key.isascii():
                kv.key.decode()  # Raises: only UTF-8 has a place in the order of texts.
            return DecodedKeyValue(key, kv, self._decoder(kv))
        except Bug:
            raise
        except Exception as error:  # noqa: BLE001  # any client can write any value
            kept = "" if otherwise is None else f", revision {otherwise.raw.mod_revision} stays"
            self._note(key, kv, f"does not decode{kept}: {error!s}", applied=False)
            return otherwise

    def _note(self, key: str, kv: KeyValue, problem: str, *, applied: bool) -> None:
        self.anomalies.append(Anomaly(key, kv.mod_revision, problem, applied))
