"""Names of journals, shards and processes, and their common alphabet.

Lengths are in bytes of UTF-8, as in the protocol. No name can hold ``#``, which separates the parts of
allocator keys, or a character that sorts below ``#``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from gazette.errors import Invalid
from gazette.protocol.pb import broker_pb2
from gazette.protocol.text.validation import within

JournalName: TypeAlias = str
"""``path/to/journal``, or ``path/to/journal;meta`` if a request permits a metadata segment."""
ShardId: TypeAlias = str
Offset: TypeAlias = int
"""A byte offset of a journal."""
Revision: TypeAlias = int
"""A revision of etcd."""

META_DELIMITER: Final = ";"
NAME_BYTES_MIN: Final = 4
NAME_BYTES_MAX: Final = 512
"""Greatest length of journal names, shard ids and path postfixes, in bytes."""

# `\w` is exactly the letters and numbers of Unicode, and "_".
_TOKEN = re.compile(r"[\w\-+/.]*")
_PATH_TOKEN = re.compile(r"[\w\-+/.=%]*")
_ASCII = {
    alphabet: bytes(code for code in range(128) if alphabet.fullmatch(chr(code)))
    for alphabet in (_TOKEN, _PATH_TOKEN)
}
"""ASCII characters of each alphabet."""


def validate_token(value: str, minimum: int, maximum: int) -> None:
    """Raise ``Invalid`` for a character that is neither letter, number nor of ``-_+/.``, or a wrong length.

    ``minimum`` and ``maximum`` are in bytes.
    """
    _validate_symbols(value, _TOKEN, minimum, maximum)


def validate_path_token(value: str, minimum: int, maximum: int) -> None:
    """Raise ``Invalid`` as ``validate_token``, but permit ``=`` and ``%``. The token need not be a path."""
    _validate_symbols(value, _PATH_TOKEN, minimum, maximum)


@lru_cache(maxsize=4096)
def validate_path_component(value: str, minimum: int, maximum: int) -> None:
    """Raise ``Invalid`` unless ``value`` is a relative path in clean form that stays below its parent.

    The protocol permits a leading ``..``, which could leave a blob store or a directory. Refuse it here.
    """
    _validate_symbols(value, _PATH_TOKEN, minimum, maximum)
    if not value:
        return
    # `normpath` keeps two slashes at the start of a path.
    if posixpath.normpath(value) != value or value.startswith("//"):
        raise Invalid(f"must be a clean path ({value})")
    if value[0] == "/":
        raise Invalid(f"cannot begin with '/' ({value})")
    if value == ".." or value.startswith("../"):
        raise Invalid(f"cannot traverse outside its parent ({value})")


@lru_cache(maxsize=4096)
def split_journal_meta(name: JournalName) -> tuple[JournalName, str]:
    """Split ``journal;meta`` at the first ``;``. Without a ``;``, meta is ``""``."""
    journal, _, meta = name.partition(META_DELIMITER)
    return journal, meta


@lru_cache(maxsize=4096)
def validate_journal_name(name: JournalName) -> None:
    """Require a journal name, with or without a metadata segment."""
    journal, delimiter, meta = name.partition(META_DELIMITER)
    validate_path_component(journal, NAME_BYTES_MIN, NAME_BYTES_MAX)
    if delimiter:
        with within("metadata path segment"):
            validate_path_component(meta, 1, NAME_BYTES_MAX)


def validate_shard_id(shard_id: ShardId) -> None:
    """Require a shard id: a token, which need not be a clean path."""
    validate_token(shard_id, NAME_BYTES_MIN, NAME_BYTES_MAX)


def validate_offsets(offsets: Mapping[JournalName, Offset]) -> None:
    """Raise ``Invalid`` unless journal names are valid (metadata permitted), and offsets at least 0."""
    for journal, offset in sorted(offsets.items()):
        with within(f"Offsets[{journal}]"):
            validate_journal_name(journal)
            if offset < 0:
                raise Invalid(f"invalid offset ({offset}; expected >= 0)")


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process of a cluster: a failure zone, and a suffix that is unique within it."""

    zone: str
    suffix: str

    def __str__(self) -> str:
        return f"{self.zone}#{self.suffix}"

    def validate(self) -> None:
        with within("Zone"):
            validate_token(self.zone, 1, 32)
        with within("Suffix"):
            validate_token(self.suffix, 4, 128)

    def to_pb(self) -> broker_pb2.ProcessSpec.ID:
        return broker_pb2.ProcessSpec.ID(zone=self.zone, suffix=self.suffix)

    @classmethod
    def from_pb(cls, pb: broker_pb2.ProcessSpec.ID) -> ProcessId:
        return cls(pb.zone, pb.suffix)


def _validate_symbols(value: str, alphabet: re.Pattern[str], minimum: int, maximum: int) -> None:
    if value.isascii():
        length = len(value)
        # A fast path for ASCII: labels and registers make this the most frequent check of all.
        valid = not value.encode().translate(None, _ASCII[alphabet])
    else:
        # Half of a surrogate pair has no UTF-8. Measure its length even so: the alphabet refuses it below.
        length = len(value.encode("utf-8", "surrogatepass"))
        valid = alphabet.fullmatch(value) is not None
    if not minimum <= length <= maximum:
        raise Invalid(f"invalid length ({length}; expected {minimum} <= length <= {maximum})")
    if not valid:
        raise Invalid(f"not a valid token ({value})")
