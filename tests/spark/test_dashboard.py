"""The dashboard for Spark at a real Prometheus: a stream of Spark has each metric that it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture
from tests.consumer.apps import source_spec
from tests.spark.conftest import MASTER, ROOT, SMALL
from tests.support.prometheus import Prometheus
from tools.dashboards import files

PROGRAMS = ("prometheus", "prometheus-blackbox-exporter", "prometheus-node-exporter")
PAGE = ROOT / "docs" / "monitoring.md"
JOURNAL = "words/one"
PANELS_S = 120.0
CLOCK = SystemClock()

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in PROGRAMS),
        reason="needs Debian's packages prometheus, prometheus-blackbox-exporter and -node-exporter",
    ),
]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    directory = tmp_path / "prometheus"
    directory.mkdir()
    with Prometheus(directory) as prometheus:
        yield prometheus


@pytest.fixture
def driver() -> Iterator[tuple[Any, str]]:
    """Yield a session with the settings of the page, and the URL of its metrics."""
    pytest.importorskip("pandas")
    from gazette.spark import session

    (settings,) = PAGE.read_text().partition("conf={")[2].split("\n    }", 1)[:1]
    conf = json.loads("{" + settings.rstrip().rstrip(",") + "}")
    port = free_port()
    small = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.driver.extraJavaOptions": SMALL,
        "spark.log.level": "ERROR",
    }
    spark = session(MASTER, conf={**conf, **small, "spark.ui.port": str(port)})
    yield spark, f"http://127.0.0.1:{port}"
    spark.stop()


async def test_each_panel_shows_a_stream(
    etcd: Etcd, tmp_path: Path, prometheus: Prometheus, driver: tuple[Any, str]
) -> None:
    spark, url = driver
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(source_spec(JOURNAL))
        prometheus.scrape([broker.http], spark=[url])

        async def fill() -> None:
            while True:
                await broker.client.append(AppendParams(JOURNAL), b'{"word":"one"}\n')
                await CLOCK.sleep(0.1)

        def start() -> Any:
            options = {
                "broker.address": broker.endpoint,
                "journal": JOURNAL,
                "isolation": "read_uncommitted",
            }
            words = spark.readStream.format("gazette").options(**options).load()
            query = words.groupBy("word").count().writeStream.format("memory")
            return query.outputMode("complete").queryName("words").start()

        async with TaskScope("test") as scope:
            scope.spawn(fill(), name="fill")
            query = await asyncio.to_thread(start)
            try:
                await shown(prometheus)
                # Between two batches with rows there may be some without.
                rows = 'max_over_time(spark_streaming_inputRate_total{query="words"}[1m]) > 0'
                while not await prometheus.query(rows):
                    assert query.isActive, query.exception()
                    await CLOCK.sleep(0.2)
            finally:
                scope.cancel()
                with contextlib.suppress(Exception):  # It may read at this moment.
                    await asyncio.to_thread(query.stop)


async def shown(prometheus: Prometheus) -> None:
    """Wait until each query of the dashboard has a sample."""
    empty = {
        target["expr"]
        for panel in json.loads(files()["spark.json"])["panels"]
        for target in panel.get("targets", ())
        if panel["title"] != "Alerts that fire"
    }
    ends_at = CLOCK.monotonic() + PANELS_S
    while empty:
        for expression in list(empty):
            asked = expression.replace("$__rate_interval", "5s").replace("$instance", ".*")
            if await prometheus.query(asked):
                empty.remove(expression)
        assert CLOCK.monotonic() < ends_at, empty
        await CLOCK.sleep(0.2)
