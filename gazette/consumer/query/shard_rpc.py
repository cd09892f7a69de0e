"""``@shard_rpc``: a gRPC method of an application that shards answer.

    class Counts(CountsServicer):
        def __init__(self, service: ConsumerService) -> None:
            self.service = service

        @shard_rpc(CountsStub)
        def Count(self, store: CountStore, request: CountRequest) -> CountResponse:
            return CountResponse(n=store.count(request.word))

The method runs on a thread of the member that answers, with the store of the shard. Clients call any
member: the called member authorizes the caller, finds the shard, and serves or forwards the call.
During a fail-over, the call waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import grpc.aio

from gazette.auth import Capability, Claims
from gazette.consumer.query.query import EVERYTHING, QueryResult, ShardQuery
from gazette.consumer.query.query_codec import of_shard, query_of, values_of
from gazette.consumer.query.query_method import query_method
from gazette.consumer.query.shard_caller import (
    Find,
    Question,
    ShardCaller,
    answer_call,
    caller_of,
    find_by,
)
from gazette.errors import Invalid
from gazette.protocol.route import Header

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_HEADER_TYPE: Final = "protocol.Header"


def shard_rpc(
    stub: Callable[[Any], Any],
    *,
    key: str | Callable[[Any], Any] | None = None,
    shard: Callable[[Any], str] | None = None,
    capability: int = Capability.READ,
    timeout_s: float | None = None,
) -> Callable[[Callable[[Any, Any, RequestT], ResponseT]], ShardRpc[RequestT, ResponseT]]:
    """Decorate a unary method of a servicer. ``stub`` is the generated client class of the service.

    ``key`` is the name of a request's field, or a function of the request. With it, the shard is found as
    publishers find the partition of a message with that key. Without, ``shard(request)`` returns the shard's
    id, by default the request's field ``shard``. With authentication, a caller needs ``capability`` for the
    shard. ``timeout_s`` bounds the whole query (default: ``--consumer.query-timeout``). Raise ``Invalid`` if
    both ``key`` and ``shard`` are given.

    The decorated method gets ``(self, store, request)``, must only read, and may be called again.
    ``self`` must have an attribute ``service``. Callers set staleness and offsets by metadata: see
    `consumer/query/query_codec`. If requests have a field ``header`` of type ``protocol.Header``, this member
    sets the field before it forwards a request, as members of other implementations expect.

    Code in the same process calls ``await api.Count.ask(request)``.
    """
    of_key = attrgetter(key) if isinstance(key, str) else key
    find = find_by("shard_rpc", of_key, shard, attrgetter("shard"))

    def decorate(method: Callable[[Any, Any, RequestT], ResponseT]) -> ShardRpc[Any, Any]:
        method = query_method(method, ("self", "store", "request"))
        return ShardRpc(method, stub, find, capability, timeout_s, method.__name__)

    return decorate


@dataclass
class ShardRpc(Generic[RequestT, ResponseT]):
    """A method made by ``@shard_rpc``: a descriptor of its class. If bound, ``instance`` is the servicer."""

    method: Callable[[Any, Any, RequestT], ResponseT]
    stub: Callable[[Any], Any]
    find: Find
    capability: int
    timeout_s: float | None
    name: str
    instance: Any = None

    def __post_init__(self) -> None:
        self.__doc__ = self.method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> ShardRpc[RequestT, ResponseT]:
        return self if instance is None else replace(self, instance=instance)

    def admit(self, path: str, metadata: Any) -> None:
        """Check the head of a call, before its message is read. Raise ``NotAllowed`` without `capability`."""
        del path
        if getattr(self.instance, "service", None) is not None:  # If it is None, the call raises.
            caller_of(self.instance.service, metadata, self.capability)

    async def __call__(self, request: RequestT, context: Any) -> ResponseT:
        """Answer a call."""

        async def answer(metadata: Any) -> QueryResult[ResponseT]:
            service = service_of(self.instance)
            claims = caller_of(service, metadata, self.capability)
            query = query_of(values_of(metadata), claims)
            if query.header is None and (header := _header_of(request)) is not None:
                query = replace(query, header=header)
            question = Question(service, self, request, query)
            return await question.ask(of_shard(query, await self.find(question)))

        return await answer_call(context, answer)

    async def ask(
        self,
        request: RequestT,
        *,
        shard: str | None = None,
        read_through: dict[str, int] | None = None,
        max_staleness_s: float | None = None,
        claims: Claims = EVERYTHING,
    ) -> QueryResult[ResponseT]:
        """Ask a shard from this process: ``shard``, or if None, the shard that the request decides, as in a
        call. For the errors see `QueryRouter.ask`."""
        query = ShardQuery(shard or "", read_through or {}, max_staleness_s, None, claims)
        question = Question(service_of(self.instance), self, request, query)
        if shard is None:
            query = replace(query, shard=await self.find(question))
        return await question.ask(query)

    def serve(self, store: Any, request: RequestT, query: ShardQuery) -> ResponseT:
        """Return the answer of a shard of this member. Called on a thread."""
        del query
        return self.method(self.instance, store, request)

    def send(self, channel: grpc.aio.Channel, request: Any, query: ShardQuery, own: Any) -> Any:
        """Begin the call that forwards a query."""
        if query.header is not None and _takes_header(request):
            copy = type(request)()
            copy.CopyFrom(request)
            copy.header.CopyFrom(query.header.to_pb())
            request = copy
        return getattr(self.stub(channel), self.name)(request, metadata=own)

    def decode(self, response: ResponseT) -> ResponseT:
        """Return the answer of another member, which the stub has decoded."""
        return response


def service_of(instance: Any) -> ShardCaller:
    """Return the attribute ``service`` of a servicer. Raise ``Invalid`` if it is missing."""
    service: ShardCaller | None = getattr(instance, "service", None)
    if service is None:
        raise Invalid(
            f"{type(instance).__name__} has no attribute service",
            hint="Set self.service to the ConsumerService that Application.initialize gets.",
        )
    return service


def _takes_header(message: Any) -> bool:
    fields = getattr(getattr(message, "DESCRIPTOR", None), "fields_by_name", {})
    header_type = getattr(fields.get("header"), "message_type", None)
    return header_type is not None and header_type.full_name == _HEADER_TYPE


def _header_of(message: Any) -> Header | None:
    has_header = _takes_header(message) and message.HasField("header")
    return Header.from_pb(message.header) if has_header else None
