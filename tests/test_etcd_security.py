"""TLS, users and roles, against real etcds that insist on them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.connection import Connection
from gazette.cluster.etcd.pb import auth_pb2, rpc_pb2, rpc_pb2_grpc
from gazette.errors import Invalid, NotAllowed, Unavailable
from gazette.runtime.clock import SystemClock
from gazette.testing.etcd import EtcdServer, ServerTls, etcd_for_tests
from tests.facts import raises

# --- TLS


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def certify(directory: Path, name: str, extensions: str) -> None:
    """Write ``name.key`` and ``name.pem``, signed by ``ca``."""
    (directory / f"{name}.ext").write_text(extensions)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        directory,
        "req",
        *key,
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.csr",
        "-subj",
        f"/CN={name}",
    )
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl(
        directory,
        *("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem"),
        *signed,
        *("-extfile", f"{name}.ext"),
    )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("certificates")
    for ca in ("ca", "stranger"):
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl(
            directory,
            *("req", "-x509", *key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem"),
            *("-subj", f"/CN={ca}", "-days", "2"),
        )
    both = "extendedKeyUsage=serverAuth,clientAuth\n"
    certify(directory, "server", "subjectAltName=IP:127.0.0.1,DNS:localhost\n" + both)
    certify(directory, "client", both)
    return directory


async def test_tls_with_client_certificates(certificates: Path, tmp_path: Path) -> None:
    def pem(name: str) -> str:
        return str(certificates / name)

    tls = ServerTls(pem("server.pem"), pem("server.key"), client_ca_file=pem("ca.pem"))
    with etcd_for_tests(tmp_path, listen="https://127.0.0.1:0", tls=tls) as server:
        endpoints = (server.endpoint,)
        mutual = EtcdSettings(
            endpoints,
            cert_file=pem("client.pem"),
            key_file=pem("client.key"),
            ca_file=pem("ca.pem"),
        )
        async with await Etcd.connect(mutual, SystemClock()) as etcd:
            await etcd.put("a", b"1")
            lease = await etcd.grant(60)
            await lease.renew()
            async with aclosing(etcd.watch("a", start_revision=1)) as watching:
                assert (await anext(watching)).created
                assert len((await anext(watching)).events) == 1

        # Case: no client certificate; another authority; no TLS at all.
        for settings in (
            EtcdSettings(endpoints, ca_file=pem("ca.pem"), request_timeout_s=0.3),
            EtcdSettings(
                endpoints,
                cert_file=pem("client.pem"),
                key_file=pem("client.key"),
                ca_file=pem("stranger.pem"),
                request_timeout_s=0.3,
            ),
            EtcdSettings((server.endpoint.replace("https", "http"),), request_timeout_s=0.3),
        ):
            with pytest.raises(Unavailable, match=r"https?://127\.0\.0\.1"):
                await Etcd.connect(settings, SystemClock())


async def test_certificates_that_were_replaced_are_used(certificates: Path, tmp_path: Path) -> None:
    """A client whose certificate etcd refuses goes on once the file has another one."""
    tls = ServerTls(
        str(certificates / "server.pem"),
        str(certificates / "server.key"),
        client_ca_file=str(certificates / "ca.pem"),
    )
    mine = tmp_path / "mine"
    mine.mkdir()
    for kind in ("pem", "key"):  # of an authority that etcd does not know
        shutil.copy(certificates / f"stranger.{kind}", mine / f"client.{kind}")
    with etcd_for_tests(tmp_path, listen="https://127.0.0.1:0", tls=tls) as server:
        settings = EtcdSettings(
            (server.endpoint,),
            cert_file=str(mine / "client.pem"),
            key_file=str(mine / "client.key"),
            ca_file=str(certificates / "ca.pem"),
            request_timeout_s=2.0,
        )
        connection = Connection(settings, SystemClock())
        etcd = Etcd(connection)
        try:
            with pytest.raises(Unavailable):
                await etcd.get("a")
            for kind in ("pem", "key"):
                shutil.copy(certificates / f"client.{kind}", mine / f"client.{kind}")
            assert await etcd.get("a") is None
            # Case: files that are gone are no reason to give up what works.
            (mine / "client.pem").unlink()
            connection.move_on(connection.preferred, Unavailable("it went away"))
            assert await etcd.get("a") is None
        finally:
            await etcd.close()


async def test_a_certificate_file_that_cannot_be_read_is_named() -> None:
    settings = EtcdSettings(("https://127.0.0.1:1",), ca_file="/nowhere/ca.pem")
    with raises(Invalid, path="ca_file", file="/nowhere/ca.pem"):
        await Etcd.connect(settings, SystemClock())


# --- users and roles


def enable_auth(server: EtcdServer) -> None:
    """Create users root/root, and app/pw with all rights below `app/`."""
    with grpc.insecure_channel(server.endpoint.removeprefix("http://")) as channel:
        auth = rpc_pb2_grpc.AuthStub(channel)
        permission = auth_pb2.Permission(
            permType=auth_pb2.Permission.READWRITE, key=b"app/", range_end=b"app0"
        )
        auth.RoleAdd(rpc_pb2.AuthRoleAddRequest(name="root"))
        auth.RoleAdd(rpc_pb2.AuthRoleAddRequest(name="apps"))
        auth.RoleGrantPermission(
            rpc_pb2.AuthRoleGrantPermissionRequest(name="apps", perm=permission)
        )
        for user, password, role in (("root", "root", "root"), ("app", "pw", "apps")):
            auth.UserAdd(rpc_pb2.AuthUserAddRequest(name=user, password=password))
            auth.UserGrantRole(rpc_pb2.AuthUserGrantRoleRequest(user=user, role=role))
        auth.AuthEnable(rpc_pb2.AuthEnableRequest())


def settings_of(server: EtcdServer, **options: Any) -> EtcdSettings:
    return EtcdSettings((server.endpoint,), **options)


async def watched(etcd: Etcd, prefix: str) -> None:
    async with aclosing(etcd.watch(prefix, start_revision=0)) as watching:
        assert (await anext(watching)).created


async def test_a_user_does_what_its_roles_allow(tmp_path: Path) -> None:
    # Hashing passwords is slow by intent; at its least cost it does not hold the test up.
    with etcd_for_tests(tmp_path, arguments=["--bcrypt-cost=4"]) as server:
        enable_auth(server)
        app = settings_of(server, user="app", password="pw")
        async with await Etcd.connect(app, SystemClock()) as etcd:
            lease = await etcd.grant(60)
            await etcd.put("app/a", b"1", lease=lease.id)
            await lease.renew()
            await watched(etcd, "app/")
            for refused in (etcd.put("other", b""), etcd.get("other"), watched(etcd, "other/")):
                with pytest.raises(NotAllowed, match="refused") as caught:
                    await refused
                assert "roles" in caught.value.hint

        # Case: a wrong password, and an unknown user.
        for user, password in (("app", "wrong"), ("unknown", "pw")):
            wrong = settings_of(server, user=user, password=password)
            with raises(NotAllowed, operation="Authenticate") as caught:
                await Etcd.connect(wrong, SystemClock())
            assert password not in str(caught.value)

        # Case: no user where one is needed.
        async with await Etcd.connect(settings_of(server), SystemClock()) as etcd:
            with raises(NotAllowed, reason="etcdserver: user name is empty"):
                await etcd.get("app/a")


async def test_tokens_are_renewed_when_etcd_forgot_them(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, durable=True, arguments=["--bcrypt-cost=4"]) as server:
        enable_auth(server)
        app = settings_of(server, user="app", password="pw")
        async with (
            await Etcd.connect(app, SystemClock()) as etcd,
            await Etcd.connect(app, SystemClock()) as watcher,
        ):
            await etcd.put("app/a", b"1")
            await asyncio.to_thread(server.restart)  # The loop sees that the connection ends.
            # Case: a write is refused before it happens, and so may be repeated.
            await etcd.put("app/a", b"2")
            kv = await etcd.get("app/a")
            assert kv is not None
            assert kv.version == 2
            # Case: a watch.
            await watched(watcher, "app/")


async def test_calls_that_wait_for_a_token_keep_their_deadlines(tmp_path: Path) -> None:
    """They ask for a token one after the other, and etcd may not answer."""
    with etcd_for_tests(tmp_path, durable=True, arguments=["--bcrypt-cost=4"]) as server:
        enable_auth(server)
        settings = settings_of(server, user="app", password="pw", request_timeout_s=1.0)
        connection = Connection(settings, SystemClock())
        server.pause()
        etcd = Etcd(connection)
        try:
            async with asyncio.timeout(5.0):
                calls = [etcd.get(f"app/{number}") for number in range(20)]
                answers = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            server.resume()
            await etcd.close()
        assert {type(answer) for answer in answers} == {Unavailable}


async def test_a_user_is_no_harm_until_etcd_asks_for_one(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, arguments=["--bcrypt-cost=4"]) as server:
        app = settings_of(server, user="app", password="pw")
        async with await Etcd.connect(app, SystemClock()) as etcd:
            await etcd.put("app/a", b"1")
            enable_auth(server)
            await etcd.put("app/a", b"2")
