"""The rows that a verification compares."""

from __future__ import annotations

import math

import apsw

from gazette.history.backfill.content import first_difference, sqlite_rows


def test_only_tables_of_sqlite_itself_are_left_out() -> None:
    connection = apsw.Connection("")
    connection.execute("CREATE TABLE sqlites (a); INSERT INTO sqlites VALUES (1)")
    connection.execute("CREATE INDEX by_a ON sqlites (a); ANALYZE")
    rows = list(sqlite_rows(connection))
    assert rows[0] == ("sqlites", (1,))
    assert {name for name, _ in rows[1:]} == {"sqlite_master"}
    assert {row[1] for _, row in rows[1:]} == {"sqlites", "by_a"}


def test_what_is_no_number_equals_itself_alone() -> None:
    rows = [("a", math.nan), ("b", {"x": [math.nan]})]
    assert first_difference(rows, [("a", float("nan")), ("b", {"x": [float("nan")]})]) is None
    for other in (0.0, math.inf, None, "nan"):
        difference = first_difference(rows, [("a", other)])
        assert difference is not None
        assert difference.place == 0
        difference = first_difference([("a", other)], rows)
        assert difference is not None
        assert difference.place == 0
