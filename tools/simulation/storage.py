"""Threads, local disks and blob stores of a simulation.

A blocking call is performed at one instant of the virtual loop, and answered at another: what it would
have waited for is added up while it runs. A call that meets a store that hangs is performed again once
the store answers, or never.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import io
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, ParamSpec, TypeVar

from gazette.blobs.blob_store import BlobInfo, validate_path, validate_prefix
from gazette.errors import NotFound, Unavailable
from gazette.fragment.local_file import disk_error
from tools.simulation.loop import Node, VirtualLoop

P = ParamSpec("P")
T = TypeVar("T")

_CALL_S: Final = 0.0003
_DIRECTORY: Final = Path("/spools")


class Hangs(BaseException):
    """Raised within a blocking call that does not get on until ``until``."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until


class Threads:
    """What the blocking calls of one node have in common: which of them runs now, and for how long."""

    def __init__(self, node: Node, rng: random.Random) -> None:
        self.node = node
        self.rng = rng
        self.inside = False
        """Whether a pool's call is being performed, rather than code of the loop."""
        self.waited_s = 0.0

    def wait(self, seconds: float) -> None:
        """Block for that long: the call of a pool, or else the node with all that is in it."""
        if self.inside:
            self.waited_s += seconds
        else:
            self.node.hold(seconds)

    def pool(self, name: str, threads: int) -> SimPool:
        return SimPool(self, name, threads)


class SimPool:
    """A `gazette.tasks.Pool` whose calls are events of the virtual loop."""

    def __init__(self, threads: Threads, name: str, count: int) -> None:
        self.name = name
        self._threads = threads
        self._free = count
        self._queue: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self._closed = False

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def submit(
        self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._queue.append((future, lambda: fn(*args, **kwargs)))
        self._begin()
        return future

    def close(self) -> None:
        self._closed = True
        queue, self._queue = self._queue, deque()
        for future, _ in queue:
            future.cancel()

    def _begin(self) -> None:
        while self._free and self._queue:
            future, call = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._free -= 1
            self._later(self._threads.rng.expovariate(1.0) * _CALL_S, self._perform, future, call)

    def _later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        node = self._threads.node
        node.loop.call_later(seconds, callback, *args, context=node.context)

    def _perform(self, future: concurrent.futures.Future[Any], call: Callable[[], Any]) -> None:
        threads = self._threads
        threads.inside, threads.waited_s = True, 0.0
        try:
            result, error = call(), None
        except Hangs as hangs:
            threads.inside = False
            self._later(max(hangs.until - threads.node.loop.now, 0.0), self._perform, future, call)
            return
        except Exception as raised:  # noqa: BLE001 - as an executor: it is the caller's
            result, error = None, raised
        threads.inside = False
        waited = threads.waited_s + threads.rng.expovariate(1.0) * _CALL_S
        self._later(waited, self._end, future, result, error)

    def _end(
        self, future: concurrent.futures.Future[Any], result: Any, error: Exception | None
    ) -> None:
        self._free += 1
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
        self._begin()


class SimDisk:
    """The disk of one node's spool files. They end with the node."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.full = False
        """No space is left: what writes fails, perhaps after a part was written."""
        self.broken = False
        """Reads and writes fail."""
        self.write_s = 0.0
        """How long each operation takes."""

    def create(self) -> SimFile:
        self.work("create a spool file")
        return SimFile(self)

    def work(self, doing: str, *, writes: bool = True) -> None:
        """Take the time that an operation takes. Raises what the disk answers."""
        if self.write_s:
            self.threads.wait(self.write_s * (0.5 + self.threads.rng.random()))
        if self.full and writes and self.threads.rng.random() < 0.7:
            raise disk_error(doing, _DIRECTORY, OSError(errno.ENOSPC, "No space left on device"))
        if self.broken and self.threads.rng.random() < 0.5:
            raise disk_error(doing, _DIRECTORY, OSError(errno.EIO, "Input/output error"))


class SimFile:
    """A `gazette.fragment.local_file.SpoolFile` in memory."""

    __slots__ = ("_content", "_disk")

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self._content = bytearray()

    def pwrite(self, content: bytes, position: int) -> None:
        """Write it, or a part of it and raise."""
        try:
            self._disk.work("write to a spool file")
        except Unavailable:
            rng = self._disk.threads.rng
            self._put(bytes(content[: rng.randrange(len(content) + 1)]), position)
            raise
        self._put(content, position)

    def _put(self, content: bytes, position: int) -> None:
        end = position + len(content)
        if len(self._content) < end:
            self._content.extend(bytes(end - len(self._content)))
        self._content[position:end] = content

    def pread(self, length: int, position: int) -> bytes:
        self._disk.work("read a spool file", writes=False)
        return bytes(self._content[position : position + length])

    def truncate(self, length: int) -> None:
        self._disk.work("truncate a spool file")
        del self._content[length:]

    def sibling(self) -> SimFile:
        return self._disk.create()


@dataclass(slots=True)
class StoreTrouble:
    """What is wrong about a bucket now."""

    error_chance: float = 0.0
    lost_answer_chance: float = 0.0
    """Of a put that is done, and answered as failed."""
    delay_s: float = 0.0
    hangs_until: float | None = None
    unmounted: bool = False
    """Another, empty directory is where the bucket was."""


@dataclass(slots=True)
class Bucket:
    """The objects of one blob store, which all nodes share. ``puts`` has each object's first content."""

    name: str
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    elsewhere: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    trouble: StoreTrouble = field(default_factory=StoreTrouble)
    on_put: Callable[[str, bytes], None] | None = None

    @property
    def trouble_free(self) -> bool:
        return self.trouble == StoreTrouble()

    def heal(self) -> None:
        self.trouble = StoreTrouble()

    @property
    def mounted(self) -> dict[str, tuple[bytes, int]]:
        return self.elsewhere if self.trouble.unmounted else self.objects


class SimStore:
    """A `gazette.blobs.blob_store.BlobStore`: a bucket as one node sees it."""

    def __init__(self, bucket: Bucket, threads: Threads, loop: VirtualLoop) -> None:
        self._bucket = bucket
        self._threads = threads
        self._loop = loop

    def _work(self) -> None:
        trouble = self._bucket.trouble
        if trouble.hangs_until is not None and self._loop.now < trouble.hangs_until:
            raise Hangs(trouble.hangs_until)
        rng = self._threads.rng
        self._threads.waited_s += rng.expovariate(1.0) * 0.01 + rng.random() * trouble.delay_s
        if trouble.error_chance and rng.random() < trouble.error_chance:
            raise Unavailable("the bucket answers 503")

    def exists(self, path: str) -> bool:
        validate_path(path)
        self._work()
        return path in self._bucket.mounted

    def open(self, path: str) -> BinaryIO:
        validate_path(path)
        self._work()
        try:
            return io.BytesIO(self._bucket.mounted[path][0])
        except KeyError:
            raise NotFound("no such object", file=path) from None

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        del content_encoding
        validate_path(path)
        self._work()
        content = source.read()
        now = int(self._loop.now + 1_700_000_000)
        self._bucket.mounted[path] = (content, now)
        if self._bucket.on_put is not None and not self._bucket.trouble.unmounted:
            self._bucket.on_put(path, content)
        lost = self._bucket.trouble.lost_answer_chance
        if lost and self._threads.rng.random() < lost:
            raise Unavailable("the connection to the bucket was reset")

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        validate_prefix(prefix)
        self._work()
        found = [
            BlobInfo(path[len(prefix) :], mod_time, len(content))
            for path, (content, mod_time) in self._bucket.mounted.items()
            if path.startswith(prefix)
        ]
        return iter(found)

    def remove(self, path: str) -> None:
        validate_path(path)
        self._work()
        self._bucket.mounted.pop(path, None)

    def sign_get(self, path: str, ttl_s: float) -> str:
        return f"sim:///{self._bucket.name}/{path}?ttl={ttl_s:g}"
