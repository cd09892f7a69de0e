"""Journals over HTTP: GET and HEAD read, PUT appends.

Each request becomes a call of the broker's own gRPC service, with the ``Authorization`` header of the
request. So requests are authenticated, routed and proxied exactly like calls of gRPC clients.

A GET without a ``Range`` gets the answer of the original: 206, with a range that has no known end. With a
``Range``, the answer is a part of the whole, as HTTP defines it. It has a ``Content-Length``, except with
``block`` and a range without an end. A body with a proper end is complete, or its read blocks and the broker
has ended the read. If the read fails, the body is cut off, without a proper end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from gazette.broker.api.call_guard import code_of_caller
from gazette.broker.http.headers import EXPOSED, append_headers, read_headers, route_headers
from gazette.broker.http.ranges import (
    MAX_OFFSET,
    ByteRange,
    EntityTag,
    Unsatisfiable,
    parse_range,
    parse_tags,
)
from gazette.broker.http.requests import METHODS, check_append, gunzipped, listed
from gazette.client.rpc.errors import rpc_error, was_too_slow
from gazette.client.rpc.stream_call import StreamCall
from gazette.errors import Broken, GazetteError, Invalid, NotAllowed, Unavailable
from gazette.net.http_requests import Refusal, check_headers, single_arguments
from gazette.net.json_gateway import CHALLENGE, Cors, Handler
from gazette.net.streaming_body import StreamedBody
from gazette.protocol.content import CHUNK_BYTES, COMMIT, Content, append_content
from gazette.protocol.error_codes import http_status_of
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Route
from gazette.protocol.rpc import validate_append_request_opening, validate_read_request
from gazette.protocol.status import Status
from gazette.runtime.numbers import parse_integer
from gazette.runtime.tasks import Pool, TaskScope

_READ_CODES: Final = {
    Status.OK: 206,
    Status.JOURNAL_NOT_FOUND: 404,
    Status.INSUFFICIENT_JOURNAL_BROKERS: 503,
    Status.OFFSET_NOT_YET_AVAILABLE: 416,
    Status.NOT_ALLOWED: 403,
}
_APPEND_CODES: Final = {
    Status.OK: 204,
    Status.JOURNAL_NOT_FOUND: 404,
    Status.NO_JOURNAL_PRIMARY_BROKER: 503,
    Status.INSUFFICIENT_JOURNAL_BROKERS: 503,
    Status.FRAGMENT_STORE_UNHEALTHY: 503,
    Status.NOT_ALLOWED: 403,
    Status.WRONG_APPEND_OFFSET: 412,
}
_ASSIGNED_SOON: Final = (Status.NO_JOURNAL_PRIMARY_BROKER, Status.INSUFFICIENT_JOURNAL_BROKERS)
"""Statuses that last until the journal gets its brokers. Answers to such appends have a ``Retry-After``."""
_HEADERS_OF: Final[Mapping[int, Mapping[str, str]]] = {401: CHALLENGE, 503: {"Retry-After": "1"}}
"""Headers of the answer to a call that raised an error, by HTTP status. An answer with a status of the
journal lacks these headers: the status may last."""
_AUTHORIZATION_MAX: Final = 7_168
"""Greatest length of the Authorization header, in bytes. Beyond 8 KiB of metadata, gRPC refuses calls at
random, and gRPC adds metadata itself."""
_CONDITIONS: Final = ("if-match", "if-none-match", "if-range")


@dataclass(frozen=True, slots=True)
class Loopback:
    """The broker's own gRPC service: ``read`` and ``append`` are the calls of ``BytePath``.

    ``http_endpoints`` returns the HTTP endpoint of each member of a route, by its endpoint for gRPC.
    ``created`` returns the revision at which a journal was created; 0 if it is not known here.
    """

    read: Callable[..., Any]
    append: Callable[..., StreamCall]
    http_endpoints: Callable[[Route], Mapping[str, str]]
    created: Callable[[str], int]


class HttpGateway:
    """The handler of all paths that name a journal. ``loopback`` is called for each request."""

    def __init__(
        self, loopback: Callable[[], Loopback], allow_origins: Sequence[str], pool: Pool
    ) -> None:
        """Make the handler. Threads of ``pool`` decode compressed bodies."""
        self._loopback = loopback
        self._pool = pool
        cors = Cors(
            allow_origins,
            methods="GET, HEAD, PUT, OPTIONS",
            headers="Authorization, Content-Encoding, Content-Type, If-Match, If-None-Match, If-Range, "
            "Range",
            expose=EXPOSED,
        )
        self.handle: Handler = cors.wrap(self._handle) if cors else self._handle

    async def _handle(self, request: Request) -> Response:
        """Answer a request by its method. Turn errors into answers with a status of HTTP."""
        try:
            if request.method in ("GET", "HEAD"):
                return await _Read(request, self._loopback()).respond()
            if request.method == "PUT":
                return await self._append(request)
            return _text(f"unknown method: {request.method}", 405, {"Allow": METHODS})
        except Refusal as refusal:
            return _text(str(refusal), refusal.code, refusal.headers)
        except NotAllowed as error:
            return _text(str(error), 401, CHALLENGE)
        except Invalid as error:
            return _text(str(error), 400)
        except ClientDisconnect:
            return Response(status_code=408)
        except grpc.aio.AioRpcError as error:
            code = http_status_of(code_of_caller(error))
            if was_too_slow(rpc_error(error, "append")):
                code = 408
            return _text(error.details() or "", code, _HEADERS_OF.get(code))
        except GazetteError as error:
            return _text(str(error), 503)

    async def _append(self, request: Request) -> Response:
        """Append the body, and return the answer. Raise ``AioRpcError`` if the call fails.

        Raise ``Invalid`` or ``Refusal`` for a request that cannot be honoured, ``NotAllowed`` for credentials
        that no call can carry. Cancellation, and a body that breaks off: nothing is committed, unless all of
        the body was sent.
        """
        is_gzip = check_append(request)
        opening = broker_pb2.AppendRequest(journal=journal_of(request))
        validate_append_request_opening(opening)
        loopback = self._loopback()
        condition = request.headers.get("if-match", "*").strip()
        if condition != "*":
            tag = _one_tag(condition)
            if tag.created != loopback.created(split_journal_meta(opening.journal)[0]):
                return _text("the journal is not the one that If-Match names", 412)
            opening.offset = tag.head
        call = loopback.append(metadata=authorization(request))
        body = gunzipped(request.stream(), self._pool) if is_gzip else request.stream()
        try:
            async with TaskScope("put") as scope:
                # The call may end before the body, and a body may never end.
                write_task = scope.spawn(_write_body(call, opening, body), name="body")
                end_task = scope.spawn(call.wait_ended(), name="answer")
                await asyncio.wait({write_task, end_task}, return_when=asyncio.FIRST_COMPLETED)
                scope.cancel()
            response = await call
        except BaseException:
            # Without the message that commits, the broker rolls back the content that it has.
            call.cancel()
            raise
        status = Status.from_pb(response.status)
        headers = _route_of(response.header, loopback, request)
        if status is not Status.OK:
            text = f"{status.name}: {response.store_health_error}".rstrip(": ")
            if status in _ASSIGNED_SOON:
                headers["Retry-After"] = "1"
            return _text(text, _APPEND_CODES.get(status, 500), headers)
        headers |= append_headers(Fragment.from_pb(response.commit))
        return Response(status_code=204, headers=headers)


class _Read:
    """One GET or HEAD."""

    def __init__(self, request: Request, loopback: Loopback) -> None:
        check_headers(request)
        self._request = request
        self._loopback = loopback
        self._metadata = authorization(request)
        self._asked = parse_read(request)

    async def respond(self) -> Response:
        """Return the response. Raise ``Invalid``, ``Unavailable`` or ``AioRpcError`` if the read cannot
        begin.

        For a condition, or a range of the last bytes, an additional call first asks for the present head. If
        the end of a range is known, the response has a ``Content-Range`` and a ``Content-Length``. A range
        without an end ends at the present head. With ``block`` its end is not known.
        """
        request, read_request = self._request, self._asked
        try:
            # Only GET gives ranges a meaning.
            byte_range = (
                parse_range(request.headers.get("range")) if request.method == "GET" else None
            )
        except Unsatisfiable as error:
            return _text(str(error), 416)
        if byte_range is not None and "offset" in request.query_params:
            raise Invalid("give either the argument offset or the header Range, not both")
        is_conditional = any(name in request.headers for name in _CONDITIONS)
        if is_conditional or (byte_range is not None and byte_range.suffix is not None):
            answer = await self._settle(byte_range)
            if isinstance(answer, Response):
                return answer
            byte_range = answer
        if byte_range is not None:
            read_request.offset, read_request.end_offset = byte_range.first, byte_range.end or 0
        call, messages, first_response = await self._start(read_request)
        status, headers = self._describe(first_response)
        if request.method == "HEAD":
            call.cancel()
            return _head_only(_READ_CODES.get(status, 500), headers)
        if status is not Status.OK:
            call.cancel()
            return _text(status.name, _READ_CODES.get(status, 500), headers)
        end = None
        if byte_range is not None and (byte_range.end is not None or not read_request.block):
            end = _end_of(byte_range, first_response.write_head, block=read_request.block)
            if first_response.offset >= end:  # The bytes asked for are gone; later ones exist.
                call.cancel()
                headers["Content-Range"] = f"bytes */{first_response.write_head}"
                return _text("no byte of the range exists any more", 416, headers)
            total = first_response.write_head if end <= first_response.write_head else "*"
            headers["Content-Range"] = f"bytes {first_response.offset}-{end - 1}/{total}"
            headers["Content-Length"] = str(end - first_response.offset)
        headers["Content-Type"] = "application/octet-stream"
        body_parts = _body(call, messages, first_response.offset, end, endless=read_request.block)
        return StreamedBody(body_parts, 206, headers)

    async def _settle(self, wanted: ByteRange | None) -> ByteRange | Response | None:
        """Check the conditions against the present journal. Return the range to read, with a suffix resolved
        to offsets; None for the whole journal, for example because ``If-Range`` does not hold.

        Return a response if no content is to be read: the journal cannot be read, a condition does not hold,
        or the suffix has no bytes. ``If-None-Match`` does not count with ``block``.
        """
        request = self._request
        peek = broker_pb2.ReadRequest(journal=self._asked.journal, offset=-1, metadata_only=True)
        call, _, first_response = await self._start(peek)
        call.cancel()
        status, headers = self._describe(first_response)
        if status not in (Status.OK, Status.OFFSET_NOT_YET_AVAILABLE):
            return _text(status.name, _READ_CODES.get(status, 500), headers)
        present_tag = self._tag(first_response.write_head)

        def holds(header: str) -> bool:
            tags = parse_tags(header)
            return header.strip() == "*" or any(tag.is_prefix_of(present_tag) for tag in tags)

        condition = listed(request, "if-match")
        if condition is not None and not holds(condition):
            return _text("the journal is not the one that If-Match names", 412, headers)
        condition = listed(request, "if-none-match")
        if (
            condition is not None
            and not self._asked.block
            and (condition.strip() == "*" or present_tag in parse_tags(condition))
        ):
            headers.pop("Content-Range", None)
            return Response(status_code=304, headers=headers)
        condition = request.headers.get("if-range")
        if condition is not None and not holds(condition):
            return None
        if wanted is None or wanted.suffix is None:
            return wanted
        if not wanted.suffix or not present_tag.head:
            headers["Content-Range"] = f"bytes */{present_tag.head}"
            return _text("the range has no bytes", 416, headers)
        begin = max(0, present_tag.head - wanted.suffix)
        return ByteRange(begin, None if self._asked.block else present_tag.head - 1)

    async def _start(
        self, asked: broker_pb2.ReadRequest
    ) -> tuple[Any, Any, broker_pb2.ReadResponse]:
        """Call Read. Return the call, an iterator of its later responses, and its first response. Raise
        ``Invalid`` for a wrong request, ``AioRpcError`` if the call fails, ``Unavailable`` if no response
        comes."""
        validate_read_request(asked)
        call = self._loopback.read(asked, metadata=self._metadata)
        messages = aiter(call)
        try:
            first = await anext(messages, None)
        except BaseException:
            call.cancel()
            raise
        if first is None:
            call.cancel()
            raise Unavailable("the broker ended the read before its first response")
        assert isinstance(first, broker_pb2.ReadResponse)
        return call, messages, first

    def _describe(self, first: broker_pb2.ReadResponse) -> tuple[Status, dict[str, str]]:
        status = Status.from_pb(first.status)
        headers = _route_of(first.header, self._loopback, self._request) | read_headers(first)
        if status in (Status.OK, Status.OFFSET_NOT_YET_AVAILABLE) and not self._asked.block:
            tag = self._tag(first.write_head)
            if tag.created:
                headers["ETag"] = str(tag)
        return status, headers

    def _tag(self, head: int) -> EntityTag:
        journal = split_journal_meta(self._asked.journal)[0]
        return EntityTag(self._loopback.created(journal), head)


def _end_of(wanted: ByteRange, head: int, *, block: bool) -> int:
    """Return the end of the body. If the read does not block, the body ends at ``head`` at the latest."""
    if wanted.end is None:
        return head
    return wanted.end if block else min(wanted.end, head)


async def _body(
    call: Any, messages: Any, offset: int, end: int | None, *, endless: bool
) -> AsyncIterator[bytes]:
    """Yield the content up to ``end``. Without an end: up to the head or, if ``endless``, until the read
    ends.

    Raise ``Broken`` if the read ends before the end or the head. Raise it also if bytes are missing: a
    message without content names the offset of the next content.
    """
    try:
        async for message in messages:
            if isinstance(message, Content) or message.content:
                content = message.content
                if end is not None:
                    content = content[: end - message.offset]
                offset = message.offset + len(content)
                yield content
                if offset == end:
                    return
            elif message.status == Status.OFFSET_NOT_YET_AVAILABLE and end is None:
                return
            elif message.status != Status.OK:
                raise Broken("the read ended early", status=Status.from_pb(message.status).name)
            elif message.offset != offset:
                raise Broken("bytes are missing", offset=offset, next=message.offset)
        if end is not None or not endless:
            raise Broken("the broker ended the read", offset=offset)
    finally:
        call.cancel()


async def _write_body(
    call: StreamCall, opening: broker_pb2.AppendRequest, body: AsyncGenerator[bytes, None]
) -> None:
    """Stream a request's body into an append, and commit it. Stop if the broker has answered."""
    async with aclosing(body):
        if not await call.write(opening):
            return
        async for part in body:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                if not await call.write(append_content(view[start : start + CHUNK_BYTES])):
                    return
    if await call.write(COMMIT):
        await call.done_writing()


def parse_read(request: Request) -> broker_pb2.ReadRequest:
    """Return the read that a GET or HEAD asks for. Raise ``Invalid`` for arguments that are not valid."""
    arguments = single_arguments(request)
    for name in arguments:
        if name not in ("offset", "block"):
            raise Invalid(f"unknown query argument {name} (expected offset or block)")
    try:
        offset = parse_integer(arguments.get("offset", "0"))
    except ValueError:
        raise Invalid(f"invalid offset ({arguments['offset'][:50]}; expected an integer)") from None
    block = arguments.get("block", "false").lower()
    if block not in ("true", "false", "1", "0"):
        raise Invalid(f"invalid block ({block}; expected true or false)")
    if not -1 <= offset <= MAX_OFFSET:  # A `ReadRequest` cannot hold other numbers.
        offset_text = arguments["offset"][:50]
        raise Invalid(f"invalid Offset ({offset_text}; expected -1 <= Offset <= MaxInt64)")
    parsed = broker_pb2.ReadRequest(
        journal=journal_of(request),
        offset=offset,
        block=block in ("true", "1"),
        metadata_only=request.method == "HEAD",
    )
    validate_read_request(parsed)
    return parsed


def journal_of(request: Request) -> str:
    path: str = request.scope["path"]
    return path.removeprefix("/")


def authorization(request: Request) -> tuple[tuple[str, str], ...]:
    """Return call metadata with the credentials of the request, not verified yet.

    Raise ``NotAllowed`` for a header that call metadata cannot carry.
    """
    value = request.headers.get("authorization")
    if not value:
        return ()
    if len(value) > _AUTHORIZATION_MAX:
        raise NotAllowed(f"the Authorization header is too long (expected <= {_AUTHORIZATION_MAX})")
    if not (value.isascii() and value.isprintable()):
        raise NotAllowed("invalid or unsupported Authorization header (expected 'Bearer')")
    return (("authorization", value),)


def _one_tag(condition: str) -> EntityTag:
    """Return the tag of a conditional append. Raise ``Invalid`` unless there is exactly one tag, of a journal
    that is not empty."""
    tags = parse_tags(condition)
    if len(tags) != 1 or str(tags[0]) != condition:
        raise Invalid(f"invalid If-Match ({condition}; expected one ETag of this journal, or *)")
    if not tags[0].head:
        raise Invalid(
            "an append to an empty journal cannot be conditional on its ETag",
            hint="The protocol takes offset 0 for no offset: condition the append on a register instead.",
        )
    return tags[0]


def _route_of(header: broker_pb2.Header, loopback: Loopback, request: Request) -> dict[str, str]:
    route = Route.from_pb(header.route)
    path = request.scope.get("raw_path", b"").decode("ascii", "replace") or request.url.path
    return route_headers(route, loopback.http_endpoints(route), path)


def _head_only(code: int, headers: dict[str, str]) -> Response:
    """Return the headers of a GET, but no length: it is not known, and zero would be wrong."""
    response = Response(status_code=code, headers=headers, media_type="application/octet-stream")
    del response.headers["content-length"]
    return response


def _text(text: str, code: int, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{text}\n" if text else "", code, headers=headers)
