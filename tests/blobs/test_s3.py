"""S3 stores over real HTTP, and all the ways in which that can go wrong."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from urllib3 import HTTPResponse

from gazette.blobs import health
from gazette.blobs.blob_store import BlobStore
from gazette.blobs.s3.access import S3Settings
from gazette.blobs.s3.store import RESUMES_MAX, SIGNATURE_TTL_MAX_S, S3Store
from gazette.errors import (
    Corrupt,
    GazetteError,
    Invalid,
    NotAllowed,
    NotFound,
    Unavailable,
)
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.runtime.clock import SystemClock
from tests.blobs.s3_endpoint import BUCKET, REGION, FaultProxy, store_url
from tests.facts import is_advised, raises
from tests.support.blob_store_tests import BlobStoreTests, FailingReader, get, paths, put
from tests.support.missing import missing

QUICK = S3Settings(connect_timeout_s=20.0, read_timeout_s=20.0, attempts=1, part_bytes=5 << 20)
IMPATIENT = S3Settings(connect_timeout_s=0.2, read_timeout_s=0.2, attempts=1)
PART = QUICK.part_bytes


def s3_store(
    proxy: FaultProxy, settings: S3Settings = QUICK, path: str = "/pre/fix/", **arguments: str
) -> S3Store:
    url = FragmentStoreUrl.parse(store_url(proxy.endpoint, path, **arguments))
    return S3Store(url, settings)


@pytest.fixture
def store(s3_proxy: FaultProxy) -> S3Store:
    return s3_store(s3_proxy)


class TestS3Store(BlobStoreTests):
    @pytest.fixture
    def store(self, s3_proxy: FaultProxy) -> S3Store:
        return s3_store(s3_proxy)


class TestS3StoreWithoutPrefix(BlobStoreTests):
    """At the root of a bucket, with all uploads in parts."""

    @pytest.fixture
    def store(self, s3_proxy: FaultProxy) -> S3Store:
        return s3_store(s3_proxy, S3Settings(attempts=1, part_bytes=1), path="/")


# --- The URL


def headers_of_put(proxy: FaultProxy) -> dict[str, str]:
    seen = [one for one in proxy.seen if one.method in ("PUT", "POST")][-1]
    return {name.lower(): value for name, value in seen.headers.items()}


def test_keys_are_prefix_and_path(s3_proxy: FaultProxy) -> None:
    """By path style, so that the bucket needs no name in DNS."""
    put(s3_store(s3_proxy), "a/journal/name.gz", b"content")
    assert s3_proxy.seen[-1].path.startswith(f"/{BUCKET}/pre/fix/a/journal/name.gz")
    assert get(s3_store(s3_proxy, path="/"), "pre/fix/a/journal/name.gz") == b"content"
    assert s3_store(s3_proxy, path="/a%20b/").prefix == "a b/"


def test_paths_are_rewritten(s3_proxy: FaultProxy) -> None:
    """`find` and `replace` move journals that were renamed, also when all of one is listed."""
    store = s3_store(s3_proxy, find="new/", replace="old/deep/")
    put(store, "new/journal/new/name", b"content")
    assert paths(s3_store(s3_proxy, path="/"), "") == ["pre/fix/old/deep/journal/new/name"]
    assert paths(store, "new/journal/") == ["new/name"]
    assert paths(store, "new/") == ["journal/new/name"]
    assert get(store, "new/journal/new/name") == b"content"
    assert "old/deep/journal/new/name?" in store.sign_get("new/journal/new/name", 60)
    store.remove("new/journal/new/name")
    assert not store.exists("new/journal/new/name")
    assert paths(s3_store(s3_proxy, find="new/", replace=""), "new/") == []
    for replace in ("../", "/", "a//b/"):
        escaping = s3_store(s3_proxy, find="new/", replace=replace)
        with pytest.raises(Invalid):
            put(escaping, "new/name", b"")
        with pytest.raises(Invalid):
            paths(escaping, "new/")


def test_arguments_go_with_every_upload(s3_proxy: FaultProxy) -> None:
    """Those that are given, and no others: an ACL that is not asked for may be refused."""
    put(s3_store(s3_proxy), "plain", b"content")
    names = {"x-amz-acl", "x-amz-storage-class", "x-amz-server-side-encryption"}
    assert not names & set(headers_of_put(s3_proxy))
    store = s3_store(
        s3_proxy, acl="bucket-owner-full-control", STORAGECLASS="STANDARD_IA", SSE="AES256"
    )
    put(store, "small", b"content")
    expected = {
        "x-amz-acl": "bucket-owner-full-control",
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-server-side-encryption": "AES256",
    }
    assert expected.items() <= headers_of_put(s3_proxy).items()
    s3_proxy.seen.clear()
    store.put("large", io.BytesIO(bytes(PART)), content_encoding="gzip")
    (begun,) = (one for one in s3_proxy.seen if one.path.endswith("?uploads"))
    headers = {name.lower(): value for name, value in begun.headers.items()}
    assert (expected | {"content-encoding": "gzip"}).items() <= headers.items()
    keyed = s3_store(s3_proxy, SSE="aws:kms", SSEKMSKeyId="key")
    put(keyed, "keyed", b"content")
    assert headers_of_put(s3_proxy)["x-amz-server-side-encryption-aws-kms-key-id"] == "key"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"Bucket": "x"}, "'Bucket'"),
        ({"profile": "a", "Profile": "b"}, "'Profile'"),
        ({"Endpoint": "ftp://host"}, "ftp://host"),
        ({"Endpoint": "http://"}, "http://"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, str], problem: str) -> None:
    query = "&".join(f"{name}={value}" for name, value in arguments.items())
    with raises(Invalid, says=problem):
        S3Store(FragmentStoreUrl.parse(f"s3://{BUCKET}/?{query}"))


def test_the_sdk_is_loaded_when_it_is_needed() -> None:
    """Not with the broker, and not on its loop: making a store does not load it either."""
    program = (
        "import sys\n"
        "from gazette.blobs.registry import BlobSettings, default_constructors\n"
        "from gazette.protocol.fragment import FragmentStoreUrl\n"
        "make = default_constructors(BlobSettings())['s3']\n"
        "make(FragmentStoreUrl.parse('s3://bucket/?Region=x'))\n"
        "assert not {'boto3', 'botocore', 'fsspec'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_the_sdk_the_extra_is_named() -> None:
    with missing("boto3"), raises(Invalid, path="stores", says="pip install 'pygazette[s3]'"):
        S3Store(FragmentStoreUrl.parse(f"s3://{BUCKET}/"))


# --- Credentials, region, endpoint


def aws_store(query: str = "", **environ: str) -> S3Store:
    return S3Store(FragmentStoreUrl.parse(f"s3://{BUCKET}/{query}"), QUICK, environ=environ)


def test_the_region_must_be_known(s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the URL, or by either name in the environment. It is part of the host of signed URLs:
    the global endpoint would redirect, and the signature is not valid where it redirects to."""

    def host(store: S3Store) -> str:
        return urlsplit(store.sign_get("path", 60)).netloc

    with raises(Invalid, path="url", says="region"):
        host(aws_store())
    assert host(aws_store("?Region=eu-west-1")) == f"{BUCKET}.s3.eu-west-1.amazonaws.com"
    assert host(aws_store(AWS_REGION="eu-west-2")) == f"{BUCKET}.s3.eu-west-2.amazonaws.com"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    assert host(aws_store()) == f"{BUCKET}.s3.eu-west-3.amazonaws.com"
    assert host(aws_store("?Region=eu-west-1")) == f"{BUCKET}.s3.eu-west-1.amazonaws.com"
    assert host(aws_store("?Endpoint=minio:9000")) == "minio:9000"
    with pytest.raises(Invalid, match="S3: "):
        host(aws_store("?Region=not%20one"))


def test_credentials_that_are_missing_are_looked_for_again(
    s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was wrong when a store was first used is kept."""
    store = s3_store(s3_proxy)
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(NotAllowed):
        store.exists("a")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with raises(NotAllowed, advises="AWS_ACCESS_KEY_ID"):
        store.exists("a")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    assert not store.exists("a")


def test_credentials_that_are_wrong_are_read_again(
    s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file that is replaced while brokers run, as secrets of containers are."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    store = s3_store(s3_proxy)

    def key_in_use() -> str:
        put(store, "path", b"content")
        authorization = s3_proxy.seen[-1].headers["Authorization"]
        return authorization.partition("Credential=")[2].partition("/")[0]

    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = x\n"
    file.write_text(text.format("FIRST"))
    assert key_in_use() == "FIRST"
    file.write_text(text.format("SECOND"))
    s3_proxy.fail("PUT", status=403, code="AccessDenied")
    with pytest.raises(NotAllowed, match="AccessDenied"):
        key_in_use()
    assert key_in_use() == "FIRST"
    s3_proxy.fail("PUT", status=403, code="InvalidAccessKeyId")
    with pytest.raises(NotAllowed, match="InvalidAccessKeyId"):
        key_in_use()
    assert key_in_use() == "SECOND"


def test_profiles(s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Profile` of the URL is one of the SDK's files."""
    with pytest.raises(NotAllowed, match="other"):
        s3_store(s3_proxy, Profile="other").exists("a")
    file = tmp_path / "credentials"
    file.write_text("[other]\naws_access_key_id = OTHER\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    url = s3_store(s3_proxy, Profile="other").sign_get("a", 60)
    assert parse_qs(urlsplit(url).query)["X-Amz-Credential"][0].startswith("OTHER/")


@pytest.mark.parametrize(
    ("query", "host"),
    [
        ("?Region=eu-west-1", f"{BUCKET}.s3.eu-west-1.amazonaws.com"),
        ("?Endpoint=https://minio", "minio"),
    ],
)
def test_uploads_are_protected_on_the_way(s3_proxy: FaultProxy, query: str, host: str) -> None:
    """By a checksum that S3 compares; of stores that only speak S3, by a digest in the signature,
    which all of them compare, and without the trailers that many do not understand."""
    store = aws_store(query)
    sent: list[AWSPreparedRequest] = []

    def keep(request: AWSPreparedRequest, **_: object) -> AWSResponse:
        sent.append(request)
        return AWSResponse(request.url, 200, {}, HTTPResponse(io.BytesIO(), preload_content=False))

    with store._client("path") as client:
        client.meta.events.register("before-send.s3", keep)
    put(store, "path", b"content")
    (request,) = sent
    headers = {name.lower(): str(value) for name, value in request.headers.items()}
    assert urlsplit(request.url).scheme == "https"
    assert urlsplit(request.url).netloc == host
    if host == "minio":
        assert hashlib.sha256(b"content").hexdigest() in headers["x-amz-content-sha256"]
        assert "x-amz-trailer" not in headers
    else:
        assert "checksum" in headers["x-amz-trailer"]


# --- Reading


CONTENT = os.urandom(3 << 20)


def test_a_broken_connection_is_resumed(s3_proxy: FaultProxy, store: S3Store) -> None:
    """At the byte where it broke, of the same version of the object."""
    put(store, "path", CONTENT)
    s3_proxy.fail("GET", "path", truncate=1_000_000)
    s3_proxy.fail("GET", "path", truncate=0)
    s3_proxy.fail("GET", "path", truncate=1_100_000)
    s3_proxy.fail("GET", "path", truncate=0, times=RESUMES_MAX - 1)
    s3_proxy.seen.clear()
    assert get(store, "path") == CONTENT
    ranges = [one.headers.get("Range") for one in s3_proxy.seen]
    assert ranges[0] is None
    assert ranges[1:3] == ["bytes=1000000-"] * 2
    assert ranges[3:] == ["bytes=2100000-"] * RESUMES_MAX
    assert all("If-Match" in one.headers for one in s3_proxy.seen[1:])


def test_resuming_ends(s3_proxy: FaultProxy, store: S3Store) -> None:
    """Some times in a row without much in between; one that makes progress may go on."""
    put(store, "path", CONTENT)
    fault = s3_proxy.fail("GET", "path", truncate=10, times=100)
    with store.open("path") as source, pytest.raises(Unavailable) as raised:
        source.read()
    assert raised.value.facts["file"] == "path"
    assert 100 - fault.times == 1 + RESUMES_MAX
    s3_proxy.heal()
    s3_proxy.fail("GET", "path", truncate=1 << 20, times=100)
    assert get(store, "path") == CONTENT


def test_an_error_ends_a_resumption(s3_proxy: FaultProxy, store: S3Store) -> None:
    """What a repetition does not cure is not repeated, and has its own type."""
    put(store, "path", CONTENT)
    s3_proxy.fail("GET", "path", truncate=10)
    refusal = s3_proxy.fail("GET", "path", status=403, code="ExpiredToken", times=9)
    with store.open("path") as source, pytest.raises(NotAllowed, match="ExpiredToken"):
        source.read()
    assert refusal.times == 8


def test_an_object_that_changes_is_not_mixed(s3_proxy: FaultProxy, store: S3Store) -> None:
    """The rest of another object is not the rest of this one."""
    put(store, "path", CONTENT)
    s3_proxy.fail("GET", "path", truncate=10)
    with store.open("path") as source:
        put(store, "path", CONTENT[::-1])
        with pytest.raises(Unavailable, match="PreconditionFailed"):
            source.read()
    s3_proxy.fail("GET", "path", truncate=10)
    with store.open("path") as source:
        store.remove("path")
        with raises(Unavailable, bucket="the-bucket", file="path", status=404):
            source.read()


def test_a_server_that_knows_no_ranges(s3_proxy: FaultProxy, store: S3Store) -> None:
    """Sends all of it again: what was read already is skipped."""
    put(store, "path", CONTENT)
    s3_proxy.fail("GET", "path", truncate=2_000_000)
    s3_proxy.fail("GET", "path", without="Range")
    assert get(store, "path") == CONTENT


def test_a_server_that_does_not_say_how_long(s3_proxy: FaultProxy, store: S3Store) -> None:
    """Chunks have an end of their own, and a missing one is noticed."""
    put(store, "path", CONTENT)
    s3_proxy.fail("GET", "path", chunked=True)
    with store.open("path") as source:
        assert not source.seekable()
        assert source.read() == CONTENT
        assert source.read() == b""
    s3_proxy.fail("GET", "path", chunked=True, truncate=100)
    assert get(store, "path") == CONTENT


def test_a_slow_response_is_waited_for(s3_proxy: FaultProxy) -> None:
    """As long as something comes."""
    put(s3_store(s3_proxy), "path", CONTENT)
    store = s3_store(s3_proxy, IMPATIENT)
    s3_proxy.fail("GET", "path", trickle=4096)
    assert get(store, "path") == CONTENT


def test_a_silent_server_is_given_up(s3_proxy: FaultProxy) -> None:
    """By every operation, within its time."""
    store = s3_store(s3_proxy, IMPATIENT)
    s3_proxy.fail(hold=True, times=100)
    for operation in operations(store):
        with raises(Unavailable, "file", bucket=BUCKET) as raised:
            operation()
        assert raised.value.facts["file"] is not None


def test_seeking(s3_proxy: FaultProxy, store: S3Store) -> None:
    """A reader that begins in the middle asks for the rest only."""
    put(store, "path", CONTENT)
    s3_proxy.seen.clear()
    with store.open("path") as source:
        assert source.seekable()
        source.seek(2_500_000)
        assert source.tell() == 2_500_000
        assert source.read() == CONTENT[2_500_000:]
        assert source.read() == b""
        source.seek(-10, io.SEEK_END)
        assert source.read() == CONTENT[-10:]
        source.seek(len(CONTENT) + 5)
        assert source.read() == b""
        source.seek(0)
        assert source.read(10) == CONTENT[:10]
    ranges = [one.headers.get("Range") for one in s3_proxy.seen]
    last = f"bytes={len(CONTENT) - 10}-"
    assert ranges == [None, "bytes=2500000-", last, None]
    with store.open("path") as source:
        pass
    with pytest.raises(ValueError, match="closed"):
        source.read()


# --- Writing


class Watched(io.RawIOBase):
    """A large source that knows how far it is ahead of what the store has received."""

    def __init__(self, proxy: FaultProxy, length: int, *, seekable: bool) -> None:
        super().__init__()
        self._proxy = proxy
        self._seekable = seekable
        self._length = length
        self._position = 0
        self.ahead = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._seekable

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = self._length + offset if whence == io.SEEK_END else offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), self._length - self._position)
        buffer[:count] = bytes(count)
        self._position += count
        self.ahead = max(self.ahead, self._position - self._proxy.received)
        return count


@pytest.mark.parametrize("seekable", [True, False])
def test_large_objects_go_in_parts(s3_proxy: FaultProxy, store: S3Store, seekable: bool) -> None:
    """No more than two of them are in memory at any time."""
    length = 4 * PART + 5
    source = Watched(s3_proxy, length, seekable=seekable)
    store.put("large", source)  # type: ignore[arg-type]
    assert s3_proxy.count("PUT", "partNumber=") == 5
    assert source.ahead <= 2 * PART
    (info,) = store.list("")
    assert info.size == length
    assert get(store, "large") == bytes(length)


def test_a_part_that_fails_is_repeated_by_itself(s3_proxy: FaultProxy) -> None:
    """Not all that went before it."""
    store = s3_store(s3_proxy, S3Settings(attempts=2, part_bytes=PART))
    s3_proxy.fail("PUT", "partNumber=2", status=503, code="SlowDown")
    put(store, "large", bytes(2 * PART))
    numbers = [one.path.partition("partNumber=")[2][:1] for one in s3_proxy.seen]
    assert "".join(numbers) == "122"
    assert get(store, "large") == bytes(2 * PART)


@pytest.mark.parametrize(
    ("method", "part"), [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId=")]
)
def test_an_upload_that_fails_leaves_nothing(
    s3_proxy: FaultProxy, store: S3Store, method: str, part: str
) -> None:
    """At any of its steps. The parts are removed, and what was there before stays."""
    put(store, "large", b"before")
    s3_proxy.fail(method, part, status=500, code="InternalError")
    with pytest.raises(Unavailable, match="InternalError"):
        put(store, "large", bytes(2 * PART))
    assert get(store, "large") == b"before"
    assert s3_proxy.count("DELETE", "uploadId=") == (part != "uploads")
    put(store, "large", bytes(2 * PART))


@pytest.mark.parametrize("length", [1000, 2 * PART])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(Corrupt("damaged spool"), Corrupt), (OSError("damaged disk"), Unavailable)],
)
def test_errors_of_the_source_are_its_own(
    s3_proxy: FaultProxy,
    store: S3Store,
    length: int,
    error: Exception,
    expected: type[GazetteError],
) -> None:
    """And not taken for ones of the network, which would be repeated."""
    failing = io.BufferedReader(FailingReader(bytes(length), error))
    with pytest.raises(expected, match="damaged") as raised:
        store.put("path", failing)
    assert type(raised.value) is expected
    assert not store.exists("path")


class SeekableFailingReader(FailingReader):
    """Has a length, as a spool has, that it does not keep."""

    def __init__(self, content: bytes, error: Exception) -> None:
        super().__init__(content, error)
        self._at_end = len(content) + 1
        self._ended = False

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._ended = whence == io.SEEK_END
        return self._at_end if self._ended else self._content.seek(offset)

    def tell(self) -> int:
        return self._at_end if self._ended else self._content.tell()


@pytest.mark.parametrize("length", [1000, PART + 10])
def test_a_spool_that_turns_out_to_be_damaged(
    s3_proxy: FaultProxy, store: S3Store, length: int
) -> None:
    """Its last bytes are withheld, and no object is made of the others."""
    source = SeekableFailingReader(bytes(length), Corrupt("damaged spool"))
    with pytest.raises(Corrupt, match="damaged spool"):
        store.put("path", source)  # type: ignore[arg-type]
    assert not store.exists("path")


class LateFailingReader(io.BytesIO):
    """Fails when it is read for the second time: after it was signed, while it is sent."""

    def __init__(self, content: bytes, error: Exception) -> None:
        super().__init__(content)
        self._error = error
        self._read_through = False

    def read(self, size: int | None = -1) -> bytes:
        if self._read_through and not self.tell():
            raise self._error
        content = super().read(size)
        self._read_through |= self.tell() == len(self.getbuffer())
        return content


def test_errors_of_the_source_while_it_is_sent(s3_proxy: FaultProxy, store: S3Store) -> None:
    """Then the SDK says that the network failed."""
    source = LateFailingReader(bytes(1000), Corrupt("damaged spool"))
    with pytest.raises(Corrupt, match="damaged spool"):
        store.put("path", source)
    assert not store.exists("path")


# --- Errors


def operations(store: BlobStore) -> list[Callable[[], object]]:
    return [
        lambda: store.exists("path"),
        lambda: store.open("path"),
        lambda: put(store, "path", b"content"),
        lambda: list(store.list("")),
        lambda: store.remove("path"),
    ]


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "AccessDenied", NotAllowed),
        (403, "InvalidAccessKeyId", NotAllowed),
        (403, "RequestTimeTooSkewed", NotAllowed),
        (400, "ExpiredToken", NotAllowed),
        (400, "InvalidArgument", NotAllowed),
        (401, "Unauthorized", NotAllowed),
        (405, "MethodNotAllowed", NotAllowed),
        (408, "RequestTimeout", Unavailable),
        (409, "OperationAborted", Unavailable),
        (429, "TooManyRequests", Unavailable),
        (500, "InternalError", Unavailable),
        (502, "", Unavailable),
        (503, "SlowDown", Unavailable),
        (504, "", Unavailable),
    ],
)
def test_what_responses_mean(
    s3_proxy: FaultProxy,
    store: S3Store,
    status: int,
    code: str,
    expected: type[GazetteError],
) -> None:
    """To every operation alike: what a repetition may cure, and what an operator must."""
    for operation in operations(store):
        # More than once: the SDK takes some for an answer of the wrong region, and looks for it.
        s3_proxy.fail(status=status, code=code, times=5)
        with pytest.raises(GazetteError) as raised:
            operation()
        s3_proxy.heal()
        assert type(raised.value) is expected
        assert raised.value.facts["bucket"] == BUCKET
        assert raised.value.facts["status"] == status
        assert raised.value.hint


@pytest.mark.parametrize("code", ["RequestTimeout", "BadDigest", "IncompleteBody"])
def test_damage_on_the_way_is_repeated(s3_proxy: FaultProxy, store: S3Store, code: str) -> None:
    """Although it has the status of a wrong request."""
    s3_proxy.fail("PUT", status=400, code=code)
    with pytest.raises(Unavailable, match=code):
        put(store, "path", b"content")


def test_a_bucket_that_does_not_exist(s3_proxy: FaultProxy) -> None:
    """Is not an object that does not exist, wherever S3 says so."""
    url = FragmentStoreUrl.parse(store_url(s3_proxy.endpoint).replace(BUCKET, "other-bucket"))
    store = S3Store(url, QUICK)
    _, *rest = operations(store)
    for operation in rest:
        with pytest.raises(NotAllowed, match="NoSuchBucket") as raised:
            operation()
        assert is_advised(raised.value)
    assert not store.exists("path")  # The response to HEAD has no body to say it.
    with raises(Invalid, bucket="b@d", file="path", path="url"):
        s3_store_of_bucket(s3_proxy, "b@d").exists("path")


def s3_store_of_bucket(proxy: FaultProxy, bucket: str) -> S3Store:
    url = FragmentStoreUrl("s3", bucket, "/", urlsplit(store_url(proxy.endpoint)).query)
    return S3Store(url, QUICK)


def test_an_endpoint_that_cannot_be_reached(s3_proxy: FaultProxy) -> None:
    store = S3Store(FragmentStoreUrl.parse(store_url("http://127.0.0.1:1")), QUICK)
    for operation in operations(store):
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            operation()


def test_requests_are_tried_so_often(s3_proxy: FaultProxy) -> None:
    """By the SDK; stores around this one do the rest."""
    store = s3_store(s3_proxy, S3Settings(attempts=2))
    s3_proxy.fail(status=503, code="SlowDown", times=9)
    with pytest.raises(Unavailable, match="503"):
        store.exists("path")
    assert s3_proxy.count("HEAD") == 2


# --- Listing


def test_listing_goes_by_pages(s3_proxy: FaultProxy) -> None:
    """A page that fails is an error, and not the end."""
    store = s3_store(s3_proxy, S3Settings(attempts=1, page_objects=10))
    names = [f"{number:04}" for number in range(15)]
    for name in ("a/", "a/directory/", "b"):
        other_put(s3_proxy, f"pre/fix/{name}")
    for name in names:
        put(store, f"a/{name}", b"")
    s3_proxy.seen.clear()
    assert [info.path for info in store.list("a/")] == names
    assert s3_proxy.count("GET", "list-type=2") == 2
    s3_proxy.fail("GET", "continuation-token", status=500, code="InternalError")
    listing = store.list("a/")
    assert [next(listing).path for _ in range(9)] == names[:9]
    with pytest.raises(Unavailable, match="InternalError"):
        list(listing)


def other_put(proxy: FaultProxy, key: str) -> None:
    """Put an object as consoles do, which make directories of empty objects."""
    client = boto3.client("s3", endpoint_url=proxy.endpoint, region_name=REGION)
    client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    client.close()


# --- Signing


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        return bytes(response.read())


def test_signed_urls(s3_proxy: FaultProxy, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone may read by them, for a time. The object is not looked for."""
    put(store, "a/ü=1%20/name", b"content")
    url = store.sign_get("a/ü=1%20/name", 59.2)
    assert fetch(url) == b"content"
    query = parse_qs(urlsplit(url).query)
    assert query["X-Amz-Expires"] == ["60"]
    assert query["X-Amz-SignedHeaders"] == ["host"]
    with pytest.raises(urllib.error.HTTPError) as raised:
        fetch(store.sign_get("missing", 60))
    raised.value.close()
    assert parse_qs(urlsplit(store.sign_get("a", 0)).query)["X-Amz-Expires"] == ["1"]
    store.sign_get("a", SIGNATURE_TTL_MAX_S)
    with raises(Invalid, path="signature_ttl"):
        store.sign_get("a", SIGNATURE_TTL_MAX_S + 1)
    # Temporary credentials have a token that must be in the URL.
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert "X-Amz-Security-Token=token" in s3_store(s3_proxy).sign_get("a", 60)


# --- Health


@pytest.mark.parametrize(
    ("method", "part", "step"),
    [
        ("PUT", "health-check", "PUT"),
        ("GET", "health-check", "GET"),
        ("GET", "list-type=2", "LIST"),
        ("GET", "X-Amz-Signature", "fetch"),
    ],
)
def test_health_checks_name_what_is_not_permitted(
    s3_proxy: FaultProxy, store: S3Store, method: str, part: str, step: str
) -> None:
    health.check(store)
    health.probe_delete(store, "some/journal/")
    assert paths(store, "") == [health.CHECK_PATH]
    s3_proxy.fail(method, part, status=403, code="AccessDenied")
    with raises(NotAllowed, says=step) as raised:
        health.check(store)
    assert "Signature" not in str(raised.value)
    assert "AKIAEXAMPLE" not in str(raised.value)


def test_deletion_is_probed(s3_proxy: FaultProxy, store: S3Store) -> None:
    s3_proxy.fail("DELETE", ".gazette-delete-probe", status=403, code="AccessDenied")
    with raises(NotAllowed, bucket="the-bucket", status=403, says="DeleteObject"):
        health.probe_delete(store, "some/journal/")


def test_missing_objects_and_permission_to_list(s3_proxy: FaultProxy, store: S3Store) -> None:
    """Without the permission to list, S3 answers 403 for an object that is not there."""
    with pytest.raises(NotFound):
        store.open("path")
    s3_proxy.fail("HEAD", status=403, code="AccessDenied")
    with pytest.raises(NotAllowed) as raised:
        store.exists("path")
    assert "list the bucket" in raised.value.hint


def test_urls_are_signed_at_once_while_credentials_are_at_hand(
    s3_proxy: FaultProxy, store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request, and so on an event loop. Credentials that are due to be renewed ask."""
    put(store, "a", b"content")
    before = len(s3_proxy.seen)
    url = store.sign_now("a", 60)
    assert url is not None
    assert urlsplit(url).path == urlsplit(store.sign_get("a", 60)).path
    with raises(Invalid, path="signature_ttl"):
        store.sign_now("a", SIGNATURE_TTL_MAX_S + 1)
    # Case: nothing is known of the credentials yet.
    assert s3_store(s3_proxy).sign_now("a", 60) is None
    assert len(s3_proxy.seen) == before

    for minutes, at_once in ((60, True), (5, False)):
        expires = datetime.fromtimestamp(SystemClock().now() + 60 * minutes, UTC).isoformat()
        answer = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "s", "Expiration": expires}
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
        program.chmod(0o755)
        file = tmp_path / "config"
        file.write_text(f"[profile renewed]\ncredential_process = {program}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
        renewed = s3_store(s3_proxy, Profile="renewed")
        assert "X-Amz-Signature" in renewed.sign_get("a", 60)
        assert (renewed.sign_now("a", 60) is not None) == at_once
