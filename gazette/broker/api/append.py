"""Stage 3 of the byte path: takes the chunks of `client/append/appender`, gives them to
`broker/append/driver`, or to the
broker that is the journal's primary.

The Append call. The append itself runs in a task of its own, which reads the caller's stream: should the
caller go away, it is interrupted rather than cancelled, and rolls back on all replicas. What is read and
not written yet is bounded (see `pipeline` and `write_behind`), whatever the size of the append.
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
from gazette.broker.api.call_guard import Expiry, authorize, code_of, counted, failing
from gazette.broker.append.driver import AppendCall, AppendDriver
from gazette.broker.append.events import AppendTerms, Ending, Outcome, SuspendControl
from gazette.broker.append.line import ContentSource
from gazette.broker.append.wire import AppendMessage
from gazette.broker.context import BrokerContext
from gazette.broker.resolver import Resolution
from gazette.client.rpc.credentials import journal_claims
from gazette.client.rpc.errors import open_channel
from gazette.client.rpc.stream_call import StreamCall
from gazette.client.rpc.wire import COMMIT, append_content
from gazette.errors import Broken, GazetteError, Invalid, NotAllowed, Unavailable
from gazette.protocol.append_session import LEDGER_KEY, SessionAppend, ledger_of
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_append_chunk, validate_append_request_opening
from gazette.protocol.status import Status
from gazette.runtime import tracing
from gazette.runtime.metrics import WRITE_HEAD

_DRAIN_S: Final = 1.0
_DRAIN_BYTES: Final = 8 << 20
_WITH_REGISTERS: Final = frozenset({Status.OK, Status.REGISTER_MISMATCH})


class ClientContent:
    """The messages of an Append stream, behind its opening, as content."""

    def __init__(self, requests: AsyncIterator[AppendMessage]) -> None:
        self._requests = requests
        self._ended = False

    async def opening(self) -> broker_pb2.AppendRequest:
        """The first message. Raises ``Invalid`` if it is not what it must be."""
        message = await self._message()
        if message is None:
            raise Broken("unexpected EOF")
        if isinstance(message, bytes):
            message = broker_pb2.AppendRequest(content=message)
        validate_append_request_opening(message)
        return message

    async def next(self) -> bytes | None:
        """See ``append_line.ContentSource``."""
        message = await self._message()
        if message is None or isinstance(message, bytes):
            return message
        validate_append_chunk(message)
        return message.content

    async def drain(self) -> None:
        """Read what the caller still sends, and forget it; for a while.

        The answer that follows would otherwise meet a message on its way, and the caller's gRPC then
        reports that this was not sent, instead of the answer.
        """
        length = 0
        with suppress(TimeoutError, Invalid):
            async with asyncio.timeout(_DRAIN_S):
                while not self._ended and length < _DRAIN_BYTES:
                    length += len(await self.next() or b"")

    async def _message(self) -> AppendMessage | None:
        try:
            message = await anext(self._requests, None)
        except DecodeError as error:
            self._ended = True  # gRPC does not go on behind it.
            raise Invalid(f"not an AppendRequest: {error}") from error
        except grpc.aio.InternalError as error:
            # What gRPC makes of a read when the caller's connection has ended just then.
            self._ended = True
            raise Broken(f"the caller has gone: {error}") from error
        self._ended = message is None
        return message


class AppendApi:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    async def append(
        self, requests: AsyncIterator[AppendMessage], call: Any
    ) -> broker_pb2.AppendResponse:
        """Serve one append, here or by way of the primary.

        Cancellation (the caller is gone): the append is rolled back, unless its commit was proposed.
        """
        context = self._context
        response: broker_pb2.AppendResponse | None = None
        with counted("Append") as outcome:
            claims = await authorize(call, context.verifier, Capability.APPEND)
            async with failing(call):
                content = ClientContent(requests)
                opening = await content.opening()
                tracing.annotate(journal=opening.journal)
                session = SessionAppend.of(call.invocation_metadata())
                driver = AppendDriver(context, _call_of(opening, claims, session), content)
                ended = await self._run(driver, claims)
                if ended.ending is Ending.PROXY:
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
                    ended = self._under_lease(ended)
                    response = await _response_of(ended, driver, call)
            if response is None:
                return broker_pb2.AppendResponse()  # Nobody is there to read it.
            outcome.status = Status.from_pb(response.status)
            if outcome.status is Status.OK and ended.commit is not None and not ended.repeated:
                WRITE_HEAD.labels(ended.commit.journal).set(ended.commit.end)
            return response

    async def _run(self, driver: AppendDriver, claims: Claims) -> Outcome:
        """Run the append until its end; one whose caller is gone, or whose claims expire, is interrupted."""
        running = self._context.scope.spawn(driver.run(), name=f"append {driver.journal}")
        expires_s = None
        if claims.expires_at is not None:
            expires_s = max(0.0, claims.expires_at - self._context.clock.now())
        try:
            async with asyncio.timeout(expires_s):
                return await asyncio.shield(running)
        except TimeoutError:
            driver.interrupt(NotAllowed("authorization expired during the append"))
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            driver.interrupt(Broken("the caller of the append is gone"))
            raise

    def _under_lease(self, ended: Outcome) -> Outcome:
        """The outcome, or a failure if it is a commit and the lease may have ended since."""
        if ended.ending is not Ending.COMMITTED:
            return ended
        try:
            self._context.lease.check()
        except Unavailable as error:
            return Outcome(Ending.FAILED, error=error, context="answer", uncertain=True)
        return ended

    async def _proxy(
        self,
        opening: broker_pb2.AppendRequest,
        session: SessionAppend | None,
        content: ContentSource,
        at: Resolution,
        call: Any,
        timeout_s: float | None,
    ) -> broker_pb2.AppendResponse:
        """Pass the append on to the primary, as it comes in, until the caller's claims expire.

        Cancellation: cancelled there, too.
        """
        peers = self._context.peers
        primary = at.header.process_id
        endpoint = peers.pick(at.header.route, process_id=primary)
        if endpoint is None:
            raise Unavailable("no endpoint is known of the primary", primary=primary)
        claims = journal_claims(Capability.APPEND, at.journal)
        metadata = peers.credentials.metadata(claims)
        if session is not None:
            metadata += session.metadata()
        upstream = peers.byte_path(endpoint).append(metadata=metadata, timeout=timeout_s)
        # Brokers that are not ours may not expect a metadata segment here, and nobody needs it.
        opening.journal = at.journal
        opening.header.CopyFrom(at.header.to_pb())
        try:
            with open_channel("Append"):
                await _forward(opening, content, upstream)
                return await upstream  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
                text = "authorization expired during the append"
                await call.abort(grpc.StatusCode.UNAUTHENTICATED, text)
            ledger = ledger_of(error.trailing_metadata())
            await call.abort(error.code(), error.details() or "", _told(ledger))
            raise  # Not reached: ``abort`` raises.
        finally:
            upstream.cancel()


async def _forward(
    opening: broker_pb2.AppendRequest, content: ContentSource, upstream: StreamCall
) -> None:
    """Write everything. Stop if the primary has answered: its response has the reason."""
    if not await upstream.write(opening):
        return
    while (chunk := await content.next()) is not None:
        if not await upstream.write(append_content(chunk) if chunk else COMMIT):
            return
    await upstream.done_writing()


def _told(ledger: str) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that tells a client of a ledger."""
    return ((LEDGER_KEY, ledger),) if ledger else ()


def _call_of(
    opening: broker_pb2.AppendRequest, claims: Claims, session: SessionAppend | None
) -> AppendCall:
    check = None
    if opening.HasField("check_registers"):
        check = LabelSelector.from_pb(opening.check_registers)
    terms = AppendTerms(
        journal=opening.journal,
        offset=opening.offset or None,  # An offset of zero cannot be asked for: it is any.
        check_registers=check,
        union_registers=LabelSet.from_pb(opening.union_registers),
        subtract_registers=LabelSet.from_pb(opening.subtract_registers),
        suspend=SuspendControl(opening.suspend),
    )
    return AppendCall(
        terms=terms,
        claims=claims,
        may_proxy=not opening.do_not_proxy,
        min_revision=opening.min_etcd_revision,
        proxy_header=Header.from_pb(opening.header) if opening.HasField("header") else None,
        session=session,
    )


async def _response_of(
    ended: Outcome, driver: AppendDriver, call: Any
) -> broker_pb2.AppendResponse:
    if ended.ending is Ending.FAILED:
        error = ended.error
        assert error is not None
        told = _told(error.facts.get("ledger", ""))
        await call.abort(_code_of(error, ended), f"{ended.context}: {error}", told)
    assert driver.resolution is not None
    response = broker_pb2.AppendResponse(
        status=ended.status.value,  # type: ignore[arg-type]
        header=driver.resolution.header.to_pb(),
        store_health_error=ended.store_error,
    )
    if ended.status is Status.OK and ended.commit is not None:
        response.commit.CopyFrom(ended.commit.to_pb())
    if ended.status in _WITH_REGISTERS:
        response.registers.CopyFrom((ended.registers or EMPTY_LABELS).to_pb())
    if driver.flow is not None:
        response.total_chunks = driver.flow.total_chunks
        response.delayed_chunks = driver.flow.delayed_chunks
    return response


def _code_of(error: GazetteError, ended: Outcome) -> grpc.StatusCode:
    """Clients repeat what is UNAVAILABLE; what may have been appended must not be repeated blindly."""
    if isinstance(error, NotAllowed):
        return grpc.StatusCode.UNAUTHENTICATED
    if "ledger" in error.facts:
        return grpc.StatusCode.ABORTED
    return grpc.StatusCode.UNKNOWN if ended.uncertain else code_of(error)
