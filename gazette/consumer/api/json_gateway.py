"""POST /v1/shards/{list,stat}: the gRPC calls of the same names, with JSON messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gazette.auth import Capability, Verifier
from gazette.consumer.api.shard_api import ShardApi
from gazette.errors import GazetteError
from gazette.net.json_gateway import (
    Cors,
    failure_response,
    not_implemented_route,
    parse_body,
    to_json,
)
from gazette.protocol.pb import consumer_pb2


def json_routes(
    allow_origins: Sequence[str], api: Callable[[], ShardApi], verifier: Verifier
) -> list[Route]:
    """Return the routes. Each request calls ``api``, which returns the implementation of the service."""
    cors = Cors(allow_origins)

    def route(path: str, name: str, capability: int, new_request: Callable[[], Message]) -> Route:
        async def handle(request: Request) -> Response:
            try:
                claims = verifier.verify(request.headers.get("authorization"), capability)
                message = new_request()
                await parse_body(request, message)
                method: Callable[..., Awaitable[Any]] = getattr(api(), name)
                response = await method(message, claims)
            except GazetteError as error:
                return failure_response(error)
            return JSONResponse(to_json(response))

        return Route(path, cors.wrap(handle), methods=["POST", "OPTIONS"])

    return [
        route("/v1/shards/list", "list", Capability.LIST, consumer_pb2.ListRequest),
        route("/v1/shards/stat", "stat", Capability.READ, consumer_pb2.StatRequest),
        not_implemented_route(allow_origins),
    ]
