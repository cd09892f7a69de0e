"""A Spark session that works without configuration: `session`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from gazette.errors import Conflict, Invalid, Unavailable, not_installed
from gazette.spark.cluster_url import require_reachable
from gazette.spark.java import ensure_java

DEFAULTS: Final[dict[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_STARTS: Final = 3
_NOT_STARTED: Final = "JAVA_GATEWAY_EXITED"
_LOCAL_DEFAULTS: Final[dict[str, str]] = {
    # Without an address Spark looks the machine's name up, and warns of the result.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def session(
    master: str = "local[*]",
    *,
    app_name: str = "gazette",
    conf: Mapping[str, str] | None = None,
) -> Any:
    """Return a session of Spark (a ``pyspark.sql.SparkSession``), with Java and workers that work.

    Find a Java (`gazette.spark.java.ensure_java`), and let workers run this same Python. ``conf``
    is further configuration, and goes first. Set ``JAVA_HOME``, ``PYSPARK_PYTHON`` and a few more
    variables of this process, for its children.

    Raise `Unavailable` if Spark has no Java, or a standalone master does not answer. Raise
    `Invalid` if Spark is not installed, and for a text that is not a master. Raise `Conflict` if
    the process has a session with another master: it can have one only.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise not_installed("Spark", str(error.name), "spark") from error
    settings = {
        **DEFAULTS,
        **(_LOCAL_DEFAULTS if master.startswith("local") else {}),
        **(conf or {}),
    }
    active: Any = SparkSession.getActiveSession()
    if active is not None:
        running = active.sparkContext.master
        if running != master:
            raise Conflict(
                f"a session with master {running} exists already, and not with {master}",
                hint="Use that one, or stop it first.",
            )
    else:
        require_reachable(master)
        os.environ["JAVA_HOME"] = str(ensure_java(os.environ))
        # By default workers run any `python3` on their PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: Any = SparkSession.builder
    builder = builder.master(master).appName(app_name)
    for name, value in settings.items():
        if not isinstance(value, str):
            raise Invalid(f"configuration is text ({value!r})", path=name)
        builder = builder.config(name, value)
    return started(builder)


def started(builder: Any) -> Any:
    """Return the builder's session. Raise `Unavailable` when Java does not start, several times over.

    A fork of this process starts it. The fork sometimes dies before it executes Java, when threads
    of gRPC are at work.
    """
    for _ in range(_STARTS - 1):
        try:
            return builder.getOrCreate()
        except RuntimeError as error:
            if _NOT_STARTED not in str(error):
                raise
    try:
        return builder.getOrCreate()
    except RuntimeError as error:
        if _NOT_STARTED not in str(error):
            raise
        raise Unavailable(
            f"Java did not start in {_STARTS} attempts",
            hint="Its output is above. Check Spark's settings (spark-defaults.conf, "
            "PYSPARK_SUBMIT_ARGS) and the machine's memory.",
        ) from error
