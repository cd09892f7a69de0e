"""Columns as of CREATE TABLE."""

from __future__ import annotations

import pyarrow as pa
import pytest

from gazette.errors import Invalid
from gazette.history.ddl import parse_columns
from tests.facts import raises


def test_columns() -> None:
    text = (
        "word STRING, `a b` long, n: int, d decimal(10, 2), e decimal, t timestamp,"
        " l array<struct<x: double, y:map<string,array<date>>>>"
    )
    assert parse_columns(text) == pa.schema(
        [
            ("word", pa.string()),
            ("a b", pa.int64()),
            ("n", pa.int32()),
            ("d", pa.decimal128(10, 2)),
            ("e", pa.decimal128(10, 0)),
            ("t", pa.timestamp("us", "UTC")),
            (
                "l",
                pa.list_(
                    pa.struct(
                        [
                            ("x", pa.float64()),
                            ("y", pa.map_(pa.string(), pa.list_(pa.date32()))),
                        ]
                    )
                ),
            ),
        ]
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "name of a column at 'the end'"),
        ("word", "type at 'the end'"),
        ("word nothing", "at 'nothing'"),
        ("word string,", "name of a column at 'the end'"),
        ("word string n int", "at 'n int'"),
        ("l array<int", "> at 'the end'"),
        ("s struct<x int>", ": at 'int>'"),
        ("d decimal(99)", "precision"),
        ("a int, a int", "columns a"),
        ("a int;", "at ';'"),
    ],
)
def test_what_is_not_valid(text: str, reason: str) -> None:
    with raises(Invalid, path="fields", says=reason):
        parse_columns(text)
