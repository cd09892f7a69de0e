"""The session of Spark that tests share: starting one takes seconds, or minutes on a busy machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MASTER = "local[2,2]"
"""Each task may fail once."""
SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Tests are short: it does not pay to compile them well."""


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a session for the tests of a module. A process has one session at a time, and one Java.

    Executors can import what tests can.
    """
    pytest.importorskip("pandas")
    from gazette.spark import session

    root = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.default.parallelism": "2",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"{SMALL} -Dderby.system.home={root}",
        "spark.sql.warehouse.dir": str(root / "warehouse"),
        "spark.local.dir": str(root),
        "spark.log.level": "ERROR",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(
            str(path) for path in (ROOT, ROOT / "examples")
        ),
    }
    spark = session(MASTER, conf=conf)
    yield spark
    spark.stop()
