"""``@shard_route``: an HTTP route of an application that one shard answers.

    class WordCount(Application[CountStore]):
        words = Source("words", Word, partitions=4, key="word")

        @shard_route("/counts/{word}", key="word")
        def count(self, store: CountStore, request: ShardRequest) -> dict[str, int]:
            return {"n": store.count(request.path["word"])}

Methods of an application are served at their paths. Those of another object are, if they are added:

    service.add_route("/shards/{shard}/count", api.count)

Members pass requests on over gRPC, whose endpoint they advertise: see `HttpQueries`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, overload

import grpc
import grpc.aio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gazette.auth import Capability, Claims, authorization_of
from gazette.client.rpc.credentials import shard_claims
from gazette.consumer.query.answer_json import answer_json
from gazette.consumer.query.query import QueryResult, ShardQuery, rpc_errors
from gazette.consumer.query.query_codec import (
    Values,
    metadata_of,
    query_of,
    result_headers,
    result_of,
    values_of,
)
from gazette.consumer.query.query_method import answering, query_method
from gazette.consumer.query.shard_rpc import Deadline, ShardCaller
from gazette.errors import Closed, GazetteError, Invalid, NotAllowed, NotFound, Retryable
from gazette.net.http_requests import (
    Refusal,
    check_headers,
    content_encoding,
    single_arguments,
)

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
    """Parameters of the query string. Each is given once."""
    headers: Mapping[str, str]
    """Headers by lower-case name, without ``authorization``. Lines of one name are joined by commas."""
    body: bytes = b""
    """The body as it was sent."""
    shard: str = ""
    """The shard that is asked. Empty in functions that find it."""

    def json(self) -> Any:
        """Return the decoded body. Raise ``Invalid`` if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.MsgspecError as error:
            raise Invalid(f"the body is not JSON: {error}", path="body") from error


class HttpAnswer(msgspec.Struct, frozen=True):
    """An HTTP answer on its way between members."""

    status: int
    headers: Mapping[str, str]
    body: bytes


ShardOf: TypeAlias = Callable[[ShardRequest], str]
"""Function that returns the id of the shard to ask."""
KeyOf: TypeAlias = str | Callable[[ShardRequest], Any]
"""Name of a parameter of the path or the query, or function that returns the key."""


def shard_of(request: ShardRequest) -> str:
    """Return the shard that a request names: a parameter ``shard`` of its path or its query."""
    return request.path.get("shard") or request.query.get("shard", "")


def shard_route(
    path: str = "",
    *,
    key: KeyOf | None = None,
    shard: ShardOf | None = None,
    methods: Iterable[str] = ("GET",),
    capability: int = Capability.READ,
    timeout_s: float | None = None,
) -> Callable[[Callable[[Any, Any, ShardRequest], Any]], ShardRoute]:
    """Decorate a method that answers an HTTP route. See `shard_rpc` for the other parameters.

    A method of an `Application` is served at ``path``. Without one, pass the method to ``add_route``.
    ``key`` finds the shard as publishers find the partition of a message with that key. Otherwise
    ``shard(request)`` returns its id, by default the parameter ``shard``.

    The method gets ``(self, store, request)`` on a thread of the member that answers. It returns a
    Starlette ``Response``, or a value that JSON can tell: see `answer_json`. Errors of our tree become
    statuses: ``NotFound`` 404, ``Invalid`` 400, ``NotAllowed`` 401, others 500. A shard that does
    not answer in time, and a member that leaves its cluster, answer 503 with ``Retry-After``.
    Raise ``Invalid`` for parameters that do not fit together.
    """
    if key is not None and shard is not None:
        raise Invalid("give key or shard, not both", path="shard_route")
    options = (path_of(path), tuple(methods), capability, timeout_s)
    find = shard_of if shard is None else shard

    def decorate(method: Callable[[Any, Any, ShardRequest], Any]) -> ShardRoute:
        method = query_method(method, ("self", "store", "request"))
        return ShardRoute(
            method, lambda instance: _OneShard(partial(method, instance), key, find, *options)
        )

    return decorate


def path_of(path: object) -> str:
    """Return the path of a decorator. Raise ``Invalid`` for anything else, as for a method."""
    if not isinstance(path, str) or (path and not path.startswith("/")):
        raise Invalid(
            f"{path!r} is not the path of a route",
            path="shard_route",
            hint='Write @shard_route("/counts/{word}", key="word"), or @shard_route() and add_route.',
        )
    return path


class ShardRoute:
    """A descriptor for one method of a class, made by a decorator of routes."""

    def __init__(self, method: Callable[..., Any], bind: Callable[[Any], BoundShardRoute]) -> None:
        self._bind = bind
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> ShardRoute: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> BoundShardRoute: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self._bind(instance)


class BoundShardRoute(ABC):
    """A route of one object: one shard answers its requests, or all of them."""

    def __init__(
        self, path: str, methods: Iterable[str], capability: int, timeout_s: float | None
    ) -> None:
        self.path = path
        """Path that the decorator gives; empty if ``add_route`` does."""
        self.methods = tuple(methods)
        self.capability = capability
        """Capability that the token of a caller needs."""
        self.timeout_s = timeout_s
        self.by_key = False
        """True if keys of messages say which shard is asked."""
        self.key_parameter = ""
        """Parameter that is the key. Empty without one. In a path, it may be empty."""

    @abstractmethod
    async def answer(
        self, service: ShardCaller, request: ShardRequest, values: Values, claims: Claims
    ) -> QueryResult[HttpAnswer]:
        """Have shards answer. Raise as `QueryRouter.ask` does."""

    @abstractmethod
    def reply(self, store: Any, request: ShardRequest) -> HttpAnswer:
        """Return what a shard answers. Called on a thread."""


class _OneShard(BoundShardRoute):
    """A route of which one shard answers each request."""

    def __init__(
        self,
        method: Callable[[Any, ShardRequest], Any],
        key: KeyOf | None,
        shard: ShardOf,
        *options: Any,
    ) -> None:
        super().__init__(*options)
        self._method = method
        self._key = key
        self._shard = shard
        self.by_key = key is not None
        self.key_parameter = key if isinstance(key, str) else ""

    async def answer(
        self, service: ShardCaller, request: ShardRequest, values: Values, claims: Claims
    ) -> QueryResult[HttpAnswer]:
        deadline = Deadline(service, self.timeout_s)
        if self._key is None:
            shard = self._shard(request)
        else:
            key = key_of(self._key, request)
            shard = await service.shard_of_key(key, claims=claims, timeout_s=deadline.left_s)
        return await ask(service, self, request, query_of(shard, values, claims), deadline.left_s)

    def reply(self, store: Any, request: ShardRequest) -> HttpAnswer:
        return encoded(self._method(store, request), request.route)


def key_of(key: KeyOf, request: ShardRequest) -> Any:
    """Return the key that a request names. Raise ``Invalid`` if it names none."""
    if not isinstance(key, str):
        return key(request)
    found = request.path.get(key, request.query.get(key))
    if found is None:
        raise Invalid(f"the request has no parameter {key}", path=key, hint=f"Add ?{key}=….")
    return found


async def ask(
    service: ShardCaller,
    route: BoundShardRoute,
    request: ShardRequest,
    query: ShardQuery,
    timeout_s: float | None,
) -> QueryResult[HttpAnswer]:
    """Have one shard answer a request, at whichever member. Raise as `QueryRouter.ask` does."""
    request = msgspec.structs.replace(request, shard=query.shard)

    async def forward(channel: grpc.aio.Channel, forwarded: ShardQuery) -> QueryResult[HttpAnswer]:
        own = shard_claims(route.capability, forwarded.shard)
        metadata = (*(service.peers.credentials.metadata(own) or ()), *metadata_of(forwarded))
        method: Any = channel.unary_unary(METHOD, None, None)
        call = method(msgspec.msgpack.encode(request), metadata=metadata)
        reply = msgspec.msgpack.decode(await call, type=HttpAnswer)
        return result_of(reply, values_of(await call.trailing_metadata()))

    return await service.ask_shard(
        query, lambda store: route.reply(store, request), forward, timeout_s=timeout_s
    )


def routes_of(instance: Any) -> list[BoundShardRoute]:
    """Return the methods of an object whose decorators give them a path, by name."""
    kind = type(instance)
    names = [name for name in dir(kind) if isinstance(getattr(kind, name, None), ShardRoute)]
    bound: list[BoundShardRoute] = [getattr(instance, name) for name in names]
    return [route for route in bound if route.path]


class HttpQueries:
    """The routes of a member that shards answer, and the gRPC service by which members pass requests
    on: ``gazette.consumer.HttpQueries/Ask``, with msgpack for messages."""

    def __init__(self, service: ShardCaller) -> None:
        self._service = service
        self._routes: dict[tuple[str, str], BoundShardRoute] = {}

    def add(
        self, path: str, route: BoundShardRoute, methods: Iterable[str]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the Starlette endpoint of a route at a path. Raise ``Invalid`` if another route is there."""
        for method in _with_head(methods):
            if (path, method) in self._routes:
                raise Invalid(
                    f"two routes are served at {method} {path}",
                    path="add_route",
                    hint="Give one of them another path, or other methods.",
                )
            self._routes[path, method] = route

        async def endpoint(request: Request) -> Response:
            try:
                answer = await self._answer(path, route, request)
            except GazetteError as error:
                return failure_answer(error)
            reply = answer.value
            return Response(reply.body, reply.status, {**reply.headers, **result_headers(answer)})

        return endpoint

    async def _answer(
        self, path: str, route: BoundShardRoute, request: Request
    ) -> QueryResult[HttpAnswer]:
        service = self._service
        check_headers(request)
        content_encoding(request, {})
        headers = _joined(request)
        claims = service.verifier.verify(headers.pop("authorization", None), route.capability)
        shard_request = ShardRequest(
            path,
            request.method,
            {name: str(value) for name, value in request.path_params.items()},
            _arguments(request),
            headers,
            await _bounded_body(request),
        )
        # Only members may send this header: drop it from other callers.
        values = {name: value for name, value in headers.items() if not name.endswith("-bin")}
        return await route.answer(service, shard_request, values, claims)

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
            route = self._routes.get((request.route, request.method))
            if route is None:
                raise NotFound(
                    f"this member has no route {request.method} {request.route}",
                    hint="Members of one cluster must run the same version of the application.",
                )
            answer = await self._answer_peer(route, request, context.invocation_metadata())
            context.set_trailing_metadata(tuple(result_headers(answer).items()))
            return msgspec.msgpack.encode(answer.value)
        raise AssertionError("unreachable: the context was aborted")

    async def _answer_peer(
        self, route: BoundShardRoute, request: ShardRequest, metadata: Any
    ) -> QueryResult[HttpAnswer]:
        service = self._service
        claims = service.verifier.verify(authorization_of(metadata), route.capability)
        values = values_of(metadata)
        if not request.shard:  # Of a member of an older version.
            return await route.answer(service, request, values, claims)
        query = query_of(request.shard, values, claims)
        return await ask(service, route, request, query, route.timeout_s)


def _joined(request: Request) -> dict[str, str]:
    """Return the headers of a request. Those of one name are a list, as in HTTP."""
    headers = request.headers
    return {
        name: ("; " if name == "cookie" else ", ").join(headers.getlist(name))
        for name in headers.keys()  # noqa: SIM118 - it is no dict.
    }


def _arguments(request: Request) -> dict[str, str]:
    """Return the parameters of the query. Raise ``Invalid`` for one that the path has as well, or twice."""
    arguments = single_arguments(request)
    for name in arguments:
        if name in request.path_params:
            raise Invalid(f"the path has the parameter {name} already", path=name)
    return arguments


def _with_head(methods: Iterable[str]) -> list[str]:
    """Return methods as Starlette takes them: in capitals, and HEAD with GET."""
    found = {method.upper() for method in methods}
    return sorted(found | {"HEAD"} if "GET" in found else found)


async def _bounded_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise Invalid(
                f"request body is too large (expected <= {BODY_BYTES_MAX} bytes)", path="body"
            )
    return bytes(body)


def encoded(value: Any, route: str) -> HttpAnswer:
    """Encode a reply, on the thread of the query, so that its content does not change meanwhile.

    Raise ``ApplicationFailed`` for a value that cannot be encoded.
    """
    with answering(route):
        return _encoded(value)


def _encoded(value: Any) -> HttpAnswer:
    if isinstance(value, Response):
        headers = {name: text for name, text in value.headers.items() if name != "content-length"}
        body = getattr(value, "body", None)
        if not isinstance(body, bytes | memoryview):
            raise Invalid(
                f"a {type(value).__name__} cannot be passed on",
                hint="Return a Response with a body, or a value that can be written as JSON.",
            )
        return HttpAnswer(value.status_code, headers, bytes(body))
    return json_answer(answer_json(value))


def json_answer(body: bytes) -> HttpAnswer:
    return HttpAnswer(200, {"content-type": "application/json"}, body)


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
    headers: Mapping[str, str] | None = {"retry-after": RETRY_AFTER_S} if status == 503 else None
    if isinstance(error, Refusal):
        status, headers = error.code, error.headers
    return JSONResponse({"error": text, "hint": error.hint}, status, headers)
