"""The parts of RocksDB's manifest that hot standbys need: column families, and WALs to read. Pure.

A manifest is a sequence of records, in the form of WALs. Each record is an edit: tags with their values.
Numbers are varints; a text comes after its length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gazette.errors import Corrupt, NotAllowed
from gazette.recoverylog.rocksdb.native import DEFAULT
from gazette.stores.rocksdb.wal import records

_COMPARATOR, _LOG_NUMBER, _COMPACT_CURSOR, _DELETED_FILE, _NEW_FILE = 1, 2, 5, 6, 103
_FAMILY, _FAMILY_ADD, _FAMILY_DROP = 200, 201, 202
_BLOB_FILE, _BLOB_GARBAGE = 400, 401
_NUMBERS: Final = frozenset({3, 4, 9, 10, 203, 300})
"""Tags with one number, which standbys do not need."""
_IGNORABLE: Final = 1 << 13
"""Bit of tags that are followed by one text, so that a reader can skip unknown tags."""
_NEW_FILE_END, _BLOB_END = 1, 0
_VARINT_BITS_MAX: Final = 70
"""Bits of the longest varint that RocksDB writes: ten bytes of seven bits."""


class RecordReader:
    """Reader of a record. Raises ``Corrupt`` beyond its end."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    @property
    def left(self) -> bool:
        return self.at < len(self.data)

    def byte(self) -> int:
        if self.at >= len(self.data):
            raise Corrupt("a record of RocksDB ends too early", length=len(self.data))
        value = self.data[self.at]
        self.at += 1
        return value

    def number(self) -> int:
        value = 0
        for shift in range(0, _VARINT_BITS_MAX, 7):
            part = self.byte()
            value |= (part & 0x7F) << shift
            if part < 0x80:
                return value
        raise Corrupt("a number in a record of RocksDB does not end", length=len(self.data))

    def numbers(self, count: int) -> None:
        """Skip ``count`` numbers."""
        for _ in range(count):
            self.number()

    def texts_up_to(self, end: int) -> None:
        """Skip pairs of a tag and a text, up to the tag ``end``."""
        while self.number() != end:
            self.text()

    def text(self) -> bytes:
        end = self.number() + self.at
        if end > len(self.data):
            raise Corrupt("a record of RocksDB ends too early", length=len(self.data))
        value = self.data[self.at : end]
        self.at = end
        return value


@dataclass(slots=True)
class Manifest:
    """The result of a manifest's edits."""

    families: dict[int, str] = field(default_factory=lambda: {0: DEFAULT})
    """Names of column families, by their numbers in WALs."""
    first_wals: dict[int, int] = field(default_factory=dict)
    """For each family, the number of the first WAL with writes that its tables may lack.

    Do not read older WALs. An older WAL may remain after a newer one, with later writes to the same keys, is
    gone.
    """

    @classmethod
    def of(cls, data: bytes) -> Manifest:
        """Read a manifest. Raise ``Corrupt`` for damage, ``NotAllowed`` for an unknown kind of edit."""
        manifest = cls()
        for record, _ in records(data, 0):
            manifest._apply(RecordReader(record))
        return manifest

    def _apply(self, reader: RecordReader) -> None:
        """Apply one edit: its tags say in any order what changes in one column family."""
        number, first_wal, added, dropped = 0, None, None, False
        while reader.left:
            tag = reader.number()
            if tag == _FAMILY:
                number = reader.number()
            elif tag == _FAMILY_ADD:
                added = _name(reader.text())
            elif tag == _FAMILY_DROP:
                dropped = True
            elif tag == _LOG_NUMBER:
                first_wal = reader.number()
            else:
                _skip(reader, tag)
        if added is not None:
            self.families[number] = added
        if dropped:
            self.families.pop(number, None)
        if first_wal is not None:
            self.first_wals[number] = max(first_wal, self.first_wals.get(number, 0))


def _name(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise Corrupt("a column family's name is not text", name=repr(text[:64])) from error


def _skip(reader: RecordReader, tag: int) -> None:
    """Skip the values of a tag that standbys do not need. Raise ``NotAllowed`` for an unknown tag."""
    if tag in _NUMBERS:
        reader.number()
    elif tag == _COMPARATOR or tag & _IGNORABLE:
        reader.text()
    elif tag == _COMPACT_CURSOR:
        reader.number()
        reader.text()
    elif tag == _DELETED_FILE:
        reader.numbers(2)
    elif tag == _NEW_FILE:
        reader.numbers(3)  # Level, number, size.
        reader.text()
        reader.text()
        reader.numbers(2)  # The first and the last sequence number.
        reader.texts_up_to(_NEW_FILE_END)
    elif tag == _BLOB_FILE:
        reader.numbers(3)
        reader.text()
        reader.text()
        reader.texts_up_to(_BLOB_END)
    elif tag == _BLOB_GARBAGE:
        reader.numbers(3)
        reader.texts_up_to(_BLOB_END)
    else:
        raise NotAllowed(
            f"a hot standby does not know this edit of RocksDB's manifest ({tag})",
            hint="The database is of another version of RocksDB; ask the primary.",
        )
