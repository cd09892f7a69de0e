"""POST /v1/shards/{list,stat}: the calls of the same names, with JSON for messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gazette.auth import Capability, Verifier
from gazette.consumer.shard_api import ShardApi
from gazette.errors import Closed, GazetteError, NotAllowed, Retryable
from gazette.protocol.pb import consumer_pb2

BODY_BYTES_MAX: Final = 1 << 20


def json_routes(
    allow_origins: Sequence[str], api: Callable[[], ShardApi], verifier: Verifier
) -> list[Route]:
    """The routes; ``api`` gives the service's implementation, for each request."""
    origins = frozenset(allow_origins)

    def handler(
        name: str, capability: int, new_request: Callable[[], Message]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            if request.method == "OPTIONS":
                response = Response()
            else:
                response = await _call(request, name, capability, new_request(), api, verifier)
            origin = request.headers.get("origin")
            if origin in origins:
                response.headers["Access-Control-Allow-Origin"] = origin or ""
                response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
                response.headers["Access-Control-Allow-Headers"] = "Content-Type, Authorization"
                response.headers["Vary"] = "Origin"
            return response

        return handle

    return [
        Route(
            "/v1/shards/list",
            handler("list", Capability.LIST, consumer_pb2.ListRequest),
            methods=["POST", "OPTIONS"],
        ),
        Route(
            "/v1/shards/stat",
            handler("stat", Capability.READ, consumer_pb2.StatRequest),
            methods=["POST", "OPTIONS"],
        ),
    ]


async def _call(
    request: Request,
    name: str,
    capability: int,
    message: Message,
    api: Callable[[], ShardApi],
    verifier: Verifier,
) -> Response:
    try:
        claims = verifier.verify(request.headers.get("authorization"), capability)
        json_format.Parse(await _bounded_body(request) or b"{}", message)
        method: Callable[..., Awaitable[Message]] = getattr(api(), name)
        response = await method(message, claims)
    except NotAllowed as error:
        return _error(401, error.message)
    except (json_format.ParseError, ValueError) as error:
        return _error(400, str(error))
    except (Retryable, Closed) as error:
        return _error(503, str(error))
    except GazetteError as error:
        return _error(500, str(error))
    value: dict[str, Any] = json_format.MessageToDict(
        response, always_print_fields_with_no_presence=True
    )
    return JSONResponse(value)


async def _bounded_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"request body is too large (expected <= {BODY_BYTES_MAX} bytes)")
    return bytes(body)


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": {"http_code": status, "message": text}}, status)
