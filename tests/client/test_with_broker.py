"""The client against real brokers on a real etcd."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gazette.client import AppendService, Client, Reader, RetryReader
from gazette.client.append.appender import AppendParams
from gazette.client.journals import FragmentsParams, JournalChange
from gazette.client.read.reader import WRITE_HEAD, ReadParams
from gazette.client.rpc.preflight import require_reachable
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Conflict, Fenced, NotFound
from gazette.protocol.fragment import Codec
from gazette.protocol.label_set import EVERYTHING, LabelSelector, LabelSet
from gazette.runtime.tasks import TaskScope, await_future
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.support.instant_clock import eventually

J = "a/journal"


async def test_what_is_appended_is_read(etcd: Etcd, tmp_path: Path) -> None:
    """By threads through the service, while a reader blocks at the head; batches keep their order."""
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        client = broker.client
        await broker.create(journal_spec(J))
        service = AppendService(client)
        expected = b"".join(b"message %d\n" % i for i in range(20_000))

        def publish() -> None:
            for line in expected.splitlines(keepends=True):
                with service.start_append(AppendParams(J)) as txn:
                    txn.write(line)

        async def read() -> bytes:
            reader = RetryReader(client, ReadParams(J, block=True, end_offset=len(expected)))
            return b"".join([piece async for piece in reader.chunks()])

        content, _ = await asyncio.gather(read(), asyncio.to_thread(publish))
        assert content == expected
        await service.flush()
        async with Reader(client, ReadParams(J, offset=WRITE_HEAD, metadata_only=True)) as reader:
            head = await client.append(AppendParams(J))
            assert head.commit.end == len(expected)
            assert reader.offset == WRITE_HEAD
        await service.close()


async def test_an_address_that_is_connected_and_does_not_answer_is_passed_over(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            addresses = f"http://127.0.0.1:{deaf.getsockname()[1]},{broker.endpoint}"
            async with Client(addresses) as client:
                await require_reachable(client, "broker", connect_s=0.5, hint="")
                assert client.address == broker.endpoint
                await client.list_journals(EVERYTHING)


async def test_registers_fence_the_older_owner(etcd: Etcd, tmp_path: Path) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(J))
        service = AppendService(broker.client)
        mine = LabelSet.of(("author", "me"))
        checked = AppendParams(J, check_registers=LabelSelector(include=mine))
        await await_future(service.append(AppendParams(J, union_registers=mine), b"1"))
        result = await await_future(service.append(checked, b"2"))
        assert result.registers == mine
        await broker.client.append(
            AppendParams(J, union_registers=LabelSet.of(("author", "you"))), b"3"
        )
        with pytest.raises(Fenced):
            await await_future(service.append(checked, b"4"))
        await service.close()


async def test_a_stored_journal_is_read_from_its_files(etcd: Etcd, tmp_path: Path) -> None:
    """After a restart only the blob store knows the content: it is read there, fragment by fragment."""
    content = b"".join(b"line %d\n" % i for i in range(60_000))
    spec = journal_spec(J, codec=Codec.ZSTANDARD, length=1 << 16)
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as first:
        await first.create(spec)
        for begin in range(0, len(content), 100_000):
            await first.client.append(AppendParams(J), content[begin : begin + 100_000])
    async with await BrokerFixture.start(
        etcd, tmp_path, id="broker-two", lease_ttl_s=60.0
    ) as second:
        await second.settled(J)
        reader = second.client.retry_reader(ReadParams(J, end_offset=len(content)))
        pieces = []
        direct = 0
        while piece := await reader.read():
            pieces.append(piece)
            direct += reader._reader is not None and reader._reader.direct is not None
        assert b"".join(pieces) == content
        assert direct == len(pieces)
        fragments = await second.client.list_fragments(
            FragmentsParams(J, page_limit=2, signature_ttl_s=10)
        )
        assert fragments[0].fragment.begin == 0
        assert fragments[-1].fragment.end == len(content)
        assert all(one.signed_url.startswith("file:///") for one in fragments)
        assert await second.client.fragment_store_health("file:///fragments/") == ""


async def test_a_graceful_hand_over_is_not_noticed(etcd: Etcd, tmp_path: Path) -> None:
    """A broker is drained under a publishing service and a blocked reader."""
    count = 300
    expected = b"".join(b"%d\n" % i for i in range(count))
    async with (
        await BrokerFixture.start(etcd, tmp_path, drain_timeout_s=20.0, lease_ttl_s=60.0) as first,
        Client(first.endpoint) as by_first,
    ):
        await first.create(journal_spec(J))
        async with (
            await BrokerFixture.start(etcd, tmp_path, id="broker-two", lease_ttl_s=60.0) as second,
            Client(second.endpoint) as client,
        ):
            service = AppendService(client)
            half = asyncio.Event()

            async def publish() -> None:
                for i in range(count):
                    future = service.append(AppendParams(J), b"%d\n" % i)
                    if i % 10 == 9:
                        await await_future(future)
                    if i == count // 3:
                        half.set()
                await service.flush()

            async def read() -> bytes:
                params = ReadParams(J, block=True, end_offset=len(expected))
                return b"".join([piece async for piece in client.retry_reader(params).chunks()])

            async def hand_over() -> None:
                await half.wait()
                await by_first.close()
                await first.stop()

            content, _, _ = await asyncio.gather(read(), publish(), hand_over())
            assert content == expected
            await service.close()


async def test_journals_are_listed_watched_and_changed(etcd: Etcd, tmp_path: Path) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        client = broker.client
        await broker.create(journal_spec("a/one"), journal_spec("a/two"))
        listed = await client.list_journals(LabelSelector.parse("prefix=a/"))
        assert [one.spec.name for one in listed.journals] == ["a/one", "a/two"]
        assert listed.journals[0].route.primary_id is not None
        seen: list[list[str]] = []

        async def watch() -> None:
            async for snapshot in client.watch_journals(LabelSelector.parse("prefix=a/")):
                seen.append([one.spec.name for one in snapshot.journals])

        async with TaskScope("test") as scope:
            scope.daemon(watch(), name="watch")
            await eventually(lambda: seen == [["a/one", "a/two"]])
            one = await client.get_journal("a/one")
            delete = JournalChange(delete="a/one", expect_mod_revision=one.mod_revision)
            await client.apply_journals([delete])
            await eventually(lambda: seen[-1] == ["a/two"])
            with pytest.raises(Conflict):
                await client.apply_journals([delete])
            scope.cancel()
        with pytest.raises(NotFound):
            await client.append(AppendParams("a/one"), b"x")
