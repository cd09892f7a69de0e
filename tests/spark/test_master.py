"""Masters of Spark, as texts and as addresses; and the report of a task that failed."""

from __future__ import annotations

import socket

import pytest

from gazette.errors import Broken, Invalid, Unavailable
from gazette.history.spark.cluster_url import addresses_of, require_reachable
from gazette.history.spark.errors import cause_in, wrap_spark_errors
from tests.facts import raises


@pytest.mark.parametrize(
    "master", ["local", "local[2]", "local[*]", "local[2,3]", "local[*, 4]", "yarn", "k8s://h:1"]
)
def test_masters_that_are_not_connected_to(master: str) -> None:
    assert addresses_of(master) == ()
    require_reachable(master)


def test_standalone_masters() -> None:
    assert addresses_of("spark://host:7077") == (("host", 7077),)
    assert addresses_of("spark://a:1,b:2") == (("a", 1), ("b", 2))
    assert addresses_of("spark://[::1]:7077") == (("::1", 7077),)


@pytest.mark.parametrize(
    "master",
    [
        "",
        "Local",
        "local[",
        "local[x]",
        "spark://",
        "spark://host",
        "spark://h:0",
        "http://h:1",
        "sc://",
        "sc://h:x",
    ],
)
def test_what_is_no_master(master: str) -> None:
    with raises(Invalid, path="--master", says=repr(master)):
        addresses_of(master)


def test_servers_of_spark_connect() -> None:
    assert addresses_of("sc://host") == (("host", 15002),)
    assert addresses_of("sc://host:1/;token=a:b;user_id=me") == (("host", 1),)
    assert addresses_of("sc://[::1]:2") == (("::1", 2),)


def test_one_of_the_masters_has_to_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # And does not listen.
        there, gone = server.getsockname()[1], unused.getsockname()[1]
        require_reachable(f"spark://127.0.0.1:{gone},127.0.0.1:{there}")
        with raises(Unavailable, says=f"127.0.0.1:{gone}"):
            require_reachable(f"spark://127.0.0.1:{gone}")


REPORT = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed 1 times:
Traceback (most recent call last):
  File "/x/worker.py", line 1, in main
    process()
  File "/x/build.py", line 2, in run_task
    raise
gazette.errors.Fenced: another process has opened the shard's state (shard=a)

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
"""


def test_what_a_task_raised_is_found() -> None:
    assert cause_in(REPORT).startswith("gazette.errors.Fenced: another process has opened")
    called = "An error occurred while calling o12.collectToPython."
    assert cause_in(f"{called}\n: java.lang.IllegalStateException: stopped\n\tat x") == (
        "java.lang.IllegalStateException: stopped"
    )
    # Spark Connect has it so.
    begun = "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most"
    assert cause_in(f"\n  See below.\n{begun} recent call last):\n  File x\nKeyError: 1\n") == (
        "KeyError: 1"
    )
    assert cause_in("") == "it did not say why"


@pytest.mark.parametrize(
    ("raised", "hint"),
    [
        ("ModuleNotFoundError: No module named 'mine'", "add it to PYTHONPATH"),
        ("gazette.errors.Invalid: not a table\nWhat to do: Return one.", "Return one."),
    ],
)
def test_what_to_do_about_what_a_task_raised(raised: str, hint: str) -> None:
    errors = pytest.importorskip("pyspark.errors")
    text = f"Job aborted:\nTraceback (most recent call last):\n  File x\n{raised}\n\n\tat org.x"
    with pytest.raises(Broken) as found, wrap_spark_errors():
        raise errors.PySparkRuntimeError(text)
    assert found.value.message.endswith(raised.partition("\n")[0])
    assert hint in str(found.value.hint)


def test_only_errors_of_spark_are_translated() -> None:
    errors = pytest.importorskip("pyspark.errors")
    with pytest.raises(Broken, match="another process has opened"), wrap_spark_errors():
        raise errors.PySparkRuntimeError(REPORT)
    with pytest.raises(LookupError), wrap_spark_errors():
        raise LookupError("of the application")
