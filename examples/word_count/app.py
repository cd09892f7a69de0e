"""Counts the n-grams of published text, exactly once, and answers how often each was seen.

Text is cut into n-grams, each published as a message to one of the partitions by its n-gram. A shard per
partition keeps the counts, in SQLite unless ``--wordcount.store`` says otherwise. Any member takes text and
queries, for all shards: routes find the shards, and the members that answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gazette import (
    Application,
    Envelope,
    ListPage,
    Publisher,
    Shard,
    ShardRequest,
    StateView,
    gather_route,
    list_route,
    runconsumer,
    shard_route,
    shard_rpc,
)
from gazette.auth import Capability, authorization_of
from gazette.config.schema import setting
from gazette.consumer.query.query import rpc_errors
from gazette.consumer.service import ConsumerService
from gazette.errors import GazetteError, Invalid
from gazette.message.mapping import modulo_mapping
from gazette.net.http_requests import Refusal
from gazette.net.json_gateway import parse_body
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.tasks import await_future
from word_count.counts import STORES, Counts, new_counts, new_view
from word_count.ngram_pb2 import (
    NGramCount,
    PublishRequest,
    PublishResponse,
    QueryRequest,
    QueryResponse,
)
from word_count.ngram_pb2_grpc import NGramServicer, NGramStub, add_NGramServicer_to_server

MESSAGE_TYPE = "app.gazette.dev/message-type"
NGRAMS = LabelSelector.parse(f"{MESSAGE_TYPE} = word_count.NGramCount")
WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True)
class WordCountFlags:
    N: int = setting(1, "words in an n-gram", name="N")
    store: str = setting("sqlite", "where shards keep their counts", choices=STORES)
    database: str = setting("", "SQLAlchemy URL of the database, for the store sql")


def ngrams(text: str, n: int) -> Iterator[str]:
    """Yield the n-grams of a text: runs of letters in lower case, with START and END around them."""
    words = WORD.findall(text.lower())
    if n == 1:
        yield from words
        return
    padded = ["START"] * (n - 1) + words + ["END"] * (n - 1)
    for begin in range(len(padded) - n + 1):
        yield " ".join(padded[begin : begin + n])


def ngram_of(message: NGramCount) -> str:
    return message.n_gram


def joined(answers: list[dict[str, int]]) -> dict[str, int]:
    """Return the counts of all shards, ordered by n-gram. No two shards count the same one."""
    return dict(sorted(item for answer in answers for item in answer.items()))


class WordCount(Application[Counts]):
    message_type = NGramCount
    config_groups: ClassVar[Mapping[str, type]] = {"wordcount": WordCountFlags}

    def __init__(self) -> None:
        self.flags = WordCountFlags()

    def keyed_journals(self) -> LabelSelector:
        return NGRAMS

    def new_store(self, shard: Shard, recorder: Any) -> Counts:
        return new_counts(self.flags.store, shard, recorder, self.flags.database)

    def new_view(self, shard: Shard, directory: Path) -> StateView | None:
        return new_view(self.flags.store, directory)

    def consume_message(
        self, shard: Shard, store: Counts, envelope: Envelope[NGramCount], publisher: Publisher
    ) -> None:
        store.gathered[envelope.message.n_gram] += envelope.message.count

    def finalize_transaction(self, shard: Shard, store: Counts, publisher: Publisher) -> None:
        store.flush()

    @shard_route("/counts/{ngram}", key="ngram")
    def count(self, store: Counts, request: ShardRequest) -> dict[str, int]:
        ngram = request.path["ngram"]
        return {"n": dict(store.counts(ngram, ngram, 1)).get(ngram, 0)}

    @list_route("/counts")
    def counts(self, store: Counts, page: ListPage) -> list[tuple[str, int]]:
        begin = "" if page.after is None else page.after + "\0"
        return store.counts(page.request.query.get("prefix", ""), begin, page.limit)

    @gather_route("/query", combine=joined)
    def query(self, store: Counts, request: ShardRequest) -> dict[str, int]:
        return dict(store.counts(request.query.get("prefix", "")))

    @shard_route("/shards/{shard:path}/counts")
    def counts_of_shard(self, store: Counts, request: ShardRequest) -> dict[str, int]:
        return dict(store.counts(request.query.get("prefix", "")))

    async def initialize(self, service: ConsumerService) -> None:
        self.flags = service.config(WordCountFlags)
        api = Api(service)
        add_NGramServicer_to_server(api, service.grpc_server)
        service.add_route("/publish", api.http_publish, methods=["POST"])


class ShardApi(NGramServicer):
    """Queries over gRPC that name a shard."""

    def __init__(self, service: ConsumerService) -> None:
        self.service = service

    @shard_rpc(NGramStub)
    def Query(self, store: Counts, request: QueryRequest) -> QueryResponse:
        grams = [NGramCount(n_gram=ngram, count=n) for ngram, n in store.counts(request.prefix)]
        return QueryResponse(grams=grams)


class Api(ShardApi):
    """Queries of all shards over gRPC, and publishing over gRPC and HTTP."""

    def __init__(self, service: ConsumerService) -> None:
        super().__init__(service)
        self.n = service.config(WordCountFlags).N
        self.partitions = service.partitions(NGRAMS)
        self.publisher = service.standalone_publisher()
        self.mapping = modulo_mapping(self.partitions, ngram_of)

    async def Query(self, request: QueryRequest, context: Any) -> QueryResponse:  # type: ignore[override]
        one = super().Query
        if request.shard:
            return await one(request, context)
        async with rpc_errors(context):
            token = authorization_of(context.invocation_metadata())
            claims = self.service.verifier.verify(token, Capability.READ)
            shards = await self.service.all_shards()
            requests = [QueryRequest(prefix=request.prefix, shard=spec.id) for spec in shards]
            answers = await asyncio.gather(*(one.ask(each, claims=claims) for each in requests))
        grams: list[NGramCount] = [gram for answer in answers for gram in answer.value.grams]
        grams.sort(key=ngram_of)
        return QueryResponse(grams=grams)

    async def Publish(self, request: PublishRequest, context: Any) -> PublishResponse:
        async with rpc_errors(context):
            await self.publish(request.text)
        return PublishResponse()

    async def http_publish(self, request: Request) -> Response:
        # As JSON, which no page of another origin may send.
        message = PublishRequest()
        try:
            await parse_body(request, message)
            return JSONResponse({"published": await self.publish(message.text)})
        except GazetteError as error:
            code = 400 if isinstance(error, Invalid) else 503
            code = error.code if isinstance(error, Refusal) else code
            return JSONResponse({"error": str(error), "hint": error.hint}, code)

    async def publish(self, text: str) -> int:
        """Publish the n-grams of a text; how many. Returns once they are durable."""
        await self.partitions.ready()
        messages = [NGramCount(n_gram=ngram, count=1) for ngram in ngrams(text, self.n)]
        futures = await self.publisher.publish_from_loop(self.mapping, messages)
        for future in futures.values():
            await await_future(future)
        return len(messages)


if __name__ == "__main__":
    runconsumer.main(WordCount(), bind_host="127.0.0.1")
