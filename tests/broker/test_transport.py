"""Brokers that speak TLS to everybody, with certificates of their own for each other; and unix sockets."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.rpc.channel import TlsSettings
from gazette.cluster.etcd.client import Etcd
from gazette.net.http_server import TlsFiles
from gazette.protocol.pb import broker_pb2
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.runtime.tls import tls_context
from gazette.testing.broker import BrokerFixture, journal_spec

JOURNAL = "a/journal"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a CA of servers, another of callers, and certificates: server, peer (a broker), intruder."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca in ("servers", "callers"):
        openssl(
            "req", "-x509", *key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}"
        )
    (directory / "san.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    for name, ca in (("server", "servers"), ("peer", "callers"), ("intruder", "servers")):
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("req", *key, *request)
        signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial")
        request = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", "san.ext")
        openssl("x509", "-req", *request, *signer)
    return directory


def started(etcd: Etcd, tmp_path: Path, pem: Path, **settings: Any) -> Any:
    """Start a broker that serves with one certificate, and calls with another one of another CA."""
    serve = TlsFiles(str(pem / "server.pem"), str(pem / "server.key"), str(pem / "callers.pem"))
    call = TlsSettings(pem / "servers.pem", pem / "peer.pem", pem / "peer.key")
    return BrokerFixture.start(
        etcd,
        tmp_path,
        server={"tls": serve},
        peer_tls=call,
        lease_ttl_s=60.0,
        **settings,
    )


async def test_everything_works_over_mutual_tls(etcd: Etcd, tmp_path: Path, pem: Path) -> None:
    async with (
        await started(etcd, tmp_path, pem, zone="a", id="broker-one") as one,
        await started(etcd, tmp_path, pem, zone="b", id="broker-two") as two,
    ):
        assert one.endpoint.startswith("https://127.0.0.1:")
        # Replication is between brokers; a request by way of the wrong one is proxied.
        await one.create(journal_spec(JOURNAL, replication=2))
        await two.settled(JOURNAL)
        for at, broker in enumerate((one, two)):
            result = await broker.client.append(AppendParams(JOURNAL), b"secret")
            assert result.commit.end == 6 * (at + 1)
        context = tls_context(ca_file=str(pem / "servers.pem"))
        context.load_cert_chain(pem / "peer.pem", pem / "peer.key")
        async with httpx.AsyncClient(verify=context) as http:
            # The gateway calls its own broker, over TLS as well.
            for broker in (one, two):
                response = await http.get(f"{broker.http}/{JOURNAL}")
                assert response.content == b"secretsecret"
            assert (await http.get(response.headers["Location"])).status_code == 206


@pytest.mark.parametrize("certificate", ["", "intruder", "plain text"])
async def test_callers_without_the_right_certificate_are_refused(
    etcd: Etcd, tmp_path: Path, pem: Path, certificate: str
) -> None:
    async with await started(etcd, tmp_path, pem) as broker:
        target = broker.endpoint.removeprefix("https://")
        if certificate == "plain text":
            channel = grpc.aio.insecure_channel(target)
        else:
            pair: tuple[bytes | None, bytes | None] = (None, None)
            if certificate:
                pair = (
                    (pem / f"{certificate}.key").read_bytes(),
                    (pem / f"{certificate}.pem").read_bytes(),
                )
            roots = (pem / "servers.pem").read_bytes()
            channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(roots, *pair))
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await JournalStub(channel).Apply(broker_pb2.ApplyRequest(), timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        context = tls_context(ca_file=str(pem / "servers.pem"))
        if certificate == "intruder":
            context.load_cert_chain(pem / "intruder.pem", pem / "intruder.key")
        url = broker.http.replace("https", "http") if certificate == "plain text" else broker.http
        async with httpx.AsyncClient(verify=context) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{url}/debug/ready")


async def test_a_broker_on_unix_sockets(etcd: Etcd, tmp_path: Path) -> None:
    socket = tmp_path / "broker.sock"
    server = {"port": f"unix://{socket}"}
    async with await BrokerFixture.start(etcd, tmp_path, server=server, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(JOURNAL))
        await broker.client.append(AppendParams(JOURNAL), b"content")
        unix = httpx.AsyncHTTPTransport(uds=f"{socket}.http")
        async with httpx.AsyncClient(transport=unix) as http:
            response = await http.get(f"http://broker/{JOURNAL}")
        assert response.content == b"content"
        # No client could follow a location that is a file of this machine.
        assert "Location" not in response.headers
