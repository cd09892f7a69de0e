"""The session of Spark that tests share: starting one takes seconds, or minutes on a busy machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


@pytest.fixture
def shared_spark(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The session of this process, made if there is none. Executors can import what tests can."""
    pytest.importorskip("pandas")
    from gazette.spark import session

    root = tmp_path_factory.getbasetemp()
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"{SMALL} -Dderby.system.home={root}",
        "spark.sql.warehouse.dir": str(root / "warehouse"),
        "spark.local.dir": str(root),
        "spark.log.level": "ERROR",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]),
    }
    return session("local[2,2]", conf=conf)
