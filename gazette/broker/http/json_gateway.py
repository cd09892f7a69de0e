"""POST /v1/journals/{list,read}: the calls of the same names, with messages as JSON.

Responses are lines of ``{"result": …}``. A call that fails after its first response ends with a line of
``{"error": …}``. A call that fails earlier gets an answer with an HTTP status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gazette.broker.api.call_guard import code_of_caller
from gazette.broker.http.gateway import authorization
from gazette.errors import GazetteError
from gazette.net.json_gateway import (
    Cors,
    error_object,
    error_response,
    failure_response,
    json_line,
    not_implemented_route,
    parse_body,
    to_json,
)
from gazette.net.streaming_body import StreamedBody
from gazette.protocol.pb import broker_pb2

Method = Callable[..., Any]


def json_routes(
    allow_origins: Sequence[str], list_method: Callable[[], Method], read: Callable[[], Method]
) -> list[Route]:
    """Return the routes. For each request, the callables give the methods of the broker's own service."""
    cors = Cors(allow_origins)

    def route(path: str, method: Callable[[], Method], new_request: Callable[[], Message]) -> Route:
        async def handle(request: Request) -> Response:
            return await _call(request, method, new_request())

        return Route(path, cors.wrap(handle), methods=["POST", "OPTIONS"])

    return [
        route("/v1/journals/list", list_method, broker_pb2.ListRequest),
        route("/v1/journals/read", read, broker_pb2.ReadRequest),
        not_implemented_route(allow_origins),
    ]


async def _call(request: Request, method: Callable[[], Method], message: Message) -> Response:
    try:
        await parse_body(request, message)
        call = method()(message, metadata=authorization(request))
        messages = aiter(call)
        first = await anext(messages, None)
    except grpc.aio.AioRpcError as error:
        return error_response(code_of_caller(error), error.details() or "")
    except GazetteError as error:
        return failure_response(error)
    return StreamedBody(_lines(call, first, messages), media_type="application/json")


async def _lines(call: Any, first: Message | None, messages: Any) -> AsyncIterator[bytes]:
    try:
        if first is not None:
            yield json_line({"result": to_json(first)})
        async for message in messages:
            yield json_line({"result": to_json(message)})
    except grpc.aio.AioRpcError as error:
        yield json_line({"error": error_object(code_of_caller(error), error.details() or "")})
    finally:
        call.cancel()
