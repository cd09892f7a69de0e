"""The core of all queries: find the shard, authorize the caller, ask the member that serves the shard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import grpc.aio

from gazette.auth import Claims, Verifier, authorization_of
from gazette.client.rpc.credentials import shard_claims
from gazette.consumer.query.keyed_shard import one_reader
from gazette.consumer.query.query import EVERYTHING, QueryResult, ShardQuery, rpc_errors
from gazette.consumer.query.query_codec import metadata_of, result_headers, result_of, values_of
from gazette.consumer.query.running_queries import RunningQueries
from gazette.errors import Invalid, Unavailable
from gazette.message.keys import KeyEncoding
from gazette.message.mapping import PartitionWatch, modulo_mapping
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.route import Header
from gazette.protocol.shard import ShardSpec
from gazette.runtime.tasks import TaskScope, first_of
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.client.client import Client
    from gazette.client.rpc.channel import Channels
    from gazette.consumer.settings import ConsumerSettings
    from gazette.net.server import Server
    from gazette.protocol.ids import ProcessId
    from gazette.runtime.clock import Clock

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", covariant=True)


class ShardRouter(Protocol):
    """The methods of `QueryRouter` that queries use."""

    def shards(self, selector: LabelSelector) -> Sequence[ShardSpec]: ...
    def shards_with_source(self, journal: str) -> tuple[ShardSpec, ...]: ...
    async def ask(
        self,
        query: ShardQuery,
        serve: Callable[[Any], T],
        proxy: Callable[[grpc.aio.Channel, ShardQuery], Awaitable[QueryResult[T]]],
        timeout_s: float,
    ) -> QueryResult[T]: ...


class KeyedJournals(Protocol):
    """The methods of an `Application` that say which shard has a key."""

    def keyed_journals(self) -> LabelSelector | None: ...
    def key_encoding(self) -> KeyEncoding: ...


class LocalMember(Protocol):
    """The part of a `ClusterMember` that its queries use: queries do not call etcd."""

    settings: ConsumerSettings
    peers: Channels
    stopping: asyncio.Event
    failed: asyncio.Event
    phase: str

    @property
    def clock(self) -> Clock: ...
    @property
    def daemons(self) -> TaskScope: ...
    @property
    def process_id(self) -> ProcessId: ...
    @property
    def server(self) -> Server: ...
    @property
    def verifier(self) -> Verifier: ...


class ShardCaller:
    """The part of a `ConsumerService` that asks shards. Loop-bound."""

    def __init__(self, member: LocalMember, application: KeyedJournals, client: Client) -> None:
        self.settings = member.settings
        """Settings of the member, from flags, environment and file."""
        self.client = client
        """Client of the brokers. The member closes it."""
        self.clock = member.clock
        """Clock of the process. Tests replace it."""
        self.peers = member.peers
        """Channels to the other members."""
        self.verifier = member.verifier
        """Verifier of the tokens of requests to this member."""
        self.running_queries = RunningQueries()
        self._member = member
        self._application = application
        self._partitions: dict[str, PartitionWatch] = {}
        self._router: ShardRouter | None = None
        self._started = asyncio.Event()

    @property
    def query_timeout_s(self) -> float:
        """Seconds that a query may take, unless its route or method gives another number."""
        return self.settings.query_timeout_s

    @property
    def has_begun(self) -> bool:
        """True once the member knows its cluster."""
        return self._started.is_set()

    def begin(self, router: ShardRouter) -> None:
        """Ask shards through ``router`` from now on, since the member knows its cluster now."""
        self._router = router
        self._started.set()

    @property
    def _shards(self) -> ShardRouter:
        if self._router is None:
            raise Unavailable("the consumer is starting")
        return self._router

    def partitions(self, selector: LabelSelector) -> PartitionWatch:
        """Return a watch of the matching journals, for mapping functions to choose from.

        The watch is empty until brokers answer for the first time: ``await partitions.ready()`` if a request
        needs the journals.
        """
        key = str(selector)
        watch = self._partitions.get(key)
        if watch is None:
            watch = self._partitions[key] = PartitionWatch(self.client.watch_journals(selector))
            self._member.daemons.daemon(watch.run(), name=f"partitions {key}")
        return watch

    def shards_with_source(self, journal: str) -> tuple[ShardSpec, ...]:
        """Return the specifications of shards that read a journal, also of disabled ones, in order of ids.

        Raise ``Unavailable`` while the member starts.
        """
        return self._shards.shards_with_source(journal)

    async def call_shard(
        self,
        shard_id: str,
        serve: Callable[[Any], T],
        proxy: Callable[[grpc.aio.Channel, Header], Awaitable[T]],
        *,
        header: Header | None = None,
        read_through: Mapping[str, int] | None = None,
        claims: Claims | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """Have the primary of a shard answer, at any member.

        If this member is the primary, call ``serve(store)`` on a thread. Otherwise call
        ``proxy(channel, header)`` with a channel to the primary's member. For the errors see
        `QueryRouter.ask`. The decorators `shard_rpc` and `shard_route` make this call for a method.
        """
        query = ShardQuery(shard_id, read_through or {}, None, header, claims or EVERYTHING)

        async def forward(channel: grpc.aio.Channel, forwarded: ShardQuery) -> QueryResult[T]:
            assert forwarded.header is not None
            return QueryResult(await proxy(channel, forwarded.header), None)

        return (await self.ask_shard(query, serve, forward, timeout_s=timeout_s)).value

    async def ask_shard(
        self,
        query: ShardQuery,
        serve: Callable[[Any], T],
        proxy: Callable[[grpc.aio.Channel, ShardQuery], Awaitable[QueryResult[T]]],
        *,
        timeout_s: float | None = None,
    ) -> QueryResult[T]:
        """Have a shard answer, and return the answer with the member that gave it: see `QueryRouter.ask`.

        ``timeout_s`` is by default ``query_timeout_s``. A starting member answers once it knows its cluster.
        Raise ``Unavailable`` if the start takes too long, or if the member ends.
        """
        left_s = await self._await_start(timeout_s)
        if self.running_queries.ended:
            raise self.running_queries.leaving(shard=query.shard)
        return await self._shards.ask(query, serve, proxy, left_s)

    async def shard_of_key(
        self, key: Any, *, claims: Claims = EVERYTHING, timeout_s: float | None = None
    ) -> str:
        """Return the id of the shard that reads messages with a key, among the shards that ``claims`` cover.

        Map the key to a partition of `Application.keyed_journals`, as publishers do. Read a text as the
        declared type of the key (`Application.key_encoding`). Raise ``Invalid`` if ``key`` cannot be a key,
        if the application has no keyed journals, or if several shards read the partition. Raise ``NotFound``
        if no shard reads it. Raise ``Unavailable`` if no broker lists the journals in time, or if this
        member leaves. ``timeout_s`` is by default ``query_timeout_s``.
        """
        partitions = self.keyed_partitions()
        encoded = self._application.key_encoding().encode(key)
        left_s = await self._await_start(timeout_s)
        try:
            async with timeout(left_s) as deadline:
                with self.running_queries.query(deadline):
                    await partitions.ready()
        except TimeoutError as error:
            if self.running_queries.ended:
                raise self.running_queries.leaving() from None
            raise Unavailable(
                f"no broker has listed the partitions of keys within {left_s:.3g} s",
                hint="Check that brokers run at --broker.address.",
            ) from error
        journal = modulo_mapping(partitions, lambda key: key)(encoded).journal
        return one_reader(journal, self.shards_with_source(journal), claims.selector)

    async def all_shards(self, *, timeout_s: float | None = None) -> Sequence[ShardSpec]:
        """Return the specifications of all shards, in order of ids.

        Raise ``Unavailable`` if the member does not know its cluster in time. ``timeout_s`` is by default
        ``query_timeout_s``.
        """
        await self._await_start(timeout_s)
        return self._shards.shards(LabelSelector())

    def keyed_partitions(self) -> PartitionWatch:
        """Return the watch of `Application.keyed_journals`. Raise ``Invalid`` if that is None."""
        selector = self._application.keyed_journals()
        if selector is None:
            raise Invalid(
                "a key is to find a shard, and no source has a key",
                path=type(self._application).__qualname__,
                hint='Declare one: words = Source("words", Word, key="word").',
            )
        return self.partitions(selector)

    async def _await_start(self, timeout_s: float | None) -> float:
        """Wait until the member knows its cluster. Return the seconds of ``timeout_s`` that are left. Raise
        ``Unavailable`` if the wait takes too long, or the member ends."""
        seconds = self.query_timeout_s if timeout_s is None else timeout_s
        begun_at, member = self.clock.monotonic(), self._member
        if not self._started.is_set():
            with suppress(TimeoutError):
                async with timeout(seconds):
                    await first_of(self._started, member.stopping, member.failed)
            if not self._started.is_set():
                raise Unavailable(f"the consumer is {member.phase}")
        return max(0.0, seconds - (self.clock.monotonic() - begun_at))


class Answerer(Protocol[AnswerT]):
    """A method of an application that answers queries, with the adapter that serves and forwards them."""

    capability: int
    """Capability that the token of a caller needs."""
    timeout_s: float | None
    """Seconds that a query may take. If None, the settings say it."""

    def serve(self, store: Any, request: Any, query: ShardQuery) -> AnswerT:
        """Return the answer of a shard of this member. Called on a thread."""
        ...

    def send(self, channel: grpc.aio.Channel, request: Any, query: ShardQuery, own: Any) -> Any:
        """Begin the call that forwards a query. ``own`` is the metadata of this member."""
        ...

    def decode(self, response: Any) -> AnswerT:
        """Return the answer in the response of another member."""
        ...


class Question(Generic[T]):
    """A request to shards, from its arrival to the answer. Loop-bound."""

    def __init__(
        self, service: ShardCaller, method: Answerer[T], request: Any, query: ShardQuery
    ) -> None:
        """Start the time-out of the query, which covers finding the shard and its answer."""
        seconds = service.query_timeout_s if method.timeout_s is None else method.timeout_s
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._method = method
        self.service = service
        self.request = request
        self.query = query
        """The query, before its shard is known."""

    @property
    def left_s(self) -> float:
        """Seconds that are left of the query's time-out."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def ask(self, query: ShardQuery) -> QueryResult[T]:
        """Have one shard answer, at any member. For the errors see `QueryRouter.ask`."""
        method, request = self._method, self.request

        async def forward(channel: grpc.aio.Channel, forwarded: ShardQuery) -> QueryResult[T]:
            # Send the peer a token of this member: the caller's token must not be passed on.
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
    """Return the function that finds the shard of a request: by its key, or by the id that it names.

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
    """Return the claims in the metadata of a call. Raise ``NotAllowed`` unless they have ``capability``."""
    return service.verifier.verify(authorization_of(metadata), capability)


async def answer_call(context: Any, answer: Callable[[Any], Awaitable[QueryResult[T]]]) -> T:
    """Answer a gRPC call by ``answer(metadata)``. The trailing metadata name the member that answered."""
    async with rpc_errors(context):
        result = await answer(context.invocation_metadata())
        context.set_trailing_metadata(tuple(result_headers(result).items()))
        return result.value
    raise AssertionError("unreachable: the context was aborted")
