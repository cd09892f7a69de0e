"""A Java that does not start is started again, and reported in the end."""

from __future__ import annotations

from typing import Any

import pytest

from gazette.errors import Unavailable
from gazette.history.spark.spark_session import started
from tests.facts import raises

errors = pytest.importorskip("pyspark.errors")


class Builder:
    """Fails as often as asked for, as PySpark does."""

    def __init__(self, failures: int, condition: str = "JAVA_GATEWAY_EXITED") -> None:
        self.failures = failures
        self.condition = condition
        self.calls = 0

    def getOrCreate(self) -> Any:
        self.calls += 1
        if self.calls <= self.failures:
            raise errors.PySparkRuntimeError(errorClass=self.condition, messageParameters={})
        return "session"


def test_a_java_that_died_as_it_began_is_started_again() -> None:
    assert started(Builder(0)) == "session"
    assert started(Builder(2)) == "session"


def test_one_that_never_starts_is_reported() -> None:
    builder = Builder(10)
    with raises(Unavailable, says="3 attempts"):
        started(builder)
    assert builder.calls == 3


def test_other_errors_are_not_tried_again() -> None:
    builder = Builder(1, "MASTER_URL_NOT_SET")
    with pytest.raises(errors.PySparkRuntimeError):
        started(builder)
    assert builder.calls == 1
