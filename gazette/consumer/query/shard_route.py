"""``@shard_route``: an HTTP route of an application that one shard answers.

    class WordCount(Application[CountStore]):
        words = Source("words", Word, partitions=4, key="word")

        @shard_route("/counts/{word}", key="word")
        def count(self, store: CountStore, request: ShardRequest) -> dict[str, int]:
            return {"n": store.count(request.path["word"])}

Methods of an application are served at their paths. Add the methods of other objects by hand:

    service.add_route("/shards/{shard}/count", api.count)

Members forward requests by gRPC: see `HttpQueries`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import grpc.aio
import msgspec
from starlette.responses import Response

from gazette.auth import Capability, Claims
from gazette.consumer.query.answer_json import answer_json
from gazette.consumer.query.query import QueryResult, ShardQuery
from gazette.consumer.query.query_codec import Values, of_shard, query_of
from gazette.consumer.query.query_method import answering, query_method
from gazette.consumer.query.shard_caller import Question, ShardCaller, find_by
from gazette.errors import Invalid
from gazette.runtime.decoders import msgpack_decoder

METHOD: Final = "/gazette.consumer.HttpQueries/Ask"


class ShardRequest(msgspec.Struct, frozen=True):
    """An HTTP request as the answering member gets it."""

    route: str
    """The route's path as given to ``add_route``."""
    method: str
    """``GET``, ``POST`` or another method of the route."""
    path: Mapping[str, str]
    """Parameters of the route's path."""
    query: Mapping[str, str]
    """Parameters of the query string. Each is given once."""
    headers: Mapping[str, str]
    """Headers by lower-case name, without ``authorization``. The values of a name are joined by commas,
    cookies by semicolons."""
    body: bytes = b""
    """The bytes of the body."""
    shard: str = ""
    """The shard that is asked. Empty before a function of the route has chosen the shard."""

    def json(self) -> Any:
        """Return the decoded body. Raise ``Invalid`` unless the body is JSON."""
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
AskShards: TypeAlias = Callable[[Question[HttpAnswer]], Awaitable[QueryResult[HttpAnswer]]]
"""Function that finds the shards of a request and asks them."""
Reply: TypeAlias = Callable[[Callable[..., Any], Any, ShardRequest], HttpAnswer]
"""Function that calls a method and encodes its answer: ``reply(method, store, request)``, on a thread."""


def shard_of(request: ShardRequest) -> str:
    """Return the shard that a request names by the parameter ``shard`` of its path or query string."""
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

    A method of an `Application` is served at ``path``. Without a path, pass the method to ``add_route``.
    With ``key``, the shard is found as publishers find the partition of a message with that key. Without,
    ``shard(request)`` returns the id of the shard, by default the parameter ``shard``.

    The method gets ``(self, store, request)`` on a thread of the member that answers. It returns a Starlette
    ``Response``, or a value that JSON can represent: see `answer_json`. A `GazetteError` becomes a status:
    ``NotFound`` 404, ``Invalid`` 400, ``NotAllowed`` 401, ``Retryable`` and ``Closed`` 503, others 500. If a
    shard does not answer in time, or the member leaves its cluster, the status is 503. Answers with 503 have
    ``Retry-After``. Raise ``Invalid`` for parameters that do not fit together.
    """
    of_key = partial(key_of, key) if isinstance(key, str) else key
    find = find_by("shard_route", of_key, shard, shard_of)

    async def ask_shards(asked: Question[HttpAnswer]) -> QueryResult[HttpAnswer]:
        return await asked.ask(of_shard(asked.query, await find(asked)))

    def reply(method: Callable[..., Any], store: Any, request: ShardRequest) -> HttpAnswer:
        return encoded(method(store, request), request.route)

    route = ShardRoute(checked_path(path), methods, capability, timeout_s, ask_shards, reply, key)
    return route.decorate("request")


def key_of(name: str, request: ShardRequest) -> str:
    """Return the parameter of a request that is the key. Raise ``Invalid`` if it is missing."""
    value = request.path.get(name, request.query.get(name))
    if value is None:
        raise Invalid(f"the request has no parameter {name}", path=name, hint=f"Add ?{name}=….")
    return value


def checked_path(path: object) -> str:
    """Return the path of a decorator. Raise ``Invalid`` unless it is empty or begins with a slash. For a
    decorator without parentheses, ``path`` is the method."""
    if not isinstance(path, str) or (path and not path.startswith("/")):
        raise Invalid(
            f"{path!r} is not the path of a route",
            path="shard_route",
            hint='Write @shard_route("/counts/{word}", key="word"), or @shard_route() and add_route.',
        )
    return path


@dataclass
class ShardRoute:
    """A route made by a decorator: a descriptor of its class. With ``instance``, the route of one object."""

    path: str
    """Path that the decorator gives. Empty if ``add_route`` gives the path."""
    methods: Iterable[str]
    capability: int
    """Capability that the token of a caller needs."""
    timeout_s: float | None
    ask_shards: AskShards
    reply: Reply
    key: KeyOf | None = None
    """The key whose shard answers: a function of the request, or the name of a parameter of the path or the
    query string."""
    method: Callable[..., Any] = lambda *_: None
    instance: Any = None

    def decorate(self, parameter: str) -> Callable[[Callable[[Any, Any, Any], Any]], ShardRoute]:
        """Return the decorator. A method of a class gets ``(self, store, parameter)``."""
        names, methods = ("self", "store", parameter), tuple(self.methods)
        return lambda method: replace(self, methods=methods, method=query_method(method, names))

    def __post_init__(self) -> None:
        self.__doc__ = self.method.__doc__

    def __get__(self, instance: Any, owner: type) -> ShardRoute:
        return self if instance is None else replace(self, instance=instance)

    async def answer(
        self, service: ShardCaller, request: ShardRequest, values: Values, claims: Claims
    ) -> QueryResult[HttpAnswer]:
        """Have shards answer. For the errors see `QueryRouter.ask`."""
        question = Question(service, self, request, query_of(values, claims))
        if request.shard:  # Another member has found the shard and forwarded the request.
            return await question.ask(of_shard(question.query, request.shard))
        return await self.ask_shards(question)

    def serve(self, store: Any, request: ShardRequest, query: ShardQuery) -> HttpAnswer:
        """Return the answer of a shard of this member. Called on a thread."""
        request = msgspec.structs.replace(request, shard=query.shard)
        return self.reply(partial(self.method, self.instance), store, request)

    def send(
        self, channel: grpc.aio.Channel, request: ShardRequest, query: ShardQuery, own: Any
    ) -> Any:
        """Begin the call that forwards a query."""
        request = msgspec.structs.replace(request, shard=query.shard)
        method: Any = channel.unary_unary(METHOD, None, None)
        return method(msgspec.msgpack.encode(request), metadata=own)

    def decode(self, response: bytes) -> HttpAnswer:
        """Return the answer in the response of another member."""
        return msgpack_decoder(HttpAnswer).decode(response)


def routes_of(instance: Any) -> list[ShardRoute]:
    """Return the methods of an object whose decorators give a path, ordered by name."""
    cls = type(instance)
    names = [name for name in dir(cls) if isinstance(getattr(cls, name, None), ShardRoute)]
    bound: list[ShardRoute] = [getattr(instance, name) for name in names]
    return [route for route in bound if route.path]


def encoded(value: Any, route: str) -> HttpAnswer:
    """Encode a reply. Raise ``ApplicationFailed`` for a value that cannot be encoded.

    Call this on the thread of the query, before the content of the reply can change.
    """
    with answering(route):
        return _encoded(value)


def _encoded(value: Any) -> HttpAnswer:
    if isinstance(value, Response):
        headers = {name: text for name, text in value.headers.items() if name != "content-length"}
        if len(value.headers) > len({*value.headers.keys()}):
            repeated = sorted(name for name in headers if len(value.headers.getlist(name)) > 1)
            raise Invalid(
                f"the {type(value).__name__} has more than one header {repeated[0]}",
                hint="A reply of a shard has each header once. Put all values into one header.",
            )
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
