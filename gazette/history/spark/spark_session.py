"""Makes a Spark session that works without configuration: `session`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from gazette.errors import Conflict, Invalid, Unavailable, not_installed
from gazette.history.spark.cluster_url import CONNECT, require_reachable
from gazette.history.spark.java import ensure_java

_TIME_ZONE: Final = "spark.sql.session.timeZone"
DEFAULTS: Final[dict[str, str]] = {
    _TIME_ZONE: "UTC",
    "spark.ui.showConsoleProgress": "false",
    # The error of a worker that has crashed says where its threads were.
    "spark.python.worker.faulthandler.enabled": "true",
}
_PY_FILES: Final = "spark.submit.pyFiles"
_CONNECT_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"
"""Environment variable that PySpark sets for a session of Spark Connect, and keeps after its end."""
_SERVER: Final = "SPARK_REMOTE"
"""Environment variable with the URL of a server: it sets the mode of Spark Connect for the whole process."""
_ONE_SESSION: Final = "Use that one, or stop it first."
_STARTS: Final = 3
_NOT_STARTED: Final = "JAVA_GATEWAY_EXITED"
_LOCAL_DEFAULTS: Final[dict[str, str]] = {
    # Without an address, Spark looks up the machine's name, and may warn of the address that it finds.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Only for local sessions: on a cluster, users need the UI to see what a job does.
    "spark.ui.enabled": "false",
}


def session(
    master: str = "local[*]",
    *,
    app_name: str = "gazette",
    conf: Mapping[str, str] | None = None,
) -> Any:
    """Return a session of Spark (a ``pyspark.sql.SparkSession``) with a working Java and working workers.

    Find a Java (`gazette.history.spark.java.ensure_java`), and let workers run the same Python. ``conf`` is
    further configuration, and takes precedence. Set ``JAVA_HOME``, ``PYSPARK_PYTHON`` and some other
    variables in the environment of this process, for its children. For a server of Spark Connect
    (``sc://host``), neither find a Java nor set variables.

    Raise `Unavailable` if no Java works, or if a master or server does not answer. Raise `Invalid` if Spark
    is not installed, and for a malformed master. Raise `Conflict` if the process has a session with another
    master: it can have only one.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise not_installed("Spark", str(error.name), "spark") from error
    if master.startswith(CONNECT):
        return _connected(master, app_name, conf or {})
    _leave_connect_mode(master)
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
                hint=_ONE_SESSION,
            )
    else:
        require_reachable(master)
        os.environ["JAVA_HOME"] = str(ensure_java(os.environ))
        # By default, workers run the first `python3` on their PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: Any = SparkSession.builder
    spark = started(_configured(builder.master(master).appName(app_name), settings))
    if spark.conf.get(_PY_FILES, ""):
        # Spark passes modules of --py-files only to registered data sources, so register ours.
        from gazette.history.spark.source.source import GazetteDataSource

        spark.dataSource.register(GazetteDataSource)
    return spark


def _configured(builder: Any, settings: Mapping[str, str]) -> Any:
    for name, value in settings.items():
        if not isinstance(value, str):
            raise Invalid(f"configuration is text ({value!r})", path=name)
        builder = builder.config(name, value)
    return builder


def _leave_connect_mode(master: str) -> None:
    """Leave the mode of Spark Connect after its session was stopped, for a session with a master.

    Raise `Conflict` if that session still runs. Do nothing if the mode is set for the whole process.
    """
    if _CONNECT_MODE not in os.environ or _SERVER in os.environ:
        return
    from pyspark.sql.connect.session import SparkSession as Connected

    if (Connected.getActiveSession() or Connected._default_session) is not None:
        raise Conflict(
            f"cannot start a session with master {master}: a session of Spark Connect still runs",
            hint=_ONE_SESSION,
        )
    del os.environ[_CONNECT_MODE]


def _connected(server: str, app_name: str, conf: Mapping[str, str]) -> Any:
    """Return a session on a server of Spark Connect. Raise ``Conflict`` for another active session."""
    import pyspark
    from pyspark.sql import SparkSession

    active: Any = None if _CONNECT_MODE in os.environ else SparkSession.getActiveSession()
    if active is not None:
        raise Conflict(
            f"a session with master {active.sparkContext.master} exists already, and not with {server}",
            hint=_ONE_SESSION,
        )
    require_reachable(server)
    settings = {_TIME_ZONE: DEFAULTS[_TIME_ZONE], **conf}
    try:
        from pyspark.sql.connect.session import SparkSession as _  # noqa: F401
    except ImportError as error:  # Its text names each missing package.
        raise Invalid(
            f"Spark Connect needs packages that are not installed ({error})",
            path="master",
            hint=f"Run `pip install 'pyspark[connect]=={pyspark.__version__}'`.",
        ) from error
    builder: Any = SparkSession.builder
    return _configured(builder.remote(server).appName(app_name), settings).getOrCreate()


def started(builder: Any) -> Any:
    """Return the builder's session. Raise `Unavailable` if Java does not start in several attempts.

    PySpark forks this process to start Java. If threads of gRPC run, the fork sometimes dies too early.
    """
    last_error: RuntimeError | None = None
    for _ in range(_STARTS):
        try:
            return builder.getOrCreate()
        except RuntimeError as error:
            if _NOT_STARTED not in str(error):
                raise
            last_error = error
    raise Unavailable(
        f"Java did not start in {_STARTS} attempts",
        hint="Its output is above. Check Spark's settings (spark-defaults.conf, "
        "PYSPARK_SUBMIT_ARGS) and the machine's memory.",
    ) from last_error
