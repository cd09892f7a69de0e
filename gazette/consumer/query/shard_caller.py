"""The core of all queries: find the shard, authorise the caller, ask the member that serves the shard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc.aio

from gazette.auth import Claims, Verifier, authorization_of
from gazette.client.rpc.channel import Channels
from gazette.client.rpc.credentials import shard_claims
from gazette.consumer.query.query import EVERYTHING, QueryResult, ShardQuery, rpc_errors
from gazette.consumer.query.query_codec import (
    metadata_of,
    result_headers,
    result_of,
    values_of,
)
from gazette.errors import Invalid
from gazette.protocol.shard import ShardSpec

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", covariant=True)


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

        Map the key to a partition of `Application.keyed_journals`, as publishers do. Read a text as the
        declared type of the key (`Application.key_encoding`). Raise ``Invalid`` if that fails, if the
        application has no such journals, or if several shards read the partition. Raise ``NotFound`` if
        no shard reads it. Raise ``Unavailable`` if no broker lists the journals in time, or if this
        member leaves. ``timeout_s`` defaults to ``query_timeout_s``.
        """
        ...

    async def all_shards(self, *, timeout_s: float | None = None) -> Sequence[ShardSpec]:
        """Return the specifications of all shards, by id.

        Raise ``Unavailable`` if the member does not know them in time. ``timeout_s`` defaults to
        ``query_timeout_s``.
        """
        ...


class Answerer(Protocol[AnswerT]):
    """A method of an application that shards answer, with the adapter that serves it and passes it on."""

    capability: int
    """Capability that the token of a caller needs."""
    timeout_s: float | None
    """Seconds that a query may take; None: as the settings say."""

    def serve(self, store: Any, request: Any, query: ShardQuery) -> AnswerT:
        """Return what a shard answers. Called on a thread."""
        ...

    def send(self, channel: grpc.aio.Channel, request: Any, query: ShardQuery, own: Any) -> Any:
        """Begin the call that passes a query on. ``own`` are the metadata of this member."""
        ...

    def decode(self, response: Any) -> AnswerT:
        """Return the answer of another member."""
        ...


class Question(Generic[T]):
    """A request to shards, from its arrival to the answer. Loop-bound."""

    def __init__(
        self, service: ShardCaller, method: Answerer[T], request: Any, query: ShardQuery
    ) -> None:
        """Start the clock of the query's time-out: it covers finding the shard and the answer."""
        seconds = service.query_timeout_s if method.timeout_s is None else method.timeout_s
        self._until = asyncio.get_running_loop().time() + seconds
        self._method = method
        self.service = service
        self.request = request
        self.query = query
        """The query, before its shard is known."""

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until - asyncio.get_running_loop().time())

    async def ask(self, query: ShardQuery) -> QueryResult[T]:
        """Have one shard answer, at whichever member. Raise as `QueryRouter.ask` does."""
        method, request = self._method, self.request

        async def forward(channel: grpc.aio.Channel, forwarded: ShardQuery) -> QueryResult[T]:
            # The caller's token must not be passed on: the peer gets a token of this member.
            claims = shard_claims(method.capability, forwarded.shard)
            own = (*self.service.peers.credentials.metadata(claims), *metadata_of(forwarded))
            call = method.send(channel, request, forwarded, own)
            response = method.decode(await call)
            return result_of(response, values_of(await call.trailing_metadata()))

        return await self.service.ask_shard(
            query, lambda store: method.serve(store, request, query), forward, timeout_s=self.left_s
        )


Find: TypeAlias = Callable[[Question[Any]], Awaitable[Any]]
"""Function that returns the id of the shard for a request."""


def find_by(
    place: str,
    key: Callable[[Any], Any] | None,
    shard: Callable[[Any], Any] | None,
    default: Callable[[Any], Any],
) -> Find:
    """Return the function that finds the shard of a request by its key, or by the shard that it names.

    Raise ``Invalid`` if both ``key`` and ``shard`` are given.
    """
    if key is not None and shard is not None:
        raise Invalid("give key or shard, not both", path=place)
    of_request = shard or default

    async def find(asked: Question[Any]) -> Any:
        if key is None:
            return of_request(asked.request)
        return await asked.service.shard_of_key(
            key(asked.request), claims=asked.query.claims, timeout_s=asked.left_s
        )

    return find


def caller_of(service: ShardCaller, metadata: Any, capability: int) -> Claims:
    """Return the claims in the metadata of a call. Raise ``NotAllowed`` if they lack ``capability``."""
    return service.verifier.verify(authorization_of(metadata), capability)


async def answer_call(context: Any, answer: Callable[[Any], Awaitable[QueryResult[T]]]) -> T:
    """Answer a gRPC call by ``answer(metadata)``. The trailing metadata name the member that answered."""
    async with rpc_errors(context):
        result = await answer(context.invocation_metadata())
        context.set_trailing_metadata(tuple(result_headers(result).items()))
        return result.value
    raise AssertionError("unreachable: the context was aborted")
