"""The word count while a process is killed: counts are right, and so is every byte of the journals.

One run per seed, each on a new cluster of real processes: at a random moment of publishing, a random
broker or consumer gets SIGKILL. Afterwards, checked against what the run knows:

- every count equals the count of what was published;
- every acknowledged append stands in its journal, whole, at the offsets of its acknowledgement;
- no two acknowledged appends share a byte;
- sequenced, the journals hold each published message once, and no other.

``GAZETTE_SEEDS`` says how many runs (default 50), ``GAZETTE_FIRST_SEED`` where they begin.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.errors import NotYet
from gazette.labels import CONTENT_PROTO_FIXED, MESSAGE_TYPE
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import PartitionWatch, modulo_mapping
from gazette.message.publisher import Publisher
from gazette.message.sequencer.sequencer import Sequencer
from gazette.protocol.label_set import LabelSelector
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.demo_load import all_counts
from gazette.run.dev.processes import ChildProcess
from gazette.run.dev.word_count import (
    NGRAM_TYPE,
    WordCountCluster,
    WordCountSettings,
    import_examples,
)
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope, await_future

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

FIRST = int(os.environ.get("GAZETTE_FIRST_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("GAZETTE_SEEDS", "50")))
LEASE_S = 4.0
BATCHES = 60
BATCH_WORDS = 400
PAUSE_S = 0.05


class Run:
    """One seed: what was published, and what was acknowledged."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = random.Random(seed)
        self.clock = SystemClock()
        settings = ClusterSettings(
            directory, brokers=3, zones=2, lease_ttl_s=LEASE_S, durable_etcd=False
        )
        self.cluster = LocalCluster(settings, self.clock)
        self.words: WordCountCluster
        self.published: Counter[str] = Counter()
        self.acknowledged: list[Any] = []
        self.killed = ""

    async def run(self) -> None:
        await self.cluster.start()
        self.words = WordCountCluster(
            self.cluster,
            WordCountSettings(lease_ttl_s=LEASE_S, max_txn_s=0.3, fragment_bytes=1 << 16),
            self.clock,
        )
        try:
            await self.words.apply_journals()
            async with TaskScope("members") as scope:
                for _ in range(2):
                    scope.spawn(self.words.start_member(), name="member")
            await self.words.apply_shards()
            await self.words.await_shards(standbys=True)
            async with TaskScope("run") as scope:
                scope.spawn(self.publish(), name="publish")
                scope.spawn(self.kill(), name="kill")
            await self.check()
        finally:
            await self.words.stop()
            await self.cluster.stop()

    async def kill(self) -> None:
        """Send SIGKILL to some process at some moment while messages are published and consumed."""
        await self.clock.sleep(self.rng.uniform(0.0, BATCHES * PAUSE_S))
        processes: list[ChildProcess] = [one.process for one in self.cluster.brokers]
        processes += [one.process for one in self.words.members]
        victim = self.rng.choice(processes)
        self.killed = victim.name
        await victim.kill()

    async def publish(self) -> None:
        from word_count.app import ngram_of
        from word_count.ngram_pb2 import NGramCount

        vocabulary = [
            f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{'x' * (i % 5)}" for i in range(300)
        ]
        brokers = self.cluster.brokers
        client = Client(",".join(one.grpc_url for one in brokers), clock=self.clock)
        appends = AppendService(client)
        futures: list[Any] = []
        async with TaskScope("publishing") as scope:
            partitions = PartitionWatch(
                client.watch_journals(LabelSelector.parse(f"{MESSAGE_TYPE} = {NGRAM_TYPE}"))
            )
            scope.spawn(partitions.run(), name="partitions")
            await partitions.ready()
            publisher = Publisher.standalone(appends, self.clock, random.SystemRandom())
            mapping = modulo_mapping(partitions, ngram_of)
            for _ in range(BATCHES):
                words = self.rng.choices(vocabulary, k=BATCH_WORDS)
                self.published.update(words)
                messages = [NGramCount(n_gram=word, count=1) for word in words]
                futures += (await publisher.publish_from_loop(mapping, messages)).values()
                await self.clock.sleep(PAUSE_S)
            for future in futures:
                self.acknowledged.append(await await_future(future))
            scope.cancel()
        await appends.close()
        await client.close()

    async def check(self) -> None:
        broker = next(one for one in self.cluster.brokers if one.process.running)
        contents: dict[str, bytes] = {}
        async with Client(broker.grpc_url, clock=self.clock) as client:
            for journal in self.words.partitions:
                contents[journal] = await read_all(client, journal)
        await self.words.await_read_through(
            {journal: len(content) for journal, content in contents.items()}, 60.0
        )
        counts = await all_counts(self.words)
        assert counts == self.published, f"killed {self.killed}"
        self.check_appends(contents)
        assert sequenced(contents) == self.published, f"killed {self.killed}"

    def check_appends(self, contents: dict[str, bytes]) -> None:
        spans: dict[tuple[str, int, int], bytes] = {}
        for result in self.acknowledged:
            commit = result.commit
            spans[commit.journal, commit.begin, commit.end] = commit.sum
        assert spans
        for (journal, begin, end), digest in spans.items():
            held = contents[journal][begin:end]
            assert len(held) == end - begin, f"acknowledged bytes are missing: {journal} {begin}"
            assert hashlib.sha1(held).digest() == digest, f"bytes changed: {journal} {begin}"
        ordered = sorted(spans)
        for (journal, _, end), (other, begin, _) in itertools.pairwise(ordered):
            assert journal != other or end <= begin, f"appends share bytes: {journal} at {begin}"


async def read_all(client: Client, journal: str) -> bytes:
    content = bytearray()
    reader = client.retry_reader(ReadParams(journal))
    try:
        while data := await reader.read(1 << 20):
            content += data
    except NotYet:
        pass
    finally:
        reader.close()
    return bytes(content)


def sequenced(contents: dict[str, bytes]) -> Counter[str]:
    from word_count.ngram_pb2 import NGramCount

    counts: Counter[str] = Counter()
    sequencer: Sequencer[Any] = Sequencer({}, 1024)
    for journal, content in contents.items():
        decoder = EnvelopeDecoder(journal, framing_of(CONTENT_PROTO_FIXED, NGramCount), 0)
        decoder.feed(content)
        while batch := decoder.decode():
            index = 0
            while index < len(batch):
                index = sequencer.queue_batch(batch, index)
                while committed := sequencer.dequeue(1000):
                    counts.update(envelope.message.n_gram for envelope in committed)
        decoder.finish()
    return counts


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_are_exact_whoever_is_killed(seed: int, tmp_path: Path) -> None:
    """A SIGKILL of one process at a random moment changes no count and no acknowledged byte."""
    import_examples()
    asyncio.run(Run(seed, tmp_path).run())
