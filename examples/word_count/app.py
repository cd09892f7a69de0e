"""Counts the n-grams of published text, exactly once, and answers how often each was seen.

Text is cut into n-grams, each published as a message to one of the partitions by its n-gram. A shard per
partition keeps the counts, in SQLite unless ``--wordcount.store`` says otherwise. Any member takes text and
queries, for all shards: what another member is primary for is asked of it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gazette import (
    Application,
    Envelope,
    Publisher,
    Shard,
    ShardRequest,
    StateView,
    runconsumer,
    shard_route,
)
from gazette.config.schema import setting
from gazette.consumer.query.query import rpc_errors
from gazette.consumer.service import ConsumerService
from gazette.errors import GazetteError, Invalid, NotFound
from gazette.message.mapping import modulo_mapping
from gazette.net.json_gateway import WrongMediaType, parse_body
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.route import Header
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
QUERY_TIMEOUT_S = 60.0


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


class WordCount(Application[Counts]):
    message_type = NGramCount
    config_groups: ClassVar[Mapping[str, type]] = {"wordcount": WordCountFlags}

    def __init__(self) -> None:
        self.flags = WordCountFlags()

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

    async def initialize(self, service: ConsumerService) -> None:
        self.flags = service.config(WordCountFlags)
        api = Api(service)
        add_NGramServicer_to_server(api, service.grpc_server)
        service.add_route("/query", api.http_query)
        service.add_route("/shards/{shard:path}/counts", api.shard_counts)
        service.add_route("/publish", api.http_publish, methods=["POST"])


class Api(NGramServicer):
    """Publish and query, over gRPC and HTTP."""

    def __init__(self, service: ConsumerService) -> None:
        self.service = service
        self.n = service.config(WordCountFlags).N
        self.partitions = service.partitions(NGRAMS)
        self.publisher = service.standalone_publisher()
        self.mapping = modulo_mapping(self.partitions, ngram_of)

    async def publish(self, text: str) -> int:
        """Publish the n-grams of a text; how many. Returns once they are durable."""
        await self.partitions.ready()
        messages = [NGramCount(n_gram=ngram, count=1) for ngram in ngrams(text, self.n)]
        futures = await self.publisher.publish_from_loop(self.mapping, messages)
        for future in futures.values():
            await await_future(future)
        return len(messages)

    async def query(
        self, prefix: str, shard: str, header: Header | None = None
    ) -> Sequence[NGramCount]:
        """Return counts of n-grams with a prefix: of one shard, or of all."""
        if shard:
            return await self.query_shard(prefix, shard, header)
        await self.partitions.ready()
        shards = {
            spec.id
            for partition in self.partitions().all
            for spec in self.service.shards_with_source(partition.journal)
        }
        if not shards:
            raise NotFound("no shard counts any journal", hint="Apply specifications of shards.")
        answers = await asyncio.gather(*(self.query_shard(prefix, one) for one in sorted(shards)))
        return sorted((gram for answer in answers for gram in answer), key=lambda gram: gram.n_gram)

    async def query_shard(
        self, prefix: str, shard: str, header: Header | None = None
    ) -> Sequence[NGramCount]:
        async def ask(channel: grpc.aio.Channel, peer: Header) -> Sequence[NGramCount]:
            request = QueryRequest(header=peer.to_pb(), prefix=prefix, shard=shard)
            response = await NGramStub(channel).Query(request, timeout=QUERY_TIMEOUT_S)
            grams: Sequence[NGramCount] = response.grams
            return grams

        def answer(store: Counts) -> list[NGramCount]:
            return [NGramCount(n_gram=ngram, count=n) for ngram, n in store.with_prefix(prefix)]

        return await self.service.call_shard(shard, answer, ask, header=header)

    @shard_route()
    def shard_counts(self, store: Counts, request: ShardRequest) -> dict[str, int]:
        return dict(store.with_prefix(request.query.get("prefix", "")))

    # gRPC.

    async def Publish(self, request: PublishRequest, context: Any) -> PublishResponse:
        async with rpc_errors(context):
            await self.publish(request.text)
        return PublishResponse()

    async def Query(self, request: QueryRequest, context: Any) -> QueryResponse:
        header = Header.from_pb(request.header) if request.HasField("header") else None
        async with rpc_errors(context):
            grams = await self.query(request.prefix, request.shard, header)
        return QueryResponse(grams=grams)

    # HTTP: GET /query?prefix=…&shard=…, POST /publish {"text": …}.

    async def http_query(self, request: Request) -> Response:
        parameters = request.query_params
        try:
            grams = await self.query(parameters.get("prefix", ""), parameters.get("shard", ""))
        except GazetteError as error:
            return failure(error)
        return JSONResponse({gram.n_gram: gram.count for gram in grams})

    async def http_publish(self, request: Request) -> Response:
        # As JSON, which no page of another origin may send.
        message = PublishRequest()
        try:
            await parse_body(request, message)
            return JSONResponse({"published": await self.publish(message.text)})
        except GazetteError as error:
            return failure(error)


def failure(error: GazetteError) -> Response:
    code = {NotFound: 404, Invalid: 400, WrongMediaType: 415}.get(type(error), 503)
    return JSONResponse({"error": str(error), "hint": error.hint}, code)


if __name__ == "__main__":
    runconsumer.main(WordCount(), bind_host="127.0.0.1")
