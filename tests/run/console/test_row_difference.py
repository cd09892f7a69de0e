"""The rows that differ between two SQLite databases, as a child process of the console answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from gazette.errors import Invalid
from gazette.run.console.row_difference import ROWS_MAX
from gazette.run.console.sql_child import answer_of

Compare = Callable[[str, list[str], list[str]], list[dict[str, Any]]]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """Return a function that compares two databases with the same tables, and statements that fill them."""

    def run(tables: str, before: list[str], after: list[str]) -> list[dict[str, Any]]:
        databases = []
        for name, statements in (("before", before), ("after", after)):
            directory = tmp_path / name
            directory.mkdir()
            connection = apsw.Connection(str(directory / "primary.db"))
            connection.execute("; ".join([tables, *statements]))
            connection.close()
            databases.append(str(directory / "primary.db"))
        answer: list[dict[str, Any]] = answer_of(
            {"databases": databases, "own_tables": ["gazette_checkpoint"]}
        )
        return answer

    return run


def rows(low: int, high: int, value: str) -> str:
    numbers = f"SELECT {low} UNION ALL SELECT i + 1 FROM n WHERE i < {high - 1}"
    return f"INSERT INTO t WITH RECURSIVE n(i) AS ({numbers}) SELECT i, {value} FROM n"


def test_rows_of_one_key_are_pairs_however_many_differ(compare: Compare) -> None:
    before, after = [rows(1000, 1400, "0")], [rows(0, 5, "1"), rows(1000, 1400, "1")]
    (table,) = compare("CREATE TABLE t (id INTEGER PRIMARY KEY, v)", before, after)
    assert (len(table["changed"]), len(table["added"]), table["removed"]) == (ROWS_MAX, 5, [])
    assert table["changed"][0] == ([1000, 0], [1000, 1], [1])
    assert table["truncated"] is True


@pytest.mark.parametrize(
    ("columns", "before", "after"),
    [
        ("id INTEGER PRIMARY KEY, v TEXT COLLATE NOCASE", "(1, 'a')", "(1, 'A')"),
        ("id INTEGER PRIMARY KEY, v", "(1, 1)", "(1, 1.0)"),
        ("id INTEGER PRIMARY KEY, v", "(1, NULL)", "(1, 0)"),
        ("id INTEGER PRIMARY KEY, v", "(1, 'a')", "(1, x'61')"),
        (
            "id BLOB PRIMARY KEY, v",
            "(x'00ff', printf('%2000d', 1))",
            "(x'00ff', printf('%2000d', 2))",
        ),
        ("id TEXT COLLATE NOCASE PRIMARY KEY, v", "('a', 1)", "('A', 1)"),
    ],
)
def test_values_are_compared_bit_by_bit(
    compare: Compare, columns: str, before: str, after: str
) -> None:
    fill = [f"INSERT INTO t VALUES {values}" for values in (before, after)]
    (table,) = compare(f"CREATE TABLE t ({columns})", fill[:1], fill[1:])
    ((_, _, places),) = table["changed"]
    assert (len(places), table["added"], table["removed"]) == (1, [], [])


def test_generated_columns_are_in_their_places(compare: Compare) -> None:
    fill = [f"INSERT INTO t (id, v) VALUES (1, {value})" for value in (5, 6)]
    columns = "g AS (v + 100), id INTEGER PRIMARY KEY, v"
    (table,) = compare(f"CREATE TABLE t ({columns})", fill[:1], fill[1:])
    assert (table["columns"], table["changed"]) == (
        ["g", "id", "v"],
        [([105, 1, 5], [106, 1, 6], [0, 2])],
    )


def test_rows_without_a_key_are_counted(compare: Compare) -> None:
    before, after = ["INSERT INTO t VALUES (1), (1), (1)"], ["INSERT INTO t VALUES (1), (1.0)"]
    (table,) = compare("CREATE TABLE t (v)", before, after)
    assert (table["removed"], table["added"], table["changed"]) == ([[1], [1]], [[1.0]], [])


def test_keys_that_are_null_may_be_repeated(compare: Compare) -> None:
    after = ["INSERT INTO t VALUES (NULL, 1), (NULL, 2), (NULL, 2)"]
    (table,) = compare("CREATE TABLE t (k TEXT PRIMARY KEY, v)", [after[0][:-11]], after)
    assert (table["added"], table["removed"]) == ([[None, 2]], [])


def test_a_table_that_one_moment_lacks_is_added_and_long_values_are_cut(compare: Compare) -> None:
    after = ["CREATE TABLE document (p)", "INSERT INTO document VALUES (zeroblob(3000000))"]
    (table,) = compare("CREATE TABLE t (v)", [], [*after, "CREATE TABLE gazette_checkpoint (c)"])
    assert (table["name"], table["removed"], table["truncated"]) == ("document", [], False)
    assert table["added"][0][0].endswith("(6000003 characters)")


def test_what_is_shown_has_a_bound(compare: Compare) -> None:
    names = [f"v{number}" for number in range(50)]
    fill = rows(0, 250, ", ".join(["hex(zeroblob(3000))"] * 50))
    table, other = compare(
        f"CREATE TABLE t (id INTEGER PRIMARY KEY, {', '.join(names)}); CREATE TABLE u (v)",
        [],
        [fill, "INSERT INTO u VALUES (1)"],
    )
    assert (len(table["added"]) < 100, table["truncated"]) == (True, True)
    assert (other["added"], other["truncated"]) == ([], True)


def test_a_text_that_is_no_text_is_a_sentence(compare: Compare) -> None:
    with pytest.raises(Invalid, match="utf-8"):
        compare("CREATE TABLE t (v)", [], ["INSERT INTO t VALUES (CAST(x'ff' AS TEXT))"])
