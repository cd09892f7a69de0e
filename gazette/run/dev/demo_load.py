"""The load of the demonstration: `Publishing` publishes a text, `Queries` asks members all the time."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import urllib.parse
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.errors import GazetteError, Unavailable
from gazette.labels import MESSAGE_TYPE
from gazette.message.mapping import PartitionWatch, modulo_mapping
from gazette.message.publisher import Publisher
from gazette.protocol.label_set import LabelSelector
from gazette.run.dev.corpus import texts
from gazette.run.dev.heads import write_head
from gazette.run.dev.word_count import NGRAM_TYPE, Member, WordCountCluster
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope, await_future

TEXT_BYTES: Final = 64 << 10
BACKLOG_BYTES: Final = 8 << 20
QUERY_TIMEOUT_S: Final = 60.0
QUERY_PAUSE_S: Final = 0.05


class Publishing:
    """Publishes a corpus as n-gram messages of one word, and counts how much of it is published."""

    def __init__(self, words: WordCountCluster, files: list[Path], clock: Clock) -> None:
        self.messages = 0
        self._words = words
        self._files = files
        self._clock = clock
        self._bytes_all = max(1, sum(path.stat().st_size for path in files))
        self._bytes = 0
        self._seconds = 0.0
        self._moved = asyncio.Event()

    @property
    def fraction(self) -> float:
        return min(1.0, self._bytes / self._bytes_all)

    @property
    def rate(self) -> float:
        """Messages per second, up to the last acknowledgement."""
        return self.messages / self._seconds if self._seconds else 0.0

    async def reached(self, fraction: float) -> None:
        """Return once that fraction of the text is with the publisher."""
        while self.fraction < fraction:
            await self._moved.wait()

    async def run(self) -> None:
        from word_count.app import ngram_of, ngrams
        from word_count.ngram_pb2 import NGramCount

        began = self._clock.monotonic()
        brokers = ",".join(broker.grpc_url for broker in self._words.cluster.brokers)
        client = Client(brokers, clock=self._clock)
        appends = AppendService(client)
        selector = LabelSelector.parse(f"{MESSAGE_TYPE} = {NGRAM_TYPE}")
        async with client, TaskScope("publishing") as scope:
            partitions = PartitionWatch(client.watch_journals(selector))
            scope.daemon(partitions.run(), name="partitions")
            scope.daemon(appends.run(), name="appends")
            await partitions.ready()
            publisher = Publisher.standalone(appends, self._clock, random.SystemRandom())
            mapping = modulo_mapping(partitions, ngram_of)

            def publish(text: str) -> int:
                messages = [NGramCount(n_gram=gram, count=1) for gram in ngrams(text, 1)]
                publisher.publish_committed_batch(mapping, messages)
                return len(messages)

            for text in texts(self._files, TEXT_BYTES):
                self.messages += await asyncio.to_thread(publish, text)
                self._bytes += len(text.encode(errors="replace"))
                self._moved.set()
                self._moved = asyncio.Event()
                while appends.backlog_bytes > BACKLOG_BYTES:
                    await self._clock.sleep(0.01)
            for future in appends.pending_except(""):
                await await_future(future)
            self._seconds = self._clock.monotonic() - began
            await appends.close()
            scope.cancel()
        self._bytes = self._bytes_all
        self._moved.set()

    async def write_heads(self) -> dict[str, int]:
        """Return the end of each partition."""
        broker = next(broker for broker in self._words.cluster.brokers if broker.process.running)
        heads: dict[str, int] = {}
        async with Client(broker.grpc_url, clock=self._clock) as client:
            for journal in self._words.partitions:
                heads[journal] = await write_head(client, journal)
        return heads


class Queries:
    """Asks members for words, one after the other. Counts answers, and keeps the reasons of failures."""

    def __init__(self, words: WordCountCluster, clock: Clock) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._killed: set[str] = set()
        self._words = words
        self._clock = clock
        self._stopped = False
        self._turn = 0

    def stop(self) -> None:
        self._stopped = True

    def is_to_be_killed(self, member: Member) -> None:
        """Count no failure of ``member`` from now on. Call this before the kill: a query may notice the end
        of the member before the member's parent does."""
        self._killed.add(member.id)

    async def run(self) -> None:
        """Query until stopped. Ask in turn all members that are not killed."""
        while not self._stopped:
            running = [member for member in self._words.members if member.id not in self._killed]
            member = running[self._turn % len(running)]
            shard = self._words.shard_ids[self._turn % len(self._words.shard_ids)]
            self._turn += 1
            try:
                await asyncio.to_thread(ask, member, f"/shards/{shard}/counts?prefix=import")
            except GazetteError as error:
                # A query that was under way at a killed member is no failure of the shard: a client would
                # turn to another member.
                if member.id not in self._killed:
                    self.failures.append(str(error))
                continue
            self.answered += 1
            await self._clock.sleep(QUERY_PAUSE_S)

    async def fail_over_s(self, shards: Collection[str]) -> float:
        """Return the seconds from now until all ``shards`` answer."""
        began = self._clock.monotonic()
        async with TaskScope("fail-over") as scope:
            for shard in shards:
                path = f"/shards/{shard}/counts?prefix=import"
                scope.spawn(asyncio.to_thread(ask_any, self._words, path), name=shard)
        return self._clock.monotonic() - began


async def all_counts(words: WordCountCluster) -> Counter[str]:
    """Return all counts of all shards."""
    counts: Counter[str] = Counter()
    for shard in words.shard_ids:
        counts.update(await asyncio.to_thread(ask_any, words, f"/shards/{shard}/counts"))
    return counts


def ask_any(words: WordCountCluster, path: str) -> dict[str, int]:
    """Return the answer of the first member that answers.

    A member may leave meanwhile: on a busy machine, it can lose its lease. If no member answers, raise
    ``Unavailable`` with the reason of the last member.
    """
    failure: GazetteError = Unavailable("no member runs", path=path)
    for member in words.members:
        if member.process.running:
            try:
                return ask(member, path)
            except Unavailable as error:
                failure = error
    raise failure


def ask(member: Member, path: str) -> dict[str, int]:
    """Return the answer to one HTTP query. Raise ``Unavailable`` if the member does not answer it."""
    url = urllib.parse.urlsplit(member.http_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=QUERY_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body: Any = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"{member.id} did not answer: {error!r}", path=path) from error
    finally:
        connection.close()
    if response.status != 200:
        raise Unavailable(f"{member.id} answered {response.status}: {body}", path=path)
    counts: dict[str, int] = body
    return counts
