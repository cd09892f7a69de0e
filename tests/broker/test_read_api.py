"""The Read call against a real broker: local content, stored content, proxied content, and its ends."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.auth import Capability, Claims, KeyedAuth, bearer
from gazette.client.append.appender import AppendParams
from gazette.client.rpc.errors import END_OF_STREAM
from gazette.cluster.etcd.client import Etcd
from gazette.fragment.local_file import LocalDisk, LocalFile
from gazette.protocol.codecs.codec import new_compressor
from gazette.protocol.content import Content, content_response, decode_read, encode_read
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import JournalFlag, Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import broker_pb2
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import STORE, BrokerFixture, journal_spec
from tests.facts import call_refused
from tests.support.tcp_proxy import TcpProxy

JOURNAL = "a/journal"


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        yield broker


def stub(broker: BrokerFixture) -> JournalStub:
    return broker.client.channels.journal(broker.endpoint)


def read(broker: BrokerFixture, *, token: str = "", **fields: Any) -> Any:
    request = broker_pb2.ReadRequest(**{"journal": JOURNAL, **fields})
    return stub(broker).Read(request, metadata=bearer(token))


async def read_all(broker: BrokerFixture, **fields: Any) -> list[broker_pb2.ReadResponse]:
    return [message async for message in read(broker, **fields)]


def content_of(messages: list[broker_pb2.ReadResponse]) -> bytes:
    return b"".join(message.content for message in messages)


async def test_endpoint_of_a_dead_broker_that_another_took_over(etcd: Etcd, tmp_path: Path) -> None:
    """Regression: the new broker proxied reads and listings of fragments to itself, again and again."""
    ports = {"port": str(free_port()), "http_port": str(free_port())}
    dead = await BrokerFixture.start(
        etcd, tmp_path, id="dead-broker", server=ports, lease_ttl_s=60.0
    )
    await dead.create(journal_spec(JOURNAL))
    await dead.crash()
    async with await BrokerFixture.start(
        etcd, tmp_path, id="newcomer", server=ports, lease_ttl_s=60.0
    ) as broker:
        with call_refused(grpc.StatusCode.UNKNOWN, "local#dead-broker", "local#newcomer"):
            await read_all(broker)
        with call_refused(grpc.StatusCode.UNKNOWN, "local#dead-broker", "local#newcomer"):
            await stub(broker).ListFragments(broker_pb2.FragmentsRequest(journal=JOURNAL))


async def append(broker: BrokerFixture, content: bytes, journal: str = JOURNAL) -> None:
    await broker.client.append(AppendParams(journal), content)


def store_fragment(
    broker_root: Path,
    begin: int,
    content: bytes,
    *,
    codec: Codec = Codec.NONE,
    mod_time: int | None = None,
    journal: str = JOURNAL,
    damage: Any = None,
) -> Path:
    """Write a fragment's file as another broker would have; ``damage`` is done to its bytes."""
    fragment = Fragment(journal, begin, begin + len(content), hashlib.sha1(content).digest(), codec)
    path = broker_root / "fragments" / fragment.content_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    compressor = new_compressor(codec)
    stored = compressor.compress(content) + compressor.finish()
    path.write_bytes(damage(stored) if damage else stored)
    if mod_time is not None:
        os.utime(path, (mod_time, mod_time))
    return path


def noise(size: int, seed: int = 1) -> bytes:
    block = hashlib.shake_128(seed.to_bytes(4, "big")).digest(min(size, 4096))
    return (block * (size // max(1, len(block)) + 1))[:size]


# --- Local content


async def test_metadata_comes_first_and_then_content_in_chunks(broker: BrokerFixture) -> None:
    await broker.create(journal_spec(JOURNAL))
    content = noise(300_000)
    await append(broker, content)
    first, *chunks, last = await read_all(broker)

    assert first.status == broker_pb2.OK
    assert (first.offset, first.write_head) == (0, 300_000)
    assert (first.fragment.begin, first.fragment.end) == (0, 300_000)
    assert first.fragment_url == ""
    assert first.header.process_id.suffix == "broker-one"
    assert list(first.header.route.endpoints) == [broker.endpoint]
    assert first.header.etcd.cluster_id

    assert [len(chunk.content) for chunk in chunks] == [131_072, 131_072, 37_856]
    assert [chunk.offset for chunk in chunks] == [0, 131_072, 262_144]
    assert content_of(chunks) == content
    # The end of a read that does not block says where the head is; it has no header.
    assert last.status == broker_pb2.OFFSET_NOT_YET_AVAILABLE
    assert (last.offset, last.write_head) == (300_000, 300_000)
    assert not last.HasField("header")


async def test_every_fragment_has_its_own_metadata(broker: BrokerFixture) -> None:
    await broker.create(journal_spec(JOURNAL))
    for content in (b"first", b"second", b"third"):
        await append(broker, content)
    messages = await read_all(broker, offset=2)
    assert content_of(messages) == b"rstsecondthird"
    spans = [(m.fragment.begin, m.fragment.end) for m in messages if m.HasField("fragment")]
    assert spans[0] == (0, 5)  # The first append is a fragment of its own.
    assert spans[-1][1] == 16
    assert sum(m.HasField("header") for m in messages) == 1


@pytest.mark.parametrize(
    ("fields", "content", "statuses"),
    [
        ({"offset": 0, "end_offset": 4}, b"0123", [Status.OK]),
        ({"offset": 2, "end_offset": 5}, b"234", [Status.OK]),
        ({"offset": 2, "end_offset": 7}, b"23456", [Status.OK, Status.OK]),
        ({"offset": 5, "end_offset": 5}, b"", [Status.OK]),
        ({"offset": 3, "end_offset": 10}, b"3456789", [Status.OK, Status.OK]),
        ({"offset": 0, "metadata_only": True}, b"", [Status.OK]),
        ({"offset": 10}, b"", [Status.OFFSET_NOT_YET_AVAILABLE]),
        ({"offset": 99}, b"", [Status.OFFSET_NOT_YET_AVAILABLE]),
        ({"offset": -1}, b"", [Status.OFFSET_NOT_YET_AVAILABLE]),
        ({"offset": -1, "metadata_only": True}, b"", [Status.OFFSET_NOT_YET_AVAILABLE]),
        ({"offset": 1, "do_not_proxy": True, "end_offset": 3}, b"12", [Status.OK]),
    ],
)
async def test_what_is_asked_for_is_what_is_read(
    broker: BrokerFixture, fields: dict[str, Any], content: bytes, statuses: list[Status]
) -> None:
    await broker.create(journal_spec(JOURNAL))
    for part in (b"01234", b"56789"):
        await append(broker, part)
    messages = await read_all(broker, **fields)
    assert content_of(messages) == content
    assert [Status.from_pb(m.status) for m in messages if not m.content] == statuses
    if fields["offset"] == -1:
        assert messages[0].offset == messages[0].write_head == 10


async def test_a_blocked_read_gets_what_is_appended_later(broker: BrokerFixture) -> None:
    await broker.create(journal_spec(JOURNAL))
    call = read(broker, offset=-1, block=True)
    reading = aiter(call)
    async with TaskScope("test") as scope:
        waiting = scope.spawn(anext(reading), name="read")
        await waiting_at(broker, 1)
        await append(broker, b"tail")
        first = await waiting
    assert (first.offset, first.fragment.end) == (0, 4)
    assert (await anext(reading)).content == b"tail"
    call.cancel()
    await waiting_at(broker, 0)


async def waiting_at(broker: BrokerFixture, count: int) -> None:
    """Return once that many reads wait at the head of the journal."""
    replica = (
        await broker.service.context.resolver.resolve(
            JOURNAL, claims=Claims(Capability.READ), may_proxy=False, require_primary=False
        )
    ).replica
    assert replica is not None
    while replica.index.waiting + replica.head_readers.waiting != count:
        await SystemClock().sleep(0.002)


async def test_a_thousand_waiting_reads_all_get_the_same_append(broker: BrokerFixture) -> None:
    await broker.create(journal_spec(JOURNAL))

    async def tail() -> bytes:
        call = read(broker, offset=0, block=True, end_offset=4)
        return content_of([message async for message in call])

    async with TaskScope("test") as scope:
        tails = [scope.spawn(tail(), name="tail") for _ in range(1000)]
        await waiting_at(broker, 1000)
        await append(broker, b"wake")
        assert {await one for one in tails} == {b"wake"}


# --- Statuses and refusals


async def test_statuses_that_are_not_about_offsets(broker: BrokerFixture) -> None:
    await broker.create(
        journal_spec("write/only", flags=JournalFlag.O_WRONLY),
        journal_spec("fully/suspended", suspend=Suspend(SuspendLevel.FULL, 5)),
    )
    for journal, status in (
        ("no/such", Status.JOURNAL_NOT_FOUND),
        ("write/only", Status.NOT_ALLOWED),
        ("fully/suspended", Status.SUSPENDED),
    ):
        (only,) = await read_all(broker, journal=journal)
        assert Status.from_pb(only.status) is status
        assert only.header.process_id.suffix == "broker-one"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"journal": "x"}, "Journal: invalid length"),
        ({"offset": -2}, "invalid Offset"),
        ({"offset": 9, "end_offset": 8}, "invalid EndOffset"),
    ],
)
async def test_what_is_wrong_with_a_request_is_unknown_with_a_text(
    broker: BrokerFixture, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(broker, **fields)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert text in (caught.value.details() or "")


async def test_tokens_are_required_narrow_and_expire_as_a_clean_end(
    etcd: Etcd, tmp_path: Path
) -> None:
    auth = KeyedAuth.parse(SystemClock(), base64.b64encode(b"k" * 32).decode())
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(JOURNAL))
        await append(broker, b"secret")
        for token, text in (
            ("", "missing or empty Authorization token"),
            ("nonsense", "verifying Authorization"),
            (auth.sign(Claims(Capability.LIST), 60), "missing required READ capability"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
                [m async for m in read(broker, token=token)]
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        narrow = auth.sign(Claims(Capability.READ, LabelSelector.of(name="b/other")), 60)
        (only,) = [m async for m in read(broker, token=narrow)]
        assert only.status == Status.JOURNAL_NOT_FOUND
        # Case: a token that is about to expire ends a blocked read, without an error. (The leeway of
        # verification lets a token in that has already expired.)
        brief = auth.sign(Claims(Capability.READ), -1)
        messages = [m async for m in read(broker, token=brief, block=True)]
        assert all(message.status == Status.OK for message in messages)


class JumpingClock(SystemClock):
    """The machine's clock, set forward at will."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


async def test_a_token_that_expires_ends_a_busy_read_too(etcd: Etcd, tmp_path: Path) -> None:
    clock = JumpingClock()
    auth = KeyedAuth.parse(clock, base64.b64encode(b"k" * 32).decode())
    async with await BrokerFixture.start(
        etcd, tmp_path, auth=auth, clock=clock, lease_ttl_s=60.0
    ) as broker:
        await broker.create(journal_spec(JOURNAL))
        await append(broker, noise(32_000_000))
        call = read(broker, token=auth.sign(Claims(Capability.READ), 60))
        received = 0
        async for message in call:
            received += len(message.content)
            clock.ahead_s = 61.0
        assert 0 < received < 32_000_000
        assert await call.code() is grpc.StatusCode.OK
        clock.ahead_s = 0.0


# --- Stored content


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.INVALID])
async def test_stored_fragments_are_read_from_any_offset(
    broker: BrokerFixture, codec: Codec
) -> None:
    content = noise(700_000)
    store_fragment(broker.file_root, 1000, content, codec=codec)
    await broker.create(journal_spec(JOURNAL))
    first, *rest = await read_all(broker, offset=1000)
    assert first.fragment.backing_store == STORE
    assert first.fragment_url.startswith("file:///fragments/a/journal/")
    assert content_of(rest) == content
    assert max(len(message.content) for message in rest) <= 131_072
    offsets = [message.offset for message in rest if message.content]
    assert offsets == sorted(set(offsets))
    for offset, end in ((300_000, 0), (701_000 - 1, 0), (5000, 600_000), (1000, 1001)):
        messages = await read_all(broker, offset=offset, end_offset=end)
        assert content_of(messages) == content[offset - 1000 : (end or 701_000) - 1000]


async def test_a_remote_fragment_is_only_described_where_proxying_is_not_wanted(
    broker: BrokerFixture,
) -> None:
    store_fragment(broker.file_root, 0, b"stored")
    await broker.create(journal_spec(JOURNAL))
    (only,) = await read_all(broker, do_not_proxy=True)
    assert (only.status, only.fragment.end) == (Status.OK.value, 6)
    assert only.fragment_url


async def test_reading_passes_from_stored_to_local_content(broker: BrokerFixture) -> None:
    store_fragment(broker.file_root, 0, b"stored ", codec=Codec.GZIP)
    await broker.create(journal_spec(JOURNAL))
    await broker.client.append(AppendParams(JOURNAL, offset=7), b"local")
    messages = await read_all(broker)
    assert content_of(messages) == b"stored local"
    stores = [m.fragment.backing_store for m in messages if m.HasField("fragment")]
    assert stores == [STORE, ""]


async def test_offsets_jump_over_what_was_pruned_and_old_fragments_are_skipped(
    broker: BrokerFixture,
) -> None:
    store_fragment(broker.file_root, 100, b"old", mod_time=1_500_000_000)
    store_fragment(broker.file_root, 103, b"new", mod_time=1_600_000_000)
    await broker.create(journal_spec(JOURNAL))
    first, *_ = messages = await read_all(broker, offset=7)
    assert first.offset == 100
    assert content_of(messages) == b"oldnew"
    first, *_ = messages = await read_all(broker, offset=0, begin_mod_time=1_550_000_000)
    assert first.offset == 103
    assert content_of(messages) == b"new"


CONTENT = noise(400_000, seed=3)


@pytest.mark.parametrize(
    ("codec", "damage", "text"),
    [
        (Codec.NONE, lambda b: b[:-1] + b"?", "does not have the SHA-1 of its name"),
        (Codec.NONE, lambda b: b"?" + b[1:], "does not have the SHA-1 of its name"),
        (Codec.NONE, lambda b: b[:-1], "ends before its fragment does"),
        (Codec.NONE, lambda b: b + b"more", "holds more than its fragment"),
        (Codec.GZIP, lambda b: b[:-4], ""),
        (Codec.GZIP, lambda b: b[:20] + b"\0\0\0\0" + b[24:], ""),
        (Codec.ZSTANDARD, lambda b: b[:-4], ""),
        (Codec.SNAPPY, lambda b: b[: len(b) // 2], ""),
        (Codec.GZIP, lambda b: new_gzip(CONTENT + b"bomb" * 1_000_000), "holds more than"),
    ],
)
async def test_a_damaged_file_is_an_error_that_names_journal_offset_and_file(
    broker: BrokerFixture, codec: Codec, damage: Any, text: str
) -> None:
    path = store_fragment(broker.file_root, 0, CONTENT, codec=codec, damage=damage)
    await broker.create(journal_spec(JOURNAL))
    received: list[bytes] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for message in read(broker):
            received.append(message.content)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    details = caught.value.details() or ""
    assert text in details
    assert f"journal={JOURNAL}" in details
    assert "offset=" in details
    assert path.name in details
    # The last bytes of a file whose digest is wrong were not served.
    assert len(b"".join(received)) < len(CONTENT)


def new_gzip(content: bytes) -> bytes:
    compressor = new_compressor(Codec.GZIP)
    return compressor.compress(content) + compressor.finish()


async def test_a_fragment_that_has_vanished_from_its_store_is_an_error(
    broker: BrokerFixture,
) -> None:
    path = store_fragment(broker.file_root, 0, b"here for now")
    await broker.create(journal_spec(JOURNAL))
    assert content_of(await read_all(broker)) == b"here for now"  # The broker has listed it.
    path.unlink()
    with call_refused(grpc.StatusCode.UNKNOWN, path.name):
        await read_all(broker)


async def test_a_reader_that_goes_away_is_no_error(
    broker: BrokerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.create(journal_spec(JOURNAL))
    for _ in range(8):
        await append(broker, noise(4_000_000))
    request = broker_pb2.ReadRequest(journal=JOURNAL, block=True)
    for seconds in (0.005, 0.02, 0.05, 0.1):
        call: Any = stub(broker).Read(request, timeout=seconds)
        with suppress(grpc.aio.AioRpcError):
            await call.read()
        # It reads no more, and its deadline passes while the broker has more to write.
        await call.code()
    async with grpc.aio.insecure_channel(broker.endpoint.removeprefix("http://")) as channel:
        call = JournalStub(channel).Read(request)
        await call.read()
    await broker.client.append(AppendParams(JOURNAL), b"the broker goes on")
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_reader_that_goes_away_leaves_no_open_file(
    broker: BrokerFixture,
) -> None:
    path = store_fragment(broker.file_root, 0, noise(8_000_000))
    await broker.create(journal_spec(JOURNAL))
    for _ in range(5):
        call = read(broker)
        async for message in call:
            if message.content:
                break
        call.cancel()

    def open_files() -> list[str]:
        links = Path("/proc/self/fd")
        return [fd.name for fd in links.iterdir() if fd.exists() and fd.resolve() == path]

    while open_files():
        await SystemClock().sleep(0.002)


# --- Proxied reads, and the end of brokers


async def test_reads_are_proxied_to_a_broker_that_has_the_journal(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with (
        await BrokerFixture.start(etcd, tmp_path, id="broker-one", lease_ttl_s=60.0) as one,
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-two", journal_limit=0, lease_ttl_s=60.0
        ) as two,
    ):
        await one.create(journal_spec(JOURNAL))
        await two.settled(JOURNAL)
        await append(one, noise(200_000))
        first, *rest = await read_all(two)
        # The answer is the other broker's, as it was given.
        assert first.header.process_id.suffix == "broker-one"
        assert content_of(rest) == noise(200_000)
        # A metadata segment is passed on, and is no part of what is asked of tokens.
        first, *_ = await read_all(two, journal=f"{JOURNAL};meta", end_offset=1)
        assert first.status == Status.OK.value

        (refused,) = await read_all(two, do_not_proxy=True)
        assert refused.status == Status.NOT_JOURNAL_BROKER.value
        assert refused.header.process_id.suffix == "broker-two"
        assert [m.suffix for m in refused.header.route.members] == ["broker-one"]

        with call_refused(grpc.StatusCode.UNKNOWN, "EndOffset", "8"):
            await read_all(two, offset=9, end_offset=8)


@pytest.mark.timeout(20)
async def test_calls_that_are_passed_on_end_when_the_other_broker_loses_its_lease(
    etcd: Etcd, tmp_path: Path
) -> None:
    """Regression: a blocked read got no answer any more, as its broker was paused beyond its lease."""
    async with (
        await BrokerFixture.start(etcd, tmp_path, id="broker-one", lease_ttl_s=60.0) as one,
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-two", journal_limit=0, lease_ttl_s=60.0
        ) as two,
    ):
        await one.create(journal_spec(JOURNAL))
        await two.settled(JOURNAL)
        await append(one, b"so far")
        call = read(two, block=True)
        stream = aiter(call)
        assert (await anext(stream)).status == Status.OK
        assert (await anext(stream)).content == b"so far"
        await waiting_at(one, 1)
        # As the key space tells it once the lease is over.
        two.service.context.peers.follow({})
        with call_refused(grpc.StatusCode.UNAVAILABLE, "Read"):
            await anext(stream)
        assert (await read_all(two))[0].status == Status.OK.value


async def test_a_proxied_read_is_signed_for_by_the_proxy(etcd: Etcd, tmp_path: Path) -> None:
    auth = KeyedAuth.parse(SystemClock(), base64.b64encode(b"k" * 32).decode())
    async with (
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-one", auth=auth, lease_ttl_s=60.0
        ) as one,
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-two", auth=auth, journal_limit=0, lease_ttl_s=60.0
        ) as two,
    ):
        await one.create(journal_spec(JOURNAL))
        await two.settled(JOURNAL)
        await append(one, b"hello")
        token = auth.sign(Claims.of_journal(Capability.READ, JOURNAL), 60)
        messages = [m async for m in read(two, token=token, journal=f"{JOURNAL};meta")]
        assert content_of(messages) == b"hello"


@pytest.mark.parametrize("who_stops", ["owner", "proxy"])
async def test_blocked_reads_end_cleanly_when_a_broker_stops(
    etcd: Etcd, tmp_path: Path, who_stops: str
) -> None:
    one = await BrokerFixture.start(etcd, tmp_path, id="broker-one", lease_ttl_s=60.0)
    two = await BrokerFixture.start(
        etcd, tmp_path, id="broker-two", journal_limit=0, lease_ttl_s=60.0
    )
    try:
        await one.create(journal_spec(JOURNAL))
        await two.settled(JOURNAL)
        await append(one, b"so far")
        stopping, other = (one, two) if who_stops == "owner" else (two, one)
        calls = [read(one, block=True), read(two, block=True)]
        streams = [aiter(call) for call in calls]
        for stream in streams:
            assert (await anext(stream)).status == Status.OK
            assert (await anext(stream)).content == b"so far"
        await waiting_at(one, 2)
        service, stopping.service.settings = stopping.service, stopping.service.settings
        await service.stop()
        expected = [0, 1] if who_stops == "owner" else [1]
        for index in expected:
            with pytest.raises(StopAsyncIteration):
                await anext(streams[index])
            assert await calls[index].code() is grpc.StatusCode.OK
        if who_stops == "proxy":
            await append(other, b", and on")
            assert [m.content async for m in take(streams[0], 2)][-1] == b", and on"
            calls[0].cancel()
    finally:
        for broker in (two, one):
            await broker.crash()


async def take(stream: AsyncIterator[Any], count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(stream)


# --- Encoding


@given(st.integers(0, (1 << 63) - 1), st.binary(min_size=1, max_size=300))
def test_content_is_encoded_as_the_generated_code_does(offset: int, content: bytes) -> None:
    message = broker_pb2.ReadResponse(offset=offset, content=content)
    encoded = content_response(offset, memoryview(content))
    assert encoded == message.SerializeToString()
    assert encode_read(encoded) is encoded
    assert encode_read(message) == encoded
    assert decode_read(encoded) == Content(offset, content)


async def test_callers_whose_connection_ends_in_the_middle(
    broker: BrokerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: gRPC logged a traceback for a read whose connection was reset while it was written."""
    await broker.create(journal_spec(JOURNAL))
    await append(broker, os.urandom(8 << 20))
    port = int(broker.endpoint.rpartition(":")[2])
    async with TcpProxy("127.0.0.1", port) as proxy:
        for _ in range(10):
            # With small windows, so that a read is never over when it is cut off.
            options = [
                ("grpc.http2.bdp_probe", 0),
                # Otherwise it would begin on the connection of the one before, which was cut off.
                ("grpc.use_local_subchannel_pool", 1),
            ]
            async with grpc.aio.insecure_channel(
                f"127.0.0.1:{proxy.port}", options=options
            ) as channel:
                calls = [
                    JournalStub(channel).Read(broker_pb2.ReadRequest(journal=JOURNAL))
                    for _ in range(4)
                ]
                for call in calls:
                    await call.read()
                    await call.read()
                proxy.cut()
                for call in calls:
                    with pytest.raises(grpc.aio.AioRpcError):
                        while await call.read() is not END_OF_STREAM:
                            pass
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == []
    await read_all(broker)


# --- Slow disks


class StallingDisk(LocalDisk):
    """A disk whose operations wait for ``gate``, and which records each waiter."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate = threading.Event()
        self.gate.set()
        self.waits: set[str] = set()

    def stall(self, operation: str) -> None:
        if not self.gate.is_set():
            self.waits.add(f"{operation} by {threading.current_thread().name.rsplit('_')[0]}")
            self.gate.wait(30)

    def create(self) -> StallingFile:
        self.stall("create")
        return StallingFile(self)


class StallingFile(LocalFile):
    def __init__(self, disk: StallingDisk) -> None:
        super().__init__(disk.directory)
        self.disk = disk

    def pwrite(self, content: bytes, position: int) -> None:
        self.disk.stall("write")
        super().pwrite(content, position)

    def pread(self, length: int, position: int) -> bytes:
        self.disk.stall("read")
        return super().pread(length, position)


async def test_a_disk_that_stalls_stops_nothing_until_memory_is_full(
    etcd: Etcd, tmp_path: Path
) -> None:
    """It stalls from its first operation on. Appends wait once memory is full, and all else goes on."""
    disk = StallingDisk(tmp_path)
    disk.gate.clear()
    limit = 1600
    async with await BrokerFixture.start(
        etcd, tmp_path, disk=disk, spool_memory_bytes=limit
    ) as broker:
        other = "b/journal"
        for journal in (JOURNAL, other):
            await broker.create(journal_spec(journal))
        async with TaskScope("test") as scope:
            try:
                await append(broker, b"a" * 700)
                # A thread waits for the disk, while the next ones are answered.
                while disk.waits != {"create by spool writes"}:
                    await SystemClock().sleep(0.001)
                await append(broker, b"b" * 800, journal=other)
                assert content_of(await read_all(broker)) == b"a" * 700
                appending = scope.spawn(append(broker, b"c" * (limit - 1499)), name="append")
                await append(broker, b"d" * 100, journal=other)
                assert content_of(await read_all(broker, journal=other)) == b"b" * 800 + b"d" * 100
                assert len((await broker.client.list_journals()).journals) == 2
                metadata = await read_all(broker, metadata_only=True)
                assert metadata[0].write_head == 700
                assert not appending.done()
            finally:
                disk.gate.set()
            await appending
        assert content_of(await read_all(broker)) == b"a" * 700 + b"c" * (limit - 1499)
