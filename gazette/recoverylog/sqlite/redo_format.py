"""The bytes of images and redo: frames, headers, and changes of a page by a commit. Pure.

`redo` says which files a database has, and why.

- A redo file: a header, then frames until the end of the file.
- A frame: length and checksum of its payload, its kind, the payload.
- The payload of a commit: pages of the database; for each page that changed, its ranges.
- The payload of an image: group, pages and checksum. For an image within a file: the file and the offset,
  too.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from gazette.errors import Corrupt, TooLarge

_HEADER: Final = struct.Struct("<8sIIQI")  # magic, page size, index, end of the predecessor, crc
_MAGIC: Final = b"GZREDO01"
HEADER_LENGTH: Final = _HEADER.size

_FRAME: Final = struct.Struct("<IIB")  # payload length, crc of kind and payload, kind
_COMMIT: Final = struct.Struct("<II")  # pages of the database, pages in the frame
_PAGE: Final = struct.Struct("<IH")  # page number (from 1), ranges (WHOLE: the page itself)
_LENGTH: Final = struct.Struct("<H")  # length - 1 of a whole page, less the zeros at its end
_RANGE: Final = struct.Struct("<HH")  # offset, length - 1
_IMAGE: Final = struct.Struct("<IIIIII")  # group, serial, first page, pages, crc, database pages
_WITHIN: Final = struct.Struct("<IIQ")  # group and serial in the name of the file, offset in it

KIND_COMMIT: Final = 1
KIND_IMAGE: Final = 2
KIND_IMAGE_WITHIN: Final = 3
_KINDS: Final = (KIND_COMMIT, KIND_IMAGE, KIND_IMAGE_WITHIN)
WHOLE: Final = 0xFFFF
PAYLOAD_BYTES_MAX: Final = 0xFFFF_0000 - (1 << 17)
"""Greatest length in bytes of a frame without its last page (at most 64 KiB): lengths have 32 bits."""

_DAMAGED: Final = (
    "The file was changed since it was played back, or the log is cut within an append, which brokers never"
    " do. Check the disk. gazctl shards unassign --failed plays the log back into another directory."
)

RANGE_GAP: Final = _RANGE.size + 4
"""Gap in bytes below which two ranges are joined: a second range costs four bytes and some time."""
_EQUAL: Final = re.compile(rb"\0{%d,}" % RANGE_GAP)  # Between two ranges, in the XOR of the pages.


@dataclass(frozen=True, slots=True)
class PageChange:
    """Change of a page by a commit: ranges of (offset, bytes), or the whole page as one range at 0."""

    page: int
    ranges: tuple[tuple[int, bytes], ...]
    whole: bool


class ImageFile(NamedTuple):
    """A file of images, identified by its first image."""

    group: int
    serial: int

    def name(self, database: str) -> str:
        return f"{database}.image-{self.group:06d}-{self.serial:08d}"


@dataclass(frozen=True, slots=True)
class ImageFrame:
    """Announcement of image ``serial`` of the pages [first, first + count) of ``group``.

    The image stands at ``offset`` of ``file``. ``pages`` is the size of the database. The redo before the
    oldest image is dropped: perhaps no commit frame is left that says it.
    """

    group: int
    serial: int
    first: int
    count: int
    crc: int
    pages: int
    file: ImageFile
    offset: int


def redo_name(database: str, index: int) -> str:
    return f"{database}.redo-{index:08d}"


def encode_header(page_size: int, index: int, previous_end: int) -> bytes:
    body = _HEADER.pack(_MAGIC, page_size, index, previous_end, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def decode_header(name: str, data: bytes) -> tuple[int, int, int]:
    """Return (page size, index, end of the predecessor) of a file. Raise ``Corrupt`` for a damaged head."""
    if len(data) == HEADER_LENGTH:
        magic, page_size, index, previous_end, crc = _HEADER.unpack(data)
        if magic == _MAGIC and zlib.crc32(data[: HEADER_LENGTH - 4]) == crc:
            return page_size, index, previous_end
    raise Corrupt("the header of a redo file is damaged", file=name, hint=_DAMAGED)


def _frame(kind: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), _crc(kind, payload), kind) + payload


def _crc(kind: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(bytes((kind,))))


def encode_commit(
    pages: int, changes: Iterable[PageChange], *, bytes_max: int = PAYLOAD_BYTES_MAX
) -> bytearray:
    """Return one commit frame, with pages in the order of ``changes``. Each page appears at most once.

    Memory has the frame once, and one change at a time: a commit may change all pages of a database.
    Raise ``TooLarge`` for more than about ``bytes_max``.
    """
    begin = _FRAME.size
    frame = bytearray(begin + _COMMIT.size)
    count = 0
    for change in changes:
        count += 1
        if len(frame) > bytes_max:
            raise TooLarge(
                f"a commit changes too much of the database: the log holds {bytes_max:,} bytes of one",
                path="commit",
                bytes_max=bytes_max,
                hint="Make the change in several transactions. The recovery log is whole: the shard recovers"
                " as of the commit before.",
            )
        if change.whole:
            data = change.ranges[0][1]
            stripped = data.rstrip(b"\0") or b"\0"
            frame += _PAGE.pack(change.page, WHOLE)
            frame += _LENGTH.pack(len(stripped) - 1)
            frame += stripped
            continue
        frame += _PAGE.pack(change.page, len(change.ranges))
        for offset, data in change.ranges:
            frame += _RANGE.pack(offset, len(data) - 1)
            frame += data
    _COMMIT.pack_into(frame, begin, pages, count)
    payload = memoryview(frame)[begin:]
    _FRAME.pack_into(frame, 0, len(payload), _crc(KIND_COMMIT, payload), KIND_COMMIT)
    return frame


def encode_image(frame: ImageFrame) -> bytes:
    body = _IMAGE.pack(frame.group, frame.serial, frame.first, frame.count, frame.crc, frame.pages)
    if not frame.offset:
        return _frame(KIND_IMAGE, body)
    return _frame(KIND_IMAGE_WITHIN, body + _WITHIN.pack(*frame.file, frame.offset))


def decode_image(kind: int, payload: memoryview) -> ImageFrame:
    """Return the announcement of an image. Raise ``Corrupt`` for a damaged announcement."""
    length = _IMAGE.size + (_WITHIN.size if kind == KIND_IMAGE_WITHIN else 0)
    if len(payload) != length:
        raise Corrupt("the redo frame of an image has a wrong length", length=len(payload))
    group, serial, first, count, crc, pages = _IMAGE.unpack_from(payload)
    file, offset = ImageFile(group, serial), 0
    if kind == KIND_IMAGE_WITHIN:
        *name, offset = _WITHIN.unpack_from(payload, _IMAGE.size)
        file = ImageFile(*name)
    return ImageFrame(group, serial, first, count, crc, pages, file, offset)


def frame_length(payload: memoryview) -> int:
    """Return the length of the frame with this payload."""
    return _FRAME.size + len(payload)


def pages_after(payload: memoryview) -> int:
    """Return the size of the database, in pages, after a commit."""
    pages: int = _COMMIT.unpack_from(payload)[0]
    return pages


def changes_of(
    payload: memoryview, page_size: int
) -> Iterator[tuple[int, int, bytes | memoryview]]:
    """Yield (page, offset in the page, bytes) of a commit's changes. Raise ``Corrupt`` for bad ranges."""
    _, count = _COMMIT.unpack_from(payload)
    pos = _COMMIT.size
    for _ in range(count):
        page, n_ranges = _PAGE.unpack_from(payload, pos)
        pos += _PAGE.size
        if not page:
            raise Corrupt("a redo frame changes a page with an invalid number")
        if n_ranges == WHOLE:
            length = _LENGTH.unpack_from(payload, pos)[0] + 1
            pos += _LENGTH.size
            if length > page_size:
                raise Corrupt("redo frame has a range beyond its page", page=page)
            yield page, 0, bytes(payload[pos : pos + length]).ljust(page_size, b"\0")
            pos += length
            continue
        for _ in range(n_ranges):
            offset, length = _RANGE.unpack_from(payload, pos)  # The stored length is one less.
            pos += _RANGE.size
            if offset + length >= page_size:
                raise Corrupt("redo frame has a range beyond its page", page=page)
            yield page, offset, payload[pos : pos + length + 1]
            pos += length + 1
    if pos != len(payload):
        raise Corrupt("redo frame is longer than its pages", length=len(payload), read=pos)


def diff_page(
    page: int, old: bytes | memoryview | None, new: bytes | memoryview
) -> PageChange | None:
    """Return the change that turns ``old`` into ``new``, or None if they are equal.

    Without ``old``, return the whole page. A range has at most 64 KiB, like a page.
    """
    if old is None or len(old) != len(new):
        return PageChange(page, ((0, bytes(new)),), whole=True)
    differences = int.from_bytes(old, "little") ^ int.from_bytes(new, "little")
    if not differences:
        return None
    changed = differences.to_bytes((differences.bit_length() + 7) // 8, "little")
    first = len(changed) - len(changed.lstrip(b"\0"))
    gaps = [match.span() for match in _EQUAL.finditer(changed, first)]
    begins = [first, *(end for _, end in gaps)]
    ends = [*(begin for begin, _ in gaps), len(changed)]
    ranges = tuple((begin, bytes(new[begin:end])) for begin, end in zip(begins, ends, strict=True))
    if sum(len(data) + _RANGE.size for _, data in ranges) >= len(new) or len(ranges) >= WHOLE:
        return PageChange(page, ((0, bytes(new)),), whole=True)
    return PageChange(page, ranges, whole=False)


def read_frames(
    data: memoryview, end: int | None, name: str, *, base: int = 0
) -> Iterator[tuple[int, memoryview]]:
    """Yield (kind, payload) of a redo file's frames. A payload ends where its frame does.

    ``data`` is the file from offset ``base`` on, which is 0 or the end of a frame. ``end`` is the end of this
    file according to its successor: later bytes were replaced. None, without a successor: the end of
    ``data``. Raise ``Corrupt`` if the last frame does not end exactly there, and for a wrong checksum or an
    unknown kind.
    """
    pos = max(base, HEADER_LENGTH)
    data_end = base + len(data)
    limit = data_end if end is None else end
    if limit > data_end or pos > limit:
        raise Corrupt(
            "a redo file is shorter than its successor says",
            file=name,
            expected=limit,
            length=data_end,
        )
    while limit - pos >= _FRAME.size:
        length, crc, kind = _FRAME.unpack_from(data, pos - base)
        begin = pos + _FRAME.size
        if begin + length > limit:
            break
        payload = data[begin - base : begin - base + length]
        if _crc(kind, payload) != crc:
            raise Corrupt("a redo frame fails its checksum", file=name, offset=pos)
        if kind not in _KINDS:
            raise Corrupt(
                "a redo frame is of an unknown kind: a later version of Gazette recorded this database",
                file=name,
                kind=kind,
                hint="Run that version, or a later one. This version cannot read the state of the shard.",
            )
        pos = begin + length
        yield kind, payload
    if pos != limit:
        raise Corrupt(
            "a redo file is torn: a frame reaches beyond its end, or is damaged",
            file=name,
            offset=pos,
            end=limit,
            hint=_DAMAGED,
        )
