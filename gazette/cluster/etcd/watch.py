"""One watch over one stream: its responses, merged and typed, until the stream fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from gazette.cluster.etcd.connection import Connection, Member, Metadata, exchange, read
from gazette.cluster.etcd.failures import StreamEnded, classify
from gazette.cluster.etcd.pb import rpc_pb2
from gazette.cluster.etcd.values import Compacted, WatchEvent, WatchResponse
from gazette.cluster.etcd.wire import event_from_pb, header_from_pb
from gazette.errors import Broken, Closed, GazetteError, NotAllowed, Unavailable
from gazette.runtime.timeouts import timeout


async def watch(
    connection: Connection, key: bytes, range_end: bytes, *, start_revision: int, progress: bool
) -> AsyncGenerator[WatchResponse, None]:
    """Yield the responses of one watch. `gazette.cluster.etcd.client.Etcd.watch` has the contract."""
    request = rpc_pb2.WatchRequest(
        create_request=rpc_pb2.WatchCreateRequest(
            key=key,
            range_end=range_end,
            start_revision=start_revision,
            progress_notify=progress,
            # Let etcd split large responses: a response that is too large would fail each new watch, too.
            fragment=True,
        )
    )
    stream, created = await _open(connection, request)
    try:
        yield WatchResponse(header_from_pb(created.header), created=True)
        events: list[WatchEvent] = []
        while True:
            response = await stream.read()
            events.extend(map(event_from_pb, response.events))
            if not response.fragment:
                yield WatchResponse(header_from_pb(response.header), tuple(events))
                events = []
    finally:
        stream.call.cancel()


async def _open(
    connection: Connection, request: rpc_pb2.WatchRequest
) -> tuple[_Stream, rpc_pb2.WatchResponse]:
    """Open the watch on the first endpoint that confirms it. Return its stream and the confirmation."""

    async def attempt(
        member: Member, metadata: Metadata, timeout_s: float
    ) -> tuple[_Stream, rpc_pb2.WatchResponse]:
        stream = _Stream(connection, member, member.watch.Watch(metadata=metadata))
        try:
            async with timeout(timeout_s):
                response = await exchange(stream.call, request)
            stream.raise_if_canceled(response)
        except TimeoutError:
            stream.call.cancel()
            raise StreamEnded("no answer in time") from None
        except BaseException:
            stream.call.cancel()
            raise
        return stream, response

    token = await connection.token()
    try:
        return await connection.call("Watch", attempt, repeatable=True)
    except NotAllowed:
        if not token:
            raise
    # etcd may report an outdated token as "permission denied", too. A new token shows the difference.
    await connection.token(stale=token)
    return await connection.call("Watch", attempt, repeatable=True)


class _Stream:
    """The stream of one watch, with its failures mapped."""

    def __init__(self, connection: Connection, member: Member, call: Any) -> None:
        self._connection = connection
        self._member = member
        self.call = call

    async def read(self) -> rpc_pb2.WatchResponse:
        """Return the next response. Raise errors of `_mapped` and ``raise_if_canceled``, or ``Closed``."""
        try:
            response: rpc_pb2.WatchResponse = await read(self.call)
            self.raise_if_canceled(response)
        except (grpc.aio.AioRpcError, StreamEnded) as cause:
            raise self._mapped(cause) from cause
        except asyncio.CancelledError:
            if self._connection.closed_by_us():
                raise Closed("the etcd client was closed") from None
            raise
        return response

    def raise_if_canceled(self, response: rpc_pb2.WatchResponse) -> None:
        """Do nothing unless etcd cancelled the watch. Raise ``Compacted`` if etcd lacks the revision,
        ``NotAllowed`` if etcd refuses the user. Raise ``StreamEnded`` if this member has no leader: the next
        endpoint may serve the watch. Else raise ``Broken``."""
        if not response.canceled:
            return
        reason = response.cancel_reason
        if response.compact_revision:
            raise Compacted(
                "the revision to watch from was compacted",
                compact_revision=response.compact_revision,
            )
        if "no leader" in reason:
            raise StreamEnded(reason)
        if "permission denied" in reason or "auth" in reason:
            raise NotAllowed(
                "etcd refused the watch",
                hint="Check the roles that etcd has for the user.",
                endpoint=self._member.endpoint,
                reason=reason,
            )
        raise Broken(
            "etcd cancelled the watch",
            endpoint=self._member.endpoint,
            reason=reason or "none was given",
        )

    def _mapped(self, cause: grpc.aio.AioRpcError | StreamEnded) -> GazetteError:
        """Return the error for a stream that broke. If another endpoint may serve the watch, return
        ``Unavailable``, and prefer the next endpoint from now on."""
        failure = classify(cause, has_user=bool(self._connection.settings.user))
        if not failure.transient:
            failure.error.facts.update(operation="Watch", endpoint=self._member.endpoint)
            return failure.error
        self._connection.move_on(self._member, failure.error)
        return Unavailable(
            "the watch was interrupted",
            hint="Resume it after the last revision that it delivered.",
            endpoint=self._member.endpoint,
            endpoints=self._connection.endpoints,
            retrying=False,
            reason=failure.error.message,
        )
