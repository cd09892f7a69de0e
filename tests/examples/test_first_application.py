"""The application of the README, run as its users run it, against `gazette dev`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange, ShardClient
from gazette.dev.cluster import ClusterSettings, LocalCluster
from gazette.dev.heads import write_head
from gazette.dev.processes import ChildProcess, await_ready
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.message.message import Message
from gazette.message.publisher import Publisher
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.testing.broker import journal_spec

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]


class Word(Message):
    word: str


async def test_it_counts_words_published_to_its_journal(tmp_path: Path) -> None:
    """Messages are consumed through a real broker by the process that the README describes."""
    clock = SystemClock()
    cluster = LocalCluster(ClusterSettings(tmp_path, brokers=1, zones=1, lease_ttl_s=60.0), clock)
    await cluster.start()
    port, http = free_port(), free_port()
    broker = cluster.brokers[0].grpc_url
    application = ChildProcess(
        "first",
        [
            *(sys.executable, str(ROOT / "examples" / "first_application.py")),
            *("--consumer.host=127.0.0.1", f"--consumer.port={port}"),
            *(f"--consumer.http-port={http}", f"--broker.address={broker}"),
            *(f"--etcd.address={cluster.etcd.endpoint}", "--consumer.drain-timeout=0s"),
        ],
        tmp_path / "first.log",
        {**cluster.environ, "PYTHONPATH": str(ROOT)},
        clock,
    )
    try:
        async with Client(broker, clock=clock) as client:
            words = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
            log = LabelSet.of((CONTENT_TYPE, CONTENT_RECOVERY_LOG))
            stores = ("file:///",)
            specs = [
                journal_spec("first/words", labels=words, stores=stores),
                journal_spec("recovery/first/shard-000", labels=log, stores=stores),
            ]
            await client.apply_journals([JournalChange(upsert=spec) for spec in specs])
            await application.start()
            await await_ready(application, http, clock, 30.0)
            appends = AppendService(client)
            publisher = Publisher.standalone(appends, clock, random.SystemRandom())
            mapping = fixed_mapping("first/words", CONTENT_JSON_LINES)
            text = ["to", "be", "or", "not", "to", "be"]
            await publisher.publish_from_loop(mapping, [Word(word=one) for one in text])
            await appends.flush()
            await appends.close()
            await consumed(port, client, clock)
    finally:
        assert await application.stop(30.0), application.log_tail()
        await cluster.stop()
    assert application.exit_code == 0, application.log_tail()


async def consumed(port: int, client: Client, clock: SystemClock) -> None:
    """Apply the shard, and return when it has read all that was published."""
    async with ShardClient(f"http://127.0.0.1:{port}", clock=clock) as shards:
        spec = ShardSpec(
            id="shard-000",
            sources=(ShardSource("first/words"),),
            recovery_log_prefix="recovery/first",
            hint_prefix="/gazette/hints/first",
            max_txn_duration_ns=1_000_000_000,
        )
        await shards.apply_shards([ShardChange(upsert=spec)])
        head = await write_head(client, "first/words")
        while True:
            listed = (await shards.list_shards()).shards
            if listed and listed[0].route.primary is not None:
                break
            await clock.sleep(0.05)
        stat = await shards.stat("shard-000", {"first/words": head})
        assert stat.read_through["first/words"] == head
