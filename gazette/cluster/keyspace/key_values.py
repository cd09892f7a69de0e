"""Decoded keys of etcd in ascending order, with lookup by bisection."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gazette.cluster.etcd.values import KeyValue

Decoder: TypeAlias = Callable[[KeyValue], object]
"""Function that decodes a key and its value. It raises if they are invalid."""


@dataclass(frozen=True, slots=True)
class DecodedKeyValue:
    """A key as text, the raw key and value, and the decoded value. The text sorts like the bytes."""

    key: str
    raw: KeyValue
    decoded: object


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
