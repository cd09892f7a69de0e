"""Each header or argument of an HTTP request that changes its meaning is honoured or refused."""

from __future__ import annotations

import gzip
import random
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import httpx
import pytest

from gazette.broker.http.requests import gunzipped
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid
from gazette.net.http_requests import Refusal
from gazette.runtime.tasks import BlockingPool
from gazette.testing.broker import BrokerFixture, journal_spec

JOURNAL = "a/journal"
LINES = b'{"n": 1}\n{"n": 2}\n'
BROKEN = 400


@pytest.fixture
async def http(etcd: Etcd, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(JOURNAL))
        async with httpx.AsyncClient(base_url=broker.http) as client:
            yield client


@pytest.fixture
def pool() -> BlockingPool:
    return BlockingPool("inflation", 2)


async def parts(body: bytes, size: int) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(body), size):
        yield body[at : at + size]


async def content(http: httpx.AsyncClient) -> bytes:
    response = await http.get(f"/{JOURNAL}")
    return b"" if response.status_code == 416 else response.content


@pytest.mark.parametrize("size", [1, 7, 4096, 5000, 1 << 20])
async def test_a_compressed_body_is_decoded_in_chunks(pool: BlockingPool, size: int) -> None:
    """Whatever its parts are, and of several members."""
    whole = random.Random(size).randbytes(20_000) + bytes(300_000)
    body = gzip.compress(whole[:5000]) + gzip.compress(whole[5000:])
    chunks = [chunk async for chunk in gunzipped(parts(body, size), pool)]
    assert b"".join(chunks) == whole
    assert max(map(len, chunks)) <= 1 << 17


async def test_a_body_that_is_damaged_or_too_large_when_decoded(pool: BlockingPool) -> None:
    body = gzip.compress(bytes(1 << 20))
    for damaged in (body[:-1], body[:-9] + b"x" + body[-8:], b"plain text", body + b"behind"):
        with pytest.raises(Invalid):
            async for _ in gunzipped(parts(damaged, 100), pool):
                pass
    made = 0
    with pytest.raises(Refusal) as refused:
        async for chunk in gunzipped(parts(body, 100), pool, limit=300_000):
            made += len(chunk)
    assert refused.value.code == 413
    assert made <= 300_000


async def test_a_put_of_gzip_appends_what_it_holds(http: httpx.AsyncClient) -> None:
    body = gzip.compress(LINES)
    for encoding in ("gzip", "X-GZip"):
        response = await http.put(
            f"/{JOURNAL}", content=body, headers={"Content-Encoding": encoding}
        )
        assert response.status_code == 204
    assert await content(http) == LINES * 2
    # Case: what cannot be decoded is refused, and nothing is appended.
    for encoding, code in (
        ("br", 415),
        ("gzip, gzip", 415),
        ("deflate", 415),
        ("aws-chunked", 415),
    ):
        response = await http.put(
            f"/{JOURNAL}", content=body, headers={"Content-Encoding": encoding}
        )
        assert response.status_code == code
        assert response.headers["Accept-Encoding"] == "gzip, identity"
    response = await http.put(
        f"/{JOURNAL}", content=body[:-3], headers={"Content-Encoding": "gzip"}
    )
    assert response.status_code == BROKEN
    assert await content(http) == LINES * 2


HONOURED = [
    ("Content-Type", "application/json"),
    ("Content-Encoding", "identity"),
    ("Content-Encoding", "gzip"),
    ("Expect", "100-continue"),
    ("If-Match", "*"),
    ("User-Agent", "x"),
]
REFUSED_BY_PUT = [
    ("Content-Encoding", "br"),
    ("Content-Range", "bytes 0-1/2"),
    ("Content-MD5", "Q2hlY2sgSW50ZWdyaXR5IQ=="),
    ("Content-Digest", "sha-256=:AAAA:"),
    ("Expect", "202-accepted"),
    ("If-Match", '"1-1"'),
    ("If-None-Match", "*"),
    ("If-Range", '"1-1"'),
    ("If-Unmodified-Since", "Tue, 01 Jan 2030 00:00:00 GMT"),
    ("Range", "bytes=0-1"),
    ("X-HTTP-Method-Override", "DELETE"),
]
REFUSED_BY_ALL = [one for one in REFUSED_BY_PUT if one[0] in ("Expect", "X-HTTP-Method-Override")]


async def test_headers_and_methods_at_random(http: httpx.AsyncClient) -> None:
    """A request with anything that is refused has no effect. Any other does what all of it says."""
    rng = random.Random(7)
    appended = b""
    for turn in range(150):
        method = rng.choice(["PUT", "PUT", "GET", "HEAD", "POST", "DELETE"])
        refused = REFUSED_BY_PUT if method == "PUT" else REFUSED_BY_ALL
        chosen = rng.sample(HONOURED, rng.randint(0, 3))
        chosen += rng.sample(refused, rng.choice([0, 0, 1, 2 if method == "PUT" else 1]))
        names = [name.lower() for name, _ in chosen]
        is_gzip = ("Content-Encoding", "gzip") in chosen
        plain = f"turn {turn}\n".encode()
        body = gzip.compress(plain) if is_gzip else plain
        arguments = rng.choice(["", "?offset=0", "?offset=0&offset=0", "?other=1", "?block=maybe"])
        twice = {name for name in names if names.count(name) > 1}
        # What is about a body, which a read does not have, has no effect on reads.
        twice -= set() if method == "PUT" else {"content-encoding"}
        wrong = any(one in refused for one in chosen) or bool(twice)
        wrong = wrong or arguments not in (("",) if method == "PUT" else ("", "?offset=0"))
        request = http.build_request(
            method,
            f"/{JOURNAL}{arguments}",
            headers=chosen,
            content=body if method == "PUT" else None,
        )
        response = await http.send(request)
        if method in ("POST", "DELETE"):
            assert response.status_code == 405
        elif method == "PUT":
            assert (response.status_code == 204) is not wrong, (chosen, response.text)
            appended += b"" if wrong else plain
        else:
            assert (response.status_code in (206, 416)) is not wrong, (chosen, response.text)
        assert await content(http) == appended, (method, chosen, arguments)


async def test_a_condition_on_several_lines_is_one_list(http: httpx.AsyncClient) -> None:
    await http.put(f"/{JOURNAL}", content=b"content")
    tag = (await http.head(f"/{JOURNAL}")).headers["ETag"]
    lines = [("If-None-Match", '"1-1"'), ("If-None-Match", tag)]
    assert (await http.get(f"/{JOURNAL}", headers=lines)).status_code == 304
    lines = [("If-Match", '"1-1"'), ("If-Match", tag)]
    assert (await http.get(f"/{JOURNAL}", headers=lines)).status_code == 206
