"""Brokers whose fragments are in S3: appended, persisted, and read by later brokers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from gazette.blobs import health
from gazette.client import Client
from gazette.client.append.appender import AppendParams
from gazette.client.journals import FragmentsParams, JournalChange
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.read.reader import ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Unavailable
from gazette.protocol.fragment import Codec
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.blobs.s3_endpoint import BUCKET, FaultProxy, store_url

CODECS = (Codec.NONE, Codec.GZIP, Codec.ZSTANDARD, Codec.GZIP_OFFLOAD_DECOMPRESSION)
CONTENT = b"".join(b"line %d of the journal\n" % i for i in range(10_000))


def name_of(codec: Codec) -> str:
    return f"acme/{codec.name.lower()}"


async def read(client: Client, journal: str, size: int = len(CONTENT)) -> tuple[bytes, int]:
    """Return the content, and how many of its pieces came from the store itself."""
    reader = client.retry_reader(ReadParams(journal, end_offset=size, block=True))
    pieces, direct = [], 0
    while piece := await reader.read():
        pieces.append(piece)
        direct += reader._reader is not None and reader._reader.direct is not None
    return b"".join(pieces), direct


async def fill(etcd: Etcd, tmp_path: Path, url: str, codecs: tuple[Codec, ...]) -> None:
    """Run a broker that appends, in several fragments, and leaves."""
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        specs = [
            journal_spec(name_of(codec), codec=codec, stores=(url,), length=1 << 16)
            for codec in codecs
        ]
        await broker.create(*specs)
        for codec in codecs:
            for begin in range(0, len(CONTENT), 90_000):
                content = CONTENT[begin : begin + 90_000]
                await broker.client.append(AppendParams(name_of(codec)), content)


async def test_fragments_outlive_their_broker(
    etcd: Etcd, tmp_path: Path, s3_proxy: FaultProxy
) -> None:
    """In every codec. Clients read them from S3 by signed URLs, or through a broker that reads
    them there."""
    url = store_url(s3_proxy.endpoint)
    await fill(etcd, tmp_path, url, CODECS)
    s3_proxy.seen.clear()
    async with (
        await BrokerFixture.start(etcd, tmp_path, id="broker-two", lease_ttl_s=60.0) as second,
        Client(second.endpoint, fragments=FragmentAccess(http=False)) as brokered,
    ):
        for codec in CODECS:
            journal = name_of(codec)
            await second.settled(journal)
            content, direct = await read(second.client, journal)
            assert content == CONTENT
            assert direct
            assert await read(brokered, journal) == (CONTENT, 0)
            fragments = await second.client.list_fragments(
                FragmentsParams(journal, signature_ttl_s=60)
            )
            assert len(fragments) >= 2
            for one in fragments:
                path = f"/{BUCKET}/pre/fix/{journal}/{one.fragment.content_name()}?"
                assert one.signed_url.startswith(s3_proxy.endpoint + path)
                assert one.fragment.backing_store == url
                assert one.fragment.mod_time > 1_700_000_000
            # What comes after goes on where the fragments end, which must be said: no broker is left
            # that knows that nothing was lost.
            after = AppendParams(journal, offset=len(CONTENT))
            head = await second.client.append(after, b"more")
            assert head.commit.end == len(CONTENT) + 4
            content, _ = await read(second.client, journal, len(CONTENT) + 4)
            assert content == CONTENT + b"more"
        assert await second.client.fragment_store_health(url) == ""
        assert (
            await second.client.fragment_store_health(
                url, check_delete=True, check_delete_prefix="acme/"
            )
            == ""
        )
        assert s3_proxy.count("DELETE", f"acme/{health.DELETE_PROBE_NAME}") == 1


async def test_another_cluster_reads_the_same_fragments(
    etcd: Etcd, tmp_path: Path, s3_proxy: FaultProxy
) -> None:
    """Under another name too, by `find` and `replace`: and appends to where they are."""
    await fill(etcd, tmp_path, store_url(s3_proxy.endpoint), (Codec.GZIP,))
    url = store_url(s3_proxy.endpoint, find="renamed/to/", replace="acme/")
    journal = "renamed/to/gzip"
    async with await BrokerFixture.start(
        etcd, tmp_path, root="/other/cluster", lease_ttl_s=60.0
    ) as other:
        await other.create(journal_spec(journal, codec=Codec.GZIP, stores=(url,)))
        content, direct = await read(other.client, journal)
        assert content == CONTENT
        assert direct
        await other.client.append(AppendParams(journal, offset=len(CONTENT)), b"more")
    puts = [one.path for one in s3_proxy.seen if one.method == "PUT" and "renamed" in one.path]
    assert puts == []
    async with await BrokerFixture.start(
        etcd, tmp_path, id="broker-two", lease_ttl_s=60.0
    ) as again:
        await again.settled(name_of(Codec.GZIP))
        size = len(CONTENT) + 4
        assert (await read(again.client, name_of(Codec.GZIP), size))[0] == CONTENT + b"more"


async def test_a_store_that_is_down(etcd: Etcd, tmp_path: Path, s3_proxy: FaultProxy) -> None:
    """Appends are refused with its error, until it is back."""
    url = store_url(s3_proxy.endpoint)
    s3_proxy.fail(status=403, code="AccessDenied", times=1_000_000)
    async with await BrokerFixture.start(
        etcd, tmp_path, store_check_timeout_s=1.0, lease_ttl_s=60.0
    ) as broker:
        spec = journal_spec("acme/journal", stores=(url,))
        await broker.client.apply_journals([JournalChange(upsert=spec)])
        error = await broker.client.fragment_store_health(url)
        assert error.startswith("health check PUT failed: S3 PutObject: AccessDenied")
        with pytest.raises(Unavailable, match="AccessDenied"):
            await broker.client.append(AppendParams("acme/journal"), b"refused")
        s3_proxy.heal()
        end = 0
        while not end:  # The next check may be some seconds away.
            with suppress(Unavailable):
                result = await broker.client.append(AppendParams("acme/journal"), b"taken")
                end = result.commit.end
        assert end == 5


async def test_a_connection_to_s3_that_breaks_is_not_noticed(
    etcd: Etcd, tmp_path: Path, s3_proxy: FaultProxy
) -> None:
    """By clients that append and read: uploads are repeated, and reads resumed."""
    url = store_url(s3_proxy.endpoint)
    s3_proxy.fail("PUT", "acme", status=500, code="InternalError", times=2)
    await fill(etcd, tmp_path, url, (Codec.NONE,))
    async with (
        await BrokerFixture.start(etcd, tmp_path, id="broker-two", lease_ttl_s=60.0) as second,
        Client(second.endpoint, fragments=FragmentAccess(http=False)) as brokered,
    ):
        await second.settled(name_of(Codec.NONE))
        s3_proxy.fail("GET", "acme/none/", truncate=40_000, times=3)
        assert await read(brokered, name_of(Codec.NONE)) == (CONTENT, 0)
        s3_proxy.fail("GET", "X-Amz-Signature", truncate=40_000, times=2)
        content, _ = await read(second.client, name_of(Codec.NONE))
        assert content == CONTENT
