"""The methods of a member that an application may call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc.aio
from starlette.routing import Route

from gazette.client.append.service import AppendService, MemoryBudget
from gazette.consumer.query.http_queries import HttpQueries
from gazette.consumer.query.shard_caller import KeyedJournals, LocalMember, ShardCaller
from gazette.consumer.query.shard_route import ShardRoute, routes_of
from gazette.errors import Bug
from gazette.message.publisher import Publisher
from gazette.message.uuid import Clock as MessageClock
from gazette.message.uuid import new_producer_id
from gazette.net.raw_path import RawPathRoute

if TYPE_CHECKING:
    import random

    from gazette.client.client import Client

T = TypeVar("T")


class ConsumerService(ShardCaller):
    """This process as a member of its application's cluster. ``Application.initialize`` gets this object. Use
    it on the event loop only."""

    def __init__(
        self,
        member: LocalMember,
        application: KeyedJournals,
        client: Client,
        config: Mapping[str, Any],
        budget: MemoryBudget,
        producer_rng: random.Random,
    ) -> None:
        super().__init__(member, application, client)
        self.grpc_server = cast("grpc.aio.Server", member.server.grpc)
        """The gRPC server. Use it only to register servicers in ``Application.initialize``.

        Register servicers by generated code, or by ``add_generic_rpc_handlers``.
        """
        self.append_service = AppendService(client, budget=budget)
        """Append service for publishing from APIs. Each shard has its own append service."""
        self.process_id = member.process_id
        """Zone and name of the member."""
        self.stopping = member.stopping
        """Event that is set when this member is asked to stop: long-running calls should end."""
        self.routes: list[Route] = []
        """HTTP routes of the application."""
        self.http_queries = HttpQueries(self)
        self._config = config
        self._producer_rng = producer_rng

    def add_route(
        self,
        path: str,
        endpoint: Callable[..., Any] | ShardRoute,
        methods: Iterable[str] = ("GET",),
    ) -> None:
        """Serve an HTTP route; call it in ``Application.initialize``.

        ``endpoint`` is a Starlette endpoint, or a method that shards answer (``@shard_route``). Raise
        ``Invalid`` for a method with a key if `Application.keyed_journals` returns None, and if another
        method is served at ``path`` already.
        """
        methods = list(methods)
        if isinstance(endpoint, ShardRoute):
            if endpoint.key is not None:
                self.keyed_partitions()  # Watch the partitions from now on, so that no query waits.
            # A key may be an empty text, so its parameter may match an empty part of a path.
            parameter = endpoint.key if isinstance(endpoint.key, str) else ""
            answer = self.http_queries.add(path, endpoint, methods)
            self.routes.append(RawPathRoute(path, answer, methods, parameter))
            return
        self.routes.append(Route(path, endpoint, methods=methods))

    def add_routes(self, instance: Any) -> None:
        """Serve all methods of an object whose decorators give them a path.

        The application's own methods need no call. For ``Invalid`` see `add_route`.
        """
        for route in routes_of(instance):
            self.add_route(route.path, route, route.methods)

    def config(self, group: type[T]) -> T:
        """Return the settings of one of the application's ``config_groups``."""
        for value in self._config.values():
            if isinstance(value, group):
                return value
        raise Bug("not a group of the application's config_groups", group=group.__name__)

    def standalone_publisher(self) -> Publisher:
        """Return a publisher for APIs of the application, outside any transaction."""
        return Publisher.standalone(self.append_service, self.clock, self._producer_rng)

    def new_publisher(self, appends: AppendService) -> Publisher:
        """Return the publisher of a shard that was promoted.

        The publisher has a new producer: acknowledgements of the former producer may still arrive.
        """
        producer = new_producer_id(self._producer_rng)
        return Publisher(appends, producer=producer, clock=MessageClock())
