"""Stage 3 of the byte path: takes the chunks of `client/append/appender`, gives them to
`broker/append/driver`, or to the broker that is the journal's primary.

The Append call. The append itself runs in a task of its own, which reads the caller's stream. If the caller
goes away, the append is interrupted rather than cancelled, and rolls back on all replicas. Content that is
read and not written yet is bounded (see `pipeline` and `spool_writer`), for appends of any size.
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
from gazette.broker.api.call_guard import Expiry, authorize, counted, failing
from gazette.broker.append.driver import AppendCall, AppendDriver
from gazette.broker.append.events import AppendTerms, Ending, Outcome, SuspendControl
from gazette.broker.append.line import ContentSource
from gazette.broker.context import BrokerContext
from gazette.broker.resolver import Resolution
from gazette.client.rpc.credentials import journal_claims
from gazette.client.rpc.errors import open_channel
from gazette.client.rpc.stream_call import StreamCall
from gazette.errors import Broken, GazetteError, Invalid, NotAllowed, Unavailable
from gazette.net.error_codes import protocol_code_of
from gazette.protocol.append_session import LEDGER_KEY, SessionAppend, ledger_of
from gazette.protocol.content import COMMIT, AppendMessage, append_content
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_append_chunk, validate_append_request_opening
from gazette.protocol.status import Status
from gazette.runtime import tracing
from gazette.runtime.metrics import WRITE_HEAD
from gazette.runtime.timeouts import timeout

_DRAIN_S: Final = 1.0
_DRAIN_BYTES: Final = 8 << 20
_WITH_REGISTERS: Final = frozenset({Status.OK, Status.REGISTER_MISMATCH})


class ClientContent:
    """The content of an Append stream: its messages after the opening."""

    def __init__(self, requests: AsyncIterator[AppendMessage]) -> None:
        self._requests = requests
        self._ended = False

    async def opening(self) -> broker_pb2.AppendRequest:
        """Return the first message. Raise ``Invalid`` if it is no valid opening, ``Broken`` at the end."""
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
        """Read and discard what the caller still sends, for a limited time.

        Without this, the answer could meet a message on its way. The caller's gRPC would then report that the
        message was not sent, instead of the answer.
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
        except grpc.aio.InternalError as error:
            # gRPC raises this for a read when the caller's connection has just ended.
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
                return broker_pb2.AppendResponse()  # The caller has gone: it reads no response.
            outcome.status = Status.from_pb(response.status)
            if outcome.status is Status.OK and ended.commit is not None and not ended.repeated:
                WRITE_HEAD.labels(ended.commit.journal).set(ended.commit.end)
            return response

    async def _run(self, driver: AppendDriver, claims: Claims) -> Outcome:
        """Run the append to its end. Interrupt it if its caller goes or its claims expire."""
        running = self._context.scope.spawn(driver.run(), name=f"append {driver.journal}")
        try:
            if claims.expires_at is None:
                return await asyncio.shield(running)
            async with timeout(max(0.0, claims.expires_at - self._context.clock.now())):
                return await asyncio.shield(running)
        except TimeoutError:
            driver.interrupt(NotAllowed("authorization expired during the append"))
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            driver.interrupt(Broken("the caller of the append is gone"))
            raise

    def _under_lease(self, ended: Outcome) -> Outcome:
        """Return the outcome, or a failure if it is a commit and the lease may have ended since."""
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
        """Pass the append on to the primary, as it arrives, until the caller's claims expire.

        Cancellation: cancelled at the primary, too.
        """
        peers = self._context.peers
        primary = at.header.process_id
        endpoint = peers.pick(at.header.route, process_id=primary)
        if endpoint is None:
            raise Unavailable("etcd has no endpoint of the journal's primary", primary=primary)
        claims = journal_claims(Capability.APPEND, at.journal)
        metadata = peers.credentials.metadata(claims)
        if session is not None:
            metadata += session.metadata()
        upstream = peers.byte_path(endpoint).append(metadata=metadata, timeout=timeout_s)
        # Brokers of other versions may not expect a metadata segment here, and none needs it.
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
            await call.abort(error.code(), error.details() or "", _ledger_metadata(ledger))
            raise  # Not reached: ``abort`` raises.
        finally:
            upstream.cancel()


async def _forward(
    opening: broker_pb2.AppendRequest, content: ContentSource, upstream: StreamCall
) -> None:
    """Write the whole append to the primary.

    Stop if the primary has answered already: its response has the reason.
    """
    if not await upstream.write(opening):
        return
    while (chunk := await content.next()) is not None:
        if not await upstream.write(append_content(chunk) if chunk else COMMIT):
            return
    await upstream.done_writing()


def _ledger_metadata(ledger: str) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that names a ledger to the client."""
    return ((LEDGER_KEY, ledger),) if ledger else ()


def _call_of(
    opening: broker_pb2.AppendRequest, claims: Claims, session: SessionAppend | None
) -> AppendCall:
    check = None
    if opening.HasField("check_registers"):
        check = LabelSelector.from_pb(opening.check_registers)
    terms = AppendTerms(
        journal=opening.journal,
        offset=opening.offset or None,  # Zero means any offset: the protocol has no other way.
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
        trailing = _ledger_metadata(error.facts.get("ledger", ""))
        await call.abort(_code_of(error, ended), f"{ended.context}: {error}", trailing)
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
    """Return the status code of a failed append.

    Clients repeat what is UNAVAILABLE. An append that may have been committed gets UNKNOWN, as
    it must not be repeated blindly.
    """
    if isinstance(error, NotAllowed):
        return grpc.StatusCode.UNAUTHENTICATED
    if "ledger" in error.facts:
        return grpc.StatusCode.ABORTED
    return grpc.StatusCode.UNKNOWN if ended.uncertain else protocol_code_of(error)
