"""Stage 1 of the byte path: the batches of one journal, in the order in which they were released.

Their content waits in memory and, past a bound, in a file. The mutex of the owning service guards everything
here, unless a docstring says otherwise.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from collections import deque
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gazette.errors import GazetteError
from gazette.protocol.append_session import SessionAppend
from gazette.protocol.content import CHUNK_BYTES, BytesLike
from gazette.protocol.ids import Revision
from gazette.protocol.journal_life import created_again
from gazette.runtime.tasks import OpFuture, begun, failed

if TYPE_CHECKING:
    from gazette.client.append.appender import AppendParams, AppendResult

SEGMENT_BYTES: Final = CHUNK_BYTES
SPILL_FILE_BYTES: Final = 64 << 20
"""Size in bytes at which a spill file takes no more content. The file is deleted once all its content was
appended."""
BATCH_BYTES_MAX: Final = 64 << 20
"""Size in bytes above which a batch takes no more appends. The last append may exceed this size."""


class MemoryBudget:
    """The bytes of waiting content that may be in memory. Thread-safe.

    Append services of a process may share one budget, which bounds the sum of their content in memory.
    """

    __slots__ = ("_lock", "bytes_max", "used")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._lock = threading.Lock()

    def add(self, length: int) -> None:
        with self._lock:
            self.used += length


class SpillFile:
    """An unlinked temporary file. Its users reserve spans under the service's mutex, and write and read them
    without the mutex. The file is closed once it is retired and no segment uses it."""

    __slots__ = ("_descriptor", "_end", "_live", "_retired")

    def __init__(self, directory: Path | None) -> None:
        descriptor, path = tempfile.mkstemp(prefix="gazette-append", dir=directory)
        os.unlink(path)
        self._descriptor = descriptor
        self._end = 0  # Where the next span begins.
        self._live = 0  # Number of spans that segments use.
        self._retired = False

    @property
    def full(self) -> bool:
        return self._end >= SPILL_FILE_BYTES

    def reserve(self, length: int) -> int:
        """Reserve a span of ``length`` bytes for the caller. Return its offset."""
        if self._live == 0:  # No segment uses the file: begin again at its start.
            self._end = 0
        offset = self._end
        self._end += length
        self._live += 1
        return offset

    def give_back(self) -> None:
        """Free a reserved span."""
        self._live -= 1
        self._close_if_unused()

    def retire(self) -> None:
        """Close the file as soon as no segment uses it. Reserve no span after this call. May be repeated."""
        self._retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and self._live == 0 and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, offset: int, data: BytesLike) -> None:
        """Write ``data`` at ``offset``. Raise ``OSError`` if the disk fails or is full; the caller may write
        the span again."""
        view = memoryview(data)
        while view.nbytes:
            written = os.pwrite(self._descriptor, view, offset)
            offset += written
            view = view[written:]

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``. Raise ``OSError`` if the file has fewer, or fails."""
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:
            raise OSError(f"short read of a spill file ({len(data)} of {length} bytes)")
        return data


class Segment:
    """A piece of content, of about one chunk: in memory (``data``), or at ``offset`` of ``file``.

    Content moves from memory to the file at most once, under the service's mutex. A reader takes ``data``
    first, and the file only if ``data`` is None.
    """

    __slots__ = ("data", "dropped", "file", "length", "offset")

    def __init__(self, data: BytesLike) -> None:
        self.data: BytesLike | None = data
        self.length = len(data)
        self.file: SpillFile | None = None
        self.offset = 0
        self.dropped = False

    def move(self, file: SpillFile, offset: int) -> None:
        self.file, self.offset, self.data = file, offset, None

    def drop(self) -> int:
        """Forget the content; return the bytes of memory that this freed. May be repeated."""
        self.dropped = True
        freed = self.length if self.data is not None else 0
        self.data = None
        if self.file is not None:
            self.file.give_back()
            self.file = None
        return freed

    def load(self) -> BytesLike:
        """Return the content, from the file if it was moved there. Blocks. Raise ``OSError`` if the file
        fails."""
        data = self.data
        if data is not None:
            return data
        assert self.file is not None, "a dropped segment is not read"
        return self.file.read(self.offset, self.length)


def segments_of(content: BytesLike) -> list[Segment]:
    """Copy content into segments. The caller may change ``content`` afterwards."""
    view = memoryview(content).cast("B")
    return [
        Segment(bytes(view[begin : begin + SEGMENT_BYTES]))
        for begin in range(0, view.nbytes, SEGMENT_BYTES)
    ]


class Batch:
    """Appends that become one RPC. They share its future.

    Invariant: the appends depend only on ``dependencies``, which are older than the batch. So batches never
    depend on each other in a circle.
    """

    __slots__ = ("buffer", "dependencies", "future", "params", "segments", "segments_bytes")

    def __init__(self, params: AppendParams, dependencies: AbstractSet[OpFuture[Any]]) -> None:
        self.params = params
        self.dependencies = dependencies
        self.future: OpFuture[AppendResult] = begun()
        self.segments: list[Segment] = []
        self.buffer = bytearray()
        """Content after the last segment."""
        self.segments_bytes = 0

    @property
    def size(self) -> int:
        """Bytes of content."""
        return self.segments_bytes + len(self.buffer)

    def accepts(self, params: AppendParams, dependencies: AbstractSet[OpFuture[Any]]) -> bool:
        """Return True if an append may join: it must not add dependencies to earlier appends."""
        return (
            (params is self.params or params == self.params)
            and (not dependencies or dependencies <= self.dependencies)
            and self.size <= BATCH_BYTES_MAX
        )


class JournalQueue:
    """One journal's batches, and the lock of the transaction that adds to them.

    The one open transaction holds ``lock``. ``tail`` is the batch that appends may still join: the last of
    ``batches``, until its RPC begins. ``failure`` is permanent.
    """

    __slots__ = (
        "_budget",
        "batches",
        "created",
        "failed_future",
        "failure",
        "flowing",
        "journal",
        "ledger",
        "lock",
        "memory",
        "sequence",
        "serving",
        "session",
        "spill",
        "staging",
        "tail",
        "trouble",
        "validated",
    )

    def __init__(self, journal: str, budget: MemoryBudget) -> None:
        self.journal = journal
        self._budget = budget
        self.session = secrets.token_hex(16)
        self.sequence = 0
        """Sequence number of the last batch whose RPC was begun: see ``protocol/append_session``."""
        self.ledger = ""
        """The ledger of sessions that the journal's primary has named; empty if it has named no ledger."""
        self.created: Revision = 0
        """CreateRevision of the journal that the session appends to; 0 while the revision is not known."""
        self.lock = threading.Lock()
        self.staging = bytearray()
        """Content of the open transaction. The next transaction uses the same buffer."""
        self.batches: deque[Batch] = deque()
        self.tail: Batch | None = None
        self.serving = False  # True while a task of the loop sends the batches.
        self.flowing = False
        """True while the first batch is being sent. False while it waits for dependencies or a retry. While
        this is True, a producer that is ahead waits a little before it writes to a disk."""
        self.memory = 0
        """Bytes of segments in memory."""
        self.spill: SpillFile | None = None  # The file that takes content now, once it is made.
        self.validated: AppendParams | None = None  # The parameters that were checked last.
        self.trouble = ""
        """The error of the first batch's last attempt; empty if the last attempt has no error."""
        self.failure: BaseException | None = None
        self.failed_future: OpFuture[AppendResult] | None = None
        """A future that has failed with ``failure``: all later appends get it."""

    def chain(self, params: AppendParams, dependencies: AbstractSet[OpFuture[Any]]) -> Batch:
        """Add a batch after all others. Later appends may join it."""
        batch = Batch(params, dependencies)
        self.batches.append(batch)
        self.tail = batch
        return batch

    def put_segments(self, batch: Batch, segments: Collection[Segment]) -> int:
        """Append segments to a batch whose buffer is empty. Return their bytes, which `hold` has counted."""
        batch.segments.extend(segments)
        length = sum(segment.length for segment in segments)
        batch.segments_bytes += length
        return length

    def cut(self, batch: Batch) -> Segment:
        """Turn a batch's buffer into a segment, and return it."""
        segment = Segment(batch.buffer)
        batch.segments.append(segment)
        batch.segments_bytes += segment.length
        batch.buffer = bytearray()
        self.hold(segment.length)
        return segment

    def seal(self, batch: Batch) -> list[Segment]:
        """Let no more appends join a batch, and return its content."""
        if self.tail is batch:
            self.tail = None
        if batch.buffer:
            self.cut(batch)
        return batch.segments

    def drop(self, segments: Collection[Segment]) -> None:
        """Forget the content of segments."""
        self.hold(-sum([segment.drop() for segment in segments]))

    def hold(self, length: int) -> None:
        """Count bytes that have come into memory; a negative ``length`` counts bytes that have left it."""
        self.memory += length
        self._budget.add(length)

    def attempt(self) -> SessionAppend:
        """Return the session append of the batch whose RPC was begun last, for the broker."""
        return SessionAppend(self.session, self.sequence, self.ledger)

    def adopt_ledger(self, error: Exception) -> bool:
        """Adopt the ledger that a primary named because it does not know the session. On the loop only.

        Return False if it named no ledger, or the ledger known here. Raise ``Corrupt`` if the journal was
        deleted and created again since the first append of this queue.
        """
        facts = error.facts if isinstance(error, GazetteError) else {}
        ledger = facts.get("ledger", "")
        is_other = bool(ledger) and ledger != self.ledger
        if is_other:
            created: Revision = facts["created"]
            if self.created and created and created != self.created:
                raise created_again(
                    self.journal,
                    self.created,
                    created,
                    hint="Earlier appends are gone with the former journal. Make a new publisher or append"
                    " service, and publish again what the present journal needs.",
                ) from error
            self.ledger, self.created = ledger, created or self.created
        return is_other

    def close_spill(self) -> None:
        """Retire the spill file: it is deleted once it holds no segment."""
        if self.spill is not None:
            self.spill.retire()
            self.spill = None

    def fail(self, error: BaseException) -> list[Batch]:
        """Refuse all appends from now on. Return the waiting batches, oldest first."""
        if self.failure is None:
            self.failure = error
            self.failed_future = failed(error)
        batches = list(self.batches)
        self.batches.clear()
        self.tail = None
        self.flowing = False
        for batch in batches:
            self.drop(batch.segments)
        self.close_spill()
        return batches

    def spill_file(self, directory: Path | None) -> SpillFile:
        """Return the file for segments; make a file if the queue has no file yet, or the last file is full.
        Raise ``OSError`` if no file can be made."""
        if self.spill is None or self.spill.full:
            file = SpillFile(directory)
            self.close_spill()
            self.spill = file
        return self.spill
