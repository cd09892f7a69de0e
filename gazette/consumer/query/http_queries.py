"""The HTTP adapter of queries: routes that shards answer, and the call that forwards a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import reduce
from operator import and_
from typing import Any, Final

import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gazette.consumer.query.query import QueryResult
from gazette.consumer.query.query_codec import result_headers, values_of
from gazette.consumer.query.shard_caller import ShardCaller, answer_call, caller_of
from gazette.consumer.query.shard_route import METHOD, HttpAnswer, ShardRequest, ShardRoute
from gazette.errors import GazetteError, Invalid, NotFound
from gazette.net.http_requests import (
    Refusal,
    bounded_body,
    check_headers,
    content_encoding,
    single_arguments,
)
from gazette.protocol.error_codes import code_of, http_status_of
from gazette.runtime import tracing
from gazette.runtime.decoders import msgpack_decoder

RETRY_AFTER_S: Final = "1"


class HttpQueries:
    """The routes of a member that shards answer, and the gRPC service by which members forward requests:
    ``gazette.consumer.HttpQueries/Ask``, with messages in msgpack."""

    def __init__(self, service: ShardCaller) -> None:
        self._service = service
        self._routes: dict[tuple[str, str], ShardRoute] = {}

    def add(
        self, path: str, route: ShardRoute, methods: Iterable[str]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the Starlette endpoint of a route at a path. Raise ``Invalid`` if the path has another route
        already, and for a method of a class that belongs to no object."""
        if route.instance is None:
            raise Invalid(
                f"the route at {path} is a method of a class, and not of an object",
                path="add_route",
                hint="Pass api.count, and not Api.count.",
            )
        for method in _with_head(methods):
            if (path, method) in self._routes:
                raise Invalid(
                    f"two routes are served at {method} {path}",
                    path="add_route",
                    hint="Give one of them another path, or other methods.",
                )
            self._routes[path, method] = route

        async def endpoint(request: Request) -> Response:
            answer = await self._answer(path, route, request)
            reply = answer.value
            return Response(reply.body, reply.status, {**reply.headers, **result_headers(answer)})

        return endpoint

    async def _answer(
        self, path: str, route: ShardRoute, request: Request
    ) -> QueryResult[HttpAnswer]:
        """Authorize a request, and have shards answer. For the errors see `ShardRoute.answer`."""
        service = self._service
        check_headers(request)
        content_encoding(request, {})  # Refuse a compressed body, which members would not decode.
        headers = _joined(request)
        authorization = headers.pop("authorization", None)
        claims = service.verifier.verify(authorization, route.capability)
        shard_request = ShardRequest(
            path,
            request.method,
            {name: str(value) for name, value in request.path_params.items()},
            _arguments(request),
            headers,
            await bounded_body(request),
        )
        # Only members may send the header ``gazette-header-bin``: drop it from an HTTP request.
        values = {name: value for name, value in headers.items() if not name.endswith("-bin")}
        if not tracing.active():
            return await route.answer(service, shard_request, values, claims)
        with tracing.serving(f"{request.method} {path}", values.items(), {"http.route": path}):
            return await route.answer(service, shard_request, values, claims)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handler of requests that other members forward."""
        service, _, method = METHOD[1:].partition("/")
        return grpc.method_handlers_generic_handler(
            service, {method: grpc.unary_unary_rpc_method_handler(self._ask)}
        )

    def admit(self, path: str, metadata: Any) -> None:
        """Check the head of a call of another member, before its message is read.

        Only the message names the route. Raise ``NotAllowed`` if a capability is missing that all routes
        require."""
        del path
        capabilities = [route.capability for route in self._routes.values()]
        caller_of(self._service, metadata, reduce(and_, capabilities) if capabilities else 0)

    async def _ask(self, data: bytes, context: Any) -> bytes:
        async def answer(metadata: Any) -> QueryResult[HttpAnswer]:
            try:
                request = msgpack_decoder(ShardRequest).decode(data)
            except msgspec.MsgspecError as error:
                raise Invalid(f"not a ShardRequest: {error}") from error
            route = self._routes.get((request.route, request.method))
            if route is None:
                raise NotFound(
                    f"this member has no route {request.method} {request.route}",
                    hint="Members of one cluster must run the same version of the application.",
                )
            claims = caller_of(self._service, metadata, route.capability)
            return await route.answer(self._service, request, values_of(metadata), claims)

        return msgspec.msgpack.encode(await answer_call(context, answer))


def _joined(request: Request) -> dict[str, str]:
    """Return the headers of a request. Join the values of a name: cookies by ``; ``, others by ``, ``."""
    headers = request.headers
    return {
        name: ("; " if name == "cookie" else ", ").join(headers.getlist(name)) for name in headers
    }


def _arguments(request: Request) -> dict[str, str]:
    """Return the parameters of the query string. Raise ``Invalid`` for a second value of a parameter."""
    arguments = single_arguments(request)
    for name in arguments:
        if name in request.path_params:
            raise Invalid(f"the path has the parameter {name} already", path=name)
    return arguments


def _with_head(methods: Iterable[str]) -> list[str]:
    """Return methods as Starlette expects them: in upper case, and with HEAD if GET is among them."""
    names = {method.upper() for method in methods}
    return sorted(names | {"HEAD"} if "GET" in names else names)


async def error_answer(_request: Request, error: Exception) -> Response:
    """Answer a request whose handler raised a `GazetteError` (for Starlette)."""
    assert isinstance(error, GazetteError)
    status = http_status_of(code_of(error))
    text = error.message if status == 401 else str(error)
    headers: Mapping[str, str] | None = {"retry-after": RETRY_AFTER_S} if status == 503 else None
    if isinstance(error, Refusal):
        status, headers = error.code, error.headers
    return JSONResponse({"error": text, "hint": error.hint}, status, headers)
