"""One member of a consumer cluster: it creates all parts and stops them in a fixed sequence.

Start: HTTP answers (not ready). The application is initialized. etcd is connected. The member
announces itself and loads the key space. gRPC serves. Brokers have answered. The member is ready.
For the stop, see ``ConsumerMember.stop``.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, cast

import grpc.aio
from prometheus_client import REGISTRY
from starlette.applications import Starlette
from starlette.routing import Route as HttpRoute

from gazette.auth import Claims, KeyedAuth, NoAuth, Verifier, admission
from gazette.client.append.service import AppendService, MemoryBudget
from gazette.client.client import Client
from gazette.client.rpc.channel import Channels, TlsSettings
from gazette.cluster.allocator.drain import Drain
from gazette.cluster.allocator.drain_status import ItemNames
from gazette.cluster.allocator.membership import Membership
from gazette.cluster.allocator.model import DecodedKV, member_key
from gazette.cluster.allocator.shutdown import end_all, leave
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.startup import connect_with_retry
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.consumer.api.json_gateway import json_routes
from gazette.consumer.api.shard_api import CAPABILITIES, ShardApi
from gazette.consumer.application import Application
from gazette.consumer.application_name import Owner, checked_name, name_of
from gazette.consumer.broker_watch import BrokerWatch
from gazette.consumer.callback_watch import CallbackWatch
from gazette.consumer.callbacks import initialized, require_callbacks
from gazette.consumer.debug_routes import debug_routes
from gazette.consumer.key_space import consumer_decoder, is_consistent, progress
from gazette.consumer.prefix_owner import claim_prefix, other_application, owner_key
from gazette.consumer.query.http_queries import HttpQueries, error_answer
from gazette.consumer.query.keyed_shard import one_reader
from gazette.consumer.query.query import EVERYTHING, QueryResult, ShardQuery
from gazette.consumer.query.query_router import QueryRouter, RunningQueries
from gazette.consumer.query.shard_route import ShardRoute, routes_of
from gazette.consumer.resolver import Resolver
from gazette.consumer.service import ConsumerService
from gazette.consumer.settings import ConsumerSettings
from gazette.consumer.shard.collector import ShardCollector
from gazette.consumer.shard.context import ShardContext
from gazette.consumer.shard.journals import retried
from gazette.consumer.shard.restarts import Restarts
from gazette.consumer.shard.shard import Shard
from gazette.consumer.shard.thread import ShardThread, WorkerFactory
from gazette.errors import Bug, GazetteError, Invalid, Unavailable
from gazette.http2.transport import Transport
from gazette.message.mapping import PartitionWatch, modulo_mapping
from gazette.message.publisher import Publisher
from gazette.message.uuid import Clock as MessageClock
from gazette.message.uuid import new_producer_id
from gazette.net.diagnostics import diagnostic_routes
from gazette.net.http_guard import GuardRules, HttpGuard
from gazette.net.raw_path import RawPathRoute
from gazette.net.server import Server
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.process import ConsumerSpec
from gazette.protocol.route import Header
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.scratch import SHARDS, sweep
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import BlockingPool, PoolFactory, TaskScope, first_of
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

T = TypeVar("T")

_CANCEL_S: Final = 10.0
_HURRIED_GRACE_S: Final = 1.0
_INITIALIZING: Final = "initializing the application"
_ANSWER_SHARE: Final = 0.8
"""Share of the time for stopping in which running queries may still be answered."""
_WORDS: Final = ItemNames("shard", "member")


@dataclass(slots=True)
class _Parts:
    """The parts that exist once etcd is connected."""

    etcd: Etcd
    key_space: KeySpace
    state: State
    resolver: Resolver
    shard_api: ShardApi
    membership: Membership


class ConsumerMember:
    """A consumer member in this process. Loop-bound. ``start``, then ``wait``, then ``stop``.

    Applications get it in ``Application.initialize``, as their `ConsumerService`.
    ``client`` calls the brokers; it is closed with the member.
    """

    def __init__(
        self,
        application: Application[Any],
        clock: Clock,
        rng: random.Random,
        server: Server,
        etcd_settings: EtcdSettings,
        settings: ConsumerSettings,
        client: Client,
        *,
        auth: KeyedAuth | NoAuth | None = None,
        peer_tls: TlsSettings | None = None,
        config: Mapping[str, Any] | None = None,
        private_diagnostics: bool = False,
        transport: Transport | None = None,
        pools: PoolFactory = BlockingPool,
        workers: WorkerFactory = ShardThread,
        producer_rng: random.Random | None = None,
    ) -> None:
        """Create a member that is not started.

        Simulations replace ``transport``, ``pools``, ``workers`` and ``producer_rng``. The last one
        defaults to the operating system's, so that no two members draw the same.
        """
        require_callbacks(application)
        self.application = application
        self.clock = clock
        self.server = server
        self.settings = settings
        self.client = client
        """Client of the brokers."""
        self._broker_watch = BrokerWatch(client, clock)
        self._append_budget = MemoryBudget(settings.append_memory_bytes)
        self._restarts = Restarts(settings.max_restarts)
        self.append_service = AppendService(client, budget=self._append_budget)
        """Append service for publishing from APIs. Each shard has its own."""
        self.callback_watch = CallbackWatch(clock, settings.lease_ttl_s)
        """Watch over the callbacks of all shards. ``runconsumer`` starts it for its process."""
        self.process_id = ProcessId(settings.zone, settings.id)
        self.stopping = asyncio.Event()
        """Event that is set when this member is asked to stop: long-running calls should end."""
        self.failure: BaseException | None = None
        self._rng = rng
        self._etcd_settings = etcd_settings
        self._auth = NoAuth() if auth is None else auth
        self._config = dict(config or {})
        self._private_diagnostics = private_diagnostics
        self.application_name = (
            checked_name(settings.application, "--consumer.application")
            if settings.application
            else name_of(application)
        )
        self._spec = ConsumerSpec(
            self.process_id,
            server.endpoint,
            settings.shard_limit,
            application=self.application_name,
        )
        self._spec.validate()
        self.peers = Channels(settings.zone, peer_tls, self._auth, clock=clock, transport=transport)
        """Channels to the other members."""
        self._transport = transport
        self._new_worker = workers
        self._producer_rng = random.SystemRandom() if producer_rng is None else producer_rng
        self._queries = pools("queries", settings.query_threads)
        self._queries_running = RunningQueries()
        self._players = pools("players", settings.player_threads)
        self._solver = pools("allocator", 1)
        self._servers = TaskScope("consumer-servers", on_failure=self.fail)
        self._daemons = TaskScope("consumer-daemons", on_failure=self.fail)
        self._shards = TaskScope("consumer-shards", on_failure=self.fail)
        self._started = asyncio.Event()
        """Set once the key space is loaded. Before that no shard is known."""
        self._failed = asyncio.Event()
        self._hurried = asyncio.Event()
        self._phase = "starting"
        self._parts: _Parts | None = None
        self._routes: list[HttpRoute] = []
        self._http_queries = HttpQueries(self)
        self._partitions: dict[str, PartitionWatch] = {}
        self._up: ShardCollector | None = None

    @property
    def grpc_server(self) -> grpc.aio.Server:
        """See `ConsumerService.grpc_server`."""
        return cast("grpc.aio.Server", self.server.grpc)

    def add_route(
        self,
        path: str,
        endpoint: Callable[..., Any] | ShardRoute,
        methods: Iterable[str] = ("GET",),
    ) -> None:
        """See `ConsumerService.add_route`."""
        methods = list(methods)
        if isinstance(endpoint, ShardRoute):
            if endpoint.key is not None:
                self._keyed_partitions()  # It lists them from now on, so that no query has to wait.
            # As a part of a path, a key may be empty.
            parameter = endpoint.key if isinstance(endpoint.key, str) else ""
            answer = self._http_queries.add(path, endpoint, methods)
            self._routes.append(RawPathRoute(path, answer, methods, parameter))
            return
        self._routes.append(HttpRoute(path, endpoint, methods=methods))

    def add_routes(self, instance: Any) -> None:
        """See `ConsumerService.add_routes`."""
        for route in routes_of(instance):
            self.add_route(route.path, route, route.methods)

    def config(self, group: type[T]) -> T:
        """See `ConsumerService.config`."""
        for value in self._config.values():
            if isinstance(value, group):
                return value
        raise Bug("not a group of the application's config_groups", group=group.__name__)

    @property
    def resolver(self) -> Resolver:
        return self._running.resolver

    @property
    def key_space(self) -> KeySpace:
        return self._running.key_space

    def partitions(self, selector: LabelSelector) -> PartitionWatch:
        """See `ConsumerService.partitions`."""
        key = str(selector)
        watch = self._partitions.get(key)
        if watch is None:
            watch = self._partitions[key] = PartitionWatch(self.client.watch_journals(selector))
            self._daemons.daemon(watch.run(), name=f"partitions {key}")
        return watch

    def standalone_publisher(self) -> Publisher:
        """See `ConsumerService.standalone_publisher`."""
        return Publisher.standalone(self.append_service, self.clock, self._producer_rng)

    def shards_with_source(self, journal: str) -> tuple[ShardSpec, ...]:
        """See `ConsumerService.shards_with_source`."""
        return self.resolver.shards_with_source(journal)

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
        """See `ConsumerService.call_shard`."""
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
        """See `ShardCaller.ask_shard`."""
        left_s = await self._await_start(timeout_s)
        if self._queries_running.ended:
            raise self._queries_running.leaving(shard=query.shard)
        router = QueryRouter(
            self._running.resolver, self.peers, self._queries, self.clock, self._queries_running
        )
        return await router.ask(query, serve, proxy, left_s)

    async def shard_of_key(
        self, key: Any, *, claims: Claims = EVERYTHING, timeout_s: float | None = None
    ) -> str:
        """See `ShardCaller.shard_of_key`."""
        partitions = self._keyed_partitions()
        encoded = self.application.key_encoding().encode(key)
        left_s = await self._await_start(timeout_s)
        try:
            async with timeout(left_s) as deadline:
                with self._queries_running.query(deadline):
                    await partitions.ready()
        except TimeoutError as error:
            if self._queries_running.ended:
                raise self._queries_running.leaving() from None
            raise Unavailable(
                f"no broker has listed the partitions of keys within {left_s:.3g} s",
                hint="Check that brokers run at --broker.address.",
            ) from error
        journal = modulo_mapping(partitions, lambda one: one)(encoded).journal
        return one_reader(journal, self.shards_with_source(journal), claims.selector)

    async def all_shards(self, *, timeout_s: float | None = None) -> Sequence[ShardSpec]:
        """See `ShardCaller.all_shards`."""
        await self._await_start(timeout_s)
        return self.resolver.shards(LabelSelector())

    def _keyed_partitions(self) -> PartitionWatch:
        selector = self.application.keyed_journals()
        if selector is None:
            raise Invalid(
                "a key is to find a shard, and no source has a key",
                path=type(self.application).__qualname__,
                hint='Declare one: words = Source("words", Word, key="word").',
            )
        return self.partitions(selector)

    async def _await_start(self, timeout_s: float | None) -> float:
        """Wait until the member knows its cluster. Return the seconds of ``timeout_s`` that are left."""
        seconds = self.settings.query_timeout_s if timeout_s is None else timeout_s
        begun = self.clock.monotonic()
        if not self._started.is_set():
            with suppress(TimeoutError):
                async with timeout(seconds):
                    await first_of(self._started, self.stopping, self._failed)
            if not self._started.is_set():
                raise Unavailable(f"the consumer is {self._phase}")
        return max(0.0, seconds - (self.clock.monotonic() - begun))

    @property
    def query_timeout_s(self) -> float:
        """See `ShardCaller.query_timeout_s`."""
        return self.settings.query_timeout_s

    @property
    def verifier(self) -> Verifier:
        """Verifier of the tokens of requests to this member."""
        return self._auth

    @property
    def _running(self) -> _Parts:
        if self._parts is None or not self._started.is_set():
            raise Unavailable("the consumer is starting")
        return self._parts

    @property
    def guard_rules(self) -> GuardRules:
        """The requests that the HTTP servers of this member accept."""
        return GuardRules.of(
            keyless=self._auth.keyless,
            endpoint=self.server.endpoint,
            hosts=self.settings.allow_hosts,
            origins=self.settings.allow_origins,
        )

    def not_ready(self) -> str:
        """Return why the member does not serve now; empty if it does."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self._parts is not None and self._parts.membership.drain.is_running:
            return self._parts.membership.drain.describe()
        brokers = self._broker_watch.not_answered
        if self._phase == _INITIALIZING:  # The application may wait for brokers here.
            return "; ".join(filter(None, (self._phase, brokers)))
        if self._phase != "ready":
            return self._phase
        state = self._running.state
        return brokers if state.local_member is not None else "this member is not in etcd"

    async def start(self) -> None:
        """Join the cluster. Return once this member serves.

        Wait for etcd without limit, and for a member of the same id to leave. Raise an error that no
        retry can heal. After a cancellation, call ``stop``.
        """
        self._phase = _INITIALIZING
        app = self._app()
        self.server.start_http(self._servers, HttpGuard(app, self.guard_rules))
        self._daemons.daemon(self._broker_watch.run(), name="brokers")
        self._daemons.daemon(self.append_service.run(), name="appends")
        self._daemons.spawn(self._sweep(), name="sweep")
        service: ConsumerService = self
        await initialized(self.application, service)
        self.add_routes(self.application)
        app.router.routes[:] = self._all_routes()
        self._phase = "connecting to etcd"
        etcd = await connect_with_retry(self._etcd_settings, self.clock, transport=self._transport)
        self._phase = "announcing itself"
        try:
            owner = await retried(
                lambda: claim_prefix(
                    etcd, self.settings.root, self.application_name, self.settings.adopt_from
                ),
                "claiming the etcd prefix",
                self.application_name,
                self.clock,
            )
        except BaseException:
            await etcd.close()
            raise
        parts = self._parts = self._build(etcd, owner)
        membership = parts.membership
        await membership.join(self._spec.to_pb().SerializeToString(), self.settings.lease_ttl_s)
        self._started.set()
        membership.follow()
        membership.allocate(self._solver)
        grpc_server = self.server.grpc
        admit = admission(self.verifier, CAPABILITIES)
        grpc_server.add_generic_rpc_handlers((parts.shard_api.handler(),), admit)
        queries = self._http_queries
        grpc_server.add_generic_rpc_handlers((queries.handler(),), queries.admit)
        await self.server.start_grpc()
        self._up = ShardCollector(parts.resolver, self.append_service, self._append_budget)
        REGISTRY.register(self._up)
        self._phase = "ready"
        log.info(
            "consumer %(member)s serves at %(endpoint)s",
            {"member": self.process_id, "endpoint": self.server.endpoint},
        )

    async def _sweep(self) -> None:
        """Remove what shards of killed processes left on the local disk."""
        parent, now = self.settings.scratch_directory, self.clock.now()
        found = await self._players.run(sweep, parent, now, (SHARDS,))
        for one in found:
            log.warning(
                "removed %(size)d bytes that a killed process left in %(path)s",
                {"size": one.size, "path": one.path},
            )

    def _check_owner(self, key_space: KeySpace) -> None:
        """Stop the member as failed if its prefix was given to another application meanwhile."""
        kv = key_space.get(owner_key(self.settings.root))
        owner = None if kv is None else kv.decoded
        if isinstance(owner, Owner) and owner.name != self.application_name:
            self.fail(other_application(self.settings.root, owner.name, self.application_name))

    def _build(self, etcd: Etcd, owner: Owner) -> _Parts:
        settings = self.settings
        decoder = consumer_decoder(settings.root, settings.max_hot_standbys)
        key_space = KeySpace(settings.root, decoder, apply_delay_s=settings.watch_delay_s)
        local_key = member_key(settings.root, settings.zone, settings.id)
        state = State(key_space, local_key, is_consistent, progress)
        context = ShardContext(
            application=self.application,
            etcd=etcd,
            key_space=key_space,
            client=self.client,
            clock=self.clock,
            rng=self._rng,
            player_pool=self._players,
            new_publisher=self._new_publisher,
            scratch_directory=settings.scratch_directory,
            hints_interval_s=settings.hints_interval_s,
            stall_timeout_s=settings.stall_timeout_s,
            lag_interval_s=settings.lag_interval_s,
            append_budget=self._append_budget,
            restarts=self._restarts,
            callback_watch=self.callback_watch,
            owner=owner,
            hint_keys=settings.hint_keys,
            new_worker=self._new_worker,
        )

        def new_shard(item: DecodedKV, assignment: DecodedKV) -> Shard:
            return Shard(context, item, assignment)

        resolver = Resolver(key_space, state, self._shards, new_shard)
        shard_api = ShardApi(
            settings.root,
            etcd,
            key_space,
            state,
            resolver,
            self.peers,
            self._auth,
            settings.hint_keys,
        )
        key_space.observers += [
            lambda: self._check_owner(key_space),
            state.observe,
            resolver.update,
            lambda: self.peers.follow(state.peers()),
        ]
        drain = Drain(
            self.clock,
            state,
            self.process_id,
            _WORDS,
            alone_timeout_s=settings.drain_timeout_s,
            timeout_s=settings.drain_timeout_max_s,
        )
        membership = Membership(etcd, key_space, state, drain, self.clock, self._daemons)
        return _Parts(etcd, key_space, state, resolver, shard_api, membership)

    def _new_publisher(self, appends: AppendService) -> Publisher:
        # Never reuse the producer of an earlier promotion: its acknowledgements may still be on their way.
        producer = new_producer_id(self._producer_rng)
        return Publisher(appends, producer=producer, clock=MessageClock())

    def _app(self) -> Starlette:
        """Return the HTTP application. It has the user's routes once the application is initialized."""

        async def starting(_request: Any) -> Any:
            raise Unavailable(f"the consumer is {self._phase}")

        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        routes = [*self._all_routes(), HttpRoute("/{path:path}", starting, methods=methods)]
        return Starlette(routes=routes, exception_handlers={GazetteError: error_answer})

    def _all_routes(self) -> list[HttpRoute]:
        routes: list[HttpRoute] = list(self._routes)
        if not self._private_diagnostics:
            routes = [*diagnostic_routes(self.not_ready), *self.debug_routes(), *routes]
        routes += json_routes(
            self.settings.allow_origins, lambda: self._running.shard_api, self._auth
        )
        return routes

    def debug_routes(self) -> list[HttpRoute]:
        """Return the routes that show what this member does."""
        return debug_routes(lambda: self._running.resolver.local_shards)

    def stop_soon(self) -> None:
        """Ask for a graceful stop. A second call ends the wait for others to take over."""
        (self._hurried if self.stopping.is_set() else self.stopping).set()

    def fail(self, error: BaseException) -> None:
        """Record that the member is broken: ``wait`` returns; call ``stop`` next. Keep the first error."""
        if self.failure is None:
            self.failure = error
        # Another member may serve our shards by now.
        self._queries_running.end(f"it failed: {error}")
        self._failed.set()

    async def wait(self) -> None:
        """Return when a stop was asked for, or the member is broken."""
        await first_of(self.stopping, self._failed)

    async def stop(self) -> None:
        """Leave, stage by stage. Each stage is bounded, and runs even if an earlier one failed.

        1. *Drain*: say in etcd that this member is leaving, and continue until others have its shards.
           Skipped if the member is broken.
        2. *Finish*: stop local shards, refuse new calls, let accepted ones end.
        3. *Release* the lease.
        4. *Cancel* what is left.

        When all is done, raise what broke the member, or else the first error of a stage.
        """
        self.stopping.set()
        stages = {
            "draining": self._drain,
            "finishing": self._finish,
            "releasing its lease": self._release,
            "cancelling": self._cancel,
        }
        first = await leave(self.process_id, stages, self._enter)
        self._phase = "stopped"
        if self.failure is not None:
            raise self.failure
        if first is not None:
            raise first

    def _enter(self, phase: str) -> None:
        self._phase = phase

    async def _drain(self) -> None:
        if self.failure is None and self._parts is not None:
            exiting = replace(self._spec, exiting=True).to_pb().SerializeToString()
            ends = {"it was asked to hurry": self._hurried, "it is broken": self._failed}
            await self._parts.membership.leave(exiting, ends)

    async def _finish(self) -> None:
        parts, settings = self._parts, self.settings
        if parts is not None:
            parts.resolver.stop_serving()
        grace_s = _HURRIED_GRACE_S if self._hurried.is_set() else settings.graceful_stop_s
        # End queries before the servers cut them off: a cut connection gives the caller no reason.
        self._queries_running.end("it stops", _ANSWER_SHARE * grace_s)
        await self.server.stop(grace_s)
        if parts is not None:
            await parts.resolver.wait_stopped(2 * settings.graceful_stop_s)

    async def _release(self) -> None:
        if self._parts is not None:
            await self._parts.membership.release()

    async def _cancel(self) -> None:
        try:
            scopes = (self._daemons, self._shards, self._servers)
            await end_all(
                self.append_service.close(_CANCEL_S), *(scope.stop(_CANCEL_S) for scope in scopes)
            )
        finally:
            if self._up is not None:
                REGISTRY.unregister(self._up)
                self._up = None
            await self.peers.close()
            await self.client.close()
            for pool in (self._queries, self._players, self._solver):
                pool.close()
            if self._parts is not None:
                await self._parts.etcd.close()

    async def crash(self) -> None:
        """End as a killed process would, for tests: hand over nothing, and keep the lease.

        Return once stores are destroyed: a killed process holds no locks of a database either.
        Raise ``Unavailable`` naming shards whose callbacks do not return.
        """
        self._phase = "crashed"
        self.stopping.set()
        self._daemons.cancel()
        try:
            if self._parts is not None:
                self._parts.resolver.stop_serving()
            await self.server.stop(0)
            if self._parts is not None:
                await self._parts.resolver.wait_stopped(_CANCEL_S)
        finally:
            await self._cancel()
