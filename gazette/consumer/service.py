"""The methods of a member that an application may call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import grpc.aio

from gazette.auth import Claims
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.consumer.query.shard_caller import ShardCaller
from gazette.consumer.query.shard_route import ShardRoute
from gazette.consumer.settings import ConsumerSettings
from gazette.message.mapping import PartitionWatch
from gazette.message.publisher import Publisher
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.route import Header
from gazette.protocol.shard import ShardSpec
from gazette.runtime.clock import Clock

T = TypeVar("T")


class ConsumerService(ShardCaller, Protocol):
    """The member of an application's cluster in this process, as ``Application.initialize`` gets it.

    Use it on the event loop only.
    """

    @property
    def grpc_server(self) -> grpc.aio.Server:
        """gRPC server at which ``Application.initialize`` registers servicers: it can do nothing else.

        Register them by generated code, or by ``add_generic_rpc_handlers``.
        """
        ...

    @property
    def client(self) -> Client:
        """Client of the brokers. The member closes it."""
        ...

    @property
    def append_service(self) -> AppendService:
        """Append service for publishing from APIs. Each shard has its own."""
        ...

    @property
    def clock(self) -> Clock:
        """Clock of the process. Tests replace it."""
        ...

    @property
    def settings(self) -> ConsumerSettings:
        """Settings of the member, from flags, environment and file."""
        ...

    @property
    def process_id(self) -> ProcessId:
        """Zone and name of the member."""
        ...

    @property
    def stopping(self) -> asyncio.Event:
        """Event that is set when this member is asked to stop: long-running calls should end."""
        ...

    def add_route(
        self,
        path: str,
        endpoint: Callable[..., Any] | ShardRoute,
        methods: Iterable[str] = ("GET",),
    ) -> None:
        """Serve an HTTP route; call it in ``Application.initialize``.

        ``endpoint`` is a Starlette endpoint, or a method that shards answer (``@shard_route``). Raise
        ``Invalid`` for a method with a key if the application has no `Application.keyed_journals`.
        """
        ...

    def add_routes(self, instance: Any) -> None:
        """Serve all methods of an object whose decorators give them a path. Raise as ``add_route`` does.

        The application's own methods are served without this call.
        """
        ...

    def config(self, group: type[T]) -> T:
        """Return the settings of one of the application's ``config_groups``."""
        ...

    def partitions(self, selector: LabelSelector) -> PartitionWatch:
        """Return a watch of the matching journals, for mapping functions to choose from.

        It is empty until brokers answer for the first time: ``await partitions.ready()`` where a request
        needs the journals.
        """
        ...

    def standalone_publisher(self) -> Publisher:
        """Return a publisher for APIs of the application, outside any transaction."""
        ...

    def shards_with_source(self, journal: str) -> tuple[ShardSpec, ...]:
        """Return the specifications of shards that read a journal, by id, including disabled ones.

        Raise ``Unavailable`` while the member starts.
        """
        ...

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
        ``proxy(channel, header)`` with a channel to the primary's member. Raise as `QueryRouter.ask`
        does. `shard_rpc` and `shard_route` do all of this for a method.
        """
        ...
