"""POST /v1/journals/{list,read}: the calls of the same names, with JSON for messages.

Responses are lines of ``{"result": …}``, and of ``{"error": …}`` at the end if the call failed. JSON
names are lowerCamelCase, 64-bit integers are strings, and fields have their zero values.
"""

from __future__ import annotations

import http
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gazette.broker.http_gateway import authorization
from gazette.errors import GazetteError
from gazette.protocol.pb import broker_pb2

BODY_BYTES_MAX: Final = 1 << 20
_ALLOWED_METHODS: Final = "GET, POST, OPTIONS"
_ALLOWED_HEADERS: Final = (
    "Cache-Control, Content-Language, Content-Length, Content-Type, Expires, Last-Modified, Pragma, "
    "Authorization"
)
_HTTP_CODES: Final = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.CANCELLED: 408,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
}

Method = Callable[..., Any]


def json_routes(
    allow_origins: Sequence[str], list_method: Callable[[], Method], read: Callable[[], Method]
) -> list[Route]:
    """The routes. The callables give the methods of the broker's own service, for each request."""
    origins = frozenset(allow_origins)

    def handler(
        method: Callable[[], Method], new_request: Callable[[], Message]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            if request.method == "OPTIONS":
                response = Response()
            else:
                response = await _call(request, method, new_request())
            origin = request.headers.get("origin")
            if origin in origins:
                response.headers["Access-Control-Allow-Origin"] = origin or ""
                response.headers["Access-Control-Allow-Methods"] = _ALLOWED_METHODS
                response.headers["Access-Control-Allow-Headers"] = _ALLOWED_HEADERS
                response.headers["Vary"] = "Origin"
            return response

        return handle

    methods = ["POST", "OPTIONS"]
    return [
        Route("/v1/journals/list", handler(list_method, broker_pb2.ListRequest), methods=methods),
        Route("/v1/journals/read", handler(read, broker_pb2.ReadRequest), methods=methods),
    ]


async def _call(request: Request, method: Callable[[], Method], message: Message) -> Response:
    try:
        json_format.Parse(await _bounded_body(request) or b"{}", message)
    except (json_format.ParseError, ValueError) as error:
        return _error_response(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    try:
        call = method()(message, metadata=authorization(request))
        messages = aiter(call)
        first = await anext(messages, None)
    except grpc.aio.AioRpcError as error:
        return _error_response(error.code(), error.details() or "")
    except GazetteError as error:
        return _error_response(grpc.StatusCode.UNAVAILABLE, str(error))
    return StreamingResponse(_lines(call, first, messages), media_type="application/json")


async def _bounded_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"request body is too large (expected <= {BODY_BYTES_MAX} bytes)")
    return bytes(body)


async def _lines(call: Any, first: Message | None, messages: Any) -> AsyncIterator[bytes]:
    try:
        if first is not None:
            yield _line({"result": to_json(first)})
        async for message in messages:
            yield _line({"result": to_json(message)})
    except grpc.aio.AioRpcError as error:
        yield _line({"error": _error(error.code(), error.details() or "")})
    finally:
        call.cancel()


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _error(code: grpc.StatusCode, text: str) -> dict[str, Any]:
    status = _HTTP_CODES.get(code, 500)
    return {
        "grpc_code": code.value[0],
        "http_code": status,
        "message": text,
        "http_status": http.HTTPStatus(status).phrase,
    }


def _error_response(code: grpc.StatusCode, text: str) -> Response:
    return JSONResponse({"error": _error(code, text)}, _HTTP_CODES.get(code, 500))


def to_json(message: Message) -> dict[str, Any]:
    """The JSON form with every field: messages that are absent are null."""
    value = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
    _add_nulls(message, value)
    return value


def _add_nulls(message: Message, value: dict[str, Any]) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        inner = value.get(field.json_name)
        if inner is None:
            value[field.json_name] = None
        elif isinstance(inner, dict):
            _add_nulls(getattr(message, field.name), inner)
        elif isinstance(inner, list):
            for one, of in zip(inner, getattr(message, field.name), strict=True):
                _add_nulls(of, one)
