"""Journals over HTTP, against a real broker: verbs, headers, JSON, and the same tokens as gRPC."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format

from gazette.auth import Capability, Claims, KeyedAuth
from gazette.blobs.blob_store import BlobInfo
from gazette.blobs.file import FileStore
from gazette.broker.append import line as append_line
from gazette.broker.http.headers import route_headers, route_token
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid
from gazette.net.json_gateway import to_json
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import JournalFlag, Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import EMPTY_ROUTE, Route
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.broker.test_append_line import taken
from tests.support.loop_time import LoopTime
from tests.support.replicas import replica_of

JOURNAL = "a/journal"
MAX = (1 << 63) - 1
ORIGIN = "https://console.example"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(
        etcd, tmp_path, allow_origins=(ORIGIN,), lease_ttl_s=60.0
    ) as broker:
        yield broker


@pytest.fixture
async def http(broker: BrokerFixture) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=broker.http) as client:
        yield client


async def append(broker: BrokerFixture, content: bytes) -> None:
    await broker.client.append(AppendParams(JOURNAL), content)


# --- PUT


async def test_put_appends_the_body_as_one(broker: BrokerFixture, http: httpx.AsyncClient) -> None:
    await broker.create(journal_spec(JOURNAL))
    body = bytes(range(256)) * 2000
    for begin, content in ((0, b"first"), (5, body)):
        response = await http.put(f"/{JOURNAL}", content=content)
        assert response.status_code == 204
        assert response.headers["X-Commit-Begin"] == str(begin)
        assert response.headers["X-Commit-End"] == str(begin + len(content))
        assert response.headers["X-Commit-SHA1-Sum"] == hashlib.sha1(content).hexdigest()
        assert response.headers["X-Write-Head"] == str(begin + len(content))
        assert response.headers["Location"] == f"{broker.http}/{JOURNAL}"
        assert 'suffix:"broker-one"' in response.headers["X-Route-Token"]
    read = await http.get(f"/{JOURNAL}?offset=5")
    assert read.content == body


async def test_puts_that_stall_are_answered_and_delay_no_other(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    """Each one used to hold the journal for a second, and was never answered."""
    await broker.create(journal_spec(JOURNAL))
    port = httpx.URL(broker.http).port
    stalled = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    head = b"PUT /a/journal HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    for index, (_, writer) in enumerate(stalled):
        writer.write(head + (b"a bit" if index % 2 else b""))
    line = replica_of(broker.service.context.resolver, JOURNAL).line
    while line.waiting < 20:
        await SystemClock().sleep(0.001)
    assert (await http.put(f"/{JOURNAL}", content=b"honest")).status_code == 204
    assert line.waiting == 20  # None of them was in its way, nor has ended.
    time = LoopTime()
    time.advance(append_line.AHEAD_S)
    time.go_on()
    for reader, writer in stalled:
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"didn't sustain the minimum append data rate" in await reader.readline()
        writer.close()
    assert (await http.get(f"/{JOURNAL}")).content == b"honest"


async def test_a_put_is_answered_though_its_body_does_not_end(broker: BrokerFixture) -> None:
    port = httpx.URL(broker.http).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PUT /no/journal HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nsome")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 404 ")
    writer.close()


async def test_puts_beyond_what_may_wait_are_refused_and_come_again(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await broker.create(journal_spec(JOURNAL))
    replica = replica_of(broker.service.context.resolver, JOURNAL)
    held = await replica.pipeline.take()
    async with TaskScope("puts") as scope:
        waiting = [scope.spawn(http.put(f"/{JOURNAL}", content=b"x"), name="put") for _ in range(2)]
        while replica.line.waiting < 2:
            await SystemClock().sleep(0.001)
        with taken(replica.line, append_line.WAITING_MAX - 2):
            refused = await http.put(f"/{JOURNAL}", content=b"y")
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert "too many appends to the journal wait" in refused.text
        replica.pipeline.give(held)
        assert [(await one).status_code for one in waiting] == [204, 204]
    assert (await http.put(f"/{JOURNAL}", content=b"y")).status_code == 204


async def test_put_goes_on_where_registers_are_full(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    """The client that fills them is refused at once, and not repeated for ever."""
    await broker.create(journal_spec(JOURNAL))
    full = LabelSet.of(*((f"register-{index:02d}", "v" * 1000) for index in range(60)))
    await broker.client.append(AppendParams(JOURNAL, union_registers=full), b"one")
    more = LabelSet.of(*((f"more-{index:02d}", "v" * 1000) for index in range(60)))
    with pytest.raises(Invalid, match="limit_bytes=65536"):
        await broker.client.append(AppendParams(JOURNAL, union_registers=more), b"never")
    response = await http.put(f"/{JOURNAL}", content=b" two")
    assert response.status_code == 204
    assert (await http.get(f"/{JOURNAL}")).content == b"one two"


async def test_put_of_nothing_commits_nothing(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await broker.create(journal_spec(JOURNAL))
    response = await http.put(f"/{JOURNAL}")
    assert response.status_code == 204
    assert response.headers["X-Commit-Begin"] == response.headers["X-Commit-End"] == "0"


async def test_a_put_that_breaks_off_appends_nothing(broker: BrokerFixture) -> None:
    await broker.create(journal_spec(JOURNAL))
    host, _, port = broker.http.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"PUT /{JOURNAL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf".encode()
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    del reader
    # The journal is free for the next append, and has nothing of the broken one.
    result = await broker.client.append(AppendParams(JOURNAL), b"whole")
    assert (result.commit.begin, result.commit.end) == (0, 5)


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        ("/no/such", 404, "JOURNAL_NOT_FOUND"),
        ("/read/only", 403, "NOT_ALLOWED"),
        ("/abc", 400, "Journal: invalid length"),
        ("/", 400, "Journal: invalid length"),
        (f"/{JOURNAL}?offset=1", 400, "takes no query"),
        ("/two/replicas", 503, "INSUFFICIENT_JOURNAL_BROKERS"),
    ],
)
async def test_refused_puts(
    broker: BrokerFixture, http: httpx.AsyncClient, path: str, code: int, text: str
) -> None:
    await broker.create(
        journal_spec(JOURNAL), journal_spec("read/only", flags=JournalFlag.O_RDONLY)
    )
    if path == "/two/replicas":
        await broker.client.apply_journals(
            [JournalChange(upsert=journal_spec("two/replicas", replication=2))]
        )
        while not broker.service.context.state.assignments_of("two/replicas"):
            await broker.service.context.key_space.next_change()
    response = await http.put(path, content=b"content")
    assert response.status_code == code
    assert text in response.text


async def test_a_put_waits_for_the_brokers_of_a_journal_that_was_just_applied(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    for count in range(5):
        spec = journal_spec(f"a/journal-{count}")
        await broker.client.apply_journals([JournalChange(upsert=spec)])
        response = await http.put(f"/{spec.name}", content=b"content")
        assert response.status_code == 204, response.text


async def test_a_put_to_a_journal_that_gets_no_broker_is_answered_with_when_to_try_again(
    etcd: Etcd, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"journal_limit": 0, "assignment_wait_s": 0.05}
    async with (
        await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0, **settings) as broker,
        httpx.AsyncClient(base_url=broker.http) as http,
    ):
        await broker.client.apply_journals([JournalChange(upsert=journal_spec(JOURNAL))])
        response = await http.put(f"/{JOURNAL}", content=b"content")
        assert (response.status_code, response.text) == (503, "NO_JOURNAL_PRIMARY_BROKER\n")
        assert response.headers["Retry-After"] == "1"


# --- GET and HEAD


async def test_get_reads_to_the_head_and_tells_where_it_is(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await broker.create(journal_spec(JOURNAL, stores=()))  # Nothing is stored meanwhile.
    for part in (b"0123", b"456789"):
        await append(broker, part)
    for query, offset, content in (("", 0, b"0123456789"), ("?offset=3", 3, b"3456789")):
        response = await http.get(f"/{JOURNAL}{query}")
        assert (response.status_code, response.content) == (206, content)
        assert response.headers["Content-Range"] == f"bytes {offset}-{MAX}/{MAX}"
        assert response.headers["X-Write-Head"] == "10"
        assert response.headers["X-Fragment-Name"].startswith("0000000000000000-0000000000000004-")
        assert "X-Fragment-Location" not in response.headers
        assert response.headers["Location"] == f"{broker.http}/{JOURNAL}"

    head = await http.head(f"/{JOURNAL}?offset=7")
    # Its GET says no length either: a length of zero would be a lie.
    assert "Content-Length" not in head.headers
    assert head.headers["Content-Type"] == "application/octet-stream"
    assert (head.status_code, head.content) == (206, b"")
    assert head.headers["X-Fragment-Name"].startswith("0000000000000004-000000000000000a-")
    # Case: at the head there is nothing, but what is known of it.
    for method in ("GET", "HEAD"):
        response = await http.request(method, f"/{JOURNAL}?offset=-1")
        assert response.status_code == 416
        assert response.headers["X-Write-Head"] == "10"
        assert response.headers["Content-Range"] == "bytes */10"
    # Case: without a journal there is neither a head nor a range.
    for method in ("GET", "HEAD"):
        response = await http.request(method, "/no/such")
        assert response.status_code == 404
        for name in ("Content-Range", "X-Write-Head", "Accept-Ranges"):
            assert name not in response.headers


async def store(broker: BrokerFixture, begin: int, content: bytes) -> Path:
    """Put a fragment into the store that was persisted long ago."""
    digest = hashlib.sha1(content).hexdigest()
    name = f"{begin:016x}-{begin + len(content):016x}-{digest}.raw"
    path = broker.file_root / "fragments" / JOURNAL / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


async def test_stored_fragments_show_where_they_are(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    content = b"stored content"
    path = await store(broker, 7, content)
    await broker.create(journal_spec(JOURNAL))
    # Case: the first jump of an offset is shown by the range.
    response = await http.get(f"/{JOURNAL}?offset=2")
    assert response.content == content
    assert response.headers["Content-Range"].startswith("bytes 7-")
    assert response.headers["X-Fragment-Name"] == path.name
    assert response.headers["X-Fragment-Location"] == f"file:///fragments/{JOURNAL}/{path.name}"
    assert response.headers["X-Fragment-Last-Modified"].endswith(" GMT")


async def test_a_body_is_cut_off_before_a_second_jump(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await store(broker, 5, b"one")
    await store(broker, 100, b"two")
    await broker.create(journal_spec(JOURNAL))
    for headers in ({}, {"Range": "bytes=5-"}):
        got = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with http.stream("GET", f"/{JOURNAL}", headers=headers) as response:
                async for part in response.aiter_raw():
                    got += part
        # What came is right, and where it goes on can be asked for.
        assert got == b"one"
    response = await http.get(f"/{JOURNAL}?offset=8")
    assert (response.content, response.headers["Content-Range"][:10]) == (b"two", "bytes 100-")


async def test_a_damaged_fragment_leaves_the_body_without_its_end(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    content = b"x" * 1_000_000
    digest = hashlib.sha1(content).hexdigest()
    path = broker.file_root / f"fragments/{JOURNAL}/{0:016x}-{len(content):016x}-{digest}.raw"
    path.parent.mkdir(parents=True)
    path.write_bytes(content[:-1])
    await broker.create(journal_spec(JOURNAL))
    with pytest.raises(httpx.RemoteProtocolError):
        await http.get(f"/{JOURNAL}")


# --- Ranges and conditions


@pytest.mark.parametrize(
    ("value", "span", "total"),
    [
        ("bytes=0-3", (0, 4), 10),
        ("bytes=2-2", (2, 3), 10),
        ("bytes=4-", (4, 10), 10),
        ("bytes=8-200", (8, 10), 10),
        (f"bytes=8-{MAX * 4}", (8, 10), 10),
        ("bytes=-3", (7, 10), 10),
        ("bytes=-200", (0, 10), 10),
        ("Bytes = 5-6", (5, 7), 10),
    ],
)
async def test_a_range_is_answered_with_its_bytes(
    broker: BrokerFixture,
    http: httpx.AsyncClient,
    value: str,
    span: tuple[int, int],
    total: int,
) -> None:
    await broker.create(journal_spec(JOURNAL))
    for part in (b"0123", b"456789"):
        await append(broker, part)
    response = await http.get(f"/{JOURNAL}", headers={"Range": value})
    begin, end = span
    assert (response.status_code, response.content) == (206, b"0123456789"[begin:end])
    assert response.headers["Content-Range"] == f"bytes {begin}-{end - 1}/{total}"
    assert response.headers["Content-Length"] == str(end - begin)
    assert response.headers["Accept-Ranges"] == "bytes"


@pytest.mark.parametrize(
    ("value", "range_of_answer"),
    [
        ("bytes=10-", "bytes */10"),
        ("bytes=10-20", "bytes */10"),
        ("bytes=-0", "bytes */10"),
        ("bytes=5-4", None),
        ("bytes=0-1,3-4", None),
        ("bytes=x-", None),
        ("bytes=", None),
        (f"bytes={MAX + 1}-", None),
    ],
)
async def test_ranges_that_cannot_be_had(
    broker: BrokerFixture, http: httpx.AsyncClient, value: str, range_of_answer: str | None
) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"0123456789")
    response = await http.get(f"/{JOURNAL}", headers={"Range": value})
    assert response.status_code == 416
    assert response.headers.get("Content-Range") == range_of_answer


async def test_ranges_that_do_not_count(broker: BrokerFixture, http: httpx.AsyncClient) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"0123456789")
    # Case: of unknown units, and of methods for which there are none.
    response = await http.get(f"/{JOURNAL}", headers={"Range": "pages=1-2"})
    assert response.headers["Content-Range"] == f"bytes 0-{MAX}/{MAX}"
    response = await http.head(f"/{JOURNAL}", headers={"Range": "bytes=20-30"})
    assert response.status_code == 206
    # Case: two answers to one question.
    response = await http.get(f"/{JOURNAL}?offset=1", headers={"Range": "bytes=2-"})
    assert (response.status_code, "not both" in response.text) == (400, True)


async def test_what_was_pruned_is_no_part_of_a_range(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await store(broker, 100, b"0123456789")
    await broker.create(journal_spec(JOURNAL))
    response = await http.get(f"/{JOURNAL}", headers={"Range": "bytes=50-104"})
    assert (response.content, response.headers["Content-Range"]) == (b"01234", "bytes 100-104/110")
    response = await http.get(f"/{JOURNAL}", headers={"Range": "bytes=50-99"})
    assert response.status_code == 416
    assert response.headers["Content-Range"] == "bytes */110"


async def test_a_range_of_a_growing_journal_ends_where_it_said(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"0123456789")
    async with http.stream("GET", f"/{JOURNAL}", headers={"Range": "bytes=5-"}) as response:
        await append(broker, b"later")
        assert await response.aread() == b"56789"
    # Case: with block=true it waits for bytes that are not there yet, and ends with the last of them.
    url = f"/{JOURNAL}?block=true"
    async with http.stream("GET", url, headers={"Range": "bytes=12-19"}) as response:
        assert response.headers["Content-Range"] == "bytes 12-19/*"
        assert response.headers["Content-Length"] == "8"
        await append(broker, b"even later")
        assert await response.aread() == b"tereven "
    # Case: without an end it goes on, as `tail -c 4 -f`.
    async with http.stream("GET", url, headers={"Range": "bytes=-4"}) as response:
        body = response.aiter_raw()
        assert await anext(body) == b"ater"
        await append(broker, b"!")
        assert await anext(body) == b"!"


async def test_a_download_is_resumed_while_the_journal_grows(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"01234")
    tag = (await http.get(f"/{JOURNAL}")).headers["ETag"]
    await append(broker, b"56789")
    headers = {"Range": "bytes=3-", "If-Range": tag}
    response = await http.get(f"/{JOURNAL}", headers=headers)
    assert response.content == b"3456789"
    assert response.headers["ETag"] != tag
    # Case: the tag is of a journal of the same name that was made at another revision.
    created = int(tag.strip('"').partition("-")[0], 16)
    other = f'"{created - 1:x}-5"'
    response = await http.get(f"/{JOURNAL}", headers={"Range": "bytes=3-", "If-Range": other})
    assert response.content == b"0123456789"
    response = await http.get(f"/{JOURNAL}", headers={"If-Match": other})
    assert response.status_code == 412


async def test_nothing_new_is_304(broker: BrokerFixture, http: httpx.AsyncClient) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"01234")
    tag = (await http.head(f"/{JOURNAL}")).headers["ETag"]
    for method in ("GET", "HEAD"):
        response = await http.request(method, f"/{JOURNAL}", headers={"If-None-Match": tag})
        assert (response.status_code, response.content) == (304, b"")
        assert (response.headers["ETag"], response.headers["X-Write-Head"]) == (tag, "5")
    await append(broker, b"5")
    response = await http.get(f"/{JOURNAL}", headers={"If-None-Match": tag})
    assert response.content == b"012345"
    assert (await http.get("/no/such", headers={"If-None-Match": "*"})).status_code == 404


async def test_appends_on_condition(broker: BrokerFixture, http: httpx.AsyncClient) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"01234")
    tag = (await http.head(f"/{JOURNAL}")).headers["ETag"]
    for code in (204, 412):
        response = await http.put(f"/{JOURNAL}", content=b"5", headers={"If-Match": tag})
        assert response.status_code == code
    for headers, code in (
        ({"If-Match": "*"}, 204),
        ({"If-Match": '"ffff-5"'}, 412),
        ({"If-Match": '"1-0"'}, 400),
        ({"If-Match": "nonsense"}, 400),
        ({"If-None-Match": "*"}, 400),
        ({"Content-Range": "bytes 0-1/2"}, 400),
    ):
        response = await http.put(f"/{JOURNAL}", content=b"6", headers=headers)
        assert response.status_code == code, response.text
    assert (await http.get(f"/{JOURNAL}")).content == b"0123456"


class SlowToList(FileStore):
    """A store whose listings of journals wait."""

    asked = threading.Event()
    go_on = threading.Event()

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        if prefix.startswith(JOURNAL):
            self.asked.set()
            assert self.go_on.wait(30)
        return super().list(prefix)


async def test_a_read_waits_for_the_first_listing(etcd: Etcd, tmp_path: Path) -> None:
    def construct(url: FragmentStoreUrl) -> FileStore:
        return SlowToList(tmp_path / "root", url)

    async with (
        await BrokerFixture.start(
            etcd,
            tmp_path,
            constructors={"file": construct},
            listing_timeout_s=0.3,
            lease_ttl_s=60.0,
        ) as broker,
        httpx.AsyncClient(base_url=broker.http) as http,
    ):
        await store(broker, 0, b"stored")
        await broker.client.apply_journals([JournalChange(upsert=journal_spec(JOURNAL))])
        await asyncio.to_thread(SlowToList.asked.wait, 30)
        # Case: what is not known yet is not answered as nothing.
        response = await http.get(f"/{JOURNAL}")
        assert response.status_code == 503
        assert "have not been listed yet" in response.text
        SlowToList.go_on.set()
        response = await http.head(f"/{JOURNAL}?offset=-1")
        assert response.headers["X-Write-Head"] == "6"


async def test_a_blocking_get_is_flushed_as_content_comes(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"first")
    async with http.stream("GET", f"/{JOURNAL}?block=true") as response:
        body = response.aiter_raw()
        assert await anext(body) == b"first"
        await append(broker, b"second")
        assert await anext(body) == b"second"


@pytest.mark.parametrize(
    ("method", "path", "code", "text"),
    [
        ("GET", "/no/such", 404, "JOURNAL_NOT_FOUND"),
        ("GET", "/write/only", 403, "NOT_ALLOWED"),
        ("GET", "/fully/suspended", 500, "SUSPENDED"),
        ("GET", f"/{JOURNAL}?ofset=1", 400, "unknown query argument ofset"),
        ("GET", f"/{JOURNAL}?offset=x", 400, "invalid offset"),
        ("GET", f"/{JOURNAL}?offset=-77", 400, "invalid Offset (-77; expected -1 <= Offset"),
        ("GET", f"/{JOURNAL}?offset={MAX + 1}", 400, f"invalid Offset ({MAX + 1}; expected"),
        ("GET", f"/{JOURNAL}?block=perhaps", 400, "invalid block"),
        ("GET", f"/{JOURNAL}?offset=1&offset=2", 400, "offset is given twice"),
        ("GET", f"/{JOURNAL}?block=true&block=false", 400, "block is given twice"),
        ("DELETE", f"/{JOURNAL}", 405, "unknown method: DELETE"),
        ("PATCH", f"/{JOURNAL}", 405, "unknown method: PATCH"),
        ("POST", f"/{JOURNAL}", 405, "unknown method: POST"),
        ("GET", "/..%2fetc", 400, "Journal: "),
    ],
)
async def test_refused_gets(
    broker: BrokerFixture, http: httpx.AsyncClient, method: str, path: str, code: int, text: str
) -> None:
    await broker.create(
        journal_spec(JOURNAL),
        journal_spec("write/only", flags=JournalFlag.O_WRONLY),
        journal_spec("fully/suspended", suspend=Suspend(SuspendLevel.FULL, 1)),
    )
    response = await http.request(method, path)
    assert (response.status_code, text in response.text) == (code, True), response.text
    assert response.headers.get("Allow") == ("GET, HEAD, PUT" if code == 405 else None)


async def test_other_brokers_journals_are_served_too(etcd: Etcd, tmp_path: Path) -> None:
    async with (
        await BrokerFixture.start(etcd, tmp_path, id="broker-one", lease_ttl_s=60.0) as one,
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-two", journal_limit=0, lease_ttl_s=60.0
        ) as two,
        httpx.AsyncClient(base_url=two.http) as http,
    ):
        await one.create(journal_spec(JOURNAL))
        await two.settled(JOURNAL)
        response = await http.put(f"/{JOURNAL}", content=b"through another")
        assert response.status_code == 204
        # The location is one that speaks HTTP.
        assert response.headers["Location"] == f"{one.http}/{JOURNAL}"
        found = await http.get(response.headers["Location"])
        assert found.content == b"through another"
        assert (await http.get(f"/{JOURNAL}")).content == b"through another"


# --- Tokens


async def test_http_asks_for_the_same_tokens_as_grpc(etcd: Etcd, tmp_path: Path) -> None:
    auth = KeyedAuth.parse(SystemClock(), base64.b64encode(b"k" * 32).decode())

    def headers(claims: Claims) -> dict[str, str]:
        return {"Authorization": f"Bearer {auth.sign(claims, 60)}"}

    async with (
        await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker,
        httpx.AsyncClient(base_url=broker.http) as http,
    ):
        await broker.create(journal_spec(JOURNAL))
        reads = headers(Claims.of_journal(Capability.READ, JOURNAL))
        appends = headers(Claims.of_journal(Capability.APPEND, JOURNAL))
        elsewhere = headers(
            Claims.of_journal(Capability.READ | Capability.APPEND | Capability.LIST, "b/other")
        )
        path = f"/{JOURNAL}"
        for request, allowed in (
            (http.build_request("PUT", path, content=b"secret"), appends),
            (http.build_request("GET", path), reads),
        ):
            for given, code in (({}, 401), (elsewhere, 404), (allowed, (204, 206))):
                request.headers.pop("Authorization", None)
                request.headers.update(given)
                response = await http.send(request)
                assert response.status_code in (code if isinstance(code, tuple) else (code,))
                assert "secret" not in response.text or given is reads
        wrong = await http.get(path, headers=appends)
        assert wrong.status_code == 401
        assert wrong.headers["WWW-Authenticate"] == "Bearer"
        assert "missing required READ capability" in wrong.text

        for route in ("list", "read"):
            body = {"journal": JOURNAL} if route == "read" else {}
            response = await http.post(f"/v1/journals/{route}", json=body)
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert "missing or empty Authorization token" in response.json()["error"]["message"]
        (line,) = lines(await http.post("/v1/journals/list", json={}, headers=elsewhere))
        assert line["result"]["journals"] == []


# --- JSON


def lines(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


async def test_lists_are_lines_of_json(broker: BrokerFixture, http: httpx.AsyncClient) -> None:
    await broker.create(journal_spec(JOURNAL), journal_spec("b/other"))
    selector = {"include": {"labels": [{"name": "name", "value": JOURNAL}]}}
    (line,) = lines(await http.post("/v1/journals/list", json={"selector": selector}))
    result = line["result"]
    assert result["status"] == "OK"
    assert result["header"]["processId"] == {"zone": "local", "suffix": "broker-one"}
    assert isinstance(result["header"]["etcd"]["revision"], str)
    (journal,) = result["journals"]
    assert journal["spec"]["name"] == JOURNAL
    assert journal["spec"]["fragment"]["refreshInterval"] == "1s"
    assert journal["spec"]["fragment"]["compressionCodec"] == "NONE"
    # Zero values are there, and messages that are absent are null.
    assert journal["spec"]["maxAppendRate"] == "0"
    assert journal["spec"]["suspend"] is None
    assert int(journal["modRevision"]) > 0
    # Case: no body is an empty request.
    (line,) = lines(await http.post("/v1/journals/list"))
    assert [one["spec"]["name"] for one in line["result"]["journals"]] == [JOURNAL, "b/other"]


async def test_reads_are_lines_of_json(broker: BrokerFixture, http: httpx.AsyncClient) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"hello")
    found = lines(await http.post("/v1/journals/read", json={"journal": JOURNAL, "offset": "1"}))
    first, content, last = (line["result"] for line in found)
    assert (first["offset"], first["writeHead"], first["content"]) == ("1", "5", "")
    assert base64.b64decode(content["content"]) == b"ello"
    assert content["header"] is None
    assert last["status"] == "OFFSET_NOT_YET_AVAILABLE"


async def test_a_json_stream_is_flushed_as_it_comes(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    await broker.create(journal_spec(JOURNAL))
    body = {"journal": JOURNAL, "block": True}
    async with TaskScope("test") as scope:
        context = http.stream("POST", "/v1/journals/read", json=body)
        opening = scope.spawn(context.__aenter__(), name="open")
        await append(broker, b"hello")
        stream = (await opening).aiter_lines()
        assert json.loads(await anext(stream))["result"]["writeHead"] == "5"
        assert json.loads(await anext(stream))["result"]["content"] == "aGVsbG8="
        await context.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (b"{", 400, "Expecting"),
        (b'{"journal": "x"}', 400, "Journal: invalid length"),
        (b" " * ((1 << 20) + 1), 400, "too large"),
    ],
)
async def test_what_is_wrong_with_a_json_request_is_an_error_object(
    http: httpx.AsyncClient, body: bytes, code: int, text: str
) -> None:
    response = await http.post("/v1/journals/read", content=body, headers=JSON)
    assert response.status_code == code
    error = response.json()["error"]
    assert set(error) == {"grpcCode", "httpCode", "httpStatus", "message", "details"}
    assert error["httpCode"] == code
    assert text in error["message"]


async def test_unknown_fields_of_json_are_skipped(
    broker: BrokerFixture, http: httpx.AsyncClient
) -> None:
    """As the original does: a client may know more fields than we do."""
    await broker.create(journal_spec(JOURNAL))
    body = {"selector": {"include": {"nonsense": {}}}, "nonsense": 1}
    (line,) = lines(await http.post("/v1/journals/list", json=body))
    assert [one["spec"]["name"] for one in line["result"]["journals"]] == [JOURNAL]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "journals/list"),
        ("PUT", "journals/list"),
        ("POST", "journals/nothing"),
        ("POST", "shards/list"),
        ("DELETE", ""),
    ],
)
async def test_what_is_not_below_v1_is_not_implemented(
    http: httpx.AsyncClient, method: str, path: str
) -> None:
    """The original answers so, and with this body."""
    response = await http.request(method, f"/v1/{path}")
    assert response.status_code == 501
    assert response.json() == {"code": 12, "message": "Not Implemented", "details": []}


async def test_only_known_origins_get_cors_headers(http: httpx.AsyncClient) -> None:
    for method in ("OPTIONS", "POST"):
        for origin in (ORIGIN, "https://evil.example", ""):
            response = await http.request(
                method, "/v1/journals/list", headers={"Origin": origin} if origin else {}
            )
            refused = method == "POST" and origin not in (ORIGIN, "")
            assert response.status_code == (403 if refused else 200)
            allowed = response.headers.get("Access-Control-Allow-Origin")
            assert allowed == (ORIGIN if origin == ORIGIN else None)
            if allowed:
                assert response.headers["Access-Control-Allow-Methods"] == "GET, POST, OPTIONS"
                assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
            if method == "OPTIONS":
                assert response.content == b""


async def test_diagnostics_are_on_the_same_port(http: httpx.AsyncClient) -> None:
    assert (await http.get("/debug/ready")).text == "ready\n"
    text = (await http.get("/metrics")).text
    assert 'gazette_journal_server_started_totals{operation="' in text


def test_every_message_has_a_json_form_that_reads_back() -> None:
    response = broker_pb2.ReadResponse(status="OFFSET_NOT_YET_AVAILABLE", offset=1, content=b"\xff")
    response.header.route.primary = -1
    value = to_json(response)
    assert value["fragment"] is None
    assert value["header"]["etcd"] is None
    parsed = json_format.ParseDict(value, broker_pb2.ReadResponse())
    assert parsed == response


def test_routes_have_the_compact_text_form() -> None:
    one, two = ProcessId("a", "one-broker"), ProcessId("b", 'two-"broker')
    assert route_token(EMPTY_ROUTE) == "primary:-1"
    assert route_token(Route((one, two), 1, ("http://x:1", ""))) == (
        'members:<zone:"a" suffix:"one-broker" > members:<zone:"b" suffix:"two-\\"broker" > '
        'primary:1 endpoints:"http://x:1" endpoints:""'
    )
    assert route_token(Route((one,), 0)) == 'members:<zone:"a" suffix:"one-broker" >'
    assert route_token(Route((ProcessId("ä", "x"),), 0)) == (
        'members:<zone:"\\303\\244" suffix:"x" >'
    )


def test_a_primary_that_is_gone_has_no_location() -> None:
    one, two = ProcessId("a", "one-broker"), ProcessId("b", "two-broker")
    for endpoint, location in (
        ("", None),
        ("unix://host/path", None),
        ("http://go:8080", "http://go:8080/a/journal"),
        ("http://ours:8080", "http://ours:8081/a/journal"),
    ):
        route = Route((one, two), 1, ("http://one:8080", endpoint))
        headers = route_headers(route, {"http://ours:8080": "http://ours:8081"}, "/a/journal")
        assert headers.get("Location") == location
    assert "Location" not in route_headers(EMPTY_ROUTE, {}, "/a/journal")


@pytest.mark.parametrize("offset", ["1_0", "١", "1²", "0x1", "+-1", " 1", "1" * 5000])
async def test_offsets_are_ascii_digits(http: httpx.AsyncClient, offset: str) -> None:
    response = await http.get(f"/{JOURNAL}", params={"offset": offset})
    assert response.status_code == 400
    assert "invalid offset" in response.text
    assert len(response.text) < 200
    body = {"journal": JOURNAL, "offset": offset}
    response = await http.post("/v1/journals/read", json=body)
    assert response.status_code == 400


@pytest.mark.parametrize("digits", ["9" * 5000, "٣", "1_0"])
async def test_ranges_of_many_or_other_digits(http: httpx.AsyncClient, digits: str) -> None:
    for header in (f"bytes={digits}-", f"bytes=-{digits}", f"bytes=0-{digits}"):
        headers = [(b"Range", header.encode())]
        response = await http.get(f"/{JOURNAL}", headers=headers)
        assert response.status_code == 416
        assert len(response.text) < 5100
