"""Durations are exact nanoseconds in every form."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.text import duration
from gazette.protocol.text.duration import format_go_duration, parse_go_duration

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

int64 = st.integers(-(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("-0", 0),
        ("0s", 0),
        ("1ns", 1),
        ("1us", 1_000),
        ("1µs", 1_000),
        ("1μs", 1_000),
        ("1.5ms", 1_500_000),
        (".5s", 500_000_000),
        ("5.s", 5_000_000_000),
        ("1m0s", 60_000_000_000),
        ("1h1m1s", 3_661_000_000_000),
        ("30m1h", 5_400_000_000_000),
        ("-1.5h", -5_400_000_000_000),
        ("+2s", 2_000_000_000),
        ("0.3333333333333333333h", 1_199_999_999_999),
        (f"0.{'1' * 63}s", 111_111_111),
        ("9223372036854775807ns", (1 << 63) - 1),
        ("-9223372036854775808ns", -(1 << 63)),
    ],
)
def test_texts_that_are_durations(text: str, ns: int) -> None:
    assert parse_go_duration(text) == ns


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", 'time: invalid duration ""'),
        ("-", 'time: invalid duration "-"'),
        ("1", 'time: missing unit in duration "1"'),
        ("1s2", 'time: missing unit in duration "1s2"'),
        ("1 s", 'time: unknown unit " s" in duration "1 s"'),
        ("1d", 'time: unknown unit "d" in duration "1d"'),
        (".s", 'time: invalid duration ".s"'),
        ("s", 'time: invalid duration "s"'),
        ("9223372036854775808ns", 'time: invalid duration "9223372036854775808ns"'),
        ("٣s", 'time: invalid duration "٣s"'),
        ("-9223372036854775809ns", 'time: invalid duration "-9223372036854775809ns"'),
        (f"0.{'1' * 64}s", f'time: invalid duration "0.{"1" * 64}s"'),
    ],
)
def test_texts_that_are_not(text: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_go_duration(text)
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (1_100, "1.1µs"),
        (2_200_000, "2.2ms"),
        (999_999_999, "999.999999ms"),
        (1_000, "1µs"),
        (1_000_000, "1ms"),
        (1_000_000_000, "1s"),
        (1_000_000_001, "1.000000001s"),
        (3_300_000_000, "3.3s"),
        (3_600_000_000_000, "1h0m0s"),
        (60_000_000_000, "1m0s"),
        (245_000_000_000, "4m5s"),
        (18_367_001_000_000, "5h6m7.001s"),
        (86_400_000_000_000, "24h0m0s"),
        (-1, "-1ns"),
        (-(1 << 63), "-2562047h47m16.854775808s"),
    ],
)
def test_texts_that_are_written(ns: int, text: str) -> None:
    assert format_go_duration(ns) == text


@PROPERTY
@given(int64)
@example(-(1 << 63))
@example((1 << 63) - 1)
def test_text_and_wire_forms_round_trip(ns: int) -> None:
    assert parse_go_duration(format_go_duration(ns)) == ns
    pb = duration.to_pb(ns)
    assert duration.from_pb(pb) == ns
    assert pb.seconds * pb.nanos >= 0


def test_a_wire_form_beyond_64_bits_is_refused() -> None:
    pb = duration.to_pb(0)
    for beyond in (1 << 63, -(1 << 63) - 1, 315_576_000_000 * 10**9):
        pb.seconds, pb.nanos = divmod(beyond, 10**9)
        with pytest.raises(Invalid, match="out of range"):
            duration.from_pb(pb)
