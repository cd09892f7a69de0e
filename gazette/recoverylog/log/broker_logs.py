"""Recovery logs read through brokers, for code in another thread than the client's event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gazette.client.append.appender import AppendParams, AppendResult, SuspendControl, backoff_s
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.client.rpc.errors import status_of
from gazette.client.waits import RepeatedCall
from gazette.errors import Broken, GazetteError, NotAllowed, Unavailable
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.status import Status

if TYPE_CHECKING:
    from gazette.client.client import Client
    from gazette.client.read.retry_reader import RetryReader

T = TypeVar("T")

READ_BYTES: Final = 1 << 20
REPEATS_MAX: Final = 10
"""Greatest number of repetitions of an append after answers that leave its outcome open."""
_CURED: Final = frozenset(
    {Status.INDEX_HAS_GREATER_OFFSET.name, Status.FRAGMENT_STORE_UNHEALTHY.name}
)
"""Refusals that end once an operator has confirmed the head of the journal, or its store is healthy."""


async def append_repeatable(
    client: Client,
    params: AppendParams,
    content: bytes,
    permit: Callable[[], Awaitable[None]] | None = None,
    *,
    is_owner: bool = False,
) -> AppendResult:
    """Append content whose repetition does no harm: repeat even if the outcome is open (``Broken``).

    A broker answers ``Broken`` if a replica is lost within the append, or if the broker itself stops. Await
    ``permit`` before each attempt. Raise ``Broken`` after `REPEATS_MAX` such answers. ``is_owner``: no
    other process would append in place of this one. So wait while brokers refuse the append for a reason of
    `_CURED`. For other errors see `Client.append`.
    """
    question, broken = RepeatedCall(), 0
    try:
        for attempt in count():
            if permit is not None:
                await permit()
            try:
                return await client.append(params, content)
            except GazetteError as error:
                broken += isinstance(error, Broken)
                is_repeated = isinstance(error, Broken) and broken <= REPEATS_MAX
                if not (is_repeated or (is_owner and status_of(error) in _CURED)):
                    raise
                client.waits.note(question, params.journal, error)
            await client.clock.sleep(backoff_s(attempt))
    finally:
        client.waits.end(question)
    raise AssertionError("unreachable: attempts are counted without end")


async def write_head(client: Client, log: JournalName, *, is_owner: bool = False) -> Offset:
    """Return the offset at which a log ends. For ``is_owner`` and the errors see `append_repeatable`.

    Only the primary knows the head: ask it by an empty append. The append keeps a suspended log suspended;
    a plain append would resume the log.
    """
    try:
        params = AppendParams(log, suspend=SuspendControl.KEEP)
        result = await append_repeatable(client, params, b"", is_owner=is_owner)
    except NotAllowed as error:
        if status_of(error) != Status.SUSPENDED.name:
            raise
    else:
        return result.commit.end
    # No broker serves a suspended log without bytes. Its specification holds its head.
    spec = (await client.get_journal(log)).spec
    return 0 if spec.suspend is None else spec.suspend.offset


class BrokerLogs:
    """A `LogSource` of a client whose event loop runs in another thread.

    Reads block until bytes arrive: a broker that has just taken a log over may learn of stored fragments only
    at its next listing. Reads raise ``Unavailable`` after ``stall_timeout_s`` seconds without bytes.
    """

    def __init__(
        self,
        client: Client,
        loop: asyncio.AbstractEventLoop,
        *,
        stall_timeout_s: float = 60.0,
    ) -> None:
        self.knows_heads = True
        self._client = client
        self._loop = loop
        self._stall_timeout_s = stall_timeout_s

    def _start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _result(self, future: concurrent.futures.Future[T], log: JournalName) -> T:
        try:
            return future.result(timeout=self._stall_timeout_s)
        except TimeoutError:
            future.cancel()
            raise Unavailable(
                "no bytes of the recovery log arrived in time",
                log=log,
                seconds=self._stall_timeout_s,
                hint="Check the brokers of this journal and its fragment store.",
            ) from None

    def bounds(self, log: JournalName) -> tuple[Offset, Offset]:
        async def look() -> tuple[Offset, Offset]:
            end = await write_head(self._client, log)
            if not end:
                return 0, 0
            # Read the byte at 0. If it was deleted, the jump says where the remaining bytes begin. No broker
            # serves a suspended log without bytes: such a log begins at its end.
            begin = end
            async with self._client.retry_reader(
                ReadParams(log, block=True, end_offset=end, metadata_only=True)
            ) as reader:
                try:
                    await reader.read()
                except OffsetJump as jump:
                    begin = jump.offset
                except NotAllowed as error:
                    if status_of(error) != Status.SUSPENDED.name:
                        raise
                else:
                    begin = 0
            return min(begin, end), end

        return self._result(self._start(look()), log)

    def read(self, log: JournalName, begin: Offset, end: Offset) -> Iterator[tuple[Offset, bytes]]:
        if begin >= end:
            return
        reader: RetryReader | None = None

        async def piece() -> tuple[Offset, bytes]:
            nonlocal reader
            if reader is None:
                reader = self._client.retry_reader(
                    ReadParams(log, begin, block=True, end_offset=end)
                )
            while True:
                try:
                    data = await reader.read(READ_BYTES)
                except OffsetJump:
                    continue  # The next read begins after the lost bytes.
                return reader.offset - len(data), data

        # Fetch the next piece while the caller uses this one.
        next_piece = self._start(piece())
        try:
            while True:
                offset, data = self._result(next_piece, log)
                if not data:
                    return
                next_piece = self._start(piece())
                yield offset, data
        finally:
            next_piece.cancel()
            if reader is not None:
                self._loop.call_soon_threadsafe(reader.close)


__all__ = ["BrokerLogs", "append_repeatable", "write_head"]
