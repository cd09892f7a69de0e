"""Readers that get fragments directly from their blob store, and open each before the previous one ends.

Calls in the threads of such a reader are fast or slow. A fast call is done before its caller goes on. Then a
read wants the next fragment before the look-ahead that opens it has begun.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from gazette.client.read import fragment_reader
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.read.reader import OffsetJump, Reader, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.errors import Closed, Corrupt, GazetteError, NotAllowed, NotFound, NotYet, Unavailable
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import Codec, Fragment
from gazette.testing.simulation.cluster import is_defect
from gazette.testing.simulation.loop import NodeClock, SimNode
from gazette.testing.simulation.storage import Bucket
from tools.simulation.world import World

if TYPE_CHECKING:
    from tools.simulation.scenario import Scenario

P = ParamSpec("P")
T = TypeVar("T")

COLD_SHARE: Final = 0.4
"""Share of the seeds with readers that read stored fragments directly from their stores."""
_SCHEME: Final = "sim"
_CALL_S: Final = 0.003
_TIMEOUT_S: Final = 30.0
"""Seconds for which a client waits for a store, as with `FragmentAccess`."""
_CLOSED_WITHIN_S: Final = 60.0
"""Seconds for which a file may stay open after its reader was closed: a thread may wait for the store."""
_PASSES_MAX: Final = 6
_SHIPPED: Final = (fragment_reader.BLOCK_BYTES, fragment_reader.AHEAD_BYTES)


def decode_in_steps(rng: random.Random | None) -> None:
    """Choose how many bytes clients decode at once: so few that a short fragment may take several steps, or,
    without ``rng``, as many as shipped clients."""
    block, ahead = _SHIPPED if rng is None else rng.choice((_SHIPPED, (300, 900)))
    vars(fragment_reader).update(BLOCK_BYTES=block, AHEAD_BYTES=ahead)


class StoreThreads:
    """A `gazette.runtime.tasks.BlockingPool` of one client, whose calls take virtual time."""

    def __init__(self, node: SimNode, rng: random.Random) -> None:
        self._node = node
        self._rng = rng
        self._at_once = rng.choice((0.0, 0.4, 0.8))
        """Share of the calls that are done before their caller goes on."""
        self.slow_s = rng.choice((0.0, 0.0, 0.1, 4.0, 25.0))
        """Longest delay of a tenth of the calls."""
        self._closed = False

    def submit(
        self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Perform a call now or later. Half of the calls that wait count as begun, so none cancels them."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        rng, future = self._rng, concurrent.futures.Future[T]()
        call = partial(fn, *args, **kwargs)
        if rng.random() < self._at_once:
            self._perform(future, call)
            return future
        if rng.random() < 0.5:
            future.set_running_or_notify_cancel()
        delay = rng.expovariate(1.0) * _CALL_S
        if rng.random() < 0.1:
            delay += rng.random() * self.slow_s
        self._node.loop.call_later(
            delay, self._perform, future, call, context=self._node.context.copy()
        )
        return future

    def close(self) -> None:
        self._closed = True

    def _perform(self, future: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
        if not future.running() and not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - as an executor: it is the caller's
            future.set_exception(error)
        else:
            future.set_result(result)


class StoreFile(io.BytesIO):
    """An object that a client has opened at its store. Reads of it may fail."""

    def __init__(self, path: str, content: bytes, access: SimFragments) -> None:
        super().__init__(content)
        self.path = path
        self._size = len(content)
        self._access = access
        access.open_files[self] = None

    def read(self, length: int | None = -1) -> bytes:
        """Read 400 bytes or an eighth of the object, however much is asked for."""
        del length
        self._access.require_answer()
        return super().read(max(400, self._size // 8))

    def close(self) -> None:
        self._access.open_files.pop(self, None)
        super().close()


class SimFragments(FragmentAccess):
    """The stored fragments that a node opens by their simulated URLs, without a broker."""

    def __init__(self, node: SimNode, rng: random.Random, bucket: Callable[[str], Bucket]) -> None:
        super().__init__()
        self.threads = StoreThreads(node, rng)
        pool: Any = self.threads
        self._pool = pool
        self._rng = rng
        self._bucket = bucket
        self._fails = rng.choice((0.0, 0.0, 0.03, 0.3))
        self.open_files: dict[StoreFile, None] = {}

    def can_open(self, url: str) -> bool:
        return url.startswith(f"{_SCHEME}:")

    def require_answer(self) -> None:
        """Raise an error instead of the store's answer, sometimes."""
        if self._rng.random() < self._fails:
            raise self._rng.choice(
                (Unavailable("the bucket answers 503"), NotAllowed("the signed URL has expired"))
            )

    def _open(self, fragment: Fragment, url: str, offset: int) -> DecodedFile:
        return super()._open(fragment, url.replace(_SCHEME, "file", 1), offset)

    def _open_file(self, fragment: Fragment, url: str, offset: int) -> DecodedFile:
        name, _, path = unquote(urlsplit(url).path).lstrip("/").partition("/")
        bucket, rng = self._bucket(name), self._rng
        trouble = bucket.trouble
        if trouble.hangs_until is not None or rng.random() < trouble.error_chance:
            raise Unavailable("the bucket answers 503, or not at all")
        self.require_answer()
        stored = bucket.mounted.get(path)
        if stored is None:
            raise NotFound("no such object", file=path)
        source = StoreFile(path, stored[0], self)
        start = None
        if fragment.codec is Codec.NONE and rng.random() < 0.7:  # Some stores ignore a range.
            source.seek(offset - fragment.begin)
            start = offset
        return DecodedFile(source, FragmentDecoder(fragment, start=start))


class ColdReader:
    """A client that reads a journal from its begin again and again."""

    def __init__(self, scenario: Scenario, name: str, journal: str, rng: random.Random) -> None:
        self._scenario = scenario
        self._world: World = scenario.world
        self._name = name
        self._journal = journal
        self._rng = rng
        self.node = SimNode(self._world.loop, name)
        self._clock = NodeClock(self._world.loop)
        self._fragments = SimFragments(self.node, rng, self._world.bucket)
        hosts = rng.sample(scenario.plan.hosts, len(scenario.plan.hosts))
        self._client = self._world.client(self.node, *hosts, fragments=self._fragments)
        self._ahead: tuple[Reader | None, float] = (None, 0.0)
        self._present: tuple[Reader | None, float] = (None, 0.0)
        """The reader that now gives bytes, and the earliest time at which it can have asked for them."""
        self._reader: RetryReader | None = None
        """The present reader. None: it was closed."""

    async def run(self) -> None:
        rng, offset = self._rng, 0
        for _ in range(_PASSES_MAX):
            await self._clock.sleep(rng.expovariate(1 / 40.0))
            if self._scenario.done:
                return
            offset = await self._pass(offset if rng.random() < 0.3 else 0)
            await self._require_closed_files()

    async def _pass(self, offset: int) -> int:
        """Read from an offset to the head, or to an end before it. Return the offset behind what was read."""
        rng, end = self._rng, 0
        head = self._scenario.heads[self._journal]
        if head > offset and rng.random() < 0.3:
            end = rng.randint(offset + 1, head)
        params = ReadParams(self._journal, offset, end_offset=end, do_not_proxy=rng.random() < 0.5)
        reader = RetryReader(self._client, params, clock=self._clock)
        self._reader = reader
        if rng.random() < 0.3:
            later = rng.choice((0.01, 0.1, 3.0)) * rng.random()
            self._world.loop.call_later(later, self._close, reader, context=self.node.context)
        try:
            async with asyncio.timeout(rng.choice((5.0, 60.0, 60.0))):
                await self._read(reader)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._world.violated(f"a read of {self._name} was cancelled by no caller")
        except Closed as error:
            if self._reader is not None:
                self._world.violated(f"{self._name} was not closed, and raised {error!r}")
        except (NotYet, TimeoutError):
            pass
        except GazetteError as error:
            if isinstance(error, Corrupt) and "created" in error.facts:
                return 0
            if isinstance(error, Corrupt) or is_defect(error):
                self._world.violated(f"reader {self._name} raised {error!r}")
        finally:
            self._close(reader)
        return reader.offset

    def _close(self, reader: RetryReader) -> None:
        reader.close()
        if self._reader is reader:  # The close of an earlier reader may come late.
            self._reader = None

    async def _read(self, reader: RetryReader) -> None:
        rng, end = self._rng, reader.params.end_offset
        most = rng.choice((0, 0, 40, 1000))
        passed = False
        """True once a jump over lost offsets has passed the end: nothing is left to read then."""
        while True:
            begun = self._world.loop.now
            try:
                # Some reads are given up after at most 10 ms. That must lose no byte.
                async with asyncio.timeout(
                    0.01 * rng.random() if rng.random() < 0.1 else None
                ) as gone:
                    content = await reader.read(most)
            except OffsetJump as jump:
                since = self._since(reader, begun)
                self._scenario.jumped(self._name, self._journal, reader, jump, since)
                passed = bool(end) and reader.offset > end
                continue
            except TimeoutError:
                if not gone.expired():
                    raise
                continue
            if self._reader is not reader:
                self._world.violated(f"{self._name} was closed, and got {len(content)} bytes")
            if end and reader.offset > end and (content or not passed):
                self._world.violated(f"{self._name} got bytes up to {reader.offset} behind {end}")
            if not content:
                if reader.offset != end and not passed:
                    self._world.violated(f"{self._name} ended at {reader.offset}, not at {end}")
                return
            self._scenario.got(
                self._name, self._journal, reader, content, self._since(reader, begun)
            )
            if rng.random() < 0.05:
                await self._clock.sleep(rng.uniform(0.0, 5.0))

    def _since(self, reader: RetryReader, begun: float) -> float:
        """Return the earliest time at which the reader can have asked for the bytes of the last read."""
        present = reader._reader
        if present is not self._present[0]:
            self._present = self._ahead if present is self._ahead[0] else (present, begun)
        if reader._next is not self._ahead[0]:
            self._ahead = (reader._next, begun)
        return self._present[1]

    async def _require_closed_files(self) -> None:
        """Require that no file of a closed reader stays open."""
        deadline = self._world.loop.now + _CLOSED_WITHIN_S
        while files := self._fragments.open_files:
            if self._world.loop.now > deadline:
                paths = sorted(file.path for file in files)
                self._world.violated(f"{self._name} has left files open: {paths}")
                return
            await self._clock.sleep(1.0)
