"""Callers of a TLS port that requires certificates: every one without a right one is refused."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from gazette.net import http_accept
from gazette.net.http_server import TlsFiles
from gazette.protocol.route import grpc_target
from gazette.runtime.tls import tls_context
from tests.hostile.conftest import Matrix
from tests.test_server import Running, bound, certificates, openssl

__all__ = ["certificates"]


@pytest.fixture(scope="module")
def strangers(certificates: Path) -> dict[str, tuple[str, str]]:
    """Make certificates that must not suffice: of another CA, self-signed, and expired."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    self_signed = (
        "req",
        "-x509",
        *key,
        "-keyout",
        "self.key",
        "-out",
        "self.pem",
        "-subj",
        "/CN=x",
    )
    openssl(certificates, *self_signed)
    other = ("req", "-x509", *key, "-keyout", "other.key", "-out", "other.pem", "-subj", "/CN=ca")
    openssl(certificates, *other)
    request = ("-keyout", "late.key", "-out", "late.csr", "-subj", "/CN=client")
    openssl(certificates, "req", *key, *request)
    for name, ca, days in (("of another CA", "other", "1"), ("expired", "ca", "-1")):
        signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", days)
        openssl(certificates, "x509", "-req", "-in", "late.csr", "-out", f"{name}.pem", *signer)
    return {
        "of another CA": ("of another CA.pem", "late.key"),
        "expired": ("expired.pem", "late.key"),
        "self-signed": ("self.pem", "self.key"),
        "none": ("", ""),
    }


async def answer(port: int, context: ssl.SSLContext | None, request: bytes) -> bytes:
    """Return what a server answers; empty if it refuses the connection."""
    try:
        async with asyncio.timeout(20):
            name = "127.0.0.1" if context else None
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=name
            )
            try:
                writer.write(request)
                return await reader.read(100)
            finally:
                writer.transport.abort()
    except (OSError, ssl.SSLError):
        return b""


async def test_strangers(
    certificates: Path,
    strangers: dict[str, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    monkeypatch.setattr(http_accept, "_HANDSHAKE_S", 0.5)
    results = matrix("TLS with required certificates")
    ca = str(certificates / "ca.pem")
    files = TlsFiles(str(certificates / "server.pem"), str(certificates / "server.key"), ca)
    get = b"GET /x HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"

    def context(pair: tuple[str, str]) -> ssl.SSLContext:
        made = tls_context(ca_file=ca)
        if pair[0]:
            made.load_cert_chain(certificates / pair[0], certificates / pair[1])
        return made

    async with Running(bound(tls=files)) as running:
        target, _ = grpc_target(running.server.endpoint)
        port = int(running.server.http_endpoint.rpartition(":")[2])
        good = context(("client.pem", "client.key"))
        assert (await answer(port, good, get)).startswith(b"HTTP/1.1 200")
        for pair in strangers.values():
            assert await answer(port, context(pair), get) == b"", pair
            read = [(certificates / one).read_bytes() if one else None for one in pair]
            credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes(), read[1], read[0])
            async with grpc.aio.secure_channel(target, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await running.call(channel)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            results.count("refused", 2)
        for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
            old = context(("client.pem", "client.key"))
            old.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.warns(DeprecationWarning, match="TLS"):
                old.minimum_version = old.maximum_version = version
            assert await answer(port, old, get) == b"", version
            results.count("refused")
        # No TLS at all, and what looks like its begin.
        for request in (get, b"\x16\x03\x01\x02\x00\x01", b"\x16\x03\x01\xff\xff" + b"x" * 70_000):
            assert not (await answer(port, None, request)).startswith(b"HTTP/1.1 2")
            async with grpc.aio.insecure_channel(target) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await running.call(channel)
            results.count("refused", 2)
        assert (await answer(port, good, get)).startswith(b"HTTP/1.1 200")
    assert len(log_lines()) <= 10, log_lines()
