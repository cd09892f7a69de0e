"""The hash of keys: FNV-1a of 32 bits, as in the Go original. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gazette.lazy_numpy import numpy as np
from gazette.message.keys import CanonicalKey

_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193
_NEWLINE: Final = ord("\n")
_FEW: Final = 16
"""For fewer keys, a loop over the bytes of each key is faster."""
_HASHES_KEPT: Final = 1 << 16


def fnv32a(key: bytes, value: int = _FNV_OFFSET) -> int:
    """Return the 32-bit FNV-1a hash. ``value`` is the hash of the bytes before ``key``."""
    for byte in key:
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def fnv32a_of_all(keys: Sequence[CanonicalKey]) -> Any:
    """Return an array of the hashes of many keys. Each step handles the bytes of all keys at one position.

    Raise ``TypeError`` for a value that is no key, ``UnicodeEncodeError`` for a text with a lone surrogate.
    """
    if len(keys) < _FEW:
        return np.array([fnv32a(bytes_of_key(key)) for key in keys], np.uint32)
    content = _joined(keys)
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == _NEWLINE)
    if len(ends) != len(keys):  # There is a newline in a key.
        encoded = [bytes_of_key(key) for key in keys]
        content = b"\n".join([*encoded, b""])
        ends = np.cumsum(np.fromiter(map(len, encoded), np.intp, len(encoded)) + 1) - 1
    if len(content) % len(keys) == 0:
        width = len(content) // len(keys)
        if np.array_equal(ends, np.arange(width - 1, len(content), width)):
            data = np.frombuffer(content, np.uint8)
            return _hash_rows(np.ascontiguousarray(data.reshape(-1, width)[:, :-1].T))
    return _hash_any_lengths(content, ends)


def _joined(keys: Sequence[Any]) -> bytes:
    """Return the bytes of keys with a newline after each."""
    try:
        return ("\n".join(keys) + "\n").encode()
    except TypeError:
        return b"\n".join([*map(bytes_of_key, keys), b""])


def _hash_rows(columns: Any) -> Any:
    """Return the hashes of keys of one length. Row i of ``columns`` has byte i of each key."""
    hashes = np.full(columns.shape[1], _FNV_OFFSET, np.uint32)
    for column in columns:
        hashes ^= column
        hashes *= _FNV_PRIME
    return hashes


def _hash_any_lengths(content: bytes, ends: Any) -> Any:
    """Return the hashes of keys of any lengths. ``ends`` are the positions of the newlines after them."""
    data, lengths = np.frombuffer(content, np.uint8), np.diff(ends, prepend=-1) - 1
    order = _longest_first(lengths)
    begins, lengths = (ends - lengths)[order], lengths[order]
    hashes = np.full(len(lengths), _FNV_OFFSET, np.uint32)
    # Up to this length, `_FEW` keys or more have a byte at each position. For the bytes beyond this length, a
    # loop over each key is faster.
    common_length = int(lengths[_FEW - 1])
    counts = np.searchsorted(-lengths, -np.arange(common_length), side="left")
    # The longest keys come first: only the first ``count`` keys have a byte at this position.
    for position, count in enumerate(counts):
        running = hashes[:count]
        running ^= data[begins[:count] + position]
        running *= _FNV_PRIME
    for index in range(np.searchsorted(-lengths, -common_length, side="left")):
        begin = int(begins[index])
        remaining = content[begin + common_length : begin + int(lengths[index])]
        hashes[index] = fnv32a(remaining, int(hashes[index]))
    in_order = np.empty_like(hashes)
    in_order[order] = hashes
    return in_order


def _longest_first(lengths: Any) -> Any:
    """Return the order of keys, the longest first. Sorting 16-bit integers is several times as fast."""
    shortfalls = lengths.max(initial=0) - lengths
    dtype = np.uint16 if shortfalls.max(initial=0) < 1 << 16 else np.intp
    return np.argsort(shortfalls.astype(dtype), kind="stable")


def bytes_of_key(key: CanonicalKey) -> bytes:
    """Return the bytes of a key, which are hashed."""
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
    """Return the hash of a key. Hashes of recent keys are cached."""
    return _key_hashes[key]
