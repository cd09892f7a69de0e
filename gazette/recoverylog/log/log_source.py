"""Sources of the bytes of recovery logs, for code without an event loop: blob stores, or a copy.

The source that reads through brokers is in `broker_logs`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol, Self

from gazette.blobs.blob_store import BlobStore
from gazette.errors import Invalid, NotFound
from gazette.fragment.conflicts import FragmentCover
from gazette.fragment.cover_set import CoverSet
from gazette.fragment.listing import list_into
from gazette.fragment.unexplained import Unexplained, facts_of, problem_of
from gazette.protocol import postfix_template
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import Fragment
from gazette.protocol.fragment_owner import FragmentOwner
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.runtime.tasks import BlockingPool

BLOCK_BYTES: Final = 1 << 20
BLOCKS_AHEAD: Final = 16


class LogSource(Protocol):
    """Source of the bytes of recovery logs. Blocking. Use it in one thread at a time.

    Methods raise ``NotFound`` for an unknown log, ``NotAllowed`` or ``Unavailable`` for a store or broker
    that refuses or does not answer, and ``Corrupt`` for damaged fragments.
    """

    @property
    def knows_heads(self) -> bool:
        """True if no bytes exist after ``bounds``. Then hints of later bytes prove a loss of data."""
        ...

    def bounds(self, log: JournalName) -> tuple[Offset, Offset]:
        """Return the offsets of the log's first remaining byte, and of its end."""
        ...

    def read(self, log: JournalName, begin: Offset, end: Offset) -> Iterator[tuple[Offset, bytes]]:
        """Yield pieces of ``[begin, end)`` in order, each with its offset. Skip bytes that were deleted.
        Close the iterator to end reading."""
        ...


class StoredLogs:
    """Logs as far as blob stores have them: brokers store closed fragments only. Calls no broker.

    ``stores`` are the stores in the journals' specifications. A fragment in several stores is read once.
    ``threads`` threads fetch and decode fragments ahead, with at most 16 MiB each in memory. Use this as
    a context manager, or ``close`` it.
    """

    def __init__(
        self,
        stores: Sequence[BlobStore],
        *,
        path_postfix_template: str = "",
        nested: Collection[JournalName] = (),
        threads: int = 4,
    ) -> None:
        """Open logs. ``nested`` are journals whose names begin with the name of a log and a slash.

        ``path_postfix_template`` is the template in the logs' specifications. Raise ``Invalid`` for an
        unsupported template.
        """
        postfix_template.parse(path_postfix_template)
        self._stores = tuple(stores)
        self._template = path_postfix_template
        self._nested = nested
        self._threads = threads
        self._pool = BlockingPool("log-fragments", threads)
        self._covers: dict[JournalName, tuple[CoverSet[Fragment], dict[Fragment, BlobStore]]] = {}
        """By log, the fragments to read, and the store of each."""

    knows_heads = False  # Brokers may have later bytes that are not stored yet.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads that read ahead."""
        self._pool.close()

    def bounds(self, log: JournalName) -> tuple[Offset, Offset]:
        """Return the bounds as of the first listing of the log. Raise ``NotFound`` if it has no fragment."""
        cover, _ = self._cover(log)
        return cover.begin, cover.end

    def refresh(self) -> None:
        """Forget the listings: the next call lists a log again."""
        self._covers.clear()

    def _cover(self, log: JournalName) -> tuple[CoverSet[Fragment], dict[Fragment, BlobStore]]:
        """Return the fragments of a log, and the store of each, as first listed. Raise ``NotFound`` if it has
        none. Raise ``Invalid`` for an object that may be a fragment of the log or of another journal."""
        listing = self._covers.get(log)
        if listing is None:
            spec = JournalSpec(log, fragment=FragmentSpec(path_postfix_template=self._template))
            owner = FragmentOwner(spec, self._nested)
            cover = FragmentCover()
            places: dict[Fragment, BlobStore] = {}
            for store in self._stores:
                listed_before = len(cover.listed)
                list_into(cover, store, "", owner)
                places.update(dict.fromkeys(cover.listed[listed_before:], store))
            unexplained = Unexplained.of(cover.unexplained).outside(cover)
            if unexplained:
                raise Invalid(
                    problem_of(unexplained),
                    hint="Give the template that wrote them as `path_postfix_template`, or the journals that "
                    "they belong to as `nested`.",
                    log=log,
                    **facts_of(unexplained),
                )
            if not len(cover):
                raise NotFound(
                    "the fragment stores have no fragment of the recovery log",
                    log=log,
                    hint="Check the journal's name and stores, and that brokers have stored fragments.",
                )
            listing = self._covers[log] = cover, places
        return listing

    def read(self, log: JournalName, begin: Offset, end: Offset) -> Iterator[tuple[Offset, bytes]]:
        cover, places = self._cover(log)
        unread = [fragment for fragment in cover if fragment.end > begin and fragment.begin < end]
        unread.reverse()
        running: list[_Prefetch] = []
        offset = begin
        try:
            while unread or running:
                while unread and len(running) < self._threads:
                    fragment = unread.pop()
                    prefetch = _Prefetch(places[fragment], fragment, max(begin, fragment.begin))
                    running.append(prefetch)
                    self._pool.submit(prefetch.run)
                for position, block in running[0].blocks():
                    # Cut the block, since fragments may overlap.
                    piece = block[max(0, offset - position) : max(0, end - position)]
                    if piece:
                        position = max(position, offset)
                        offset = position + len(piece)
                        yield position, piece
                running.pop(0)
        finally:
            for prefetch in running:
                prefetch.stop()


class _Prefetch:
    """A fragment that a thread decodes while earlier fragments are read."""

    def __init__(self, store: BlobStore, fragment: Fragment, begin: Offset) -> None:
        self._store = store
        self._fragment = fragment
        self._offset = begin
        self._blocks: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()
        """Decoded blocks, in order. Empty bytes end the fragment, and so does an error."""
        self._room = threading.Semaphore(BLOCKS_AHEAD)
        self._stopped = False

    def run(self) -> None:
        """Decode the fragment on a thread of the pool, at most `BLOCKS_AHEAD` blocks ahead of the reader."""
        try:
            if self._stopped:
                return
            fragment = self._fragment
            source = self._store.open(fragment.content_path())
            with DecodedFile(source, FragmentDecoder(fragment)) as file:
                file.skip_to(self._offset)
                while True:
                    self._room.acquire()
                    if self._stopped:  # `stop` has released the semaphore.
                        return
                    block = file.read(BLOCK_BYTES)
                    self._blocks.put(block)
                    if not block:
                        return
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self._blocks.put(error)

    def blocks(self) -> Iterator[tuple[Offset, bytes]]:
        while True:
            block = self._blocks.get()
            if isinstance(block, BaseException):
                raise block
            if not block:
                return
            self._room.release()
            yield self._offset, block
            self._offset += len(block)

    def stop(self) -> None:
        self._stopped = True
        self._room.release()


class CopiedLogs:
    """Copy of another source in a directory, so that its bytes are fetched only once.

    ``directory`` must exist. The copies are files without names. They end with ``close`` or the process.
    """

    def __init__(self, source: LogSource, directory: Path) -> None:
        self._source = source
        self._directory = directory
        self._files: dict[JournalName, int] = {}
        self._spans: dict[JournalName, list[tuple[Offset, Offset]]] = {}
        """By log, the ranges of offsets that its copy has. Ranges that were read in turn are joined."""
        self._bounds: dict[JournalName, tuple[Offset, Offset]] = {}

    @property
    def knows_heads(self) -> bool:
        return self._source.knows_heads

    def bounds(self, log: JournalName) -> tuple[Offset, Offset]:
        """Return the bounds as of the first call."""
        if log not in self._bounds:
            self._bounds[log] = self._source.bounds(log)
        return self._bounds[log]

    def read(self, log: JournalName, begin: Offset, end: Offset) -> Iterator[tuple[Offset, bytes]]:
        if log not in self._files:
            path = self._directory / f"log-{len(self._files)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._files[log] = os.open(path, flags, 0o600)
            path.unlink()  # The open file needs no name, and ends with the process.
        file, spans = self._files[log], self._spans.setdefault(log, [])
        while begin < end:
            copied_to = next((last for first, last in spans if first <= begin < last), None)
            if copied_to is not None:  # The copy has these bytes.
                data = os.pread(file, min(BLOCK_BYTES, copied_to - begin, end - begin), begin)
                yield begin, data
                begin += len(data)
                continue
            next_begin = min((first for first, _ in spans if first > begin), default=end)
            for offset, data in self._source.read(log, begin, min(end, next_begin)):
                _write_copy(file, data, offset)
                _add_span(spans, offset, offset + len(data))
                yield offset, data
            begin = min(end, next_begin)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._spans.clear()


def _write_copy(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset += written


def _add_span(spans: list[tuple[Offset, Offset]], begin: Offset, end: Offset) -> None:
    """Add a range to the spans of a copy. Lengthen the last span if the range continues it."""
    if spans and spans[-1][1] == begin:
        spans[-1] = spans[-1][0], end
    else:
        spans.append((begin, end))


__all__ = ["CopiedLogs", "LogSource", "StoredLogs"]
