"""Streams of a journal that is deleted and created again, and is longer already than what was read."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Corrupt
from gazette.history.backfill.plan import checkpoint_of
from gazette.history.first_pass import fold_by_threads
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.uuid import OUTSIDE_TXN
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import raises
from tests.spark.test_stream import Query, line

JOURNAL = "topic/a"
LABELS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))


async def test_a_stream_reads_another_life_from_its_begin_or_fails(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        loop = asyncio.get_running_loop()

        def run(coro: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(coro, loop).result(30)

        def append(*numbers: int) -> None:
            lines = b"".join(line(2, n, OUTSIDE_TXN, n=n) for n in numbers)
            run(broker.client.append(AppendParams(JOURNAL), lines))

        def create_again() -> None:
            delete = JournalChange(delete=JOURNAL, expect_mod_revision=-1)
            run(broker.client.apply_journals([delete]))
            (broker.file_root / "second").mkdir()
            spec = journal_spec(JOURNAL, labels=LABELS)
            fragment = replace(spec.fragment, stores=("file:///second/",))
            run(broker.create(replace(spec, fragment=fragment)))

        def play() -> None:
            run(broker.create(journal_spec(JOURNAL, labels=LABELS)))
            given = {"broker.address": broker.endpoint, "refresh": "0", "journal": JOURNAL}
            skipping = {**given, "failOnDataLoss": "false"}
            append(*range(10, 15))
            strict, lenient = Query(given), Query(skipping)
            assert strict.step() == lenient.step() == [10, 11, 12, 13, 14]
            assert lenient.step() is None
            create_again()
            append(*range(20, 32))
            for query in (strict, Query(given, [*strict.log])):
                with raises(Corrupt, "created", "created_before", journal=JOURNAL):
                    query.step()
            assert lenient.step() == list(range(20, 32))
            append(32)
            assert Query(skipping, lenient.log).step() == [32]
            assert lenient.step() is None
            # Batches of the present life are planned again as they were. Those of the former are gone.
            again = Query(skipping, lenient.log)
            first, second = itertools.pairwise(lenient.log[-3:])
            assert [again.batch(*first), again.batch(*second)] == [list(range(20, 32)), [32]]
            with raises(Corrupt, "created", journal=JOURNAL):
                again.batch(*lenient.log[:2])

        await asyncio.to_thread(play)


async def test_a_backfilled_checkpoint_knows_the_lives_of_its_sources(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(JOURNAL, labels=LABELS))
        await broker.client.append(AppendParams(JOURNAL), line(1, 1, OUTSIDE_TXN, n=1))
        listed = await broker.client.get_journal(JOURNAL)

        def fold() -> Any:
            with Access.of(broker.endpoint).open() as access:
                return fold_by_threads(access, take_snapshot(access, Selection((JOURNAL,))))

        spec = ShardSpec("shard", (ShardSource(f"{JOURNAL};reader"),))
        checkpoint = checkpoint_of(await asyncio.to_thread(fold), spec, "app")
        assert checkpoint.lives == {f"{JOURNAL};reader": listed.life}
