"""Channels: one per endpoint, closed when unused, never under a call; TLS, unix sockets, state."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest

from gazette.client.channel import Channels, ChannelSettings, TlsSettings
from gazette.client.dispatch import Health
from gazette.errors import Closed, Invalid, Unavailable
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2, broker_pb2_grpc
from gazette.protocol.route import Route
from gazette.testing.clock import ManualClock
from gazette.testing.instant_clock import eventually
from gazette.testing.stub_broker import Send, StubBroker
from gazette.testing.tcp_proxy import TcpProxy

FRAGMENTS = broker_pb2.FragmentsRequest(journal="a/journal")


@pytest.fixture(autouse=True)
def answers(broker: StubBroker) -> None:
    broker.answers["ListFragments"] = lambda request: broker_pb2.FragmentsResponse()


async def test_an_endpoint_has_one_channel(broker: StubBroker) -> None:
    channels = Channels()
    assert channels.journal(broker.endpoint) is channels.journal(broker.endpoint)
    await channels.journal(broker.endpoint).ListFragments(FRAGMENTS)
    assert len(channels) == 1
    await channels.close()
    await channels.close()
    with pytest.raises(Closed):
        channels.journal(broker.endpoint)


async def test_unused_channels_are_closed_but_not_under_a_call(broker: StubBroker) -> None:
    clock = ManualClock()
    channels = Channels(clock=clock, settings=ChannelSettings(idle_s=30))
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


async def test_calls_to_a_process_that_lost_its_lease_end(broker: StubBroker) -> None:
    channels = Channels()
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


async def test_a_process_that_is_back_is_reached_without_its_back_off(broker: StubBroker) -> None:
    """Also if its key was created again in the step in which it vanished."""
    patient = ChannelSettings(backoff_min_s=300.0, backoff_max_s=300.0, connect_timeout_s=300.0)
    async with TcpProxy("127.0.0.1", broker.port) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        channels = Channels(settings=patient)
        channels.follow({endpoint: 7})
        proxy.refuse()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await channels.journal(endpoint).ListFragments(FRAGMENTS)
        await proxy.accept()
        channels.follow({endpoint: 9})
        await channels.journal(endpoint).ListFragments(FRAGMENTS)
        await channels.close()


async def test_a_failing_connection_is_failing_until_it_is_ready(broker: StubBroker) -> None:
    channels = Channels(settings=ChannelSettings(backoff_max_s=0.05))
    stub = channels.journal(broker.endpoint)
    assert channels.health(broker.endpoint) is Health.IDLE
    await stub.ListFragments(FRAGMENTS)
    assert channels.health(broker.endpoint) is Health.READY
    await broker.stop()
    async with asyncio.timeout(10):
        # The first may find the old connection ending, and only the next that there is no other.
        while channels.health(broker.endpoint) is not Health.FAILING:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ListFragments(FRAGMENTS)
    assert channels.pick(Route((broker.id,), 0, (broker.endpoint,))) is None
    await broker.start()
    await stub.ListFragments(FRAGMENTS, wait_for_ready=True)
    assert channels.health(broker.endpoint) is Health.READY
    await channels.close()


async def test_a_member_without_endpoint_cannot_be_called(broker: StubBroker) -> None:
    channels = Channels("local")
    route = Route((broker.id,), 0, (broker.endpoint,))
    await channels.member(route, broker.id).ListFragments(FRAGMENTS)
    with pytest.raises(Unavailable):
        channels.member(route, ProcessId("local", "another"))
    await channels.close()


async def test_closing_cancels_calls(broker: StubBroker) -> None:
    channels = Channels()
    broker.on_read(Send(hang=True))
    call = channels.journal(broker.endpoint).Read(broker_pb2.ReadRequest(journal="a/journal"))
    await eventually(lambda: broker.reads)
    await channels.close()
    with pytest.raises(asyncio.CancelledError):
        await call.read()


async def test_a_peer_that_falls_silent_is_given_up(broker: StubBroker) -> None:
    """Its connection stands, and nothing comes: keepalive notices, where nothing else would."""
    settings = ChannelSettings(keepalive_s=0.1, keepalive_timeout_s=0.1)
    broker.on_read(Send(hang=True))
    async with TcpProxy("127.0.0.1", broker.port) as proxy:
        channels = Channels(settings=settings)
        stub = channels.journal(f"http://127.0.0.1:{proxy.port}")
        call = stub.Read(broker_pb2.ReadRequest(journal="a/journal"))
        await eventually(lambda: broker.reads)
        proxy.hold_requests()
        proxy.hold_replies()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channels.close()


async def test_messages_of_many_megabytes_are_received(broker: StubBroker) -> None:
    channels = Channels()
    broker.on_read(Send((broker_pb2.ReadResponse(content=bytes(15 << 20)),)))
    call = channels.journal(broker.endpoint).Read(broker_pb2.ReadRequest(journal="a/journal"))
    assert len((await call.read()).content) == 15 << 20
    await channels.close()


async def test_unix_sockets_are_endpoints(broker: StubBroker, tmp_path: Path) -> None:
    server = grpc.aio.server()
    broker_pb2_grpc.add_JournalServicer_to_server(broker, server)
    server.add_insecure_port(f"unix://{tmp_path}/socket")
    await server.start()
    channels = Channels()
    await channels.journal(f"unix://localhost{tmp_path}/socket").ListFragments(FRAGMENTS)
    await channels.close()
    await server.stop(None)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        " -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    return certificate, key


@pytest.mark.parametrize("mutual", [False, True])
async def test_https_endpoints_are_spoken_to_over_tls(
    broker: StubBroker, certificate: tuple[Path, Path], mutual: bool
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
    channels = Channels(tls=tls)
    await channels.journal(f"https://127.0.0.1:{port}").ListFragments(FRAGMENTS)
    with pytest.raises(grpc.aio.AioRpcError):
        await channels.journal(f"http://127.0.0.1:{port}").ListFragments(FRAGMENTS)
    await channels.close()
    await server.stop(None)


async def test_what_is_no_endpoint_or_no_certificate_is_refused(tmp_path: Path) -> None:
    channels = Channels(tls=TlsSettings(ca_file=tmp_path / "missing"))
    for endpoint in ("localhost:8080", "http://", "nothing"):
        with pytest.raises(Invalid):
            channels.journal(endpoint)
    with pytest.raises(Invalid, match="missing"):
        channels.journal("https://localhost:1")
    with pytest.raises(Invalid, match="together"):
        TlsSettings(cert_file=tmp_path).credentials()
    await channels.close()
