"""Threads, local disks and blob stores of a simulation.

A blocking call runs in a real thread, but never in parallel with other code. While the call runs, the loop
stands still. While the call waits, its thread stands still, and the wait takes virtual time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import io
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, ParamSpec, TypeVar

from gazette.blobs.blob_store import BlobInfo, validate_path, validate_prefix
from gazette.errors import NotAllowed, NotFound, Unavailable
from gazette.fragment.local_file import disk_error
from gazette.testing.simulation.loop import SimNode, VirtualLoop

P = ParamSpec("P")
T = TypeVar("T")

SIMULATED: Final = "simulated"
"""Name of the real threads that run calls."""
_CALL_S: Final = 0.003
_LOCK_S: Final = 0.01
"""Seconds between two looks at a lock that another call holds."""
_AT_ONCE: Final = 0.9
"""Share of the calls that run at once on the loop, while nothing is wrong: threads cost time."""
_DIRECTORY: Final = Path("/spools")
_local = threading.local()


class Unwound(BaseException):
    """Ends a blocking call whose simulation is over."""


class TurnThread:
    """A thread of the system that runs one call at a time, in turns with the thread of the loop."""

    idle: list[TurnThread] = []  # noqa: RUF012 - threads are used again by the next simulation

    def __init__(self) -> None:
        # One thread releases each lock, and the other thread acquires it.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._call: Callable[[], None] | None = None
        self.waits_s: float | None = None
        """Seconds for which the call wants to wait; None once it has ended."""
        self.unwinding = False
        threading.Thread(target=self._work, name=SIMULATED, daemon=True).start()

    @classmethod
    def run(cls, call: Callable[[], None]) -> TurnThread:
        """Run a call until it waits or ends."""
        worker = cls.take()
        worker.begin(call)
        return worker

    @classmethod
    def take(cls) -> TurnThread:
        """Return a thread to ``begin`` a call in."""
        return cls.idle.pop() if cls.idle else cls()

    @staticmethod
    def current() -> TurnThread | None:
        """Return the thread that the caller runs in; None on the loop."""
        worker: TurnThread | None = getattr(_local, "worker", None)
        return worker

    def begin(self, call: Callable[[], None]) -> None:
        """Run a call until it waits or ends. The thread must be idle."""
        self._call, self.unwinding = call, False
        self.resume()

    def resume(self) -> None:
        """Let the call go on until it waits again, or ends."""
        self._go.release()
        self._back.acquire()
        if self.waits_s is None:
            self.idle.append(self)

    def unwind(self) -> None:
        """End a call that waits."""
        self.unwinding = True
        while self.waits_s is not None:
            self.resume()

    def wait(self, seconds: float) -> None:
        """Wait in the thread for so many seconds. Raise ``Unwound`` at the end of the simulation."""
        if not self.unwinding:
            self.waits_s = seconds
            self._back.release()
            self._go.acquire()
        if self.unwinding:
            raise Unwound

    def _work(self) -> None:
        _local.worker = self
        while True:
            self._go.acquire()
            assert self._call is not None
            self._call()
            self._call, self.waits_s = None, None
            self._back.release()


class Threads:
    """The threads of one node. A wait blocks the thread of its call, or the whole node."""

    def __init__(self, node: SimNode, rng: random.Random) -> None:
        self.node = node
        self.rng = rng
        self.troubled: Callable[[], bool] = lambda: False
        """Returns True while calls take longer than usual, so that they must not be performed at once."""
        self.locked = 0
        """Number of locks that calls hold. No call runs at once then, since it could not wait for a lock."""
        self._waiting: dict[TurnThread, None] = {}
        self._at_once = False

    def wait(self, seconds: float) -> None:
        """Block the thread of a pool for that long; on the loop, block the whole node."""
        if self._at_once:
            return
        if (worker := TurnThread.current()) is not None:
            worker.wait(seconds)
        else:
            self.node.block(seconds)

    def pool(self, name: str, threads: int) -> SimPool:
        return SimPool(self, name, threads)

    def start(self, call: Callable[[], None]) -> None:
        """Run a call in a thread, to its end or until it waits."""
        context = self.node.context.copy()
        if not self.troubled() and self.rng.random() < _AT_ONCE and not self.locked:
            self._at_once = True
            context.run(call)
            self._at_once = False
            return
        self._follow(TurnThread.run(lambda: context.run(call)))

    def _resume(self, worker: TurnThread) -> None:
        del self._waiting[worker]
        worker.resume()
        self._follow(worker)

    def _follow(self, worker: TurnThread) -> None:
        if worker.waits_s is not None:
            self._waiting[worker] = None
            node = self.node
            node.loop.call_later(worker.waits_s, self._resume, worker, context=node.context)

    def unwind(self) -> None:
        """End all calls that wait, at the end of a simulation."""
        for worker in list(self._waiting):
            worker.unwind()


class SimLock:
    """A lock for calls that take virtual time. A lock of `threading` would block the loop's thread, too."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._held = False

    def __enter__(self) -> None:
        while self._held:
            self._threads.wait(_LOCK_S)
        self._held = True
        self._threads.locked += 1

    def __exit__(self, *_: object) -> None:
        self._held = False
        self._threads.locked -= 1


class SimPool:
    """A `gazette.runtime.tasks.Pool` whose calls take virtual time."""

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

    def lock(self) -> SimLock:
        return SimLock(self._threads)

    def close(self) -> None:
        self._closed = True
        queue, self._queue = self._queue, deque()
        for future, _ in queue:
            future.cancel()

    def _begin(self) -> None:
        while self._free and self._queue:
            future, call = self._queue.popleft()
            self._free -= 1
            node = self._threads.node
            node.loop.call_later(
                self._threads.rng.expovariate(1.0) * _CALL_S,
                self._threads.start,
                lambda future=future, call=call: self._perform(future, call),
                context=node.context,
            )

    def _perform(self, future: concurrent.futures.Future[Any], call: Callable[[], Any]) -> None:
        """Perform the call, in a thread."""
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - as an executor: it is the caller's
                future.set_exception(error)
            else:
                future.set_result(result)
        self._free += 1
        self._begin()


class SpoolDisk:
    """The disk of one node's spool files. They end with the node."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.full = False
        """No space is left: writes fail, perhaps after a part was written."""
        self.broken = False
        """Reads and writes fail."""
        self.write_s = 0.0
        """Mean seconds of each operation."""

    def create(self) -> SimFile:
        self.work("create a spool file")
        return SimFile(self)

    @property
    def is_in_trouble(self) -> bool:
        return bool(self.write_s) or self.full or self.broken

    def work(self, doing: str, *, writes: bool = True) -> None:
        """Wait as long as an operation takes. Raise the error of a failing disk."""
        if self.write_s:
            self.threads.wait(self.write_s * (0.5 + self.threads.rng.random()))
        if self.full and writes and self.threads.rng.random() < 0.7:
            raise disk_error(doing, _DIRECTORY, OSError(errno.ENOSPC, "No space left on device"))
        if self.broken and self.threads.rng.random() < 0.5:
            raise disk_error(doing, _DIRECTORY, OSError(errno.EIO, "Input/output error"))


class SimFile:
    """A `gazette.fragment.local_file.SpoolFile` in memory."""

    __slots__ = ("_content", "_disk")

    def __init__(self, disk: SpoolDisk) -> None:
        self._disk = disk
        self._content = bytearray()

    def pwrite(self, content: bytes, position: int) -> None:
        """Write ``content``. If the disk fails, write a part of it, and raise."""
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

    def pread_now(self, length: int, position: int) -> bytes | None:
        if self._disk.is_in_trouble or self._disk.threads.rng.random() < 0.3:
            return None  # The bytes are not in the page cache.
        return bytes(self._content[position : position + length])

    def truncate(self, length: int) -> None:
        self._disk.work("truncate a spool file")
        del self._content[length:]

    def sibling(self) -> SimFile:
        return self._disk.create()


@dataclass(slots=True)
class StoreTrouble:
    """The present faults of a bucket."""

    error_chance: float = 0.0
    refuses: bool = False
    """True if the store's errors do not end by waiting, such as those of expired credentials."""
    lost_answer_chance: float = 0.0
    """Chance of a put that is performed, and answered as failed."""
    delay_s: float = 0.0
    hangs_until: float | None = None
    unmounted: bool = False
    """Another, empty directory is where the bucket was."""


@dataclass(slots=True)
class Bucket:
    """The objects of one blob store, which all nodes share. ``elsewhere`` has objects put while unmounted."""

    name: str
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    elsewhere: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    trouble: StoreTrouble = field(default_factory=StoreTrouble)
    on_put: Callable[[str, bytes, str], None] | None = None
    """Called with the path and content of an object, and the process that put it."""
    on_remove: Callable[[str], None] | None = None

    @property
    def trouble_free(self) -> bool:
        return self.trouble == StoreTrouble()

    def heal(self) -> None:
        """End all trouble. Copy objects that were put below the mount point, as an operator does."""
        self.trouble = StoreTrouble()
        elsewhere, self.elsewhere = self.elsewhere, {}
        for path, stored in elsewhere.items():
            if path not in self.objects:
                self.objects[path] = stored
                if self.on_put is not None:
                    self.on_put(path, stored[0], "")

    @property
    def mounted(self) -> dict[str, tuple[bytes, int]]:
        return self.elsewhere if self.trouble.unmounted else self.objects


class SimStore:
    """A `gazette.blobs.blob_store.BlobStore`: a bucket as the process ``user`` sees it."""

    def __init__(self, bucket: Bucket, threads: Threads, loop: VirtualLoop, user: str = "") -> None:
        self._bucket = bucket
        self._user = user
        self._threads = threads
        self._loop = loop

    def _work(self) -> None:
        """Wait as long as a request takes. Raise the error of a failing store."""
        rng = self._threads.rng
        trouble = self._bucket.trouble
        self._threads.wait(rng.expovariate(1.0) * 0.01 + rng.random() * trouble.delay_s)
        trouble = self._bucket.trouble
        if trouble.hangs_until is not None and self._loop.now < trouble.hangs_until:
            self._threads.wait(trouble.hangs_until - self._loop.now)
        if trouble.error_chance and rng.random() < trouble.error_chance:
            if trouble.refuses:
                raise NotAllowed("the bucket answers 403")
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
            self._bucket.on_put(path, content, self._user)
        lost = self._bucket.trouble.lost_answer_chance
        if lost and self._threads.rng.random() < lost:
            raise Unavailable("the connection to the bucket was reset")

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        validate_prefix(prefix)
        self._work()
        infos = [
            BlobInfo(path[len(prefix) :], mod_time, len(content))
            for path, (content, mod_time) in self._bucket.mounted.items()
            if path.startswith(prefix)
        ]
        return iter(infos)

    def remove(self, path: str) -> None:
        validate_path(path)
        self._work()
        self._bucket.mounted.pop(path, None)
        if self._bucket.on_remove is not None and not self._bucket.trouble.unmounted:
            self._bucket.on_remove(path)

    def sign_get(self, path: str, ttl_s: float) -> str:
        return self.sign_now(path, ttl_s)

    def sign_now(self, path: str, ttl_s: float) -> str:
        return f"sim:///{self._bucket.name}/{path}?ttl={ttl_s:g}"
