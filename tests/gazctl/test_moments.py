"""Points in time as people give them."""

from __future__ import annotations

import pytest

from gazette.errors import Invalid
from gazette.gazctl.io.time_args import age_text, parse_moment, time_text
from tests.facts import raises

NOW = 1_700_000_000.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("1234", 1234),
        (" 1234 ", 1234),
        ("24h", 1_700_000_000 - 86400),
        ("1h30m", 1_700_000_000 - 5400),
        ("0", 0),
        ("2023-11-14T22:13:20Z", 1_700_000_000),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000),
        ("2023-11-14", 1_699_920_000),
    ],
)
def test_moments_are_read(text: str, expected: int) -> None:
    assert parse_moment(text, NOW, "--from") == expected


@pytest.mark.parametrize("text", ["soon", "-", "12:00", "2023-13-01"])
def test_others_are_refused(text: str) -> None:
    with raises(Invalid, path="--from", says=f'"{text}"'):
        parse_moment(text, NOW, "--from")


def test_moments_are_written() -> None:
    assert time_text(1_700_000_000) == "2023-11-14 22:13:20Z"
    texts = [age_text(seconds) for seconds in (-1, 0, 59, 60, 3599, 3600, 86399, 86400, 1e7)]
    assert texts == ["0s", "0s", "59s", "1m", "59m", "1h", "23h", "1d", "115d"]
