"""A Spark session that works as it is: `session`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from gazette.errors import Conflict, Invalid, Unavailable
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
    # Else Spark looks the machine's name up, and warns of what it finds.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def session(
    master: str = "local[*]",
    *,
    app_name: str = "gazette",
    conf: Mapping[str, str] | None = None,
) -> Any:
    """A session of Spark (a ``pyspark.sql.SparkSession``), with Java and workers that are there.

    Finds a Java (`gazette.spark.java.ensure_java`), and lets workers run this very Python. ``conf`` is
    further configuration, and wins. Sets ``JAVA_HOME``, ``PYSPARK_PYTHON`` and a few more variables of this
    process, for what it starts.

    Raises `Unavailable` if Spark is not installed, has no Java, or a standalone master does not answer;
    `Invalid` for what names no master; `Conflict` if there is a session
    with another master, which a process has one of only.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unavailable(
            f"Spark cannot be imported: {error}", hint="Run `pip install 'pygazette[spark]'`."
        ) from error
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
                f"a session with master {running} is there already, and not {master}",
                hint="Use that one, or stop it first.",
            )
    else:
        require_reachable(master)
        os.environ["JAVA_HOME"] = str(ensure_java(os.environ))
        # Else workers run whatever `python3` is on their PATH.
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
    """The builder's session. Raises `Unavailable` when Java does not start, several times over.

    It is started by a fork of this process, which now and then does not live to execute it when threads
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
            f"Java did not start, {_STARTS} times over",
            hint="What it said is above. Spark's settings (spark-defaults.conf, PYSPARK_SUBMIT_ARGS) and"
            " the machine's memory are what it fails for.",
        ) from error
