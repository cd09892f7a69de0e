"""Stage 9 of the byte path: takes fragments from `index`, gives their content to `reader`.

The Read call. Content is read from the spool's memory and file while these exist, and from the blob store
afterwards. Without a replica here, another broker of the journal serves the read. One read uses a few blocks
of memory, for fragments of any size and readers of any speed.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import grpc.aio

from gazette.auth import Capability, Claims
from gazette.broker.api.call_guard import (
    CountedOutcome,
    Expired,
    Expiry,
    authorize,
    counted,
    ending_on_error,
    passed_on,
)
from gazette.broker.context import BrokerContext
from gazette.broker.head_readers import HeadReader, located
from gazette.broker.replica import Replica
from gazette.broker.resolver import Resolution
from gazette.client.rpc.credentials import journal_claims
from gazette.client.rpc.errors import open_channel
from gazette.errors import Closed, Unavailable
from gazette.fragment.index import AT_WRITE_HEAD, IndexResult
from gazette.fragment.local_file import LocalFragment
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.content import content_response
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import Offset
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_read_request
from gazette.protocol.status import Status
from gazette.runtime import tracing
from gazette.runtime.store_calls import StoreCall

METHOD: Final = "/protocol.Journal/Read"
_READ_AHEAD_BYTES: Final = 1 << 18
"""Bytes of a spool file that a thread reads at once. A slow reader keeps this many bytes in memory."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Responses of one read on their way to its caller, until the caller's authorization expires."""

    call: Any
    expiry: Expiry

    async def write(self, message: broker_pb2.ReadResponse | bytes) -> None:
        """Write a message. Return when gRPC has taken the message: a slow reader holds the read back. Raise
        ``Expired`` if the claims have expired."""
        self.expiry.check()
        await self.call.write(message)

    @property
    def sender(self) -> Callable[[bytes, int], bool]:
        """``HeadReader.send`` of this stream. Once the claims have expired, it sends nothing."""
        send: Callable[[bytes, int], bool] = self.call.send_now
        if self.expiry.remaining_s is None:
            return send
        return lambda content, messages: not self.expiry.is_over and send(content, messages)


class ReadApi:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._proxied: dict[Any, None] = {}
        self._stopped = False

    def stop(self) -> None:
        """End proxied reads cleanly, and refuse to proxy others. Local reads end with their replicas."""
        self._stopped = True
        for upstream in self._proxied:
            upstream.cancel()

    async def read(self, request: broker_pb2.ReadRequest, call: Any) -> None:
        """Serve a read until its end, or until the caller, its claims or the replica are gone.

        The stream then ends without an error. The reader resumes at a broker that serves the journal.
        """
        context = self._context
        with counted("Read") as outcome:
            claims = await authorize(call, context.verifier, Capability.READ)
            async with ending_on_error(call):
                validate_read_request(request)
                tracing.annotate(journal=request.journal, offset=request.offset)
                with suppress(Expired):
                    await self._read(request, claims, call, outcome)
            outcome.status = outcome.status or Status.OK

    async def _read(
        self, request: broker_pb2.ReadRequest, claims: Claims, call: Any, outcome: CountedOutcome
    ) -> None:
        """Serve the read from the local replica or another broker, or answer with the status of a failure."""
        expiry = Expiry(claims, self._context.clock)
        resolving = self._context.resolver.resolve(
            request.journal,
            claims=claims,
            may_proxy=not request.do_not_proxy,
            require_primary=False,
            min_etcd_revision=request.min_etcd_revision,
            proxy_header=Header.from_pb(request.header) if request.HasField("header") else None,
        )
        resolution = await expiry.bound(resolving)
        status = resolution.status
        if status is Status.OK and resolution.spec is not None and not resolution.spec.may_read:
            status = Status.NOT_ALLOWED
        outcome.status = status
        if status is not Status.OK:
            await call.write(
                broker_pb2.ReadResponse(
                    status=status.value,  # type: ignore[arg-type]
                    header=resolution.header.to_pb(),
                )
            )
        elif resolution.is_local:
            assert resolution.replica is not None
            stream = _Stream(call, expiry)
            outcome.status = await self._serve(
                request, resolution.replica, resolution.header, stream
            )
        else:
            await self._proxy(request, resolution, call, expiry)

    async def _serve(
        self, request: broker_pb2.ReadRequest, replica: Replica, header: Header, stream: _Stream
    ) -> Status:
        """Serve from a local replica: for each fragment its metadata, then its content.

        Return the status of the last metadata that was sent, or OK if the replica ends meanwhile. The first
        metadata carry the header: `HeadReaders` may send only later metadata.
        """
        index, offset, is_first = replica.index, request.offset, True
        if not index.first_refresh.is_set and (offset == AT_WRITE_HEAD or not request.block):
            # Before the first listing, the index knows neither the head nor which offsets lack content.
            try:
                waiting = replica.wait_listed(self._context.settings.listing_timeout_s)
                await stream.expiry.bound(waiting)
            except Closed:
                return Status.OK
        while True:
            try:
                if not is_first:
                    offset = await self._wait_at_head(request, replica, offset, stream)
                querying = index.query(offset, request.block, request.begin_mod_time)
                result = await stream.expiry.bound(querying)
            except Closed:
                return Status.OK
            response = await self._metadata(result)
            if is_first:
                response.header.CopyFrom(header.to_pb())
                response.created = replica.life
                for begin, end in index.lost:
                    response.lost.add(begin=begin, end=end)
                is_first = False
            await stream.write(response)
            if result.fragment is None or request.metadata_only:
                return result.status
            if result.local is None and request.do_not_proxy:
                return result.status  # The caller reads the fragment from its store.
            offset, end = result.offset, result.fragment.end
            if request.end_offset:
                end = min(end, request.end_offset)
            if offset < end:
                await self._send(result, offset, end, stream)
            offset = max(offset, end)
            if request.end_offset and offset >= request.end_offset:
                return result.status

    async def _wait_at_head(
        self, request: broker_pb2.ReadRequest, replica: Replica, offset: Offset, stream: _Stream
    ) -> Offset:
        """Wait at the head while nothing is left to read. All readers at the head are served together.

        Return the offset from which this reader continues alone. A read with an end, or one that does not
        block, always reads alone.
        """
        reads_alone = request.end_offset or not getattr(stream.call, "can_send_now", False)
        if reads_alone or not request.block:
            return offset
        result = replica.index.find(offset, request.begin_mod_time)
        if result.status is Status.OK:
            return offset
        reader = HeadReader(result.offset, stream.sender)
        await stream.expiry.bound(replica.head_readers.serve(reader))
        return reader.offset

    async def _metadata(self, found: IndexResult) -> broker_pb2.ReadResponse:
        """Return the metadata of a fragment, with a signed URL if a store has the fragment."""
        response, fragment = located(found), found.fragment
        if fragment is not None and fragment.backing_store and fragment.mod_time:
            active = self._context.blob_stores.get(fragment.backing_store)
            ttl_s = self._context.settings.signed_url_ttl_s
            [response.fragment_url] = await active.sign([fragment.content_path()], ttl_s)
        return response

    async def _send(self, found: IndexResult, offset: Offset, end: Offset, stream: _Stream) -> None:
        """Send the bytes from ``offset`` to ``end``: from the local file, or else from the store."""
        size = self._context.settings.read_chunk_bytes
        if found.local is not None:
            await self._send_local(found.local, offset, end, size, stream)
            return
        assert found.fragment is not None
        async with aclosing(self._stored(found.fragment, offset, end)) as blocks:
            async for block in blocks:
                view = memoryview(block)
                for start in range(0, len(view), size):
                    chunk = view[start : start + size]
                    await stream.write(content_response(offset, chunk))
                    offset += len(chunk)

    async def _send_local(
        self, local: LocalFragment, offset: Offset, end: Offset, size: int, stream: _Stream
    ) -> None:
        """Send bytes of this broker's files. Raise ``Unavailable`` once its lease may have ended."""
        run, lease = self._context.pools.reads.run, self._context.lease
        while offset < end:
            length = min(size, end - offset)
            content = local.pread_now(offset, length)
            if content is None:
                content = await run(local.pread, offset, min(_READ_AHEAD_BYTES, end - offset))
            view = memoryview(content)
            for start in range(0, len(view), size):
                chunk = view[start : start + size]
                lease.check()
                await stream.write(content_response(offset, chunk))
                offset += len(chunk)

    async def _stored(
        self, fragment: Fragment, offset: Offset, end: Offset
    ) -> AsyncGenerator[bytes, None]:
        """Yield blocks of a stored fragment, read and decoded ahead in a thread.

        Yield a block once the next block was read, or once the block is known to be the last. If the read
        goes to the fragment's end, the last block is yielded after the check of the file. So the last bytes
        of a damaged file are not served.
        """
        active = self._context.blob_stores.get(fragment.backing_store)
        calls, store = active.calls, active.store
        block_bytes = self._context.settings.remote_block_bytes

        def start() -> DecodedFile:
            source = store.open(fragment.content_path())
            begin = offset if fragment.codec is Codec.NONE and source.seekable() else fragment.begin
            try:
                if begin != fragment.begin:
                    source.seek(begin - fragment.begin)
                file = DecodedFile(source, FragmentDecoder(fragment, start=begin))
                file.skip_to(offset)
            except BaseException:
                source.close()
                raise
            return file

        opening = calls.start(start)
        try:
            file = await calls.answer(opening)
        except BaseException:
            opening.future.add_done_callback(self._close_opened)
            raise

        def read() -> StoreCall[bytes]:
            return calls.start(file.read, min(block_bytes, max(1, end - offset)))

        last_call: concurrent.futures.Future[Any] = opening.future
        withheld = b""
        try:
            next_call = read()
            while True:
                last_call = next_call.future
                block = await calls.answer(next_call)
                offset += len(block)
                # A read to the end of the fragment goes on to an empty block, which verifies the fragment.
                is_last = not block or (offset >= end and end < fragment.end)
                if not is_last:
                    next_call = read()
                    last_call = next_call.future
                if withheld:
                    yield withheld
                withheld = block
                if is_last:
                    break
            if withheld:
                yield withheld
        finally:
            # A thread may still be reading the file: close the file after that call.
            last_call.add_done_callback(lambda _: self._close(file))

    def _close_opened(self, opening: concurrent.futures.Future[DecodedFile]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._close(opening.result())

    def _close(self, file: DecodedFile) -> None:
        """Close a stored file in a thread: its store may need the network for that."""
        try:
            self._context.pools.reads.submit(file.close)
        except (RuntimeError, Unavailable):
            file.close()  # The broker has ended, or gets no thread.

    async def _proxy(
        self, request: broker_pb2.ReadRequest, resolution: Resolution, call: Any, expiry: Expiry
    ) -> None:
        """Pass on the answers of another broker of the journal, without decoding them."""
        timeout_s = expiry.remaining_s
        upstream = self._open_upstream(request, resolution, timeout_s)
        self._proxied[upstream] = None
        try:
            with open_channel("Read"):
                async for message in upstream:
                    await call.write(message)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
                raise Expired from None
            await call.abort(*passed_on(error))
        except Closed:
            if not self._stopped:
                raise
        finally:
            self._proxied.pop(upstream, None)
            upstream.cancel()

    def _open_upstream(
        self, request: broker_pb2.ReadRequest, resolution: Resolution, timeout_s: float | None
    ) -> Any:
        if self._stopped:
            raise Closed("the broker is stopping")
        peers = self._context.peers
        endpoint, header = reachable(self._context, resolution)
        forwarded = broker_pb2.ReadRequest()
        forwarded.CopyFrom(request)
        forwarded.journal = resolution.journal  # Peers need no metadata segment.
        forwarded.header.CopyFrom(header.to_pb())
        method = peers.grpc_channel(endpoint).unary_stream(
            METHOD,
            request_serializer=broker_pb2.ReadRequest.SerializeToString,
            response_deserializer=None,
        )
        metadata = peers.credentials.metadata(journal_claims(Capability.READ, resolution.journal))
        return method(forwarded, metadata=metadata, timeout=timeout_s)


def reachable(context: BrokerContext, resolution: Resolution) -> tuple[str, Header]:
    """Return the endpoint of the broker that a resolution names, and the header for a call to it.

    If no broker is named, choose the best broker of the route. The returned header names the chosen broker.
    A broker that has taken over the endpoint refuses a request with another broker's name. Without a name,
    the request could be proxied again and again, even to this broker itself.

    Raise ``Unavailable`` if no member of the route has an endpoint.
    """
    header = resolution.header
    endpoint = context.peers.pick(header.route, process_id=header.process_id)
    if endpoint is None and header.process_id is None:
        # All connections fail now: try an endpoint rather than give up.
        endpoint = next((candidate for candidate in header.route.endpoints if candidate), None)
    if not endpoint:
        raise Unavailable(
            "no broker of the journal has an endpoint now",
            journal=resolution.journal,
            members=", ".join(str(member) for member in header.route.members),
        )
    chosen = header.route.members[header.route.endpoints.index(endpoint)]
    return endpoint, replace(header, process_id=chosen)
