"""Journals over HTTP: GET and HEAD read, PUT appends, POST /v1/journals/… answers JSON.

Every request becomes a call of the broker's own gRPC service, with the ``Authorization`` header of the
request: so it is authenticated, routed and proxied exactly as a gRPC client's is.
"""

from __future__ import annotations

import email.utils
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

import grpc
import grpc.aio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from gazette.client.wire import CHUNK_BYTES, COMMIT, Content, append_content
from gazette.errors import GazetteError, Invalid
from gazette.protocol.fragment import Fragment
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Route
from gazette.protocol.rpc import validate_append_request_opening, validate_read_request
from gazette.protocol.status import Status

MAX_OFFSET: Final = (1 << 63) - 1

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
}
_GRPC_CODES: Final = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.CANCELLED: 408,
}


@dataclass(frozen=True, slots=True)
class Loopback:
    """The broker's own gRPC service: ``read`` and ``append`` as of ``client.channel.BytePath``."""

    read: Callable[..., Any]
    append: Callable[..., Any]
    http_endpoint: str
    grpc_endpoint: str


class HttpGateway:
    """The handler of every path that is a journal's name. ``loopback`` is asked for each request."""

    def __init__(self, loopback: Callable[[], Loopback]) -> None:
        self._loopback = loopback

    async def handle(self, request: Request) -> Response:
        try:
            if request.method in ("GET", "HEAD"):
                return await self._read(request)
            if request.method == "PUT":
                return await self._append(request)
            return PlainTextResponse(f"unknown method: {request.method}\n", 400)
        except Invalid as error:
            return PlainTextResponse(f"{error}\n", 400)
        except ClientDisconnect:
            return Response(status_code=408)
        except grpc.aio.AioRpcError as error:
            code = _GRPC_CODES.get(error.code(), 500)
            return PlainTextResponse(f"{error.details()}\n", code)
        except GazetteError as error:
            return PlainTextResponse(f"{error}\n", 503)

    async def _read(self, request: Request) -> Response:
        parsed = parse_read(request)
        loopback = self._loopback()
        call = loopback.read(parsed, metadata=authorization(request))
        messages = aiter(call)
        first = await anext(messages, None)
        if first is None:
            call.cancel()
            return PlainTextResponse("the broker ended the read before its first response\n", 503)
        assert isinstance(first, broker_pb2.ReadResponse)
        status = Status.from_pb(first.status)
        headers = read_headers(first, loopback, request.url.path)
        if status is not Status.OK or request.method == "HEAD":
            call.cancel()
            body = "" if request.method == "HEAD" else f"{status.name}\n"
            return PlainTextResponse(body, _READ_CODES.get(status, 500), headers=headers)
        headers["Content-Type"] = "application/octet-stream"
        return StreamingResponse(self._body(call, messages, first.offset), 206, headers=headers)

    async def _body(self, call: Any, messages: Any, offset: int) -> AsyncIterator[bytes]:
        """The content, until the read ends or jumps to another offset.

        An error leaves the body without its end, so that the client knows that it was cut.
        """
        try:
            async for message in messages:
                if isinstance(message, Content) or message.content:
                    offset = message.offset + len(message.content)
                    yield message.content
                elif message.status != Status.OK or message.offset != offset:
                    return
        finally:
            call.cancel()

    async def _append(self, request: Request) -> Response:
        if request.url.query:
            raise Invalid(f"unexpected query of an append ({request.url.query})")
        opening = broker_pb2.AppendRequest(journal=journal_of(request))
        validate_append_request_opening(opening)
        loopback = self._loopback()
        call = loopback.append(metadata=authorization(request))
        try:
            await _write_body(call, opening, request)
            response = await call
        except BaseException:
            # Without the message that commits, the broker rolls back what it has.
            call.cancel()
            raise
        status = Status.from_pb(response.status)
        headers = _route_headers(response.header, loopback, request.url.path)
        if status is not Status.OK:
            text = f"{status.name}: {response.store_health_error}".rstrip(": ")
            return PlainTextResponse(f"{text}\n", _APPEND_CODES.get(status, 500), headers=headers)
        commit = Fragment.from_pb(response.commit)
        headers["X-Commit-Begin"] = str(commit.begin)
        headers["X-Commit-End"] = str(commit.end)
        headers["X-Commit-SHA1-Sum"] = commit.sum.hex()
        headers["X-Write-Head"] = str(commit.end)
        return Response(status_code=204, headers=headers)


async def _write_body(call: Any, opening: broker_pb2.AppendRequest, request: Request) -> None:
    """Stream the request's body into an append, and commit it.

    When the broker has answered already, there is nobody to write to: its answer is the outcome.
    """
    try:
        await call.write(opening)
        async with aclosing(request.stream()) as body:
            async for part in body:
                view = memoryview(part)
                for at in range(0, len(view), CHUNK_BYTES):
                    await call.write(append_content(view[at : at + CHUNK_BYTES]))
        await call.write(COMMIT)
        await call.done_writing()
    except (grpc.aio.AioRpcError, grpc.aio.UsageError):
        if not call.done():
            raise


def parse_read(request: Request) -> broker_pb2.ReadRequest:
    """The read that a GET or HEAD asks for. Raises ``Invalid``."""
    arguments: dict[str, str] = {}
    for name, value in parse_qsl(request.url.query, keep_blank_values=True):
        if name not in ("offset", "block"):
            raise Invalid(f"unknown query argument {name} (expected offset or block)")
        arguments[name] = value
    try:
        offset = int(arguments.get("offset", "0"))
    except ValueError:
        raise Invalid(f"invalid offset ({arguments['offset']}; expected an integer)") from None
    block = arguments.get("block", "false").lower()
    if block not in ("true", "false", "1", "0"):
        raise Invalid(f"invalid block ({block}; expected true or false)")
    parsed = broker_pb2.ReadRequest(
        journal=journal_of(request),
        offset=offset if -1 <= offset <= MAX_OFFSET else -2,
        block=block in ("true", "1"),
        metadata_only=request.method == "HEAD",
    )
    validate_read_request(parsed)
    return parsed


def journal_of(request: Request) -> str:
    path: str = request.scope["path"]
    return path.removeprefix("/")


def authorization(request: Request) -> tuple[tuple[str, str], ...]:
    """Call metadata with the credentials of the request, whatever they are worth."""
    value = request.headers.get("authorization")
    return (("authorization", value),) if value else ()


def read_headers(
    response: broker_pb2.ReadResponse, loopback: Loopback, path: str
) -> dict[str, str]:
    headers = _route_headers(response.header, loopback, path)
    headers["X-Write-Head"] = str(response.write_head)
    headers["Content-Range"] = f"bytes {response.offset}-{MAX_OFFSET}/{MAX_OFFSET}"
    if response.HasField("fragment"):
        fragment = Fragment.from_pb(response.fragment)
        headers["X-Fragment-Name"] = fragment.content_name()
        if fragment.mod_time:
            headers["X-Fragment-Last-Modified"] = email.utils.formatdate(
                fragment.mod_time, usegmt=True
            )
        if response.fragment_url:
            headers["X-Fragment-Location"] = response.fragment_url
    return headers


def _route_headers(header: broker_pb2.Header, loopback: Loopback, path: str) -> dict[str, str]:
    """``X-Route-Token``, and as ``Location`` where the primary has the journal.

    Of this broker its HTTP endpoint is known; of others only what they advertise.
    """
    route = Route.from_pb(header.route)
    headers = {"X-Route-Token": route_token(route)}
    if endpoint := route.primary_endpoint:
        if endpoint == loopback.grpc_endpoint:
            endpoint = loopback.http_endpoint
        headers["Location"] = f"{endpoint}{path}"
    return headers


def route_token(route: Route) -> str:
    """A route in the compact text form of protobuf."""
    parts = [
        f"members:<zone:{_quoted(member.zone)} suffix:{_quoted(member.suffix)} >"
        for member in route.members
    ]
    if route.primary != 0:
        parts.append(f"primary:{-1 if route.primary is None else route.primary}")
    parts += [f"endpoints:{_quoted(endpoint)}" for endpoint in route.endpoints]
    return " ".join(parts)


def _quoted(text: str) -> str:
    """A string of the text form: octal escapes for what is not ASCII, which headers cannot have."""
    out: list[str] = []
    for byte in text.encode():
        char = chr(byte)
        if char in '"\\':
            out.append(f"\\{char}")
        elif 0x20 <= byte < 0x7F:
            out.append(char)
        else:
            out.append(f"\\{byte:03o}")
    return f'"{"".join(out)}"'
