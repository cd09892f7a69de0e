"""The hash of keys: FNV-1a of 32 bits, as in the Go original. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gazette.message.keys import CanonicalKey

_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193
_PRIME: Final = np.uint32(_FNV_PRIME)
_HASHES_KEPT: Final = 1 << 16


def fnv32a(key: bytes) -> int:
    """Return the 32-bit FNV-1a hash."""
    value = _FNV_OFFSET
    for byte in key:
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def fnv32a_of_all(keys: Sequence[CanonicalKey]) -> Any:
    """Return an array of the hashes of many keys. It takes one step for each byte of the longest."""
    content = _joined_ascii(keys)
    if content is None:
        encoded = [bytes_of_key(key) for key in keys]
        keys, content = encoded, b"".join(encoded)
    lengths = np.fromiter(map(len, keys), np.intp, len(keys))
    data = np.frombuffer(content, np.uint8)
    longest = int(lengths.max(initial=0))
    if longest * len(keys) == len(data):
        return _of_rows(np.ascontiguousarray(data.reshape(len(keys), longest).T))
    return _of_lengths(data, lengths)


def _joined_ascii(keys: Sequence[Any]) -> bytes | None:
    """Return texts as one, if each character is a byte; else None."""
    try:
        text = "".join(keys)
    except TypeError:
        return None
    return text.encode() if text.isascii() else None


def _of_rows(columns: Any) -> Any:
    """Return the hashes of keys of one length, given their bytes by place."""
    hashes = np.full(columns.shape[1], _FNV_OFFSET, np.uint32)
    for column in columns:
        hashes ^= column
        hashes *= _PRIME
    return hashes


def _of_lengths(data: Any, lengths: Any) -> Any:
    order = np.argsort(-lengths, kind="stable")
    begins = (np.cumsum(lengths) - lengths)[order]
    counts = np.searchsorted(-lengths[order], -np.arange(lengths.max(initial=0)), side="left")
    hashes = np.full(len(lengths), _FNV_OFFSET, np.uint32)
    for at, count in enumerate(counts):
        # The longest keys come first: those that have a byte here.
        running = hashes[:count]
        running ^= data[begins[:count] + at]
        running *= _PRIME
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
