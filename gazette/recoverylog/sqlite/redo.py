"""Files that represent a SQLite database in a recovery log: images and redo.

Whole pages for every transaction would be 27 to 82 times the changed bytes. Instead, the log has these
files for a database ``primary.db``:

    /primary.db.image-<group>-<serial>   images of groups: their pages, each as of one commit
    /primary.db.redo-<index>             a frame for each later commit: byte ranges that changed

A *group* is a run of consecutive pages. Groups are re-imaged one at a time, the oldest first. A
redo file is obsolete once every group has a later image. So the bytes of log that a recovery reads
are bounded, and the database is never copied in one step.

An image file is named after its first image. It may have further images, at other offsets. The larger
the database, the more images in a file: hints name every file, and must fit into etcd (ADR 9). The file
is removed once all its groups have later images, which come in the same order.

Redo files are read in the order of their index. They have frames of three kinds. A commit has the
size of the database, and for each page the ranges that changed. The second kind announces a new
image of a group at the begin of a file. The third kind announces an image within a file. The third kind
is newer: older versions refuse a log that has such frames. Small databases do not use it.

A frame is either complete or absent: a commit is one append, and the log is played back to the
end of an append. So a file that ends within a frame is damaged: the frame's length may be wrong, with
commits after it. A file's header has the end of its predecessor. So bytes that a later owner replaced
are never read as data.

This module works only on files; `redo_format` has their bytes. `stores/sqlite/redo_recording` owns
the connection. The form is ours: the Go original records RocksDB files in its place.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gazette.errors import Corrupt, GazetteError, Invalid
from gazette.recoverylog.private_files import write_at
from gazette.recoverylog.sqlite.redo_format import (
    HEADER_LENGTH,
    KIND_COMMIT,
    ImageFile,
    ImageFrame,
    changes_of,
    decode_header,
    decode_image,
    frame_length,
    pages_after,
    read_frames,
    redo_name,
)


class LaterImages:
    """Pages whose image is later than the present position of redo. Such an image has all changes up to this
    position: redo must leave its pages as they are."""

    def __init__(self, groups: dict[int, GroupImage]) -> None:
        self._images = sorted((image.first, image.count, group) for group, image in groups.items())
        self._firsts = [first for first, _, _ in self._images]
        self._waiting = set(groups)

    def announce(self, group: int) -> None:
        """Note that the image of ``group`` was taken at the present position."""
        self._waiting.discard(group)

    def have(self, page: int) -> bool:
        """Return True if the image of a page has all changes up to the present position."""
        if not self._waiting:
            return False
        position = bisect.bisect_right(self._firsts, page) - 1
        if position < 0:
            return False
        first, count, group = self._images[position]
        return page < first + count and group in self._waiting


@dataclass(frozen=True, slots=True)
class GroupImage:
    """The last image of a group, and the redo file that announced it."""

    serial: int
    first: int
    count: int
    crc: int
    redo_index: int
    file: ImageFile
    offset: int


@dataclass(slots=True)
class RedoState:
    """State from which a new owner continues to record. Sizes are in bytes, positions are redo indices."""

    page_size: int
    pages: int
    groups: dict[int, GroupImage] = field(default_factory=dict)
    """The last image of each group, by its number; the oldest image first."""
    redo: dict[int, int] = field(default_factory=dict)
    """Valid length in bytes of each redo file, by index."""

    @property
    def last_index(self) -> int:
        return max(self.redo, default=0)

    def note_image(self, frame: ImageFrame, redo_index: int) -> None:
        self.groups.pop(frame.group, None)
        self.groups[frame.group] = GroupImage(
            frame.serial,
            frame.first,
            frame.count,
            frame.crc,
            redo_index,
            frame.file,
            frame.offset,
        )


@dataclass(frozen=True, slots=True)
class RedoFile:
    """A redo file of a directory. ``end`` is its end according to its successor; None without a successor."""

    path: Path
    index: int
    page_size: int
    end: int | None

    def frames(self, begin: int = 0) -> Iterator[tuple[int, memoryview]]:
        """Return the frames from an offset on. Memory holds one file at a time."""
        with self.path.open("rb") as file:
            file.seek(begin)
            data = file.read()
        return read_frames(memoryview(data), self.end, self.path.name, base=begin)


def redo_files(paths: Mapping[str, Path], database: str) -> list[RedoFile]:
    """Return the redo files of a database among ``paths``, in order. Raise ``Corrupt`` if a file is missing,
    a header is damaged, or page sizes differ."""
    pattern = re.compile(re.escape(database) + r"\.redo-([0-9]{8,})$")
    # Index, path and header. A header is (page size, index, end of the predecessor).
    entries: list[tuple[int, Path, tuple[int, int, int]]] = []
    for name, path in paths.items():
        if match := pattern.match(name):
            with path.open("rb") as file:
                header = decode_header(path.name, file.read(HEADER_LENGTH))
            entries.append((int(match.group(1)), path, header))
    entries.sort(key=lambda entry: entry[0])
    for (index, _, first), (next_index, path, second) in itertools.pairwise(entries):
        if next_index != index + 1:
            missing = redo_name(database, index + 1)
            raise Corrupt(
                f"{missing} is missing: the next redo file is {path.name}",
                hint="Recover the log again: it may have been cut off, or a file was removed.",
            )
        if first[0] != second[0]:
            raise Corrupt("redo files differ in page size", file=path.name)
    # The last file has no successor that says where it ends.
    ends: list[int | None] = [*(header[2] for _, _, header in entries[1:]), None][: len(entries)]
    return [
        RedoFile(path, index, header[0], end)
        for (index, path, header), end in zip(entries, ends, strict=True)
    ]


def files_of(directory: Path) -> dict[str, Path]:
    """Return the files of a directory, by name."""
    return {path.name: path for path in directory.iterdir()}


def is_recorded(directory: Path, database: str) -> bool:
    """Return True if a played-back directory has redo files of this database. Raise ``Corrupt`` as
    `redo_files` does."""
    return bool(redo_files(files_of(directory), database))


def materialize(directory: Path, database: str) -> RedoState:
    """Turn images and redo into ``directory/database``, a file that stock SQLite opens.

    The result is exactly the database as of the last commit in the log. Remove images and redo files from
    ``directory``, never from the log. For the errors see `build`: an error leaves all files unchanged.
    """
    paths = files_of(directory)
    target = directory / (database + ".materialize")
    state = build(paths, database, target)
    target.replace(directory / database)
    pattern = re.compile(re.escape(database) + r"\.(image-\d{6,}-\d{8,}|redo-\d{8,})$")
    for name, path in paths.items():
        if pattern.match(name):
            path.unlink()
    return state


def build(paths: Mapping[str, Path], database: str, target: Path) -> RedoState:
    """Write the database to ``target``, as of the last commit of the images and redo in ``paths``.

    Change no other file. Raise ``GazetteError`` for bad files or a failing disk: ``target`` is then absent.
    """
    files = redo_files(paths, database)
    if not files:
        raise Invalid(
            "the directory has no recorded database",
            directory=str(target.parent),
            database=database,
        )
    state = _read_state(files)
    try:
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_images(descriptor, paths, database, state)
            _replay(descriptor, files, state)
            os.ftruncate(descriptor, state.pages * state.page_size)
        finally:
            os.close(descriptor)
    except (OSError, GazetteError) as error:
        target.unlink(missing_ok=True)
        if isinstance(error, GazetteError):
            raise
        raise GazetteError(
            f"cannot build the database from its log: {error.strerror or error}",
            hint="Free space in the directory for recovered files, or choose another.",
            directory=str(target.parent),
        ) from error
    return state


def apply_redo(descriptor: int, file: RedoFile, begin: int, pages: int) -> tuple[int, int]:
    """Apply the frames of a redo file from offset ``begin`` on to a database with all earlier frames.

    ``pages`` is the present size of the database. Return (size in pages, offset after the last frame).
    Ignore images: the database has their content already. Raise ``Corrupt`` for a damaged frame.
    """
    position = max(begin, HEADER_LENGTH)
    for kind, payload in file.frames(position):
        position += frame_length(payload)
        if kind != KIND_COMMIT:
            continue
        pages = pages_after(payload)
        for page, offset, data in changes_of(payload, file.page_size):
            write_at(descriptor, data, (page - 1) * file.page_size + offset)
    return pages, position


def _read_state(files: list[RedoFile]) -> RedoState:
    """Find the last image of each group, the database's size, and the ends of files: the first pass."""
    state = RedoState(page_size=files[0].page_size, pages=0)
    for file in files:
        position = HEADER_LENGTH
        for kind, payload in file.frames():
            position += frame_length(payload)
            if kind == KIND_COMMIT:
                former_pages, state.pages = state.pages, pages_after(payload)
                if state.pages < former_pages:
                    _drop_beyond(state)
            else:
                frame = decode_image(kind, payload)
                state.pages = frame.pages
                state.note_image(frame, file.index)
        state.redo[file.index] = position
    return state


def _drop_beyond(state: RedoState) -> None:
    """Drop images of groups that a shrunk database no longer has."""
    for group in [number for number, image in state.groups.items() if image.first > state.pages]:
        del state.groups[group]


def _write_images(
    descriptor: int, paths: Mapping[str, Path], database: str, state: RedoState
) -> None:
    """Write the last image of each group. Raise ``Corrupt`` for an image that is missing or wrong."""
    for group, image in state.groups.items():
        name = image.file.name(database)
        if name not in paths:
            raise Corrupt("an image that the redo files need is missing", file=name, group=group)
        expected = image.count * state.page_size
        with paths[name].open("rb") as file:
            file.seek(image.offset)
            data = file.read(expected)
        if len(data) < expected or zlib.crc32(data) != image.crc:
            raise Corrupt(
                "an image does not match its announcement in the redo files",
                file=name,
                group=group,
                offset=image.offset,
                length=len(data),
                expected=expected,
            )
        write_at(descriptor, data, (image.first - 1) * state.page_size)


def _replay(descriptor: int, files: list[RedoFile], state: RedoState) -> None:
    """Apply every change that is later than its page's image: the second pass."""
    page_size, pages = state.page_size, state.pages
    if not pages:
        return
    # The file is written through mapped memory. Allocate it now: a full disk raises an error here, and a
    # signal later.
    os.posix_fallocate(descriptor, 0, pages * page_size)
    later = LaterImages(state.groups)
    with mmap.mmap(descriptor, pages * page_size) as target:
        for file in files:
            for kind, payload in file.frames():
                if kind != KIND_COMMIT:
                    frame = decode_image(kind, payload)
                    last_image = state.groups.get(frame.group)
                    if last_image is not None and last_image.serial == frame.serial:
                        later.announce(frame.group)
                    continue
                for page, offset, data in changes_of(payload, page_size):
                    # A page beyond the final end was dropped. A later commit would rewrite it in full.
                    if page > pages or later.have(page):
                        continue
                    begin = (page - 1) * page_size + offset
                    target[begin : begin + len(data)] = data
