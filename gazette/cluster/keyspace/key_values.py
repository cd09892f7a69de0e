"""Decoded keys of etcd in ascending order, with lookup by bisection."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from gazette.cluster.etcd.values import KeyValue

Decoder: TypeAlias = Callable[[KeyValue], object]
"""Function that decodes a key and its value. It raises any error for an invalid key or value."""


@dataclass(frozen=True, slots=True)
class DecodedKeyValue:
    """A key as text, the raw key and value, and the decoded value. The text sorts like the bytes."""

    key: str
    raw: KeyValue
    decoded: object


class Keyed(Protocol):
    @property
    def key(self) -> str: ...


K = TypeVar("K", bound=Keyed)


def differences(before: Sequence[K], now: Sequence[K]) -> Iterator[tuple[K | None, K | None, int]]:
    """Yield each entry that differs, as ``(before, now, its index in now)``, in order of keys.

    Both sequences ascend. ``before`` is None for a new entry, and ``now`` for one that is gone. Equal runs
    are compared as slices. So a few changes of many entries cost little more than to compare two lists.
    """
    old = new = 0
    run = 1  # Length of the next slices to compare: twice as long after equal slices, shorter after others.
    while (rest := min(len(before) - old, len(now) - new)) > 0:
        run = min(run, rest)
        if before[old : old + run] == now[new : new + run]:
            old, new, run = old + run, new + run, run * 2
        elif run > 1:
            run = max(1, run // 4)
        else:
            former, present = before[old], now[new]
            yield (
                former if former.key <= present.key else None,
                present if present.key <= former.key else None,
                new,
            )
            old += former.key <= present.key
            new += present.key <= former.key
    yield from ((entry, None, new) for entry in before[old:])
    yield from ((None, entry, index) for index, entry in enumerate(now[new:], new))


def _key(kv: DecodedKeyValue) -> str:
    return kv.key


def index_of(kvs: Sequence[DecodedKeyValue], key: str, begin: int = 0) -> int:
    """Return the index of the first entry, from ``begin`` on, whose key is not below ``key``."""
    return bisect.bisect_left(kvs, key, lo=begin, key=_key)


def find(kvs: Sequence[DecodedKeyValue], key: str) -> DecodedKeyValue | None:
    """Return the entry with exactly that key, or None."""
    index = index_of(kvs, key)
    if index < len(kvs) and kvs[index].key == key:
        return kvs[index]
    return None


def prefixed(kvs: Sequence[DecodedKeyValue], prefix: str) -> Sequence[DecodedKeyValue]:
    """Return the entries whose key begins with ``prefix``."""
    begin = index_of(kvs, prefix)
    # The key function is False for all entries with the prefix, which come first, then True.
    end = bisect.bisect_left(kvs, True, lo=begin, key=lambda kv: not kv.key.startswith(prefix))
    return kvs[begin:end]
