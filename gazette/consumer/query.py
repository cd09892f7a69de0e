"""Having a shard answer a question, wherever its primary is, through a fail-over if need be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from gazette.auth import Claims
from gazette.client.channel import Channels
from gazette.clock import Clock
from gazette.consumer.resolver import Resolution, Resolver
from gazette.errors import (
    Closed,
    GazetteError,
    Invalid,
    Moved,
    NotAllowed,
    NotFound,
    Retryable,
    Unavailable,
)
from gazette.protocol.ids import ProcessId
from gazette.protocol.route import Header
from gazette.protocol.status import ShardStatus
from gazette.tasks import BlockingPool, TaskScope, portable, settled

T = TypeVar("T")

EVERYTHING: Final = Claims(0)
_PAUSE_S: Final = 0.05
_PAUSE_MAX_S: Final = 0.5
_RETRIED_CODES: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED}
)
_KINDS: Final[dict[grpc.StatusCode, type[GazetteError]]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.INVALID_ARGUMENT: Invalid,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
}
"""What `rpc_errors` makes of errors, turned back: an answer is the same whoever is asked."""


async def call_shard(
    resolver: Resolver,
    peers: Channels,
    pool: BlockingPool,
    clock: Clock,
    shard_id: str,
    serve: Callable[[Any], T],
    proxy: Callable[[grpc.aio.Channel, Header], Awaitable[T]],
    *,
    header: Header | None,
    read_through: Mapping[str, int] | None,
    claims: Claims | None,
    timeout_s: float,
) -> T:
    """Have the primary of a shard answer.

    ``serve(store)`` is called, on a thread of ``pool``, when this member is the primary; else
    ``proxy(channel, header)`` with a channel to the primary and the header to send along. The peer
    gives that to its own call as ``header``, and then never passes it on again. Both may be called
    again after a failure: they must only read.

    Without a primary, or with one that is unreachable, this waits for the next: a query waits for a
    fail-over, it does not fail. Raises ``NotFound``, ``Unavailable`` after ``timeout_s`` seconds, what
    ``serve`` raises, and ``Moved`` if ``header`` is given and this member is not the primary.
    Cancellation: ``serve`` may still run.
    """
    attempt = _Attempt(
        resolver, peers, pool, shard_id, serve, proxy, header, read_through, claims or EVERYTHING
    )
    reason = "it has no primary"
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            pause_s = _PAUSE_S
            while True:
                try:
                    answer: T = await attempt.run()
                    return answer
                except Retryable as error:
                    if header is not None:
                        raise
                    reason = str(error)
                await _change_or(resolver, clock, pause_s)
                pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise Unavailable(
            f"shard {shard_id} did not answer within {timeout_s:g} s: {reason}",
            hint="See `gazctl shards list` for its status.",
            shard=shard_id,
        ) from error


async def _change_or(resolver: Resolver, clock: Clock, pause_s: float) -> None:
    """Wait for a change of the key space, at most for a while."""
    async with TaskScope("pause") as scope:
        waits = {
            scope.spawn(resolver.next_change(), name="change"),
            scope.spawn(clock.sleep(pause_s), name="pause"),
        }
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        scope.cancel()


class _Attempt:
    def __init__(
        self,
        resolver: Resolver,
        peers: Channels,
        pool: BlockingPool,
        shard_id: str,
        serve: Callable[[Any], Any],
        proxy: Callable[[grpc.aio.Channel, Header], Awaitable[Any]],
        header: Header | None,
        read_through: Mapping[str, int] | None,
        claims: Claims,
    ) -> None:
        self._resolver = resolver
        self._peers = peers
        self._pool = pool
        self._shard_id = shard_id
        self._serve = serve
        self._proxy = proxy
        self._header = header
        self._read_through = read_through
        self._claims = claims

    async def run(self) -> Any:
        """One attempt. Raises ``Retryable`` when another may succeed."""
        resolution = await self._resolve()
        if resolution.status is ShardStatus.SHARD_NOT_FOUND:
            raise NotFound(f"shard {self._shard_id} does not exist", shard=self._shard_id)
        if resolution.status is not ShardStatus.OK:
            raise Moved(f"its status is {resolution.status.name}", shard=self._shard_id)
        if resolution.is_local:
            return await self._local(resolution)
        return await self._remote(resolution)

    async def _resolve(self) -> Resolution:
        try:
            return await self._resolver.resolve(
                self._shard_id,
                claims=self._claims,
                may_proxy=self._header is None,
                proxy_header=self._header,
                read_through=self._read_through,
            )
        except Closed as error:
            raise Unavailable(str(error), shard=self._shard_id) from error
        except Invalid as error:
            if self._header is None:
                raise
            raise Moved(str(error), shard=self._shard_id) from error

    async def _local(self, resolution: Resolution) -> Any:
        shard, store = resolution.shard, resolution.store
        assert shard is not None
        loop = asyncio.get_running_loop()

        def serve() -> Any:
            try:
                return self._serve(store)
            except BaseException as error:
                other = portable(error)
                if other is error:
                    raise
                raise other from error

        # Not ended by a cancellation of ours: the thread goes on, and with it its use of the store.
        shard.begin_use()
        answer = self._pool.submit(serve)
        answer.add_done_callback(lambda _: loop.call_soon_threadsafe(shard.end_use))
        try:
            return await settled(answer)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        except Closed as error:
            raise Moved("its store was closed", shard=self._shard_id) from error

    async def _remote(self, resolution: Resolution) -> Any:
        """Ask the primary, until it answers or is the primary no more."""
        header = resolution.header
        endpoint = self._peers.pick(header.route, process_id=header.process_id)
        if endpoint is None:
            raise Moved("its primary has no endpoint", shard=self._shard_id)
        async with TaskScope(f"ask {self._shard_id}") as scope:
            channel = self._peers.grpc_channel(endpoint)
            asked = scope.spawn(self._asked(channel, header, endpoint), name="ask")
            while not asked.done():
                change = scope.spawn(self._resolver.next_change(), name="change")
                await asyncio.wait({asked, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if not asked.done() and not self._is_primary(header.process_id):
                    scope.cancel()
                    raise Moved("its primary changed", shard=self._shard_id)
            scope.cancel()
            result = asked.result()
        if isinstance(result, GazetteError):
            raise result
        return result

    def _is_primary(self, process_id: ProcessId | None) -> bool:
        present = self._resolver.primary_of(self._shard_id)
        return present is not None and present == process_id

    async def _asked(self, channel: grpc.aio.Channel, header: Header, endpoint: str) -> Any:
        """The peer's answer, or the error that it amounts to."""
        try:
            return await self._proxy(channel, header)
        except grpc.aio.AioRpcError as error:
            if error.code() in _RETRIED_CODES:
                return Unavailable(
                    f"its primary did not answer: {error.details()}",
                    shard=self._shard_id,
                    endpoint=endpoint,
                )
            kind = _KINDS.get(error.code(), GazetteError)
            return kind(error.details() or str(error.code()), hint="See the log of the peer.")


@asynccontextmanager
async def rpc_errors(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Around a handler of an application: errors of our tree end the call with a fitting code."""
    try:
        yield
    except (Retryable, Closed) as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    except NotFound as error:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    except NotAllowed as error:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
    except Invalid as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except GazetteError as error:
        await context.abort(grpc.StatusCode.UNKNOWN, str(error))
