"""Ask the member that serves a shard, and wait through a fail-over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from gazette.client.rpc.channel import Channels
from gazette.client.rpc.errors import open_channel
from gazette.cluster.etcd.lease import Lease
from gazette.consumer.query.query import QueryResult, ShardQuery
from gazette.consumer.query.running_queries import RunningQueries
from gazette.consumer.resolver import Resolution, Resolver
from gazette.consumer.shard.shard import Shard
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
from gazette.protocol.error_codes import refusal_of
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.route import Header
from gazette.protocol.shard import ShardSpec
from gazette.protocol.status import ShardStatus
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import Pool, TaskScope, as_plain_error, await_future
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S: Final = 0.05
_PAUSE_MAX_S: Final = 0.5
_STANDBY_GRACE_S: Final = 1.0
"""Seconds that a standby may take to make a new edition. After that, the primary is asked, if it exists."""
_RETRIED_CODES: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED}
)


@dataclass(frozen=True, slots=True)
class QueryRouter:
    """Router of a member's queries: has its own shards answer, or asks the member that serves the shard."""

    resolver: Resolver
    peers: Channels
    pool: Pool
    clock: Clock
    lease: Lease
    """The lease of this member. Without a lease, its shards may not answer as primaries."""
    running: RunningQueries

    def shards(self, selector: LabelSelector) -> Sequence[ShardSpec]:
        """Return the specifications of the matching shards, in order of ids."""
        return self.resolver.shards(selector)

    def shards_with_source(self, journal: str) -> tuple[ShardSpec, ...]:
        """Return the specifications of shards that read a journal, in order of ids."""
        return self.resolver.shards_with_source(journal)

    async def ask(
        self,
        query: ShardQuery,
        serve: Callable[[Any], T],
        proxy: Callable[[grpc.aio.Channel, ShardQuery], Awaitable[QueryResult[T]]],
        timeout_s: float,
    ) -> QueryResult[T]:
        """Have the shard answer.

        If this member may answer, call ``serve(store)`` on a thread of ``pool``. Otherwise call
        ``proxy(channel, query)`` with a channel to a member that may answer. The ``query`` given to ``proxy``
        has the header to send. Both functions may be called again after a failure: they must only read.

        If no primary can be reached, wait for the next primary: a query outlasts a fail-over. Raise
        ``NotFound`` if the shard does not exist. Raise ``Unavailable`` after ``timeout_s`` seconds, when this
        member leaves, or once the shard has failed and nothing will restart it. Raise ``Moved`` if the query
        has a header and this member may not answer. An error of ``serve`` reaches the caller; if ``serve``
        raised it in another member, as the error of its status. After a cancellation ``serve`` may still run.
        """
        attempts = _Attempts(self, query, serve, proxy)
        try:
            async with timeout(timeout_s) as deadline:
                with self.running.query(deadline):
                    return await self._answer(attempts, query)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            if self.running.ended:
                raise self.running.leaving(shard=query.shard) from None
            raise Unavailable(
                f"shard {query.shard} did not answer within {timeout_s:.3g} s: {attempts.describe()}",
                hint="See `gazctl shards list` for its status.",
                shard=query.shard,
            ) from error

    async def _answer(self, attempts: _Attempts, query: ShardQuery) -> QueryResult[Any]:
        """Make attempts, with pauses, until one succeeds. For a query with a header, make one attempt."""
        pause_s = _PAUSE_S
        for attempt in count():
            try:
                return await attempts.run()
            except Retryable as error:
                if query.header is not None:
                    raise
                attempts.note_failure(error)
            # Do not give up after the first attempt: the second asks standbys, which may still answer.
            if attempt:
                self._require_not_failed(query.shard)
            await self._await_change_or_pause(pause_s)
            pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
        raise AssertionError("unreachable: attempts are counted without end")

    def _require_not_failed(self, shard_id: str) -> None:
        """Raise ``Unavailable``, with the reason, if the shard has failed and will not be restarted."""
        failure = self.resolver.failure_of(shard_id)
        if failure:
            reason, _, hint = failure.partition("\n")
            raise Unavailable(
                f"shard {shard_id} has failed: {reason}",
                hint=hint or "Correct the cause, then: gazctl shards unassign --failed.",
            )

    async def _await_change_or_pause(self, pause_s: float) -> None:
        """Wait for a change of the key space, at most ``pause_s`` seconds."""
        async with TaskScope("pause") as scope:
            waits = {
                scope.spawn(self.resolver.next_change(), name="change"),
                scope.spawn(self.clock.sleep(pause_s), name="pause"),
            }
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            scope.cancel()


@dataclass
class _Attempts:
    """The attempts at one query, and the state that is kept from one attempt to the next."""

    router: QueryRouter
    query: ShardQuery
    serve: Callable[[Any], Any]
    proxy: Callable[[grpc.aio.Channel, ShardQuery], Awaitable[QueryResult[Any]]]
    primary_failed: bool = False
    """True if a call to the primary has failed, and standbys were not asked since then."""
    describe: Callable[[], str] = lambda: "it has no primary"
    """Returns the reason of the last failure, or of the present wait."""

    def __post_init__(self) -> None:
        self._resolver = self.router.resolver
        self._shard_id = self.query.shard

    def note_failure(self, error: Retryable) -> None:
        """Keep the reason of a failed attempt."""
        facts = {name: value for name, value in error.facts.items() if name != "shard"}
        reason = str(GazetteError(error.message, **facts))
        self.describe = lambda: reason

    def _note_wait(self, describe: Callable[[], str]) -> None:
        self.describe = describe

    async def run(self) -> QueryResult[Any]:
        """Make one attempt. Raise ``Retryable`` if a later attempt may succeed, ``NotFound`` if there is no
        such shard."""
        if self.query.max_staleness_s is not None and not self.query.read_through:
            answer = await self._ask_standby()
            if answer is not None:
                return answer
        resolution = await self._resolve()
        if resolution.status is ShardStatus.SHARD_NOT_FOUND:
            raise NotFound(f"shard {self._shard_id} does not exist", shard=self._shard_id)
        if resolution.status is not ShardStatus.OK:
            raise Moved(f"its status is {resolution.status.name}", shard=self._shard_id)
        if resolution.is_local:
            return await self._ask_local(resolution)
        try:
            return await self._ask_remote(resolution.header)
        except Retryable:
            self.primary_failed = True
            raise

    async def _resolve(self) -> Resolution:
        """Resolve the shard: see `Resolver.resolve`. Raise ``Unavailable`` if this member has stopped
        serving, and ``Moved`` if the query's header is meant for another member."""
        query = self.query
        try:
            return await self._resolver.resolve(
                self._shard_id,
                claims=query.claims,
                may_proxy=query.header is None,  # A header shows that a member forwarded it.
                proxy_header=query.header,
                read_through=query.read_through,
                on_wait=self._note_wait,
            )
        except Closed as error:
            raise Unavailable(str(error), shard=self._shard_id) from error
        except Invalid as error:
            if query.header is None:
                raise
            raise Moved(str(error), shard=self._shard_id) from error

    async def _ask_local(self, resolution: Resolution) -> QueryResult[Any]:
        shard = resolution.shard
        assert shard is not None
        # The store stays in use until `serve` has ended on its thread, which a cancellation does not stop.
        shard.begin_use()
        try:
            value = await self._serve_on_thread(resolution.store, shard.end_use)
        except Exception:
            self._require_lease()  # Also an error such as "no such key" may be out of date.
            raise
        self._require_lease()
        return QueryResult(value, resolution.local_id)

    def _require_lease(self) -> None:
        """Raise ``Moved`` if the lease may have ended: another member may lead now, with a newer state."""
        if self.router.lease.remaining_s <= 0:
            raise Moved("the lease of its member may have ended", shard=self._shard_id)

    async def _serve_on_thread(self, store: Any, done: Callable[[], None]) -> Any:
        """Return the result of ``serve(store)`` on a thread. Call ``done`` on the loop once ``serve`` ends.

        Raise ``Unavailable`` if the member has stopped, and ``Moved`` if the store was closed. Errors of
        ``serve`` reach the caller.
        """
        loop = asyncio.get_running_loop()

        def serve() -> Any:
            try:
                return self.serve(store)
            except BaseException as error:
                plain_error = as_plain_error(error)
                if plain_error is error:
                    raise
                raise plain_error from error

        try:
            answer = self.router.pool.submit(serve)
        except RuntimeError as error:
            done()
            raise Unavailable("this member has stopped", shard=self._shard_id) from error
        except Unavailable:
            done()
            raise
        answer.add_done_callback(lambda _: loop.call_soon_threadsafe(done))
        try:
            return await await_future(answer)
        except asyncio.CancelledError:
            if answer.cancelled():
                # The pool was closed; this task was not cancelled.
                raise Unavailable("this member has stopped", shard=self._shard_id) from None
            answer.cancel()
            raise
        except Closed as error:
            raise Moved("its store was closed", shard=self._shard_id) from error

    async def _ask_standby(self) -> QueryResult[Any] | None:
        """Return the answer of this member's standby, or None. If this member has no standby, ask the
        standbys of other members, once after each failed call to the primary."""
        query, resolver = self.query, self._resolver
        shard = resolver.standby(self._shard_id, query.claims)
        if shard is not None:
            return await self._ask_own_standby(shard)
        if not self.primary_failed or query.header is not None:
            return None
        self.primary_failed = False
        for header in resolver.standby_headers(self._shard_id, query.claims):
            try:
                return await self._ask_remote(header)
            except Retryable as error:
                log.info(
                    "a standby of %(shard)s did not answer: %(error)s",
                    {"shard": self._shard_id, "error": error},
                )
        return None

    async def _ask_own_standby(self, shard: Shard) -> QueryResult[Any] | None:
        """Return the answer from an edition of this member's standby; None if the standby has no edition that
        is fresh enough, and cannot make a new edition in time."""
        reads, max_staleness_s = shard.reads, self.query.max_staleness_s
        if reads is None or max_staleness_s is None:
            return None
        only_choice = self.query.header is not None or self._resolver.primary_of(shard.id) is None
        try:
            async with timeout(None if only_choice else _STANDBY_GRACE_S):
                edition = await reads.begin(max_staleness_s)
        except TimeoutError:
            return None  # The task that makes the edition goes on: later queries use the edition.
        except (Retryable, NotAllowed):
            return None
        except GazetteError as error:
            log.warning(
                "standby of shard %(shard)s cannot answer: %(error)s",
                {"shard": shard.id, "error": error},
            )
            return None
        staleness_s = reads.age_s(edition)
        value = await self._serve_on_thread(edition.reader, lambda: reads.end(edition))
        return QueryResult(value, self._resolver.local_id, staleness_s)

    async def _ask_remote(self, header: Header) -> QueryResult[Any]:
        """Ask a member. Raise ``Moved`` if the member has no endpoint, or ceases to be the primary during the
        call. Raise the error in its answer."""
        endpoint = self.router.peers.pick(header.route, process_id=header.process_id)
        if endpoint is None:
            raise Moved("its member has no endpoint", shard=self._shard_id)
        was_primary = self._is_primary(header.process_id)
        async with TaskScope(f"ask {self._shard_id}") as scope:
            channel = self.router.peers.grpc_channel(endpoint)
            call = scope.spawn(self._ask_member(channel, header, endpoint), name="ask")
            while not call.done():
                change = scope.spawn(self._resolver.next_change(), name="change")
                await asyncio.wait({call, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if not call.done() and was_primary and not self._is_primary(header.process_id):
                    scope.cancel()
                    raise Moved("its primary changed", shard=self._shard_id)
            scope.cancel()
            result = call.result()
        if isinstance(result, GazetteError):
            raise result
        return result

    def _is_primary(self, process_id: ProcessId | None) -> bool:
        primary_id = self._resolver.primary_of(self._shard_id)
        return primary_id is not None and primary_id == process_id

    async def _ask_member(
        self, channel: grpc.aio.Channel, header: Header, endpoint: str
    ) -> QueryResult[Any] | GazetteError:
        """Return the peer's answer, or the error of its status. Do not raise the error: that would cancel
        `_ask_remote`."""
        try:
            with open_channel("query", shard=self._shard_id):
                answer = await self.proxy(channel, replace(self.query, header=header))
        except Closed as error:
            return Moved(f"its member has lost its lease: {error.message}", shard=self._shard_id)
        except grpc.aio.AioRpcError as error:
            if error.code() in _RETRIED_CODES:
                return Unavailable(
                    f"its member did not answer: {error.details()}",
                    shard=self._shard_id,
                    endpoint=endpoint,
                )
            error_type = refusal_of(error.code())
            return error_type(error.details() or str(error.code()), hint="See the log of the peer.")
        return answer if answer.member is not None else replace(answer, member=header.process_id)
