"""Backfills of journals that have lost bytes for good."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.errors import NotYet
from gazette.history.backfill.plan import plan_snapshot
from gazette.history.backfill.settings import HistoryEnd
from gazette.history.snapshot import LostBytes, Snapshot
from gazette.history.source import Access
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.uuid import OUTSIDE_TXN, build_uuid
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.testing.stored import json_line
from tests.backfill.apps import WindowsBackfill
from tests.confirmed_loss import LENGTH, holed_journal
from tests.facts import logged, raises

LABELS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
PRODUCER = bytes([1, 0, 0, 0, 0, 1])


def line(clock: int) -> bytes:
    fields: dict[str, object] = {"word": str(clock), "pad": "x" * LENGTH}
    return json_line(fields, build_uuid(PRODUCER, clock, OUTSIDE_TXN))


async def test_a_backfill_goes_on_behind_what_an_operator_has_confirmed(
    etcd: Etcd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [line(at) for at in range(1, 6)]
    spec = ShardSpec("shard-000", sources=(ShardSource("topic/a"),))
    async with holed_journal(etcd, tmp_path, "topic/a", lines[:4], {1, 3}, LABELS) as holed:
        access = Access.of(holed.broker.endpoint, file_root=holed.broker.file_root)

        def plan() -> Snapshot:
            with access.open() as opened:
                return plan_snapshot(opened, WindowsBackfill(), [spec], HistoryEnd())

        with raises(NotYet, journal="topic/a"):
            await asyncio.to_thread(plan)
        await holed.confirm()
        await holed.append(lines[4])
        (journal,) = (await asyncio.to_thread(plan)).journals
        assert [len(lines[0])] * 3 == [one.end - one.begin for one in journal.pieces]
        assert journal.missed == tuple(LostBytes(*one, is_confirmed=True) for one in holed.lost)
        for begin, end in holed.lost:
            assert logged(caplog, "reason", journal="topic/a", begin=begin, end=end)
