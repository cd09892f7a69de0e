"""Spark aborts a write whose commit has failed. What is decided stays decided."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.errors import Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.runtime import failpoints
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.spark.test_sink import batch, words, writer

JSON = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(
            journal_spec("topic/a", labels=JSON), journal_spec("topic/b", labels=JSON)
        )
        yield broker


@pytest.mark.parametrize("point", ["sink.deciding", "sink.decided", "sink.acknowledged"])
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_commit_that_failed_is_completed_although_spark_has_aborted_it(
    broker: BrokerFixture, tmp_path: Path, point: str, *, streaming: bool
) -> None:
    """Spark calls `abort` after any error of `commit`, and then runs the batch again."""
    data = batch(word=[f"w{n}" for n in range(9)])
    options: dict[str, Any] = {"streaming": streaming, "selector": "prefix=topic/"}
    options |= {"mapping": "modulo", "key": "word", "commits": str(tmp_path / "commits")}
    if not streaming:
        options["commitId"] = "nightly"
    number = (0,) if streaming else ()

    def play() -> None:
        one = writer(broker, data.schema, **options)
        attempt = one.write(iter([data]))
        assert len(attempt.attempt.commits) == 2, "both journals"
        with failpoints.armed(f"{point}=error"), pytest.raises(Unavailable, match="failpoint"):
            one.commit([attempt], *number)
        writer(broker, data.schema, **options).abort([attempt], *number)
        again = writer(broker, data.schema, **options)
        second = again.write(iter([data]))
        again.commit([second], *number)
        found, pending = words(broker)
        assert (sorted(found), pending) == ([f"w{n}" for n in range(9)], 0)

    await asyncio.to_thread(play)
