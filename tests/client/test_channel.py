"""Channels: one per endpoint, closed when unused, never under a call; TLS, unix sockets, state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams
from gazette.client.read.reader import ReadParams
from gazette.client.rpc.channel import Channels, ChannelSettings, TlsSettings
from gazette.client.rpc.counted_channel import Health
from gazette.client.rpc.preflight import require_reachable
from gazette.errors import Closed, GazetteError, Invalid, Unavailable
from gazette.http2 import frames as fr
from gazette.http2.grpc_client import Http2Transport
from gazette.http2.metadata import HEAD_BLOCK
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2, broker_pb2_grpc
from gazette.protocol.route import Route
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from tests.facts import logged, raises
from tests.raw_server import raw_server
from tests.support.instant_clock import eventually
from tests.support.stub_broker import Send, StubBroker
from tests.support.tcp_proxy import TcpProxy

Connect: TypeAlias = Callable[..., Channels]
FRAGMENTS = broker_pb2.FragmentsRequest(journal="a/journal")


@pytest.fixture(params=["grpcio", "http2"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Make channels of one transport after the other."""

    def make(zone: str = "", tls: TlsSettings | None = None, **options: Any) -> Channels:
        if request.param == "http2":
            options["transport"] = Http2Transport((tls or TlsSettings()).context)
        return Channels(zone, tls, **options)

    return make


@pytest.fixture(autouse=True)
def answers(broker: StubBroker) -> None:
    broker.answers["ListFragments"] = lambda request: broker_pb2.FragmentsResponse()


async def test_an_endpoint_has_one_channel(connect: Connect, broker: StubBroker) -> None:
    channels = connect()
    assert channels.journal(broker.endpoint) is channels.journal(broker.endpoint)
    await channels.journal(broker.endpoint).ListFragments(FRAGMENTS)
    assert len(channels) == 1
    await channels.close()
    await channels.close()
    with pytest.raises(Closed):
        channels.journal(broker.endpoint)


async def test_unused_channels_are_closed_but_not_under_a_call(
    connect: Connect, broker: StubBroker
) -> None:
    clock = ManualClock()
    channels = connect(clock=clock, settings=ChannelSettings(idle_s=30))
    async with StubBroker("second") as second, StubBroker("third") as third:
        broker.on_read(Send(hang=True))
        call = channels.journal(broker.endpoint).Read(broker_pb2.ReadRequest(journal="a/journal"))
        await eventually(lambda: broker.reads)
        channels.pin(third.endpoint)
        channels.journal(second.endpoint)
        channels.journal(third.endpoint)
        clock.advance(31)
        channels.journal(third.endpoint)
        # The second is gone; the first has a call, the third is pinned.
        assert len(channels) == 2
        assert channels.health(second.endpoint) is Health.IDLE
        call.cancel()
        await eventually(call.done)
        clock.advance(31)
        channels.journal(third.endpoint)
        assert len(channels) == 1
    await channels.close()


async def test_a_close_that_is_cancelled_cuts_all_connections_off(broker: StubBroker) -> None:
    channels = Channels()
    async with StubBroker("second") as second:
        calls = []
        for stub in (broker, second):
            stub.on_read(Send(hang=True))
            request = broker_pb2.ReadRequest(journal="a/journal")
            calls.append(channels.journal(stub.endpoint).Read(request))
        await eventually(lambda: broker.reads and second.reads)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await channels.close(60.0)
        await eventually(lambda: all(call.done() for call in calls))
        await channels.close()


async def test_calls_to_a_process_that_lost_its_lease_end(
    connect: Connect, broker: StubBroker
) -> None:
    channels = connect()
    channels.follow({broker.endpoint: 7, "http://127.0.0.1:1": 8})
    broker.on_read(Send(hang=True))
    call = channels.journal(broker.endpoint).Read(broker_pb2.ReadRequest(journal="a/journal"))
    await eventually(lambda: broker.reads)
    channels.follow({broker.endpoint: 7})
    assert not call.done()
    channels.follow({})
    with pytest.raises(asyncio.CancelledError):
        await anext(aiter(call))
    channels.follow({broker.endpoint: 9})
    await channels.journal(broker.endpoint).ListFragments(FRAGMENTS)
    await channels.close()


async def test_a_process_that_is_back_is_reached_without_its_back_off(
    connect: Connect, broker: StubBroker
) -> None:
    """Also if its key was created again in the step in which it vanished."""
    patient = ChannelSettings(backoff_min_s=300.0, backoff_max_s=300.0, connect_timeout_s=300.0)
    async with TcpProxy("127.0.0.1", broker.port) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        channels = connect(settings=patient)
        channels.follow({endpoint: 7})
        proxy.refuse()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await channels.journal(endpoint).ListFragments(FRAGMENTS)
        await proxy.accept()
        channels.follow({endpoint: 9})
        await channels.journal(endpoint).ListFragments(FRAGMENTS)
        await channels.close()


async def test_a_failing_connection_is_failing_until_it_is_ready(
    connect: Connect, broker: StubBroker
) -> None:
    channels = connect(settings=ChannelSettings(backoff_max_s=0.05))
    stub = channels.journal(broker.endpoint)
    assert channels.health(broker.endpoint) is Health.IDLE
    await stub.ListFragments(FRAGMENTS)
    assert channels.health(broker.endpoint) is Health.READY
    await broker.stop()
    async with asyncio.timeout(60):
        # The first may find the old connection ending, and only the next that there is no other.
        while channels.health(broker.endpoint) is not Health.FAILING:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ListFragments(FRAGMENTS)
    assert channels.pick(Route((broker.id,), 0, (broker.endpoint,))) is None
    await broker.start()
    await stub.ListFragments(FRAGMENTS, wait_for_ready=True)
    assert channels.health(broker.endpoint) is Health.READY
    await channels.close()


async def test_a_member_without_endpoint_cannot_be_called(
    connect: Connect, broker: StubBroker
) -> None:
    channels = connect("local")
    route = Route((broker.id,), 0, (broker.endpoint,))
    await channels.member(route, broker.id).ListFragments(FRAGMENTS)
    with pytest.raises(Unavailable):
        channels.member(route, ProcessId("local", "another"))
    await channels.close()


async def test_closing_cancels_calls(connect: Connect, broker: StubBroker) -> None:
    channels = connect()
    broker.on_read(Send(hang=True))
    call = channels.journal(broker.endpoint).Read(broker_pb2.ReadRequest(journal="a/journal"))
    await eventually(lambda: broker.reads)
    await channels.close()
    with pytest.raises(asyncio.CancelledError):
        await call.read()


def test_pings_keep_the_policy_of_go_servers() -> None:
    """These permit one in five minutes, and close a connection at the third that comes too early."""
    options = dict(ChannelSettings().options())
    assert options["grpc.keepalive_time_ms"] > 300_000
    assert options["grpc.keepalive_permit_without_calls"] == 0


@pytest.mark.long
async def test_a_server_that_refuses_pings_gets_half_as_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The interval of the refused channel grows. Those that are opened later know of it, too."""
    policy = [
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 300_000),
        ("grpc.http2.max_ping_strikes", 1),
    ]
    stub = StubBroker()
    stub.on_read(Send(hang=True))
    opened: list[int] = []

    class Recorded:
        ends_silent_calls = False

        def channel(self, target: str, credentials: Any, options: Any) -> Any:
            opened.append(dict(options)["grpc.keepalive_time_ms"])
            return Http2Transport().channel(target, credentials, options)

    async with serving(stub, policy) as endpoint:
        settings = ChannelSettings(keepalive_s=0.1, keepalive_timeout_s=2.0)
        channels = Channels(settings=settings, transport=Recorded())
        channels.follow({endpoint: 1})
        call = channels.journal(endpoint).Read(broker_pb2.ReadRequest(journal="a/journal"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)too.many.pings"):
            await call.read()
        await eventually(lambda: caplog.records)
        logged(caplog, seconds=0.2)
        channels.follow({endpoint: 2})
        channels.journal(endpoint)
        assert opened == [100, 200]
        await channels.close()


@asynccontextmanager
async def serving(
    stub: StubBroker, options: Sequence[tuple[str, Any]] = (), interceptors: Sequence[Any] = ()
) -> AsyncIterator[str]:
    """Serve a stub with options of gRPC; the endpoint."""
    server = grpc.aio.server(options=options, interceptors=interceptors)
    broker_pb2_grpc.add_JournalServicer_to_server(stub, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield endpoint
    finally:
        await server.stop(None)


@pytest.fixture
async def silenced(broker: StubBroker) -> AsyncIterator[tuple[TcpProxy, str]]:
    """Yield a proxy before a broker whose reads wait for ever, and its endpoint."""
    broker.on_read(Send(hang=True), Send(hang=True))
    async with TcpProxy("127.0.0.1", broker.port) as proxy:
        yield proxy, f"http://127.0.0.1:{proxy.port}"


ASK_OFTEN = ChannelSettings(silence_s=0.1, silence_timeout_s=0.2)


async def test_a_peer_that_falls_silent_is_given_up(
    broker: StubBroker, silenced: tuple[TcpProxy, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its machine acknowledges what is sent, and no ping is due: it is asked, and does not answer."""
    proxy, endpoint = silenced
    async with Client(endpoint, channel_settings=ASK_OFTEN) as client:
        reader = client.reader(ReadParams("a/journal", block=True))

        async def fall_silent() -> None:
            await eventually(lambda: broker.reads)
            proxy.hold_requests()
            proxy.hold_replies()

        read, _ = await asyncio.gather(reader.read(), fall_silent(), return_exceptions=True)
        assert isinstance(read, Unavailable)
        logged(caplog, endpoint=endpoint, seconds=0.2)
        proxy.release()
        await client.channels.journal(endpoint).ListFragments(FRAGMENTS)


async def test_calls_that_give_up_do_not_hide_a_silent_peer(
    broker: StubBroker, silenced: tuple[TcpProxy, str]
) -> None:
    """A member asks its brokers again and again, with a time-out. That such calls end says nothing."""
    proxy, endpoint = silenced
    async with Client(endpoint, channel_settings=ASK_OFTEN) as client, TaskScope("test") as scope:
        reader = client.reader(ReadParams("a/journal", block=True))
        read = scope.spawn(_error_of(reader.read()), name="read")
        await eventually(lambda: broker.reads)
        proxy.hold_requests()
        proxy.hold_replies()
        async with asyncio.timeout(10):
            while not read.done():
                with suppress(TimeoutError, GazetteError):
                    async with asyncio.timeout(0.02):
                        await client.list_fragments(FragmentsParams("a/journal"))
        assert isinstance(read.result(), Unavailable)
        proxy.release()


async def test_a_check_of_an_address_that_falls_silent_is_an_answer(
    silenced: tuple[TcpProxy, str],
) -> None:
    """The connection is closed meanwhile. A cancellation that no caller asked for would end its task."""
    proxy, endpoint = silenced
    async with Client(endpoint, channel_settings=ASK_OFTEN) as client:
        await client.channels.journal(endpoint).ListFragments(FRAGMENTS)
        proxy.hold_requests()
        proxy.hold_replies()
        with raises(Unavailable, says=f"cannot reach the broker at {endpoint}"):
            await require_reachable(client, "broker", connect_s=30.0, hint="Look.")
        proxy.release()


async def _error_of(work: Awaitable[Any]) -> BaseException | None:
    try:
        await work
    except GazetteError as error:
        return error
    return None


class Asked(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Notes the methods that a server is called by."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        self.methods.append(details.method)
        return await continuation(details)


async def test_a_peer_that_answers_is_not_given_up(connect: Connect) -> None:
    """However long a read waits at the head. The answer is that the peer does not know the method."""
    asked, stub = Asked(), StubBroker()
    stub.on_read(Send(hang=True))
    async with serving(stub, interceptors=[asked]) as endpoint:
        channels = connect(settings=ChannelSettings(silence_s=0.02))
        call = channels.journal(endpoint).Read(broker_pb2.ReadRequest(journal="a/journal"))
        await eventually(lambda: asked.methods.count("/grpc.health.v1.Health/Check") == 3)
        assert not call.done()
        call.cancel()
        await channels.close()


@pytest.mark.parametrize("sends", ["content", "pings"])
async def test_a_peer_that_sends_content_is_not_given_up(sends: str) -> None:
    """Its answer to the question comes behind all content that is on its way, over a slow link. Pings are
    answered by proxies, too."""
    asked = bytearray()
    part = fr.frame(fr.DATA, 0, 1, b"x") if sends == "content" else fr.ping(bytes(8))

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(fr.settings({}))
        while b"/protocol.Journal/Read" not in asked:
            asked.extend(await reader.read(1 << 16))
        writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS, 1, HEAD_BLOCK))
        writer.write(fr.frame(fr.DATA, 0, 1, bytes([0, 0, 1, 0, 0])))  # A message of 64 KiB begins.
        while data := await reader.read(1 << 16):
            asked.extend(data)
            writer.write(fr.ping(bytes(8)))  # Its answer is read next.
            writer.write(part)

    async with raw_server(slow) as server:
        channels = Channels(settings=ASK_OFTEN)
        call = channels.journal(f"http://{server.target}").Read(
            broker_pb2.ReadRequest(journal="a/journal")
        )
        if sends == "pings":
            await eventually(call.done)
            assert await call.code() is grpc.StatusCode.CANCELLED
        else:
            await eventually(lambda: asked.count(b"/grpc.health.v1.Health/Check") == 3)
            assert not call.done()
            call.cancel()
        await channels.close()


async def test_messages_of_many_megabytes_are_received(
    connect: Connect, broker: StubBroker
) -> None:
    channels = connect()
    broker.on_read(Send((broker_pb2.ReadResponse(content=bytes(15 << 20)),)))
    call = channels.journal(broker.endpoint).Read(broker_pb2.ReadRequest(journal="a/journal"))
    assert len((await call.read()).content) == 15 << 20
    await channels.close()


async def test_unix_sockets_are_endpoints(
    connect: Connect, broker: StubBroker, tmp_path: Path
) -> None:
    server = grpc.aio.server()
    broker_pb2_grpc.add_JournalServicer_to_server(broker, server)
    server.add_insecure_port(f"unix://{tmp_path}/socket")
    await server.start()
    channels = connect()
    await channels.journal(f"unix://localhost{tmp_path}/socket").ListFragments(FRAGMENTS)
    await channels.close()
    await server.stop(None)


@pytest.mark.parametrize("mutual", [False, True])
async def test_https_endpoints_are_spoken_to_over_tls(
    connect: Connect, broker: StubBroker, certificate: tuple[Path, Path], mutual: bool
) -> None:
    chain, key = certificate
    server = grpc.aio.server()
    broker_pb2_grpc.add_JournalServicer_to_server(broker, server)
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials(
            [(key.read_bytes(), chain.read_bytes())],
            root_certificates=chain.read_bytes() if mutual else None,
            require_client_auth=mutual,
        ),
    )
    await server.start()
    tls = TlsSettings(ca_file=chain, **({"cert_file": chain, "key_file": key} if mutual else {}))
    channels = connect(tls=tls)
    await channels.journal(f"https://127.0.0.1:{port}").ListFragments(FRAGMENTS)
    with pytest.raises(grpc.aio.AioRpcError):
        await channels.journal(f"http://127.0.0.1:{port}").ListFragments(FRAGMENTS)
    await channels.close()
    await server.stop(None)


async def test_what_is_no_endpoint_or_no_certificate_is_refused(
    connect: Connect, tmp_path: Path
) -> None:
    channels = connect(tls=TlsSettings(ca_file=tmp_path / "missing"))
    for endpoint in ("localhost:8080", "http://", "nothing"):
        with pytest.raises(Invalid):
            channels.journal(endpoint)
    with pytest.raises(Invalid, match="missing"):
        channels.journal("https://localhost:1")
    with pytest.raises(Invalid, match="together"):
        TlsSettings(cert_file=tmp_path).credentials()
    await channels.close()
