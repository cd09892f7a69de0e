"""Objects in a dictionary. The reference by which other stores are tested."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO
from urllib.parse import quote

from gazette.blobs.blob_store import BlobInfo, validate_path, validate_prefix
from gazette.errors import NotFound


class MemoryStore:
    """A blob store for tests and simulations. ``now`` returns Unix seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int, str]] = {}

    def exists(self, path: str) -> bool:
        validate_path(path)
        return path in self._objects

    def open(self, path: str) -> BinaryIO:
        validate_path(path)
        try:
            return io.BytesIO(self._objects[path][0])
        except KeyError:
            raise NotFound("no such object", file=path) from None

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        validate_path(path)
        content = source.read()
        with self._lock:
            self._objects[path] = (content, int(self.now()), content_encoding)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        validate_prefix(prefix)
        with self._lock:
            objects = list(self._objects.items())
        for path, (content, mod_time, _) in objects:
            if path.startswith(prefix):
                yield BlobInfo(path[len(prefix) :], mod_time, len(content))

    def remove(self, path: str) -> None:
        validate_path(path)
        with self._lock:
            self._objects.pop(path, None)

    def sign_get(self, path: str, ttl_s: float) -> str:
        validate_path(path)
        return f"memory:///{quote(path)}?ttl={ttl_s:g}"

    def sign_now(self, path: str, ttl_s: float) -> str:
        return self.sign_get(path, ttl_s)

    def content_encoding(self, path: str) -> str:
        """Return the content encoding that ``put`` got for the object."""
        return self._objects[path][2]
