"""Stage 5 of the byte path: takes content and proposals from `pipeline` of a journal's primary, gives them to
the spool of this broker's replica.

The Replicate call holds the spool while the primary keeps its stream open. So a pipeline is an exclusive
right to append. A primary that is gone must not keep the spool for ever. gRPC's keepalive ends the streams of
peers that are silently dead. Once the route has changed, this broker ends an idle stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from gazette.auth import Capability, Claims
from gazette.broker.api.call_guard import (
    CountedOutcome,
    Expired,
    Expiry,
    authorize,
    counted,
    ending_on_error,
)
from gazette.broker.append.invalidation import Superseded, take_unless
from gazette.broker.context import BrokerContext
from gazette.broker.lease_guard import LeaseGuard
from gazette.broker.replica import Replica
from gazette.broker.replication.other_followers import Incarnation
from gazette.broker.replication.spool_writer import SpoolWriter
from gazette.broker.resolver import Resolution
from gazette.errors import Closed, Invalid, Moved
from gazette.fragment.spool import Proposal, SpoolResult
from gazette.fragment.spool_file import Spool
from gazette.http2.messages import prefixed
from gazette.net.grpc.call_metrics import MalformedRequest
from gazette.protocol.content import ReplicateContent, ReplicateMessage
from gazette.protocol.fragment import Fragment
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header, Route
from gazette.protocol.rpc import validate_replicate_request
from gazette.protocol.status import Status
from gazette.runtime.tasks import TaskScope

_STOPPING_GRACE_S: Final = 1.0
"""Seconds that the present append gets to end when this broker stops serving. They delay only the stop."""
_GRACES_PER_TIMEOUT: Final = 3
"""An idle stream of an old route is ended after ``peer_timeout_s`` divided by this number, in seconds.

The first proposal of the next pipeline waits for the spool, and needs its answer within ``peer_timeout_s``.
"""

_ACCEPTED: Final = broker_pb2.ReplicateResponse()
_PREFIXED_ACCEPTED: Final = prefixed(_ACCEPTED.SerializeToString())


class ReplicateApi:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    async def replicate(self, requests: AsyncIterator[ReplicateMessage], call: Any) -> None:
        """Serve a primary until it ends its stream, or is gone. Roll uncommitted content back.

        When the token that opened a stream expires, the stream ends as UNAUTHENTICATED. Primaries renew their
        streams before that (`pipeline`). Cancellation: uncommitted content is rolled back, and the spool is
        given back.
        """
        with counted("Replicate") as outcome:
            claims = await authorize(call, self._context.verifier, Capability.REPLICATE)
            try:
                async with ending_on_error(call):
                    await self._replicate(requests, claims, call, outcome)
            except Expired:
                await call.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization has expired")

    async def _replicate(
        self,
        requests: AsyncIterator[ReplicateMessage],
        claims: Claims,
        call: Any,
        outcome: CountedOutcome,
    ) -> None:
        """Wait for the spool, apply the primary's messages to it, and give it back at the end. If there is no
        spool to wait for, answer once, with the status that says why."""
        opening = await anext(requests, None)
        if opening is None:
            outcome.status = Status.OK
            return
        header, proposal = _opening_of(opening)
        expiry = Expiry(claims, self._context.clock)
        resolution, joined = await expiry.bound(
            self._join(proposal.fragment.journal, claims, header)
        )
        if joined is None:
            status = resolution.status if resolution.status is not Status.OK else Status.WRONG_ROUTE
            outcome.status = status
            await call.write(_response(status, resolution.header_pb))
            return
        replica, spool = joined
        context = self._context
        local = SpoolWriter(spool, context.scope, context.pools.spools, primary=False)
        stream = _Stream(
            local,
            requests,
            call,
            resolution.header_pb,
            expiry,
            replica,
            context.lease,
            resolution,
            replica.other_followers(resolution.header.route),
        )
        replica.others.follow(stream.others)
        try:
            async with TaskScope(f"replicate {resolution.journal}") as scope:
                resolve = partial(self._resolve, resolution.journal, claims, header)
                watch = _RouteWatch(context, scope, stream, header.route, resolve)
                watch.follow(resolution)
                try:
                    await stream.serve(proposal)
                finally:
                    watch.end()
                scope.cancel()
        finally:
            await _give_back(replica, local)
        outcome.status = Status.OK

    async def _join(
        self, journal: str, claims: Claims, header: Header
    ) -> tuple[Resolution, tuple[Replica, Spool] | None]:
        """Wait for the spool. Return the local resolution, and the replica with its spool.

        Return None in place of replica and spool if the resolution failed, if its route is not that of
        ``header``, or if the journal was created after ``header``.
        """
        while True:
            resolved = await self._resolve(journal, claims, header)
            if resolved.status is not Status.OK or not resolved.header.route.equivalent(
                header.route
            ):
                return resolved, None
            if (
                resolved.item_kv is None
                or header.etcd.revision < resolved.item_kv.raw.create_revision
            ):
                # The journal was created again with the same route. Its primary does not know that yet.
                return resolved, None
            replica = resolved.replica
            assert replica is not None
            try:
                return resolved, (replica, await take_unless(replica.spool, resolved.invalidated))
            except Superseded:
                continue
            except Closed:
                # The replica has ended. With a later resolution, another replica may have taken its place.
                if not resolved.invalidated.is_set:
                    raise

    async def _resolve(self, journal: str, claims: Claims, header: Header) -> Resolution:
        return await self._context.resolver.resolve(
            journal, claims=claims, may_proxy=False, require_primary=False, proxy_header=header
        )


@dataclass(slots=True, eq=False)
class _Stream:
    """A primary's messages, applied to the spool that is held for it."""

    local: SpoolWriter
    requests: AsyncIterator[ReplicateMessage]
    call: Any
    header: broker_pb2.Header | None
    """The header of the local resolution; sent with the first answer."""
    expiry: Expiry
    replica: Replica
    lease: LeaseGuard
    resolution: Resolution
    others: frozenset[Incarnation]
    """The other followers: the primary sends them the same messages."""
    messages: int = 0
    has_content: bool = False
    """True if content has arrived that no accepted proposal has committed yet."""

    async def serve(self, proposal: Proposal) -> None:
        """Apply and answer the first proposal. Then apply all messages, until the primary ends its stream."""
        await self._propose(proposal, acknowledge=True)
        if getattr(self.call, "can_handle_each", False):
            await self.call.each(self._handle_now, self.expiry.bound)
            return
        while (message := await self._next()) is not None:
            await self._handle(message)

    def _handle_now(self, message: ReplicateMessage) -> Coroutine[Any, Any, None] | None:
        """Apply a message at once, and return None. If a step must wait, return a coroutine of the rest.

        Most proposals commit exactly the content that has arrived. ``SpoolWriter.commit_now`` recognizes such
        a proposal without decoding it: this broker would encode the same proposal to equal bytes.
        """
        self.expiry.check()
        if isinstance(message, ReplicateContent):
            if not self.local.content_now(message.content, message.delta):
                return self._handle(message)
            self.messages += 1
            self.has_content = True
            return None
        if self.header is not None or not self.lease.holds:
            return self._handle(message)
        fragment = self.local.commit_now(message)
        if fragment is None:
            return self._handle(message)
        self.messages += 1
        self._follow(fragment)
        self.lease.check()
        if self.call.send_now(_PREFIXED_ACCEPTED, 1):
            return None
        return self.call.write(_ACCEPTED)  # type: ignore[no-any-return]

    async def _handle(self, message: ReplicateMessage) -> None:
        """Apply a message. Wait only for the spool and the caller."""
        self.expiry.check()
        self.messages += 1
        if isinstance(message, ReplicateContent):
            self.has_content = True
            await self.local.content(message.content, message.delta)
            return
        request = _decoded(message)
        proposed = validate_replicate_request(request)
        if proposed is not None:
            await self._propose(Proposal(*proposed), acknowledge=request.acknowledge)
        else:
            self.has_content = True
            await self.local.content(request.content, request.content_delta)

    async def _next(self) -> ReplicateMessage | None:
        """Return the next message; None at the end. Raise ``Expired`` if the claims expire before it
        arrives."""
        if self.expiry.remaining_s is None:
            return await anext(self.requests, None)
        return await self.expiry.bound(anext(self.requests, None))

    async def _propose(self, proposal: Proposal, *, acknowledge: bool) -> None:
        """Apply a proposal. Answer if ``acknowledge``, else raise ``Invalid`` if the spool refuses it. Raise
        ``Unavailable`` if an answer is due, and the lease may have ended."""
        if acknowledge:
            # Readers get committed bytes. If this broker was paused, another broker may have these offsets.
            self.lease.check()
        result = await self.local.propose(proposal)
        if result.status is Status.OK:
            self._follow(result.fragment)
        if acknowledge:
            self.lease.check()  # Without our lease, another replica may have taken this replica's place.
            header, self.header = self.header, None
            await self.call.write(_answer(result, header))
        elif result.status is not Status.OK:
            # The primary does not wait for an answer, and builds all later messages on the proposal.
            raise Invalid(
                f"no ack requested but status != OK (status {result.status.name})",
                journal=proposal.fragment.journal,
                proposal=proposal.fragment.content_name(),
                spool=result.fragment.content_name(),
            )

    def _follow(self, fragment: Fragment) -> None:
        """Record that the primary has ``fragment``, too. Other followers may also have its new content."""
        replica, resolution = self.replica, self.resolution
        replica.follow(fragment, resolution.reassigned, resolution.tenure)
        if self.has_content:
            self.has_content = False
            replica.others.committed(self.others)


class _RouteWatch:
    """Ends a stream in ``scope`` that its primary should have ended. No task runs while the route stays.

    ``resolve`` returns the present resolution.
    """

    def __init__(
        self,
        context: BrokerContext,
        scope: TaskScope,
        stream: _Stream,
        route: Route,
        resolve: Callable[[], Awaitable[Resolution]],
    ) -> None:
        self._context = context
        self._scope = scope
        self._stream = stream
        self._route = route
        self._resolve = resolve
        self._resolution: Resolution | None = None

    def follow(self, resolution: Resolution) -> None:
        """Watch for changes after ``resolution``."""
        self._resolution = resolution
        resolution.invalidated.listen(self._changed)

    def end(self) -> None:
        """Watch no more."""
        if self._resolution is not None:
            self._resolution.invalidated.forget(self._changed)

    def _changed(self) -> None:
        if not self._scope.is_stopping:
            self._scope.spawn(self._look(), name="watch")

    async def _look(self) -> None:
        """Continue to watch if the route is still the same.

        If the route has changed, raise ``Moved`` once the old route's primary is idle, or at once if that
        primary has lost its lease. Raise ``Closed`` soon after this broker stops serving, even if the route
        still names this broker: the primary cannot see the stop.

        The route may stay while the replica is replaced, because this broker was assigned again. Raise
        ``Moved`` then, too: readers would miss the bytes that the former replica still gets.
        """
        clock = self._context.clock
        try:
            resolution = await self._resolve()
        except Closed:
            await clock.sleep(_STOPPING_GRACE_S)
            raise
        if resolution.status is Status.OK and resolution.header.route.equivalent(self._route):
            if resolution.replica is not self._stream.replica:
                raise Moved(
                    "the journal was assigned to this broker again: the stream belongs to its former replica",
                    journal=resolution.journal,
                )
            self.follow(resolution)
            return
        primary = self._route.primary_id
        if primary is not None and self._context.state.member(primary.zone, primary.suffix) is None:
            raise Moved("the primary of the stream has lost its lease", primary=primary)
        grace_s = self._context.settings.peer_timeout_s / _GRACES_PER_TIMEOUT
        messages = -1
        while self._stream.messages != messages:
            messages = self._stream.messages
            await clock.sleep(grace_s)
        raise Moved(
            "the route has changed, and its primary has not ended its stream",
            journal=resolution.journal,
            revision=resolution.header.etcd.revision,
            grace_s=grace_s,
        )


async def _give_back(replica: Replica, local: SpoolWriter) -> None:
    """Settle all writes, and give the spool back. Cancellation: the spool is given back."""
    try:
        await local.settle()
    finally:
        await replica.give_back_spool(local.spool, primary=False)


def _decoded(message: bytes) -> broker_pb2.ReplicateRequest:
    try:
        return broker_pb2.ReplicateRequest.FromString(message)
    except DecodeError as error:
        raise MalformedRequest(error) from error


def _opening_of(message: ReplicateMessage) -> tuple[Header, Proposal]:
    if isinstance(message, ReplicateContent):
        raise Invalid("expected first ReplicateRequest to have Header")
    request = _decoded(message)
    proposed = validate_replicate_request(request)
    if not request.HasField("header"):
        raise Invalid("expected first ReplicateRequest to have Header")
    if proposed is None:
        raise Invalid("expected first ReplicateRequest to have Proposal")
    return Header.from_pb(request.header), Proposal(*proposed)


def _answer(result: SpoolResult, header: broker_pb2.Header | None) -> broker_pb2.ReplicateResponse:
    if result.status is Status.OK:
        return _ACCEPTED if header is None else _response(Status.OK, header)
    answer = broker_pb2.ReplicateResponse(
        status=result.status.value,  # type: ignore[arg-type]
        fragment=result.fragment.to_pb(),
        registers=result.registers.to_pb(),
    )
    if header is not None:
        answer.header.CopyFrom(header)
    return answer


def _response(status: Status, header: broker_pb2.Header) -> broker_pb2.ReplicateResponse:
    return broker_pb2.ReplicateResponse(
        status=status.value,  # type: ignore[arg-type]
        header=header,
    )
