"""Stage 8 of the byte path: stores around other stores. One counts their calls, one repeats failed calls."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

from gazette.blobs import metrics
from gazette.blobs.blob_store import BlobInfo, BlobStore, LocalSigner, list_after
from gazette.errors import Unavailable
from gazette.runtime.store_calls import off_store, on_store

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

ATTEMPTS_MAX: Final = 3
_DELAY_S: Final = 0.1
_COPY_BYTES: Final = 1 << 18


class InstrumentedStore:
    """Counts and times the calls of another store. ``monotonic`` returns the seconds of a clock."""

    def __init__(self, store: BlobStore, name: str, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._name = name
        self._monotonic = monotonic

    def exists(self, path: str) -> bool:
        with self._observed("exists"):
            return self._store.exists(path)

    def open(self, path: str) -> BinaryIO:
        with self._observed("get"):
            return self._store.open(path)

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        counted_reader = _CountedReader(source)
        with self._observed("put"), io.BufferedReader(counted_reader, _COPY_BYTES) as reader:
            self._store.put(path, reader, content_encoding=content_encoding)
        encoding = content_encoding or "none"
        metrics.PUT_BYTES.labels(self._name, encoding).inc(counted_reader.count)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        return self._listed(lambda: self._store.list(prefix))

    def list_after(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        return self._listed(lambda: list_after(self._store, prefix, after))

    def _listed(self, begin: Callable[[], Iterator[BlobInfo]]) -> Iterator[BlobInfo]:
        items = 0
        with self._observed("list"):
            for info in begin():
                items += 1
                yield info
                on_store()
        metrics.LIST_ITEMS.labels(self._name).observe(items)

    def remove(self, path: str) -> None:
        with self._observed("remove"):
            self._store.remove(path)

    def sign_get(self, path: str, ttl_s: float) -> str:
        with self._observed("signget"):
            return self._store.sign_get(path, ttl_s)

    def sign_now(self, path: str, ttl_s: float) -> str | None:
        """Return the result of the store, or None if the store is no ``LocalSigner``."""
        if not isinstance(self._store, LocalSigner):
            return None
        with self._observed("signget"):
            return self._store.sign_now(path, ttl_s)

    @contextmanager
    def _observed(self, operation: str) -> Iterator[None]:
        """Count and time the block as one operation. Its thread waits for the store (`on_store`)."""
        started = self._monotonic()
        on_store()
        status = "error"
        try:
            yield
            status = "success"
        except GeneratorExit:  # A listing that its reader did not read to the end.
            status = "success"
            raise
        finally:
            # After "get", the thread still reads the object from the store. All other operations have ended.
            (on_store if operation == "get" else off_store)()
            metrics.OPERATIONS.labels(self._name, operation, status).inc()
            metrics.OPERATION_SECONDS.labels(self._name, operation, status).observe(
                self._monotonic() - started
            )


class RetryingStore:
    """Repeats calls of another store that raise ``Unavailable``, up to ``ATTEMPTS_MAX`` attempts.

    Repetitions are for short failures: the persister and health checks handle outages. Threads call ``wait``
    with a number of seconds; ``wait`` should return at once while the process stops.
    """

    def __init__(
        self, store: BlobStore, rng: random.Random, wait: Callable[[float], object]
    ) -> None:
        self._store = store
        self._rng = rng
        self._wait = wait

    def exists(self, path: str) -> bool:
        return self.repeated(lambda: self._store.exists(path))

    def open(self, path: str) -> BinaryIO:
        return self.repeated(lambda: self._store.open(path))

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        """Store an object. Repeat a failed call only if ``source`` is seekable."""
        if not source.seekable():
            self._store.put(path, source, content_encoding=content_encoding)
            return
        begin = source.tell()

        def put() -> None:
            source.seek(begin)
            self._store.put(path, source, content_encoding=content_encoding)

        self.repeated(put)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """List objects. Repeat a failed listing only before it has returned the first object."""
        return self._listed(lambda: self._store.list(prefix))

    def list_after(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        """List as ``list``, and as in ``OrderedListing``."""
        return self._listed(lambda: list_after(self._store, prefix, after))

    def _listed(self, begin: Callable[[], Iterator[BlobInfo]]) -> Iterator[BlobInfo]:
        """List again after a failure, but only until the first object has come."""

        def first() -> tuple[BlobInfo | None, Iterator[BlobInfo]]:
            listing = begin()
            return next(listing, None), listing

        first_info, other_infos = self.repeated(first)
        if first_info is not None:
            yield first_info
            yield from other_infos

    def remove(self, path: str) -> None:
        self.repeated(lambda: self._store.remove(path))

    def sign_get(self, path: str, ttl_s: float) -> str:
        return self.repeated(lambda: self._store.sign_get(path, ttl_s))

    def sign_now(self, path: str, ttl_s: float) -> str | None:
        """Return the result of the store, without repetition; None if the store is no ``LocalSigner``."""
        if not isinstance(self._store, LocalSigner):
            return None
        return self._store.sign_now(path, ttl_s)

    def repeated(self, operation: Callable[[], T]) -> T:
        """Run ``operation`` on the store, with the same repetitions as the store's own operations."""
        for attempt in range(1, ATTEMPTS_MAX):
            try:
                return operation()
            except Unavailable:
                self._wait(_DELAY_S * 4**attempt * (0.5 + self._rng.random()))
        return operation()


class _CountedReader(io.RawIOBase):
    """Counts the bytes that a store has read. Bytes that it reads twice count once."""

    def __init__(self, source: BinaryIO) -> None:
        super().__init__()
        self._source = source
        self._position = 0
        self._begin = source.tell() if source.seekable() else 0
        self.count = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._source.seekable()

    def tell(self) -> int:
        return self._begin + self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = self._source.seek(offset, whence)
        self._position = position - self._begin
        return position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        off_store()
        content = self._source.read(len(view))
        on_store()
        view[: len(content)] = content
        self._position += len(content)
        self.count = max(self.count, self._position)
        return len(content)
