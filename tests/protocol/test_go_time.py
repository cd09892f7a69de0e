"""Layouts are read as Go reads them. Expected texts are what Go's own formatter gives."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.protocol.text.go_time import format_go_time

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TIME = 1574202030.12345  # 2019-11-19 22:20:30.12345 UTC, a Tuesday.


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("2006-01-02", "2019-11-19"),
        ("15", "22"),
        ("Mon Jan _2 15:04:05 2006", "Tue Nov 19 22:20:30 2019"),
        ("Monday, 02-Jan-06 15:04:05 MST", "Tuesday, 19-Nov-19 22:20:30 UTC"),
        ("January 2, 2006 at 3:04pm (MST)", "November 19, 2019 at 10:20pm (UTC)"),
        ("2006-01-02T15:04:05Z07:00", "2019-11-19T22:20:30Z"),
        ("2006-01-02T15:04:05.999999999Z07:00", "2019-11-19T22:20:30.12345Z"),
        ("Mon, 02 Jan 2006 15:04:05 -0700", "Tue, 19 Nov 2019 22:20:30 +0000"),
        ("-07:00 -07 -07:00:00 Z0700 Z07", "+00:00 +00 +00:00:00 Z Z"),
        ("15:04:05.000", "22:20:30.123"),
        ("15:04:05.0000000", "22:20:30.1234500"),
        ("15:04:05,00", "22:20:30,12"),
        ("03PM 1/2/6", "10PM 11/19/6"),
        ("002 __2", "323 323"),
        ("_2006", "_2019"),
        ("year=2006/month=01/day=02", "year=2019/month=11/day=19"),
        ("Months Janu", "Months Janu"),
        ("no elements", "no elements"),
        (".0000x1", ".1234x11"),
        (".05", ".30"),
    ],
)
def test_elements(layout: str, text: str) -> None:
    assert format_go_time(layout, TIME) == text


def test_the_zero_time_is_in_the_year_one() -> None:
    assert format_go_time("2006-01-02T15:04:05.999 Mon", None) == "0001-01-01T00:00:00 Mon"


def test_midnight_and_noon_are_twelve() -> None:
    assert format_go_time("3 03 PM pm", 0) == "12 12 AM am"
    assert format_go_time("3 03 PM pm", 12 * 3600) == "12 12 PM pm"
    assert format_go_time("__2 _2", 0) == "  1  1"


@PROPERTY
@given(st.integers(0, 253_402_300_799), st.sampled_from("abcdefgxyz-/=%"))
def test_a_date_reads_back(seconds: int, separator: str) -> None:
    text = format_go_time(f"2006{separator}01{separator}02", seconds)
    year, month, day = text.split(separator)
    assert (len(year), len(month), len(day)) == (4, 2, 2)
