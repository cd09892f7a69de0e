"""``@shard_route``: an HTTP route of an application that shards answer.

    class Api:
        def __init__(self, service: ConsumerService) -> None:
            self.service = service

        @shard_route()
        def count(self, store: CountStore, request: ShardRequest) -> dict[str, int]:
            return {"n": store.count(request.query["word"])}

    service.add_route("/shards/{shard}/count", Api(service).count)

Members pass requests on over gRPC, whose endpoint they advertise: see `HttpQueries`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, overload

import grpc
import grpc.aio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gazette.auth import Capability, authorization_of
from gazette.client.rpc.credentials import shard_claims
from gazette.consumer.query.query import QueryResult, ShardQuery, rpc_errors
from gazette.consumer.query.query_codec import (
    metadata_of,
    query_of,
    result_headers,
    result_of,
    values_of,
)
from gazette.consumer.query.shard_rpc import service_of
from gazette.errors import Closed, GazetteError, Invalid, NotAllowed, NotFound, Retryable

BODY_BYTES_MAX: Final = 1 << 20
RETRY_AFTER_S: Final = "1"
METHOD: Final = "/gazette.consumer.HttpQueries/Ask"


class ShardRequest(msgspec.Struct, frozen=True):
    """An HTTP request as the answering member gets it."""

    route: str
    """The route's path as given to ``add_route``."""
    method: str
    """``GET``, ``POST`` or another one that ``add_route`` allows."""
    path: Mapping[str, str]
    """Parameters of the route's path."""
    query: Mapping[str, str]
    """Parameters of the query string."""
    headers: Mapping[str, str]
    """Headers by lower-case name, without ``authorization``."""
    body: bytes = b""
    """The body as it was sent."""

    def json(self) -> Any:
        """Return the decoded body. Raise ``Invalid`` if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.MsgspecError as error:
            raise Invalid(f"the body is not JSON: {error}", path="body") from error


class _Reply(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes


def shard_of(request: ShardRequest) -> str:
    """Return the shard that a request names: a parameter ``shard`` of its path or its query."""
    return request.path.get("shard") or request.query.get("shard", "")


def shard_route(
    *,
    shard: Callable[[ShardRequest], str] = shard_of,
    capability: int = Capability.READ,
    timeout_s: float | None = None,
) -> Callable[[Callable[[Any, Any, ShardRequest], Any]], ShardRoute]:
    """Decorate a method that answers an HTTP route. See `shard_rpc` for the other parameters.

    The method gets ``(self, store, request)`` on a thread of the member that answers. It returns a
    Starlette ``Response``, or a value that msgspec encodes as JSON. Errors of our tree become
    statuses: ``NotFound`` 404, ``Invalid`` 400, ``NotAllowed`` 401, others 500. A shard that does
    not answer in time, and a member that leaves its cluster, answer 503 with ``Retry-After``.
    """

    def decorate(method: Callable[[Any, Any, ShardRequest], Any]) -> ShardRoute:
        return ShardRoute(method, shard, capability, timeout_s)

    return decorate


class ShardRoute:
    """A descriptor for one method of a class, made by ``@shard_route``."""

    def __init__(
        self,
        method: Callable[[Any, Any, ShardRequest], Any],
        shard: Callable[[ShardRequest], str],
        capability: int,
        timeout_s: float | None,
    ) -> None:
        self.method = method
        self.shard = shard
        self.capability = capability
        self.timeout_s = timeout_s
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> ShardRoute: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> BoundShardRoute: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else BoundShardRoute(self, instance)


class BoundShardRoute:
    """The endpoint of one object. ``add_route`` gives it its path."""

    def __init__(self, route: ShardRoute, instance: Any) -> None:
        self._route = route
        self._instance = instance

    def at(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """Return the Starlette endpoint for a path."""

        async def endpoint(request: Request) -> Response:
            try:
                answer = await self._answer(path, request)
            except GazetteError as error:
                return failure_answer(error)
            reply = answer.value
            return Response(reply.body, reply.status, {**reply.headers, **result_headers(answer)})

        return endpoint

    async def _answer(self, path: str, request: Request) -> QueryResult[_Reply]:
        service, route = service_of(self._instance), self._route
        headers = dict(request.headers.items())
        claims = service.verifier.verify(headers.pop("authorization", None), route.capability)
        shard_request = ShardRequest(
            path,
            request.method,
            {name: str(value) for name, value in request.path_params.items()},
            dict(request.query_params),
            headers,
            await _bounded_body(request),
        )
        # Only members may send this header: drop it from other callers.
        values = {name: value for name, value in headers.items() if not name.endswith("-bin")}
        return await self.answer(
            shard_request, query_of(route.shard(shard_request), values, claims)
        )

    async def answer(self, request: ShardRequest, query: ShardQuery) -> QueryResult[_Reply]:
        """Have the shard answer. Raise as `QueryRouter.ask` does."""
        service, route = service_of(self._instance), self._route

        async def forward(channel: grpc.aio.Channel, forwarded: ShardQuery) -> QueryResult[_Reply]:
            own = shard_claims(route.capability, forwarded.shard)
            metadata = (*(service.peers.credentials.metadata(own) or ()), *metadata_of(forwarded))
            ask: Any = channel.unary_unary(METHOD, None, None)
            call = ask(msgspec.msgpack.encode(request), metadata=metadata)
            reply = msgspec.msgpack.decode(await call, type=_Reply)
            return result_of(reply, values_of(await call.trailing_metadata()))

        return await service.ask_shard(
            query,
            lambda store: _reply(route.method(self._instance, store, request)),
            forward,
            timeout_s=route.timeout_s,
        )

    async def answer_peer(self, request: ShardRequest, metadata: Any) -> QueryResult[_Reply]:
        """Answer a request that another member passed on. Raise as `QueryRouter.ask` does."""
        service, route = service_of(self._instance), self._route
        claims = service.verifier.verify(authorization_of(metadata), route.capability)
        return await self.answer(
            request, query_of(route.shard(request), values_of(metadata), claims)
        )


class HttpQueries:
    """The routes of a member that shards answer, and the gRPC service by which members pass requests
    on: ``gazette.consumer.HttpQueries/Ask``, with msgpack for messages."""

    def __init__(self) -> None:
        self._routes: dict[str, BoundShardRoute] = {}

    def add(self, path: str, route: BoundShardRoute) -> Callable[[Request], Awaitable[Response]]:
        self._routes[path] = route
        return route.at(path)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        service, _, method = METHOD[1:].partition("/")
        return grpc.method_handlers_generic_handler(
            service, {method: grpc.unary_unary_rpc_method_handler(self._ask)}
        )

    async def _ask(self, data: bytes, context: Any) -> bytes:
        async with rpc_errors(context):
            try:
                request = msgspec.msgpack.decode(data, type=ShardRequest)
            except msgspec.MsgspecError as error:
                raise Invalid(f"not a ShardRequest: {error}") from error
            route = self._routes.get(request.route)
            if route is None:
                raise NotFound(
                    f"this member has no route {request.route}",
                    hint="Members of one cluster must run the same version of the application.",
                )
            answer = await route.answer_peer(request, context.invocation_metadata())
            context.set_trailing_metadata(tuple(result_headers(answer).items()))
            return msgspec.msgpack.encode(answer.value)
        raise AssertionError("unreachable: the context was aborted")


async def _bounded_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise Invalid(
                f"request body is too large (expected <= {BODY_BYTES_MAX} bytes)", path="body"
            )
    return bytes(body)


def _reply(value: Any) -> _Reply:
    """Encode the reply on the thread of the query, so that its content does not change meanwhile."""
    if isinstance(value, Response):
        headers = {name: text for name, text in value.headers.items() if name != "content-length"}
        body = getattr(value, "body", None)
        if not isinstance(body, bytes | memoryview):
            raise Invalid(
                f"a {type(value).__name__} cannot be passed on",
                hint="Return a Response with a body, or a value that can be written as JSON.",
            )
        return _Reply(value.status_code, headers, bytes(body))
    try:
        body = msgspec.json.encode(value)
    except (TypeError, ValueError) as error:
        raise Invalid(f"the answer cannot be written as JSON: {error}") from error
    return _Reply(200, {"content-type": "application/json"}, body)


async def error_answer(_request: Request, error: Exception) -> Response:
    """Answer a request whose handler raised an error of our tree (for Starlette)."""
    assert isinstance(error, GazetteError)
    return failure_answer(error)


def failure_answer(error: GazetteError) -> Response:
    """Return the response that carries an error of our tree."""
    codes: tuple[tuple[type[GazetteError] | tuple[type[GazetteError], ...], int], ...] = (
        (NotFound, 404),
        (Invalid, 400),
        (NotAllowed, 401),
        ((Retryable, Closed), 503),
    )
    status = next((code for kinds, code in codes if isinstance(error, kinds)), 500)
    text = error.message if status == 401 else str(error)
    headers = {"retry-after": RETRY_AFTER_S} if status == 503 else None
    return JSONResponse({"error": text, "hint": error.hint}, status, headers)
