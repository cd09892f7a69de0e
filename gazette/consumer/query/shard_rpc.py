"""``@shard_rpc``: a gRPC method of an application that shards answer.

    class Counts(CountsServicer):
        def __init__(self, service: ConsumerService) -> None:
            self.service = service

        @shard_rpc(CountsStub)
        def Count(self, store: CountStore, request: CountRequest) -> CountResponse:
            return CountResponse(n=store.count(request.word))

The method is called on a thread of the member that answers, with that shard's store. Any member
takes the call: it authorizes the caller, finds the shard, and serves the call or passes it on. It
waits through a fail-over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, Final, Generic, Protocol, TypeVar, overload

import grpc.aio

from gazette.auth import Capability, Claims, Verifier, authorization_of
from gazette.client.rpc.channel import Channels
from gazette.client.rpc.credentials import shard_claims
from gazette.consumer.query.query import EVERYTHING, QueryResult, ShardQuery, rpc_errors
from gazette.consumer.query.query_codec import (
    metadata_of,
    query_of,
    result_headers,
    result_of,
    values_of,
)
from gazette.consumer.query.query_method import query_method
from gazette.errors import Invalid
from gazette.protocol.route import Header
from gazette.protocol.shard import ShardSpec

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
T = TypeVar("T")

_HEADER_FIELD: Final = "header"
_HEADER_TYPE: Final = "protocol.Header"


class ShardCaller(Protocol):
    """The part of a `ConsumerService` that has shards answer."""

    @property
    def peers(self) -> Channels:
        """Channels to the other members."""
        ...

    @property
    def verifier(self) -> Verifier:
        """Verifier of the tokens of requests to this member."""
        ...

    @property
    def query_timeout_s(self) -> float:
        """Seconds that a query may take unless its route or method says otherwise."""
        ...

    async def ask_shard(
        self,
        query: ShardQuery,
        serve: Callable[[Any], T],
        proxy: Callable[[grpc.aio.Channel, ShardQuery], Awaitable[QueryResult[T]]],
        *,
        timeout_s: float | None = None,
    ) -> QueryResult[T]:
        """Have a shard answer, and say which member did: see `QueryRouter.ask`.

        ``timeout_s`` defaults to the settings'. A member that is starting answers once it
        knows its cluster.
        """
        ...

    async def shard_of_key(
        self, key: Any, *, claims: Claims = EVERYTHING, timeout_s: float | None = None
    ) -> str:
        """Return the id of the shard that reads messages with a key, of those that ``claims`` cover.

        The key is mapped to a partition of `Application.keyed_journals` as publishers do. A text is read as
        the declared type of the key (`Application.key_encoding`). Raise ``Invalid`` if it cannot be, if the
        application has no such journals, or if several shards read that partition. Raise
        ``NotFound`` if no shard does. Raise ``Unavailable`` if no broker lists them in time, or this
        member leaves. ``timeout_s`` defaults to ``query_timeout_s``.
        """
        ...

    async def all_shards(self, *, timeout_s: float | None = None) -> Sequence[ShardSpec]:
        """Return the specifications of all shards, by id.

        Raise ``Unavailable`` if the member does not know them in time. ``timeout_s`` defaults to
        ``query_timeout_s``.
        """
        ...


class Deadline:
    """The time of one query: to find its shard, and to have that answer."""

    def __init__(self, service: ShardCaller, timeout_s: float | None) -> None:
        seconds = service.query_timeout_s if timeout_s is None else timeout_s
        self._at = asyncio.get_running_loop().time() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._at - asyncio.get_running_loop().time())


def shard_rpc(
    stub: Callable[[Any], Any],
    *,
    key: str | Callable[[Any], Any] | None = None,
    shard: Callable[[Any], str] | None = None,
    capability: int = Capability.READ,
    timeout_s: float | None = None,
) -> Callable[[Callable[[Any, Any, RequestT], ResponseT]], ShardRpc[RequestT, ResponseT]]:
    """Decorate a unary method of a servicer; ``stub`` is the generated class of its service's clients.

    ``key`` names a field of the request, or is a function of it. It finds the shard as publishers
    find the partition of a message with that key. Otherwise ``shard(request)`` returns the id of the
    shard to ask, by default the request's field ``shard``. With authentication, a caller needs
    ``capability`` for that shard. ``timeout_s`` bounds how long to wait for a shard (default:
    ``--consumer.query-timeout``).

    The decorated method gets ``(self, store, request)``, must only read, and may be called again.
    ``self`` must have an attribute ``service``. Metadata of a call carry what it allows and asks
    for: see `consumer/query/query_codec`. A request may have a field ``header`` of type
    ``protocol.Header``. Such a request is passed on with the header, as members of other
    implementations expect.

    Its ``ask`` calls it in this process: ``await api.Count.ask(request)``. Raise ``Invalid`` if both
    ``key`` and ``shard`` are given.
    """
    if key is not None and shard is not None:
        raise Invalid("give key or shard, not both", path="shard_rpc")
    of_key = attrgetter(key) if isinstance(key, str) else key
    of_shard = attrgetter("shard") if shard is None else shard

    async def find(service: ShardCaller, request: Any, claims: Claims, timeout_s: float) -> Any:
        if of_key is None:
            return of_shard(request)
        return await service.shard_of_key(of_key(request), claims=claims, timeout_s=timeout_s)

    def decorate(method: Callable[[Any, Any, RequestT], ResponseT]) -> ShardRpc[Any, Any]:
        method = query_method(method, ("self", "store", "request"))
        return ShardRpc(method, stub, find, capability, timeout_s)

    return decorate


class ShardRpc(Generic[RequestT, ResponseT]):
    """A descriptor for one method of a class, made by ``@shard_rpc``."""

    def __init__(
        self,
        method: Callable[[Any, Any, RequestT], ResponseT],
        stub: Callable[[Any], Any],
        shard: Callable[[ShardCaller, Any, Claims, float], Awaitable[Any]],
        capability: int,
        timeout_s: float | None,
    ) -> None:
        self.method = method
        self.stub = stub
        self.shard = shard
        self.capability = capability
        self.timeout_s = timeout_s
        self.name = method.__name__
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> ShardRpc[RequestT, ResponseT]: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> BoundShardRpc[RequestT, ResponseT]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else BoundShardRpc(self, instance)


class BoundShardRpc(Generic[RequestT, ResponseT]):
    """The method of one servicer."""

    def __init__(self, rpc: ShardRpc[RequestT, ResponseT], instance: Any) -> None:
        self._rpc = rpc
        self._instance = instance

    async def __call__(self, request: RequestT, context: Any) -> ResponseT:
        """Answer a call."""
        async with rpc_errors(context):
            values = values_of(context.invocation_metadata())
            service = service_of(self._instance)
            claims = service.verifier.verify(
                authorization_of(context.invocation_metadata()), self._rpc.capability
            )
            deadline = Deadline(service, self._rpc.timeout_s)
            shard = await self._rpc.shard(service, request, claims, deadline.left_s)
            query = _with_field(query_of(shard, values, claims), request)
            answer = await self._answer(service, request, query, deadline)
            context.set_trailing_metadata(tuple(result_headers(answer).items()))
            return answer.value
        raise AssertionError("unreachable: the context was aborted")

    async def ask(
        self,
        request: RequestT,
        *,
        shard: str | None = None,
        read_through: dict[str, int] | None = None,
        max_staleness_s: float | None = None,
        claims: Claims = EVERYTHING,
    ) -> QueryResult[ResponseT]:
        """Have a shard answer a request of this process. Raise as `QueryRouter.ask` does."""
        service = service_of(self._instance)
        deadline = Deadline(service, self._rpc.timeout_s)
        if shard is None:
            shard = await self._rpc.shard(service, request, claims, deadline.left_s)
        query = ShardQuery(shard, read_through or {}, max_staleness_s, None, claims)
        return await self._answer(service, request, query, deadline)

    async def _answer(
        self, service: ShardCaller, request: RequestT, query: ShardQuery, deadline: Deadline
    ) -> QueryResult[ResponseT]:
        rpc = self._rpc

        async def forward(
            channel: grpc.aio.Channel, forwarded: ShardQuery
        ) -> QueryResult[ResponseT]:
            own = shard_claims(rpc.capability, forwarded.shard)
            metadata = (*(service.peers.credentials.metadata(own) or ()), *metadata_of(forwarded))
            method: Callable[..., Awaitable[Any]] = getattr(rpc.stub(channel), rpc.name)
            call: Any = method(_with_header(request, forwarded.header), metadata=metadata)
            response = await call
            return result_of(response, values_of(await call.trailing_metadata()))

        return await service.ask_shard(
            query,
            lambda store: rpc.method(self._instance, store, request),
            forward,
            timeout_s=deadline.left_s,
        )


def service_of(instance: Any) -> ShardCaller:
    """Return the service whose shards are asked. Raise ``Invalid`` without one."""
    service: ShardCaller | None = getattr(instance, "service", None)
    if service is None:
        raise Invalid(
            f"{type(instance).__name__} has no attribute service",
            hint="Set self.service to the ConsumerService that Application.initialize gets.",
        )
    return service


def _has_header(message: Any) -> bool:
    descriptor = getattr(message, "DESCRIPTOR", None)
    found = None if descriptor is None else descriptor.fields_by_name.get(_HEADER_FIELD)
    return (
        found is not None
        and found.message_type is not None
        and found.message_type.full_name == _HEADER_TYPE
    )


def _with_field(query: ShardQuery, request: Any) -> ShardQuery:
    """Return the query with the header that the request itself carries."""
    if query.header is not None or not _has_header(request) or not request.HasField("header"):
        return query
    return ShardQuery(
        query.shard,
        query.read_through,
        query.max_staleness_s,
        Header.from_pb(request.header),
        query.claims,
    )


def _with_header(request: Any, header: Header | None) -> Any:
    if header is None or not _has_header(request):
        return request
    copy = type(request)()
    copy.CopyFrom(request)
    copy.header.CopyFrom(header.to_pb())
    return copy
