"""The word count: publish and query over gRPC and HTTP, by any member, for any shard."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid
from gazette.labels import CONTENT_PROTO_FIXED, CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.run.dev.word_count import NGRAM_TYPE, import_examples
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from tests.facts import raises

PARTITIONS = ("words/part-000", "words/part-001")
SHARDS = ("shard-000", "shard-001")
LEASE_S = 60.0
"""Longer than a busy machine stands still: members that die end their leases."""
TEXT = "The quick brown fox, the lazy dog. The END of the fox?"


@pytest.fixture(scope="module", autouse=True)
def _examples() -> None:
    import_examples()


@dataclass
class Cluster:
    broker: BrokerFixture
    members: list[ConsumerFixture]

    async def settle(self) -> None:
        for shard in SHARDS:
            await self.members[0].read_to_heads(shard)


def application(
    n: int = 1, store: str = "sqlite", database: str = ""
) -> tuple[Any, dict[str, Any]]:
    from word_count.app import WordCount, WordCountFlags

    flags = WordCountFlags(N=n, store=store, database=database)
    return WordCount(), {"wordcount": flags}


@pytest.fixture
async def cluster(etcd: Etcd, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Start two members, each the primary of one of two shards."""
    labels = LabelSet.of((MESSAGE_TYPE, NGRAM_TYPE), (CONTENT_TYPE, CONTENT_PROTO_FIXED))
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(
            *(journal_spec(name, labels=labels) for name in PARTITIONS),
            *(log_spec(shard) for shard in SHARDS),
        )
        members: list[ConsumerFixture] = []
        try:
            for name in ("consumer-one", "consumer-two"):
                app, config = application()
                members.append(
                    await ConsumerFixture.start(
                        etcd,
                        broker,
                        app,
                        tmp_path,
                        id=name,
                        config=config,
                        shard_limit=1,
                        drain_timeout_s=10.0,
                        lease_ttl_s=60.0,
                    )
                )
            await members[0].create(*map(shard_spec, SHARDS, PARTITIONS))
            yield Cluster(broker, members)
        finally:
            for member in members:
                await member.crash()


async def test_text_is_cut_into_ngrams() -> None:
    from word_count.app import ngrams

    assert list(ngrams("To be, or not", 1)) == ["to", "be", "or", "not"]
    assert list(ngrams("to be", 3)) == [
        "START START to",
        "START to be",
        "to be END",
        "be END END",
    ]


async def test_any_member_takes_text_and_answers_for_all_shards(cluster: Cluster) -> None:
    held = [set(member.service.resolver.local_shards) for member in cluster.members]
    assert sorted(map(len, held)) == [1, 1], "the shards are not spread over the members"
    async with httpx.AsyncClient() as http:
        for member in cluster.members:
            answer = await http.post(f"{member.http}/publish", json={"text": TEXT})
            assert answer.json() == {"published": 12}
        await cluster.settle()
        for member in cluster.members:
            counts = (await http.get(f"{member.http}/query")).json()
            assert counts == {
                "the": 8,
                "fox": 4,
                "quick": 2,
                "brown": 2,
                "lazy": 2,
                "dog": 2,
                "end": 2,
                "of": 2,
            }
            prefixed = (await http.get(f"{member.http}/query?prefix=d")).json()
            assert prefixed == {"dog": 2}
            assert (await http.get(f"{member.http}/query?prefix=zz")).json() == {}
            parts = [
                (await http.get(f"{member.http}/shards/{shard}/counts")).json() for shard in SHARDS
            ]
            assert parts[0] | parts[1] == counts
            assert not parts[0].keys() & parts[1].keys()
            for ngram, n in {**counts, "absent": 0, "th": 0}.items():
                assert (await http.get(f"{member.http}/counts/{ngram}")).json() == {"n": n}
            assert await listed(http, f"{member.http}/counts?limit=3") == counts
            assert await listed(http, f"{member.http}/counts?limit=1&prefix=d") == {"dog": 2}


async def listed(http: httpx.AsyncClient, url: str) -> dict[str, int]:
    """Return all pages of a list."""
    found: dict[str, int] = {}
    after = ""
    while True:
        page = (await http.get(url + after)).json()
        found |= {item["key"]: item["value"] for item in page["items"]}
        if page["next"] is None:
            return found
        after = f"&after={page['next']}"


async def test_the_same_over_grpc(cluster: Cluster) -> None:
    from word_count.ngram_pb2 import PublishRequest, QueryRequest
    from word_count.ngram_pb2_grpc import NGramStub

    for member in cluster.members:
        async with grpc.aio.insecure_channel(member.endpoint.removeprefix("http://")) as channel:
            stub = NGramStub(channel)
            await stub.Publish(PublishRequest(text="one two two"))
            await cluster.settle()
            response = await stub.Query(QueryRequest(prefix="t"))
            assert [gram.n_gram for gram in response.grams] == ["two"]
            parts = [await stub.Query(QueryRequest(prefix="o", shard=one)) for one in SHARDS]
            assert [gram.n_gram for part in parts for gram in part.grams] == ["one"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Query(QueryRequest(shard="no-such-shard"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert response.grams[0].count == 4


async def test_what_is_wrong_is_answered_as_such(cluster: Cluster) -> None:
    url = cluster.members[0].http
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/shards/no-such-shard/counts")).status_code == 404
        json = {"Content-Type": "application/json"}
        assert (await http.post(f"{url}/publish", content=b"\xff", headers=json)).status_code == 400
        assert (await http.post(f"{url}/publish", content=b"text")).status_code == 415
        assert (await http.get(f"{url}/publish")).status_code == 405


@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
@pytest.mark.parametrize("store", ["sqlite", "rocksdb", "json", "sql"])
async def test_every_store_counts_the_same_through_a_fail_over(
    store: str, etcd: Etcd, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One member dies while text is published; counts are those of the text, in any store."""
    if store == "rocksdb":
        pytest.importorskip("rocksdict")
    database = request.getfixturevalue("postgres_url") if store == "sql" else ""
    labels = LabelSet.of((MESSAGE_TYPE, NGRAM_TYPE), (CONTENT_TYPE, CONTENT_PROTO_FIXED))
    members: list[ConsumerFixture] = []
    async with (
        await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=LEASE_S) as broker,
        httpx.AsyncClient() as http,
    ):
        await broker.create(*(journal_spec(name, labels=labels) for name in PARTITIONS))
        await broker.create(*(log_spec(shard) for shard in SHARDS))
        try:
            for name in ("consumer-one", "consumer-two"):
                app, config = application(2, store, database)
                member = await ConsumerFixture.start(
                    etcd, broker, app, tmp_path, id=name, config=config, lease_ttl_s=LEASE_S
                )
                members.append(member)
            specs = [
                shard_spec(shard, journal, log=store != "sql", hot_standbys=1)
                for shard, journal in zip(SHARDS, PARTITIONS, strict=True)
            ]
            await members[0].create(*specs)
            held = [len(one.service.resolver.local_shards) for one in members]
            assert held == [2, 2], "every member is primary or standby of both"
            for index in range(10):
                if index == 5:
                    await members[0].die()
                answer = await http.post(
                    f"{members[1].http}/publish", json={"text": TEXT}, timeout=30
                )
                assert answer.json() == {"published": 13}
            for shard in SHARDS:
                await members[1].read_to_heads(shard)
            counts = (await http.get(f"{members[1].http}/query", timeout=30)).json()
            assert counts == {
                **dict.fromkeys(["START the", "the quick", "quick brown", "brown fox"], 10),
                **dict.fromkeys(["fox the", "the lazy", "lazy dog", "dog the", "the end"], 10),
                **dict.fromkeys(["end of", "of the", "the fox", "fox END"], 10),
            }
            assert await listed(http, f"{members[1].http}/counts?limit=4") == counts
            end = f"{members[1].http}/counts/the%20end"
            assert (await http.get(end, timeout=30)).json() == {"n": 10}
            some = (await http.get(f"{members[1].http}/query?prefix=the%20", timeout=30)).json()
            assert some == dict.fromkeys(["the quick", "the lazy", "the end", "the fox"], 10)
        finally:
            for member in members:
                await member.crash()
            if store == "sql":
                from word_count.sql_counts import METADATA

                from gazette.stores.sql.store import shared_engine

                shared_engine(database, METADATA).dispose()
                # A member that crashed in a commit closes nothing: let its connection go here.
                gc.collect()


async def test_a_store_that_lacks_its_database_is_named(tmp_path: Path) -> None:
    from word_count.counts import new_counts

    for kind, option in (("sql", "database"), ("other", "store")):
        with raises(Invalid, path=f"--wordcount.{option}", says=kind):
            new_counts(kind, None, None, "")  # type: ignore[arg-type]


async def test_counts_survive_the_member_that_held_them(
    cluster: Cluster, etcd: Etcd, tmp_path: Path
) -> None:
    app, config = application()
    async with httpx.AsyncClient() as http:
        await http.post(f"{cluster.members[0].http}/publish", json={"text": TEXT})
        await cluster.settle()
        gone, left = cluster.members
        before = (await http.get(f"{left.http}/query")).json()
        spare = await ConsumerFixture.start(
            etcd,
            cluster.broker,
            app,
            tmp_path,
            id="consumer-three",
            config=config,
            lease_ttl_s=60.0,
        )
        cluster.members.append(spare)
        await gone.stop()
        for member in (left, spare):
            assert (await http.get(f"{member.http}/query", timeout=30)).json() == before
