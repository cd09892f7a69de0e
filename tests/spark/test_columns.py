"""Columns of journals, beside those of Spark's own JSON source: counted, and by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from gazette.spark import read
from gazette.testing.stored import write_journal

pytestmark = [pytest.mark.spark, pytest.mark.long]

STORE, JOURNAL = "file:///fragments/", "topic/one"


def test_columns_are_those_of_spark(spark: Any, tmp_path: Path) -> None:
    lines = b'{"n":1,"N":2,"":3,"a.b":4,"`q`":5,"s":{"x":1,"":6}}\n' * 1000
    (tmp_path / "lines.json").write_bytes(lines)
    write_journal(tmp_path, STORE, JOURNAL, [lines])
    given = {"store": f"file://{tmp_path}/fragments", "journal": JOURNAL}
    unnamed = StructField("", LongType())
    schemas: list[Any] = [
        StructType([]),
        StructType([unnamed]),
        StructType([StructField("s", StructType([unnamed])), unnamed]),
        StructType([StructField("s", StructType([]))]),
        "n bigint",
        "`a.b` bigint, ```q``` bigint, missing string",
        "S struct<X:bigint>, A string",
    ]
    for schema in schemas:
        ours = spark.read.format("gazette").options(**given).schema(schema).load()
        theirs = spark.read.schema(schema).json(f"{tmp_path}/lines.json")
        assert ours.count() == theirs.count() == 1000
        assert ours.collect() == theirs.collect()
        again = read(spark, schema=schema, **given)
        assert again.count() == 1000
        assert again.collect() == theirs.collect()
    inferred = spark.read.format("gazette").options(**given).load()
    assert set(inferred.columns[7:]) == {"n", "N", "a.b", "`q`", "s"}
    assert inferred.select("`a.b`", "s.x").distinct().collect() == [(4, 1)]
