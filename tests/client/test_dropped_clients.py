"""Clients that are dropped without being closed, or used on a second event loop: named, and closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import pytest

import gazette.client
from gazette import Message, open_publisher
from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardClient
from gazette.errors import Closed, GazetteError, Invalid
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.runtime.tasks import LoopThread, await_future
from tests.facts import raises
from tests.support.instant_clock import eventually
from tests.support.stub_broker import StubBroker

JOURNAL: Final = "a/journal"
COUNT: Final = 50
FRAGMENTS: Final = FragmentSpec(1024, Codec.NONE, (), 10**9, 0, 0, "")
LABELS: Final = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))


class Word(Message):
    word: str = ""


@pytest.fixture
async def broker() -> AsyncIterator[StubBroker]:
    async with StubBroker() as stub:
        journal = broker_pb2.ListResponse.Journal(
            spec=JournalSpec(JOURNAL, 1, LABELS, FRAGMENTS).to_pb(),
            mod_revision=1,
            create_revision=1,
            route=stub.route_of(JOURNAL).to_pb(),
        )
        answer = broker_pb2.ListResponse(header=stub.header().to_pb(), journals=[journal])
        stub.answers["List"] = lambda request: [answer]
        stub.journal(JOURNAL).append(b"content")
        yield stub


# The ways to use a client of each public class. Each returns what holds its connections.

Use = Callable[[str], Awaitable[Any]]


async def use_client(address: str) -> Client:
    client = Client(address)
    await client.append(AppendParams(JOURNAL), b"content")
    return client


async def use_shard_client(address: str) -> ShardClient:
    client = ShardClient(address)
    with contextlib.suppress(GazetteError):  # The broker of this test is no consumer.
        await client.list_shards()
    return client


async def use_append_service(address: str) -> AppendService:
    service = AppendService(Client(address))
    await await_future(service.append(AppendParams(JOURNAL), b"content"))
    return service


async def use_publisher(address: str) -> Any:
    publisher = ClientPublisher(Client(address))
    await publisher.publish(JOURNAL, Word(word="content"))
    return publisher


async def use_publisher_in_a_transaction(address: str) -> Any:
    publisher = ClientPublisher(Client(address))
    async with publisher.transaction() as transaction:
        await transaction.publish(JOURNAL, Word(word="content"))
    return publisher


async def use_sync_publisher(address: str) -> Any:
    def use() -> Any:
        publisher = open_publisher(address)
        publisher.publish(JOURNAL, Word(word="content"))
        return publisher

    return await asyncio.to_thread(use)


async def use_reader(address: str) -> Any:
    """Leave a read that waits at its broker."""
    reader = Client(address).reader(ReadParams(JOURNAL, block=True))
    assert await reader.read()
    return reader


async def use_retry_reader(address: str) -> Any:
    reader = Client(address).retry_reader(ReadParams(JOURNAL, block=True))
    assert await reader.read()
    return reader


USES: Final[dict[str, tuple[Use, list[str]]]] = {
    "Client": (use_client, ["Client"]),
    "ShardClient": (use_shard_client, ["ShardClient"]),
    "AppendService": (use_append_service, ["AppendService", "Client"]),
    "ClientPublisher": (use_publisher, ["ClientPublisher", "Client"]),
    "ClientTransaction": (use_publisher_in_a_transaction, ["ClientPublisher", "Client"]),
    "SyncPublisher": (use_sync_publisher, ["SyncPublisher"]),
    "Reader": (use_reader, ["Client"]),
    "RetryReader": (use_retry_reader, ["Client"]),
}
"""By class: a use, and the classes of which the log names each once it was dropped."""


def test_each_public_class_with_a_close_is_here() -> None:
    public = [getattr(gazette.client, name) for name in gazette.client.__all__]
    for module in ("gazette.client.shards", "gazette.message.publishing.client_publisher"):
        public += vars(importlib.import_module(module)).values()
    closed = {
        one.__name__
        for one in public
        if inspect.isclass(one) and hasattr(one, "close") and one.__module__.startswith("gazette.")
    }
    internal = {"ClusterAccess", "LoopThread", "PublishingService"}
    assert closed - internal == USES.keys() - {"ClientTransaction"}


def sockets() -> int:
    """Return the number of sockets that this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def dropped(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    lines = [one.args for one in caplog.records if one.name == "gazette.runtime.loop_bound"]
    return [one for one in lines if isinstance(one, dict)]


@pytest.mark.parametrize("name", USES)
async def test_what_was_dropped_is_named_and_its_sockets_are_closed(
    broker: StubBroker, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    use, named = USES[name]
    before = sockets()
    count = 5 if name == "SyncPublisher" else COUNT
    held = [await use(broker.endpoint) for _ in range(count)]
    assert sockets() >= before + count
    assert dropped(caplog) == []
    held.clear()
    await eventually(lambda: gc.collect() >= 0 and sockets() <= before)
    await eventually(lambda: "publisher" not in [one.name for one in threading.enumerate()])
    lines = dropped(caplog)
    assert sorted(one["what"].split()[1] for one in lines) == sorted(named * count)
    assert all(one["where"].startswith(__file__) and one["hint"] for one in lines)


async def test_what_was_closed_or_never_used_is_not_named(
    broker: StubBroker, caplog: pytest.LogCaptureFixture
) -> None:
    address = broker.endpoint
    unused = [Client(address), ShardClient(address)]
    async with Client(address) as client, ShardClient(address) as shards:
        service = AppendService(client)
        await await_future(service.append(AppendParams(JOURNAL), b"content"))
        await service.close()
        async with ClientPublisher(client) as publisher:
            await publisher.publish(JOURNAL, Word(word="content"))
        with contextlib.suppress(GazetteError):
            await shards.list_shards()
    sync = await use_sync_publisher(address)
    await asyncio.to_thread(sync.close)
    del unused, client, shards, service, publisher, sync
    gc.collect()
    assert dropped(caplog) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Of asyncio, for the loop that ends first.
@pytest.mark.parametrize("name", sorted(USES.keys() - {"SyncPublisher"}))
@pytest.mark.parametrize("is_over", [False, True])
async def test_a_second_loop_is_refused_by_name(
    broker: StubBroker, name: str, is_over: bool
) -> None:
    """Check each class while its first loop runs in another thread, and after that loop has ended."""
    use: Any = USES[name][0]
    first = LoopThread("first loop")
    held = await asyncio.to_thread(first.run, use(broker.endpoint))
    if is_over:
        await asyncio.to_thread(first.close)
    for call in calls_of(held):
        with raises(
            Invalid,
            path="loop",
            former_loop="closed" if is_over else "open",
            advises="asyncio.run_coroutine_threadsafe",
        ) as raised:
            await call()
        assert raised.value.facts["made_at"].startswith(__file__)
    await asyncio.to_thread(first.close)
    del held, call, raised
    gc.collect()


def calls_of(held: Any) -> list[Callable[[], Any]]:
    match held:
        case Client():
            return [
                held.list_journals,
                lambda: held.append(AppendParams(JOURNAL), b"content"),
                lambda: held.retry_reader(ReadParams(JOURNAL)).read(),
                lambda: held.reader(ReadParams(JOURNAL)).read(),
                lambda: anext(held.watch_journals().__aiter__()),
                held.close,
            ]
        case ShardClient():
            return [held.list_shards, lambda: held.stat("a-shard"), held.close]
        case AppendService():
            return [held.flush, held.run, held.close]
    if hasattr(held, "transaction"):
        return [
            lambda: held.publish(JOURNAL, Word()),
            held.transaction().__aenter__,
            held.__aenter__,
            held.close,
        ]
    return [held.read]


async def test_a_client_without_a_loop_is_bound_by_its_first_use(broker: StubBroker) -> None:
    client = await asyncio.to_thread(Client, broker.endpoint)
    await client.append(AppendParams(JOURNAL), b"content")
    await client.close()
    with raises(Closed):
        await client.append(AppendParams(JOURNAL), b"content")
