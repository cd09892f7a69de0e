"""Calls of a gRPC service over HTTP: POST with messages as JSON, and CORS for browsers.

JSON names are lowerCamelCase, 64-bit integers are strings, bytes are base64, enumerations are names, and
fields have their zero values. Messages that are absent are null.
"""

from __future__ import annotations

import http
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gazette.errors import GazetteError, Invalid
from gazette.net.http_requests import Refusal, bounded_body, check_headers, content_encoding
from gazette.protocol.error_codes import code_of, http_status_of
from gazette.runtime.numbers import parse_number

Handler = Callable[[Request], Awaitable[Response]]

_METHODS: Final = ("GET", "HEAD", "PUT", "POST", "DELETE", "PATCH", "OPTIONS")
CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}
"""Headers of each 401 answer: the accepted scheme."""
_NUMBERS: Final = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
        FieldDescriptor.CPPTYPE_FLOAT,
        FieldDescriptor.CPPTYPE_DOUBLE,
    }
)


class Cors:
    """The origins whose pages may call. Only answers to these origins have headers of CORS."""

    METHODS: Final = "GET, POST, OPTIONS"
    HEADERS: Final = (
        "Cache-Control, Content-Language, Content-Length, Content-Type, Expires, Last-Modified, "
        "Pragma, Authorization"
    )

    def __init__(
        self,
        origins: Sequence[str],
        *,
        methods: str = METHODS,
        headers: str = HEADERS,
        expose: str = "",
    ) -> None:
        self._origins = frozenset(origins)
        self._headers = {
            "Access-Control-Allow-Methods": methods,
            "Access-Control-Allow-Headers": headers,
        }
        if expose:
            self._headers["Access-Control-Expose-Headers"] = expose

    def __bool__(self) -> bool:
        return bool(self._origins)

    def wrap(self, handle: Handler) -> Handler:
        """Wrap ``handle``: answer OPTIONS here, and add the headers of CORS to all answers."""

        async def wrapped(request: Request) -> Response:
            response = Response() if request.method == "OPTIONS" else await handle(request)
            origin = request.headers.get("origin")
            if self._origins:
                response.headers["Vary"] = "Origin"
            if origin is not None and origin in self._origins:
                response.headers["Access-Control-Allow-Origin"] = origin
                response.headers.update(self._headers)
            return response

        return wrapped


async def parse_body(request: Request, message: Message) -> None:
    """Read the body as the JSON of ``message``; no body is an empty message. Skip unknown fields.

    Raise ``Invalid`` for a query, or a body that is too long or not such JSON. Raise `Refusal` for an encoded
    body, and for a type other than ``application/json``: browsers send other types for any page, without
    asking the server. A call without a body needs no type.
    """
    check_headers(request)
    content_encoding(request, {})
    if request.url.query:
        raise Invalid(
            f"a call takes no query ({request.url.query})",
            hint="Send its arguments as JSON, in the body.",
        )
    body = await bounded_body(request)
    headers = request.headers.getlist("content-type")
    if (body or headers) and [header.partition(";")[0].strip().lower() for header in headers] != [
        "application/json"
    ]:
        raise Refusal(
            415,
            "expected a body of Content-Type application/json",
            path="body",
            hint="Send the header Content-Type: application/json.",
        )
    try:
        json_format.Parse(body or b"{}", message, ignore_unknown_fields=True)
        value = json.loads(body or b"{}")
        _check_numbers(value, message.DESCRIPTOR)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise Invalid(str(error), path="body") from error
    if not isinstance(value, dict):  # ``json_format`` accepts an empty list as an empty message.
        raise Invalid("expected an object of JSON", path="body")


def _check_numbers(value: Any, descriptor: Any) -> None:
    """Raise ``ValueError`` for a string that ``json_format`` reads as a number, but JSON would not.

    ``value`` was parsed as a message of ``descriptor`` before.
    """
    if not isinstance(value, dict) or descriptor.full_name.startswith("google.protobuf."):
        return
    fields = {field.json_name: field for field in descriptor.fields} | dict(
        descriptor.fields_by_name
    )
    for name, inner in value.items():
        field = fields.get(name)
        if field is None:
            continue
        if _is_map(field):
            field = field.message_type.fields_by_name["value"]
            inner = list(inner.values()) if isinstance(inner, dict) else inner
        for item in inner if isinstance(inner, list) else [inner]:
            if field.message_type is not None:
                _check_numbers(item, field.message_type)
            elif isinstance(item, str) and field.cpp_type in _NUMBERS:
                parse_number(item)


def error_object(code: grpc.StatusCode, text: str, status: int = 0) -> dict[str, Any]:
    """Return the value of ``error``; ``status`` replaces the HTTP status of the code."""
    status = status or http_status_of(code)
    return {
        "grpcCode": code.value[0],
        "httpCode": status,
        "message": text,
        "httpStatus": http.HTTPStatus(status).phrase,
        "details": [],
    }


def error_response(code: grpc.StatusCode, text: str) -> Response:
    """Return ``{"error": …}`` with the HTTP status of the code of a failed call."""
    headers = CHALLENGE if code is grpc.StatusCode.UNAUTHENTICATED else None
    return JSONResponse({"error": error_object(code, text)}, http_status_of(code), headers)


def failure_response(error: GazetteError) -> Response:
    """Return the ``error_response`` of a ``GazetteError``."""
    if isinstance(error, Refusal):
        body = error_object(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.code)
        return JSONResponse({"error": body}, error.code, error.headers)
    return error_response(code_of(error), str(error))


def not_implemented_route(allow_origins: Sequence[str]) -> Route:
    """Return the route that answers 501 for each path below ``/v1/`` that no earlier route serves."""

    async def handle(_request: Request) -> Response:
        code, text = grpc.StatusCode.UNIMPLEMENTED, "Not Implemented"
        body = {"code": code.value[0], "message": text, "details": []}
        return JSONResponse(body, http_status_of(code))

    return Route("/v1/{path:path}", Cors(allow_origins).wrap(handle), methods=list(_METHODS))


def json_line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def to_json(message: Message) -> dict[str, Any]:
    """Return the JSON form with all fields: messages that are absent are null."""
    value = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
    _add_nulls(message, value)
    return value


def _add_nulls(message: Message, value: dict[str, Any]) -> None:
    """Set the absent messages of ``value``, the JSON form of ``message``, to None, at any depth."""
    for field in message.DESCRIPTOR.fields:
        if field.type != FieldDescriptor.TYPE_MESSAGE or _is_map(field):
            continue
        inner = value.get(field.json_name)
        if inner is None:
            value[field.json_name] = None
        elif isinstance(inner, dict):
            _add_nulls(getattr(message, field.name), inner)
        elif isinstance(inner, list):
            for item, item_message in zip(inner, getattr(message, field.name), strict=True):
                _add_nulls(item_message, item)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)
