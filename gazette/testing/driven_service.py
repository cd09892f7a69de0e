"""The service that `AppDriver` passes to ``Application.initialize``, without a cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from gazette.config.schema import Schema
from gazette.consumer.application import Application
from gazette.consumer.query.shard_route import ShardRoute, routes_of
from gazette.errors import Bug, NotAllowed
from gazette.message.mapping import Partitions
from gazette.message.publisher import Publisher
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.clock import Clock
from gazette.testing.memory_journals import MemoryAppends

T = TypeVar("T")


class DrivenPartitions:
    """The driver's journals that match a selector. An instance is a `PartitionsFunc`."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    def __call__(self) -> Partitions:
        return self._partitions

    async def ready(self) -> None:
        """Return at once, since the driver knows its journals."""


class _Registrations:
    """Stand-in for a gRPC server that records what is registered, and serves nothing."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self.handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers += handlers.values()


class DrivenService:
    """The parts of a `ConsumerService` that ``initialize`` may use: settings, partitions, and
    registrations.

    Registered services and routes are recorded, not served. Methods that need brokers, etcd or
    other members raise ``NotAllowed``. ``config`` has the settings by group. The default is the
    settings of the application.
    """

    def __init__(
        self,
        application: Application[Any],
        clock: Clock,
        journals: Iterable[JournalSpec],
        appends: MemoryAppends,
        config: Mapping[str, Any] | None,
    ) -> None:
        self.application = application
        self.clock = clock
        self.append_service = appends
        self.grpc_server = _Registrations()
        self.stopping = asyncio.Event()
        self.routes: list[tuple[str, Any, tuple[str, ...]]] = []
        self._journals = tuple(journals)
        self._config = config

    def add_route(
        self,
        path: str,
        endpoint: Callable[..., Any] | ShardRoute,
        methods: Iterable[str] = ("GET",),
    ) -> None:
        """Record a route in ``routes``."""
        self.routes.append((path, endpoint, tuple(methods)))

    def add_routes(self, instance: Any) -> None:
        """Record the routes of an object whose decorators give them a path."""
        for route in routes_of(instance):
            self.add_route(route.path, route, route.methods)

    def config(self, group: type[T]) -> T:
        """Return the settings of one of the application's ``config_groups``. Raise `Bug` for another
        class."""
        if self._config is None:
            groups = self.application.config_groups
            self._config = Schema("driver", groups).load([], {}).groups
        for value in self._config.values():
            if isinstance(value, group):
                return value
        raise Bug("not a group of the application's config_groups", group=group.__name__)

    def partitions(self, selector: LabelSelector) -> DrivenPartitions:
        """Return the journals of the driver that match."""
        matching = [spec for spec in self._journals if selector.matches(spec.labels_with_name())]
        return DrivenPartitions(Partitions.of_specs(matching))

    def standalone_publisher(self) -> Publisher:
        """Return a publisher outside of any transaction."""
        return Publisher.standalone(self.append_service, self.clock, random.SystemRandom())

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotAllowed(
            f"a driver without services has no service.{name}",
            hint="Test it with gazette_consumer (ConsumerFixture), or pass initialize=False.",
        )
