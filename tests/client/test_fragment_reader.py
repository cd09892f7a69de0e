"""Stored fragments: every codec, files and HTTP, and files that are not what their name says."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import http.server
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gazette.client.read.fragment_reader import AHEAD_BYTES, FragmentAccess
from gazette.errors import (
    Broken,
    Closed,
    Corrupt,
    GazetteError,
    Invalid,
    NotAllowed,
    NotFound,
    Unavailable,
)
from gazette.protocol.codecs.codec import new_compressor
from gazette.protocol.fragment import Codec, Fragment
from tests.facts import raises

CONTENT = b"".join(b"line %d of the journal\n" % i for i in range(100_000))
CODECS = [codec for codec in Codec if codec is not Codec.INVALID]


def fragment_of(content: bytes, codec: Codec, begin: int = 1000) -> Fragment:
    digest = hashlib.sha1(content).digest()
    return Fragment("a/journal", begin, begin + len(content), digest, codec, "file:///store/", 1)


def encode(content: bytes, codec: Codec) -> bytes:
    """Compress as a primary writes it: GZIP in several members."""
    compressor = new_compressor(codec)
    out = []
    for begin in range(0, len(content), 700_000):
        out += [compressor.compress(content[begin : begin + 700_000]), compressor.end_batch()]
    return b"".join([*out, compressor.finish()])


@dataclass
class Store:
    """An HTTP server with scripted objects."""

    port: int = 0
    objects: dict[str, bytes] = field(default_factory=dict)
    encodings: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    truncate: dict[str, int] = field(default_factory=dict)
    ranges: bool = True
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}?signature=abc"


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].lstrip("/")
            store.requests.append((path, dict(self.headers)))
            status = store.statuses.get(path, 200 if path in store.objects else 404)
            body = store.objects.get(path, b"") if status == 200 else b"<Error/>"
            span = self.headers.get("Range")
            if status == 200 and span and store.ranges:
                status, body = 206, body[int(span.removeprefix("bytes=").rstrip("-")) :]
            self.send_response(status)
            if path in store.encodings:
                self.send_header("Content-Encoding", store.encodings[path])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: store.truncate.get(path, len(body))])

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        store.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield store
        server.shutdown()
        thread.join()


@pytest.fixture
def access(tmp_path: Path) -> Iterator[FragmentAccess]:
    access = FragmentAccess(file_root=tmp_path, timeout_s=5)
    yield access
    access.close()


def put_file(root: Path, fragment: Fragment, data: bytes) -> str:
    path = root / "store" / fragment.content_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return f"file:///store/{fragment.content_path()}"


async def read(access: FragmentAccess, fragment: Fragment, url: str, offset: int) -> bytes:
    stream = await access.open(fragment, url, offset)
    try:
        blocks = []
        while block := await stream.next():
            blocks.append(block)
        assert await stream.next() == b""
        return b"".join(blocks)
    finally:
        stream.close()
        stream.close()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("skip", [0, 1, 1_234_567, len(CONTENT)])
async def test_files_are_read_from_any_offset(
    access: FragmentAccess, tmp_path: Path, codec: Codec, skip: int
) -> None:
    fragment = fragment_of(CONTENT, codec)
    url = put_file(tmp_path, fragment, encode(CONTENT, codec))
    assert access.can_open(url)
    assert await read(access, fragment, url, fragment.begin + skip) == CONTENT[skip:]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("skip", [0, 1_234_567])
async def test_signed_urls_are_read_from_any_offset(
    access: FragmentAccess, store: Store, codec: Codec, skip: int
) -> None:
    fragment = fragment_of(CONTENT, codec)
    store.objects["object"] = encode(CONTENT, codec)
    if codec is Codec.GZIP_OFFLOAD_DECOMPRESSION:
        store.encodings["object"] = "gzip"
    content = await read(access, fragment, store.url("object"), fragment.begin + skip)
    assert content == CONTENT[skip:]
    (_, headers) = store.requests[0]
    assert headers["Accept-Encoding"] == ("gzip" if codec is Codec.GZIP else "identity")
    assert ("Range" in headers) == (codec is Codec.NONE and skip > 0)


async def test_a_store_that_undid_the_gzip_is_understood(
    access: FragmentAccess, store: Store
) -> None:
    """Transcoding stores give the content of offloaded fragments; even such that looks like gzip."""
    content = gzip.compress(b"content that is a gzip file itself")
    fragment = fragment_of(content, Codec.GZIP_OFFLOAD_DECOMPRESSION)
    store.objects["object"] = content
    assert await read(access, fragment, store.url("object"), fragment.begin) == content


async def test_a_store_that_ignores_ranges_is_understood(
    access: FragmentAccess, store: Store
) -> None:
    fragment = fragment_of(CONTENT, Codec.NONE)
    store.objects["object"], store.ranges = CONTENT, False
    content = await read(access, fragment, store.url("object"), fragment.begin + 77)
    assert content == CONTENT[77:]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("damage", ["short", "long", "cut", "changed"])
@pytest.mark.parametrize("length", [300_000, AHEAD_BYTES])
async def test_a_file_that_is_not_what_its_name_says_is_corrupt(
    access: FragmentAccess, tmp_path: Path, codec: Codec, damage: str, length: int
) -> None:
    content = CONTENT[:length]
    fragment = fragment_of(content, codec)
    if damage == "cut":
        data = encode(content, codec)[:-5]
    else:
        changed = {
            "short": content[:-1],
            "long": content + b"x",
            "changed": content[:150_000] + b"X" + content[150_001:],
        }
        data = encode(changed[damage], codec)
    url = put_file(tmp_path, fragment, data)
    stream = await access.open(fragment, url, fragment.begin)
    given = 0
    with pytest.raises(Corrupt):
        while block := await stream.next():
            given += len(block)
    stream.close()
    # No reader can have taken it for the whole fragment.
    assert given < fragment.length


async def test_a_digest_that_differs_is_found_out_from_the_middle_too(
    access: FragmentAccess, tmp_path: Path
) -> None:
    fragment = replace(fragment_of(CONTENT, Codec.ZSTANDARD), sum=bytes(range(20)))
    url = put_file(tmp_path, fragment, encode(CONTENT, Codec.ZSTANDARD))
    with pytest.raises(Corrupt, match="SHA-1"):
        await read(access, fragment, url, fragment.begin + 1_000_000)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, NotFound), (403, NotAllowed), (503, Unavailable), (418, Broken)],
)
async def test_refusals_of_a_store_are_errors_of_their_kind(
    access: FragmentAccess, store: Store, status: int, kind: type[GazetteError]
) -> None:
    fragment = fragment_of(CONTENT, Codec.NONE)
    store.statuses["object"] = status
    with pytest.raises(kind) as caught:
        await access.open(fragment, store.url("object"), fragment.begin)
    # A signed URL is a secret.
    assert "signature" not in str(caught.value)


async def test_a_transfer_that_ends_early_is_broken_and_not_corrupt(
    access: FragmentAccess, store: Store
) -> None:
    fragment = fragment_of(CONTENT, Codec.NONE)
    store.objects["object"], store.truncate["object"] = CONTENT, 1_000_000
    with raises(Broken, "host", "missing"):
        await read(access, fragment, store.url("object"), fragment.begin)


async def test_a_store_that_is_not_there_is_unavailable(access: FragmentAccess) -> None:
    fragment = fragment_of(CONTENT, Codec.NONE)
    with pytest.raises(Unavailable):
        await access.open(fragment, "http://127.0.0.1:1/x", fragment.begin)


async def test_what_can_be_opened(tmp_path: Path) -> None:
    access = FragmentAccess()
    assert not access.can_open("file:///a")
    assert access.can_open("https://a/b")
    assert not access.can_open("s3://a/b")
    assert not FragmentAccess(http=False).can_open("https://a/b")


async def test_files_outside_the_root_and_offsets_outside_the_fragment_are_refused(
    access: FragmentAccess, tmp_path: Path
) -> None:
    fragment = fragment_of(CONTENT, Codec.NONE)
    (tmp_path.parent / "secret").write_bytes(CONTENT)
    with pytest.raises((Invalid, NotFound)):
        await access.open(fragment, "file:///../secret", fragment.begin)
    with pytest.raises((Invalid, NotFound)):
        await access.open(fragment, "file:///x/%2e%2e/%2e%2e/secret", fragment.begin)
    url = put_file(tmp_path, fragment, CONTENT)
    for offset in (fragment.begin - 1, fragment.end + 1):
        with pytest.raises(Invalid):
            await access.open(fragment, url, offset)


def put_pipe(root: Path, fragment: Fragment) -> tuple[int, str]:
    """Put a fragment whose content is written to the returned descriptor, and ends when that is closed."""
    path = root / "store" / fragment.content_path()
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    # For both directions: no end waits for the other, or breaks when the other is closed.
    return os.open(path, os.O_RDWR), f"file:///store/{fragment.content_path()}"


@pytest.mark.parametrize("is_client_closed", [False, True])
async def test_a_read_that_waits_for_a_thread_is_closed_and_not_cancelled(
    tmp_path: Path, is_client_closed: bool
) -> None:
    access = FragmentAccess(file_root=tmp_path, threads=1)
    fragment = fragment_of(CONTENT[:1000], Codec.NONE)
    stream = await access.open(fragment, put_file(tmp_path, fragment, CONTENT[:1000]), 1000)
    late = replace(fragment, journal="late/journal")
    pipe, url = put_pipe(tmp_path, late)
    late_stream = await access.open(late, url, 1000)  # From now on it takes the only thread.
    assert await stream.next() == CONTENT[:1000]

    async def close() -> None:
        access.close() if is_client_closed else stream.close()

    ended, _ = await asyncio.gather(stream.next(), close(), return_exceptions=True)
    assert isinstance(ended, Closed)
    os.close(pipe)
    with pytest.raises(GazetteError):
        await late_stream.next()
    stream.close()
    late_stream.close()


async def test_a_read_that_is_closed_while_a_thread_decodes_gives_no_bytes(
    access: FragmentAccess, tmp_path: Path
) -> None:
    fragment = fragment_of(CONTENT[:1000], Codec.NONE)
    pipe, url = put_pipe(tmp_path, fragment)
    stream = await access.open(fragment, url, 1000)

    async def close() -> None:
        stream.close()
        os.write(pipe, CONTENT[:1000])
        os.close(pipe)

    ended, _ = await asyncio.gather(stream.next(), close(), return_exceptions=True)
    assert isinstance(ended, Closed)
