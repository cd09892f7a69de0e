"""Stage 3 of the byte path: takes the chunks of `client/append/appender`, gives them to
`broker/commit/driver`, or to the broker that is the journal's primary.

The Append call. `whole_append` serves a small append at once, together with others that have arrived. Any
other call has two tasks. One runs its handler; the other runs the append, and reads the caller's stream. If
the caller goes away, the append is interrupted and not cancelled: it rolls back on all replicas. `pipeline`
and `spool_writer` bound the content in memory, for appends of any size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from gazette.auth import Capability, Claims
from gazette.broker.api.append_answers import encoded, failure_of, note_head, under_lease
from gazette.broker.api.call_guard import Expiry, authorize, counted, ending_on_error, passed_on
from gazette.broker.api.whole_append import EXPIRED, terms_of
from gazette.broker.append.events import Ending, Outcome
from gazette.broker.append.line import ContentSource
from gazette.broker.commit.driver import AppendCall, AppendDriver
from gazette.broker.context import BrokerContext
from gazette.broker.resolver import Resolution
from gazette.client.rpc.credentials import journal_claims
from gazette.client.rpc.errors import open_channel
from gazette.client.rpc.stream_call import StreamCall
from gazette.errors import Broken, Invalid, NotAllowed, Unavailable
from gazette.protocol.append_session import SessionAppend, created_of, introduction, ledger_of
from gazette.protocol.content import COMMIT, AppendMessage, append_content
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_append_chunk, validate_append_request_opening
from gazette.protocol.status import Status
from gazette.runtime import tracing
from gazette.runtime.tasks import await_shared
from gazette.runtime.timeouts import timeout

_DRAIN_S: Final = 1.0
_DRAIN_BYTES: Final = 8 << 20


class ClientContent:
    """The messages of an Append stream: the opening, then the content."""

    def __init__(self, requests: AsyncIterator[AppendMessage]) -> None:
        self._requests = requests
        self._ended = False

    async def opening(self) -> broker_pb2.AppendRequest:
        """Return the first message. Raise ``Invalid`` if it is no valid opening, ``Broken`` if the stream is
        empty."""
        message = await self._message()
        if message is None:
            raise Broken("unexpected EOF")
        if isinstance(message, bytes):
            message = broker_pb2.AppendRequest(content=message)
        validate_append_request_opening(message)
        return message

    async def next(self) -> bytes | None:
        """Return the next chunk, as ``line.ContentSource.next`` does."""
        message = await self._message()
        if message is None or isinstance(message, bytes):
            return message
        validate_append_chunk(message)
        return message.content

    async def drain(self) -> None:
        """Read and discard the rest of the caller's stream, up to a limit of time and of bytes.

        Without the drain, the answer could cross a message on the wire. The caller's gRPC would then report
        only that the message was not sent, and drop the answer.
        """
        length = 0
        if self._ended:
            return
        with suppress(TimeoutError, Invalid):
            async with timeout(_DRAIN_S):
                while length < _DRAIN_BYTES and (chunk := await self.next()) is not None:
                    length += len(chunk)

    async def _message(self) -> AppendMessage | None:
        try:
            message = await anext(self._requests, None)
        except DecodeError as error:
            self._ended = True  # gRPC reads no further message.
            raise Invalid(f"not an AppendRequest: {error}") from error
        self._ended = message is None
        return message


class AppendApi:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    async def append(
        self, requests: AsyncIterator[AppendMessage], call: Any
    ) -> broker_pb2.AppendResponse:
        """Serve one append, here or through the primary.

        Cancellation (the caller is gone): the append is rolled back, unless its commit was proposed. A
        proxied append is cancelled at the primary.
        """
        context = self._context
        response: broker_pb2.AppendResponse | None = None
        with counted("Append") as outcome:
            claims = await authorize(call, context.verifier, Capability.APPEND)
            async with ending_on_error(call):
                content = ClientContent(requests)
                opening = await content.opening()
                tracing.annotate(journal=opening.journal)
                session = SessionAppend.of(call.invocation_metadata())
                driver = AppendDriver(context, _call_of(opening, claims, session), content)
                append_outcome = await self._run(driver, claims)
                if append_outcome.ending is Ending.PROXY:
                    assert driver.resolution is not None
                    expiry = Expiry(claims, context.clock)
                    response = await self._proxy(
                        opening,
                        session,
                        driver.content,
                        driver.resolution,
                        call,
                        expiry.remaining_s,
                    )
                else:
                    await content.drain()
                    append_outcome = under_lease(context, append_outcome)
                    if append_outcome.ending is Ending.FAILED:
                        await call.abort(*failure_of(append_outcome))
                    response = _response_of(append_outcome, driver)
            if response is None:
                return broker_pb2.AppendResponse()  # Not reached: ``abort`` raises.
            outcome.status = Status.from_pb(response.status)
            note_head(append_outcome)
            if append_outcome.commit is not None:
                commit = append_outcome.commit
                tracing.annotate(begin=commit.begin, end=commit.end)
            return response

    async def _run(self, driver: AppendDriver, claims: Claims) -> Outcome:
        """Run the append to its end, and return its outcome.

        If the claims expire, interrupt the append, and still return its outcome. If the caller goes away,
        interrupt the append, and do not wait for its end.
        """
        append_task = self._context.scope.spawn(driver.run(), name=f"append {driver.journal}")
        try:
            if claims.expires_at is None:
                return await await_shared(append_task)
            async with timeout(max(0.0, claims.expires_at - self._context.clock.now())):
                return await await_shared(append_task)
        except TimeoutError:
            driver.interrupt(NotAllowed(EXPIRED))
            return await await_shared(append_task)
        except asyncio.CancelledError:
            driver.interrupt(Broken("the caller of the append is gone"))
            raise

    async def _proxy(
        self,
        opening: broker_pb2.AppendRequest,
        session: SessionAppend | None,
        content: ContentSource,
        resolution: Resolution,
        call: Any,
        timeout_s: float | None,
    ) -> broker_pb2.AppendResponse:
        """Pass the append on to the primary, as it arrives, until the caller's claims expire.

        Cancellation: the append is cancelled at the primary, too. Raise ``Unavailable`` if etcd has no
        endpoint of the primary. End the call if the primary fails it, or if the claims expire.
        """
        peers = self._context.peers
        primary = resolution.header.process_id
        endpoint = peers.pick(resolution.header.route, process_id=primary)
        if endpoint is None:
            raise Unavailable("etcd has no endpoint of the journal's primary", primary=primary)
        claims = journal_claims(Capability.APPEND, resolution.journal)
        metadata = peers.credentials.metadata(claims)
        if session is not None:
            metadata += session.metadata()
        upstream = peers.byte_path(endpoint).append(metadata=metadata, timeout=timeout_s)
        # The name loses its metadata segment: brokers of other versions may not expect a segment here.
        opening.journal = resolution.journal
        opening.header.CopyFrom(resolution.header.to_pb())
        try:
            with open_channel("Append"):
                await _forward(opening, content, upstream)
                return await upstream  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
                await call.abort(grpc.StatusCode.UNAUTHENTICATED, EXPIRED)
            trailing = error.trailing_metadata()
            ledger_metadata = introduction(ledger_of(trailing), created_of(trailing))
            await call.abort(*passed_on(error), ledger_metadata)
            raise  # Not reached: ``abort`` raises.
        finally:
            upstream.cancel()


async def _forward(
    opening: broker_pb2.AppendRequest, content: ContentSource, upstream: StreamCall
) -> None:
    """Write the whole append to the primary. Stop if the primary has answered already: its response has the
    reason."""
    if not await upstream.write(opening):
        return
    while (chunk := await content.next()) is not None:
        if not await upstream.write(append_content(chunk) if chunk else COMMIT):
            return
    await upstream.done_writing()


def _call_of(
    opening: broker_pb2.AppendRequest, claims: Claims, session: SessionAppend | None
) -> AppendCall:
    return AppendCall(
        terms=terms_of(opening),
        claims=claims,
        may_proxy=not opening.do_not_proxy,
        min_revision=opening.min_etcd_revision,
        proxy_header=Header.from_pb(opening.header) if opening.HasField("header") else None,
        session=session,
    )


def _response_of(ended: Outcome, driver: AppendDriver) -> broker_pb2.AppendResponse:
    """Return the response as a message. Decode the result of `encoded`: `WholeAppend` sends it as bytes."""
    assert driver.resolution is not None
    return broker_pb2.AppendResponse.FromString(
        encoded(ended, driver.resolution.append_header, driver.flow)
    )
