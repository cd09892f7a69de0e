"""Stage 7 of the byte path: takes the bytes of a spool from `spool_file`, gives the bytes of its
fragment's file to `persister`.

The primary of a journal compresses during appends, so that a fragment can be persisted soon after it
completes. Other replicas compress a fragment only if they must persist it themselves. Before the last bytes
are uploaded, the SHA-1 of all bytes is compared with the SHA-1 in the fragment's name. A damaged spool raises
``Corrupt`` and never gets into a blob store.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Final

from gazette.errors import Corrupt, Unavailable
from gazette.fragment import metrics
from gazette.fragment.local_file import SpoolContent, SpoolFile
from gazette.fragment.set_aside import content_encoding
from gazette.protocol.codecs.codec import Compressor, new_compressor
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import Offset
from gazette.protocol.label_set import LabelSet
from gazette.runtime.tasks import Pool

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)

COMPRESSION_BATCH_BYTES: Final = 1 << 20
"""Bytes that are committed before the next batch is compressed. Only a last gzip member has less content."""

_TURN_BYTES: Final = 8 << 20
"""Bytes that one spool may compress before other spools get the thread."""

_READ_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class CompletedSpool:
    """A spool that was rolled. Its fragment does not change any more, and must be persisted.

    A path postfix is made from ``registers`` and ``first_append_time`` (Unix seconds, of this broker's
    clock). The local file lives as long as this value.
    """

    fragment: Fragment
    registers: LabelSet
    first_append_time: float
    file: SpoolContent
    compression: SpoolCompression | None
    """None for codec NONE."""

    @property
    def content_encoding(self) -> str:
        """The content encoding to store with the object: see ``content_encoding`` of ``set_aside``."""
        return content_encoding(self.fragment)

    def open(self) -> BinaryIO:
        """Return a reader of the fragment's file. Call it in a thread: it may have to compress.

        If no compressed file could be written (a full disk), the bytes are compressed as they are read; such
        a reader is not seekable. If the spool differs from what its fragment says, this call raises
        ``Corrupt``, or the reader raises ``Corrupt`` in place of the last bytes.
        """
        if self.compression is None:
            return io.BufferedReader(_VerifiedContent(self.file, self.fragment), _READ_BYTES)
        compressed = self.compression.finish(self.fragment)
        if compressed is not None:
            return io.BufferedReader(compressed, _READ_BYTES)
        return io.BufferedReader(_CompressedContent(self.file, self.fragment), _READ_BYTES)

    async def cut_to(self, end: Offset, pool: Pool) -> CompletedSpool:
        """Return the same spool without the bytes at ``end`` and beyond. Compute its digest in ``pool``.

        ``end`` is within the fragment. Raise ``Corrupt`` or ``Unavailable`` if the file cannot be read, and
        ``Corrupt`` if the file differs from what the fragment says. Cancellation: no effect.
        """
        fragment = self.fragment
        assert fragment.begin < end < fragment.end
        digest = await asyncio.wrap_future(pool.submit(self._digest_to, end - fragment.begin))
        codec = fragment.codec
        return replace(
            self,
            fragment=replace(fragment, end=end, sum=digest),
            compression=None if codec is Codec.NONE else SpoolCompression(self.file, codec, pool),
        )

    def _digest_to(self, length: int) -> bytes:
        """Return the digest of the first ``length`` bytes. Read all bytes, to detect a damaged file. This
        call blocks."""
        content = _VerifiedContent(self.file, self.fragment)
        sha1 = hashlib.sha1(usedforsecurity=False)
        while part := content.read(min(_READ_BYTES, length)):
            sha1.update(part)
            length -= len(part)
        while content.read(_READ_BYTES):
            pass
        return sha1.digest()


class SpoolCompression:
    """The compressed form of one spool, which follows its commits.

    Call ``advance`` on the event loop: it never waits. Everything else runs in threads, one at a time. After
    an error, only the compressed file is given up. The spool still has the bytes: they are compressed while
    they are persisted.
    """

    def __init__(self, source: SpoolContent, codec: Codec, pool: Pool) -> None:
        self._source = source
        self._pool = pool
        self._target = 0  # Committed bytes of the spool. Only the loop sets this number.
        self._scheduled = False  # True while a thread will compress.
        # The thread that compresses holds the lock, which guards the attributes below.
        self._lock = pool.lock()
        self._compressor: Compressor = new_compressor(codec)
        self._output: SpoolFile | None = None  # None: not begun, or given up.
        self._through = 0
        self._written = 0
        self._sum = hashlib.sha1(usedforsecurity=False)
        self._usable = True  # False during a step, and for good once a step has failed.
        self._finished = False  # True once the file is whole.

    @property
    def through(self) -> int:
        """Number of committed bytes that have been compressed."""
        return self._through

    def advance(self, length: int) -> None:
        """Record that the spool's first ``length`` bytes are committed."""
        self._target = length
        if self._usable and not self._scheduled and self._due():
            self._schedule()

    def finish(self, fragment: Fragment) -> io.RawIOBase | None:
        """Return a reader of the whole compressed file; None if the file was given up. Call it in a thread.

        Each call gives an independent reader. Raise ``Corrupt`` if the spool's bytes are too few, or do not
        have the fragment's digest.
        """
        with self._lock:
            if self._usable and not self._finished:
                self._finished = self._attempt(fragment.length, final=True)
                if self._finished and self._sum.digest() != fragment.sum:
                    self._usable, self._output = False, None
                    raise _damaged(fragment)
            if self._output is None or not self._usable:
                return None
            return _FileContent(self._output, self._written)

    def _schedule(self) -> None:
        """Have a thread compress. Without a thread, do nothing: a later commit or `finish` compresses."""
        self._scheduled = True
        try:
            self._pool.submit(self._turn)
        except (RuntimeError, Unavailable):
            self._scheduled = False

    def _due(self) -> bool:
        return self._target - self._through >= COMPRESSION_BATCH_BYTES

    def _turn(self) -> None:
        """Compress up to `_TURN_BYTES`, in a thread. Queue another turn if a batch is left."""
        with self._lock:
            if self._usable and not self._finished:
                self._attempt(min(self._target, self._through + _TURN_BYTES), final=False)
        # A commit between the test and the reset is compressed with the next commit, or by `finish`.
        has_more = self._usable and not self._finished and self._due()
        self._scheduled = has_more
        if has_more:
            self._schedule()

    def _attempt(self, through: int, *, final: bool) -> bool:
        """Compress the bytes before ``through``. Return False if the compressed file is given up. Raise
        ``Corrupt`` if the spool is too short."""
        # A step that fails in the middle cannot be undone: the stream is unusable unless the step succeeds.
        self._usable = False
        try:
            while self._through < through:
                content = self._source.pread(
                    min(_READ_BYTES, through - self._through), self._through
                )
                if not content:
                    raise Corrupt("spool file is shorter than its fragment", length=through)
                self._sum.update(content)
                self._write(self._compressor.compress(content))
                self._through += len(content)
            self._write(self._compressor.finish() if final else self._compressor.end_batch())
        except Unavailable as error:
            self._output = None
            metrics.COMPRESSION_FAILURES.inc()
            log.warning(
                "a spool will be compressed as it is persisted: %(error)s", {"error": error}
            )
            return False
        self._usable = True
        return True

    def _write(self, compressed: bytes) -> None:
        if self._output is None:
            self._output = self._source.sibling()
        self._output.pwrite(compressed, self._written)
        self._written += len(compressed)


class _FileContent(io.RawIOBase):
    """The first ``length`` bytes of a local file."""

    def __init__(self, file: SpoolContent, length: int) -> None:
        super().__init__()
        self._file = file
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = min(max(base + offset, 0), self._length)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        content = self._file.pread(min(len(view), self._length - self._position), self._position)
        if not content and self._position < self._length and view:
            raise Corrupt("spool file is shorter than its fragment", length=self._length)
        self._position += len(content)
        view[: len(content)] = content
        return len(content)


class _VerifiedContent(_FileContent):
    """The bytes of a spool, hashed as they are read. Read them from the start, in order.

    A seek to the start begins again. Raises ``Corrupt`` in place of the last bytes if the digest differs.
    """

    def __init__(self, file: SpoolContent, fragment: Fragment) -> None:
        super().__init__(file, fragment.length)
        self._fragment = fragment
        self._sum = hashlib.sha1(usedforsecurity=False)
        self._hashed = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = super().seek(offset, whence)
        if position == 0:
            self._sum = hashlib.sha1(usedforsecurity=False)
            self._hashed = 0
        return position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self._position not in (self._hashed, self._length):
            raise io.UnsupportedOperation("a spool can only be read from its start")
        count = super().readinto(buffer)
        self._sum.update(memoryview(buffer)[:count])
        self._hashed += count
        if count and self._hashed == self._length and self._sum.digest() != self._fragment.sum:
            raise _damaged(self._fragment)
        return count


class _CompressedContent(io.RawIOBase):
    """The bytes of a spool, hashed and compressed as they are read."""

    def __init__(self, file: SpoolContent, fragment: Fragment) -> None:
        super().__init__()
        self._content = _VerifiedContent(file, fragment)
        self._compressor: Compressor | None = new_compressor(fragment.codec)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        while not self._ready and self._compressor is not None:
            if content := self._content.read(_READ_BYTES):
                self._ready = memoryview(self._compressor.compress(content))
            else:
                self._ready = memoryview(self._compressor.finish())
                self._compressor = None
        part = self._ready[: len(view)]
        self._ready = self._ready[len(part) :]
        view[: len(part)] = part
        return len(part)


def _damaged(fragment: Fragment) -> Corrupt:
    return Corrupt(
        "spool is not what its fragment says: the SHA-1 differs",
        hint="The local disk or memory changed the bytes. Check them. Another replica may still upload.",
        journal=fragment.journal,
        begin=fragment.begin,
        end=fragment.end,
        expected=fragment.sum.hex(),
    )
