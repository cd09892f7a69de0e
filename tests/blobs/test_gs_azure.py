"""Google's and Azure's stores against emulators, for machines that run one.

::

    fake-gcs-server -scheme http -port 4443 -backend memory -external-url http://127.0.0.1:4443
    azurite-blob --inMemoryPersistence --blobPort 10000 --skipApiVersionCheck
    GAZETTE_TEST_GS=http://127.0.0.1:4443 GAZETTE_TEST_AZURE=http://127.0.0.1:10000 \\
        pytest tests/blobs/test_gs_azure.py
"""

from __future__ import annotations

import gzip
import io
import json
import os
import urllib.request
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gazette.blobs import fsspec as fsspec_store
from gazette.blobs import health
from gazette.blobs.azure import DELEGATION_KEY_RESERVE_S, DELEGATION_KEY_S, AzureStore
from gazette.blobs.gs import SIGNATURE_TTL_MAX_S, GsStore
from gazette.errors import Corrupt, Invalid, NotAllowed, Unavailable
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.testing.clock import ManualClock
from tests.blobs.s3_endpoint import FaultProxy
from tests.facts import raises
from tests.support.blob_store_tests import BlobStoreTests, FailingReader, get, paths, put

GS = os.environ.get("GAZETTE_TEST_GS", "")
AZURE = os.environ.get("GAZETTE_TEST_AZURE", "")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

if not GS and not AZURE:
    pytest.skip("GAZETTE_TEST_GS and GAZETTE_TEST_AZURE name no emulator", allow_module_level=True)

gs = pytest.mark.skipif(not GS, reason="GAZETTE_TEST_GS names no emulator")
azure = pytest.mark.skipif(not AZURE, reason="GAZETTE_TEST_AZURE names no emulator")


def connection() -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint={AZURE}/{ACCOUNT};"
    )


def gs_store(bucket: str, path: str = "/pre/fix/") -> GsStore:
    url = FragmentStoreUrl.parse(f"gs://{bucket}{path}")
    return GsStore(url, environ={"STORAGE_EMULATOR_HOST": GS})


def azure_store(container: str, path: str = "/pre/fix/") -> AzureStore:
    url = FragmentStoreUrl.parse(f"azure://{container}{path}")
    return AzureStore(url, environ={"AZURE_STORAGE_CONNECTION_STRING": connection()})


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", GS)
    name = f"bucket-{uuid.uuid4().hex}"
    request = urllib.request.Request(
        f"{GS}/storage/v1/b?project=p",
        data=json.dumps({"name": name}).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=5).close()
    return name


@pytest.fixture
def container() -> str:
    from azure.storage.blob import BlobServiceClient

    name = f"container-{uuid.uuid4().hex}"
    with BlobServiceClient.from_connection_string(connection()) as service:
        service.create_container(name)
    return name


@gs
class TestGsStore(BlobStoreTests):
    @pytest.fixture
    def store(self, bucket: str) -> GsStore:
        return gs_store(bucket)


@gs
class TestGsStoreWithoutPrefix(BlobStoreTests):
    @pytest.fixture
    def store(self, bucket: str) -> GsStore:
        return gs_store(bucket, "/")


@azure
class TestAzureStore(BlobStoreTests):
    @pytest.fixture
    def store(self, container: str) -> AzureStore:
        return azure_store(container)


@azure
class TestAzureStoreWithoutPrefix(BlobStoreTests):
    @pytest.fixture
    def store(self, container: str) -> AzureStore:
        return azure_store(container, "/")


@pytest.fixture(params=[pytest.param("gs", marks=gs), pytest.param("azure", marks=azure)])
def store(request: pytest.FixtureRequest) -> GsStore | AzureStore:
    if request.param == "gs":
        return gs_store(request.getfixturevalue("bucket"))
    return azure_store(request.getfixturevalue("container"))


def test_large_objects(store: GsStore | AzureStore) -> None:
    """Go and come in blocks; one that fails leaves nothing."""
    content = os.urandom(3 * fsspec_store.BLOCK_BYTES + 12345)
    put(store, "large", content)
    assert get(store, "large") == content
    with store.open("large") as source:
        source.seek(3_000_000)
        assert source.read(10) == content[3_000_000:3_000_010]
    failing = io.BufferedReader(FailingReader(content, Corrupt("damaged spool")))
    with pytest.raises(Corrupt):
        store.put("failed", failing)
    assert paths(store, "") == ["large"]


def test_encoded_objects_are_read_as_they_are_stored(store: GsStore | AzureStore) -> None:
    """The codec of a fragment undoes its compression, and nothing before it does."""
    compressed = gzip.compress(os.urandom(100_000))
    store.put("encoded", io.BytesIO(compressed), content_encoding="gzip")
    assert get(store, "encoded") == compressed
    (info,) = store.list("")
    assert info.size == len(compressed)


def test_many_objects_are_listed(store: GsStore | AzureStore) -> None:
    names = [f"{number:03}" for number in range(30)]
    for name in names:
        put(store, f"a/{name}", b"x")
    assert paths(store, "a/") == names


def test_a_bucket_that_does_not_exist(store: GsStore | AzureStore) -> None:
    missing = gs_store("missing") if isinstance(store, GsStore) else azure_store("missing")
    with pytest.raises(NotAllowed):
        put(missing, "path", b"")
    with pytest.raises(NotAllowed):
        paths(missing, "")
    assert not missing.exists("path")


@gs
@pytest.mark.parametrize(("status", "expected"), [(403, NotAllowed), (401, NotAllowed)])
def test_refusals_of_gs(
    bucket: str, monkeypatch: pytest.MonkeyPatch, status: int, expected: type[Exception]
) -> None:
    parts = urlsplit(GS)
    with FaultProxy((str(parts.hostname), parts.port or 80)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.endpoint)
        store = gs_store(bucket)
        put(store, "path", b"content")
        proxy.fail(status=status, code="refused", times=1000)
        for operation in (
            lambda: put(store, "path", b""),
            lambda: store.open("path"),
            lambda: store.exists("path"),
            lambda: paths(store, ""),
            lambda: store.remove("path"),
        ):
            with pytest.raises(expected):
                operation()


@azure
def test_azure_signs_with_the_key_of_the_account(container: str) -> None:
    store = azure_store(container)
    put(store, "a/ü=1%20/name", b"content")
    url = store.sign_get("a/ü=1%20/name", 60)
    with urllib.request.urlopen(url, timeout=5) as response:
        assert response.read() == b"content"
    health.check(store)
    with raises(Invalid, path="signature_ttl"):
        store.sign_get("a", 10_000_000)


@azure
def test_keys_of_azure_must_be_right(container: str) -> None:
    url = FragmentStoreUrl.parse(f"azure://{container}/")
    wrong = connection().replace(KEY, KEY[::-1].lstrip("=") + "==")
    store = AzureStore(url, environ={"AZURE_STORAGE_CONNECTION_STRING": wrong})
    for operation in (
        lambda: put(store, "path", b""),
        lambda: store.open("path"),
        lambda: store.exists("path"),
        lambda: paths(store, ""),
        lambda: store.remove("path"),
    ):
        with pytest.raises(NotAllowed):
            operation()


class Delegations:
    """As much of a file system of an Azure account as signing needs."""

    def __init__(self) -> None:
        from azure.storage.blob.aio import BlobServiceClient
        from fsspec.asyn import get_loop

        self.loop = get_loop()
        self.service_client = self
        self.client = BlobServiceClient("https://account.blob.core.windows.net")
        self.url, self.account_name = self.client.url, "account"
        self.get_blob_client = self.client.get_blob_client
        self.keys: list[float] = []

    async def get_user_delegation_key(self, start: Any, expiry: Any) -> Any:
        from azure.storage.blob import UserDelegationKey

        key = UserDelegationKey()
        key.signed_oid = key.signed_tid = "id"
        key.signed_start, key.signed_expiry = "2023-11-14T00:00:00Z", "2030-01-01T00:00:00Z"
        key.signed_service, key.signed_version, key.value = "b", "2020-02-10", KEY
        self.keys.append(expiry.timestamp())
        return key


def test_azure_ad_signs_with_delegated_keys(clock: ManualClock) -> None:
    """One is used as long as an hour is left of it, and it outlives what it signs."""
    pytest.importorskip("adlfs")
    url = FragmentStoreUrl.parse("azure-ad://tenant/account/container/pre/")
    environ = {"AZURE_CLIENT_ID": "id", "AZURE_CLIENT_SECRET": "secret"}
    files = Delegations()

    class Store(AzureStore):
        def make_files(self) -> Any:
            return files

    store = Store(url, environ=environ, clock=clock)
    signed = store.sign_get("a/b", 60)
    parts = urlsplit(signed)
    assert (parts.scheme, parts.netloc) == ("https", "account.blob.core.windows.net")
    assert parts.path == "/container/pre/a/b"
    assert parse_qs(parts.query)["spr"] == ["https"]
    assert parse_qs(parts.query)["sp"] == ["r"]
    store.sign_get("a/b", 60)
    assert files.keys == [clock.now() + DELEGATION_KEY_S]
    clock.advance(DELEGATION_KEY_S - DELEGATION_KEY_RESERVE_S - 1)
    store.sign_get("a/b", 60)
    assert len(files.keys) == 1
    clock.advance(2)
    store.sign_get("a/b", 60)
    assert files.keys[1:] == [clock.now() + DELEGATION_KEY_S]
    store.sign_get("a/b", 5 * 3600)
    assert files.keys[2:] == [clock.now() + 5 * 3600 + DELEGATION_KEY_RESERVE_S]


def test_gs_signs_with_the_key_of_a_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are the application's default credentials. Others do not sign, and a host without any
    is refused and not anonymous."""
    pytest.importorskip("gcsfs")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file = tmp_path / "key.json"
    account = {
        "type": "service_account",
        "project_id": "project",
        "private_key": private.decode(),
        "private_key_id": "1",
        "client_email": "broker@project.iam.gserviceaccount.com",
        "token_uri": "https://127.0.0.1:1/token",
    }
    file.write_text(json.dumps(account))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    url = FragmentStoreUrl.parse("gs://bucket/pre/")
    store = GsStore(url, environ={})
    parts = urlsplit(store.sign_get("a/b", 60))
    assert (parts.netloc, parts.path) == ("storage.googleapis.com", "/bucket/pre/a/b")
    assert parse_qs(parts.query)["X-Goog-Expires"] == ["60"]
    with raises(Invalid, path="signature_ttl"):
        store.sign_get("a", SIGNATURE_TTL_MAX_S + 1)

    emulated = GsStore(url, environ={"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"})
    assert emulated.sign_get("a/b", 60) == "gs://bucket/pre/a/b"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises((NotAllowed, Unavailable), match="DefaultCredentialsError"):
        GsStore(url, environ={}).exists("a")
