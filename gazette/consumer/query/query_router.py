"""Ask the member that serves a shard, and wait through a fail-over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from gazette.client.rpc.channel import Channels
from gazette.client.rpc.errors import open_channel
from gazette.consumer.query.query import Answer, Question
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
from gazette.net.error_codes import refusal_of
from gazette.protocol.ids import ProcessId
from gazette.protocol.route import Header
from gazette.protocol.status import ShardStatus
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import Pool, TaskScope, portable, settled

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S: Final = 0.05
_PAUSE_MAX_S: Final = 0.5
_STANDBY_PATIENCE_S: Final = 1.0
"""Seconds that a standby may take to come up to date while a primary can be asked instead."""
_RETRIED_CODES: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED}
)


class RunningQueries:
    """The queries that this member answers now, so that all can be ended. Loop-bound."""

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()
        self._reason = ""
        self._until: float | None = None

    @property
    def ended(self) -> bool:
        """True if no query is answered any more."""
        return self._until is not None and asyncio.get_running_loop().time() >= self._until

    @contextmanager
    def query(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Count a query until the block ends. ``end`` moves its deadline."""
        self._deadlines.add(deadline)
        try:
            self._bound(deadline)
            yield
        finally:
            self._deadlines.discard(deadline)

    def end(self, reason: str, within_s: float = 0.0) -> None:
        """End queries that run, and those that begin later, within ``within_s`` seconds."""
        until = asyncio.get_running_loop().time() + within_s
        if self._until is None or until < self._until:
            self._until, self._reason = until, reason
            for deadline in self._deadlines:
                self._bound(deadline)

    def _bound(self, deadline: asyncio.Timeout) -> None:
        present = deadline.when()
        if self._until is not None and (present is None or self._until < present):
            deadline.reschedule(self._until)

    def leaving(self, shard: str) -> Unavailable:
        """Return the error of a query that was ended."""
        return Unavailable(
            f"this member leaves its cluster: {self._reason}",
            hint="Ask again: another member answers.",
            shard=shard,
        )


@dataclass(frozen=True, slots=True)
class QueryRouter:
    """Router of a member's queries: it asks shards, and answers for them."""

    resolver: Resolver
    peers: Channels
    pool: Pool
    clock: Clock
    running: RunningQueries

    async def ask(
        self,
        question: Question,
        serve: Callable[[Any], T],
        proxy: Callable[[grpc.aio.Channel, Question], Awaitable[Answer[T]]],
        timeout_s: float,
    ) -> Answer[T]:
        """Have the shard answer.

        If this member may answer, call ``serve(store)`` on a thread of ``pool``. Otherwise call
        ``proxy(channel, question)`` with a channel to a member that may, and with the header to
        send along. Both may be called again after a failure: they must only read.

        Without a reachable primary, wait for the next one: a query outlasts a fail-over. Raise
        ``NotFound``. Raise ``Unavailable`` after ``timeout_s`` seconds or when this member leaves.
        Raise what ``serve`` raises. Raise ``Moved`` if the question has a header and this member
        may not answer. After a cancellation ``serve`` may still run.
        """
        attempts = _Attempts(self, question, serve, proxy)
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                with self.running.query(deadline):
                    return await self._answer(attempts, question)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            if self.running.ended:
                raise self.running.leaving(question.shard) from None
            raise Unavailable(
                f"shard {question.shard} did not answer within {timeout_s:g} s: {attempts.describe()}",
                hint="See `gazctl shards list` for its status.",
                shard=question.shard,
            ) from error

    async def _answer(self, attempts: _Attempts, question: Question) -> Answer[Any]:
        pause_s = _PAUSE_S
        while True:
            try:
                return await attempts.run()
            except Retryable as error:
                if question.header is not None:
                    raise
                attempts.failed(error)
            await self._change_or(pause_s)
            pause_s = min(_PAUSE_MAX_S, 2 * pause_s)

    async def _change_or(self, pause_s: float) -> None:
        """Wait for a change of the key space, at most ``pause_s`` seconds."""
        async with TaskScope("pause") as scope:
            waits = {
                scope.spawn(self.resolver.next_change(), name="change"),
                scope.spawn(self.clock.sleep(pause_s), name="pause"),
            }
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            scope.cancel()


class _Attempts:
    def __init__(
        self,
        asking: QueryRouter,
        question: Question,
        serve: Callable[[Any], Any],
        proxy: Callable[[grpc.aio.Channel, Question], Awaitable[Answer[Any]]],
    ) -> None:
        self._resolver = asking.resolver
        self._peers = asking.peers
        self._pool = asking.pool
        self._question = question
        self._shard_id = question.shard
        self._serve = serve
        self._proxy = proxy
        self._may_be_stale = question.max_staleness_s is not None and not question.read_through
        self._primary_failed = False
        self.describe: Callable[[], str] = lambda: "it has no primary"
        """Returns why the last attempt did not succeed, or what the present one waits for."""

    def failed(self, error: Retryable) -> None:
        """Keep why an attempt has failed."""
        reason = str(error)
        self.describe = lambda: reason

    def _waits(self, describe: Callable[[], str]) -> None:
        self.describe = describe

    async def run(self) -> Answer[Any]:
        """Make one attempt. Raise ``Retryable`` when another may succeed."""
        if self._may_be_stale:
            answer = await self._of_standby()
            if answer is not None:
                return answer
        resolution = await self._resolve()
        if resolution.status is ShardStatus.SHARD_NOT_FOUND:
            raise NotFound(f"shard {self._shard_id} does not exist", shard=self._shard_id)
        if resolution.status is not ShardStatus.OK:
            raise Moved(f"its status is {resolution.status.name}", shard=self._shard_id)
        if resolution.is_local:
            return await self._local(resolution)
        try:
            return await self._remote(resolution.header)
        except Retryable:
            self._primary_failed = True
            raise

    async def _resolve(self) -> Resolution:
        question = self._question
        try:
            return await self._resolver.resolve(
                self._shard_id,
                claims=question.claims,
                may_proxy=question.header is None,
                proxy_header=question.header,
                read_through=question.read_through,
                on_wait=self._waits,
            )
        except Closed as error:
            raise Unavailable(str(error), shard=self._shard_id) from error
        except Invalid as error:
            if question.header is None:
                raise
            raise Moved(str(error), shard=self._shard_id) from error

    async def _local(self, resolution: Resolution) -> Answer[Any]:
        shard = resolution.shard
        assert shard is not None
        # Our cancellation does not end the thread, which goes on using the store.
        shard.begin_use()
        value = await self._served(resolution.store, shard.end_use)
        return Answer(value, resolution.local_id)

    async def _served(self, store: Any, done: Callable[[], None]) -> Any:
        loop = asyncio.get_running_loop()

        def serve() -> Any:
            try:
                return self._serve(store)
            except BaseException as error:
                other = portable(error)
                if other is error:
                    raise
                raise other from error

        try:
            answer = self._pool.submit(serve)
        except RuntimeError as error:
            done()
            raise Unavailable("this member has stopped", shard=self._shard_id) from error
        answer.add_done_callback(lambda _: loop.call_soon_threadsafe(done))
        try:
            return await settled(answer)
        except asyncio.CancelledError:
            if answer.cancelled():
                # This task was not cancelled: the pool was closed.
                raise Unavailable("this member has stopped", shard=self._shard_id) from None
            answer.cancel()
            raise
        except Closed as error:
            raise Moved("its store was closed", shard=self._shard_id) from error

    async def _of_standby(self) -> Answer[Any] | None:
        """Return the answer of our standby, or of another's if the primary does not answer; or None."""
        question, resolver = self._question, self._resolver
        shard = resolver.standby(self._shard_id, question.claims)
        if shard is not None:
            return await self._of_ours(shard)
        if not self._primary_failed or question.header is not None:
            return None
        self._primary_failed = False
        for header in resolver.standby_headers(self._shard_id, question.claims):
            try:
                return await self._remote(header)
            except Retryable as error:
                log.info(
                    "a standby of %(shard)s did not answer: %(error)s",
                    {"shard": self._shard_id, "error": error},
                )
        return None

    async def _of_ours(self, shard: Shard) -> Answer[Any] | None:
        reads, max_staleness_s = shard.reads, self._question.max_staleness_s
        if reads is None or max_staleness_s is None:
            return None
        alone = self._question.header is not None or self._resolver.primary_of(shard.id) is None
        try:
            async with asyncio.timeout(None if alone else _STANDBY_PATIENCE_S):
                edition = await reads.begin(max_staleness_s)
        except TimeoutError:
            return None  # The refresh goes on for later queries.
        except (Retryable, NotAllowed):
            return None
        except GazetteError as error:
            log.warning(
                "standby of shard %(shard)s cannot answer: %(error)s",
                {"shard": shard.id, "error": error},
            )
            return None
        staleness_s = reads.age_s(edition)
        value = await self._served(edition.reader, lambda: reads.end(edition))
        return Answer(value, self._resolver.local_id, staleness_s)

    async def _remote(self, header: Header) -> Answer[Any]:
        """Ask a member until it answers or does not have that role any more."""
        endpoint = self._peers.pick(header.route, process_id=header.process_id)
        if endpoint is None:
            raise Moved("its member has no endpoint", shard=self._shard_id)
        was_primary = self._is_primary(header.process_id)
        async with TaskScope(f"ask {self._shard_id}") as scope:
            channel = self._peers.grpc_channel(endpoint)
            asked = scope.spawn(self._asked(channel, header, endpoint), name="ask")
            while not asked.done():
                change = scope.spawn(self._resolver.next_change(), name="change")
                await asyncio.wait({asked, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if not asked.done() and was_primary and not self._is_primary(header.process_id):
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

    async def _asked(
        self, channel: grpc.aio.Channel, header: Header, endpoint: str
    ) -> Answer[Any] | GazetteError:
        """Return the peer's answer, or the error that it stands for."""
        try:
            with open_channel("query", shard=self._shard_id):
                answer = await self._proxy(channel, replace(self._question, header=header))
        except Closed as error:
            return Moved(f"its member has lost its lease: {error.message}", shard=self._shard_id)
        except grpc.aio.AioRpcError as error:
            if error.code() in _RETRIED_CODES:
                return Unavailable(
                    f"its member did not answer: {error.details()}",
                    shard=self._shard_id,
                    endpoint=endpoint,
                )
            kind = refusal_of(error.code())
            return kind(error.details() or str(error.code()), hint="See the log of the peer.")
        return answer if answer.member is not None else replace(answer, member=header.process_id)
