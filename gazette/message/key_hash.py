"""The hash of keys: FNV-1a of 32 bits, as in the Go original. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gazette.message.keys import CanonicalKey

_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193
_HASHES_KEPT: Final = 1 << 16


def fnv32a(key: bytes) -> int:
    """Return the 32-bit FNV-1a hash."""
    value = _FNV_OFFSET
    for byte in key:
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def fnv32a_of_all(keys: Sequence[bytes]) -> Any:
    """Return an array of the hashes of many keys. It takes one step for each byte of the longest."""
    lengths = np.fromiter(map(len, keys), np.intp, len(keys))
    order = np.argsort(-lengths, kind="stable")
    content = np.frombuffer(b"".join(keys), np.uint8)
    begins = (np.cumsum(lengths) - lengths)[order]
    counts = np.searchsorted(-lengths[order], -np.arange(lengths.max(initial=0)), side="left")
    hashes = np.full(len(keys), _FNV_OFFSET, np.uint32)
    prime = np.uint32(_FNV_PRIME)
    for at, count in enumerate(counts):
        # The longest keys come first: those that have a byte here.
        running = hashes[:count]
        running ^= content[begins[:count] + at]
        running *= prime
    found = np.empty_like(hashes)
    found[order] = hashes
    return found


def bytes_of_key(key: CanonicalKey) -> bytes:
    """Return the bytes that are hashed."""
    return key.encode() if isinstance(key, str) else key


class _KeyHashes(dict[CanonicalKey, int]):
    """Hashes of recent keys, since the loop over their bytes is slow in Python. Any thread may use it."""

    def __missing__(self, key: CanonicalKey) -> int:
        if len(self) >= _HASHES_KEPT:
            self.clear()
        self[key] = key_hash = fnv32a(bytes_of_key(key))
        return key_hash


_key_hashes: Final = _KeyHashes()


def hash_of_key(key: CanonicalKey) -> int:
    """Return the hash of a key. Those of recent keys are kept."""
    return _key_hashes[key]
