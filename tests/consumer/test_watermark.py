"""The watermark: equal to one that is computed from all that happened, and the same after a restore."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.consumer.timers.timer import EventTime
from gazette.consumer.timers.watermark import Watermark
from gazette.errors import Corrupt, Invalid
from tests.facts import raises

SOURCES = ("a", "b", "c")
Step = tuple[str, int]
"""A source and the time of its message; without a source, seconds that pass."""

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(SOURCES), st.integers(-50, 50)),
        st.tuples(st.just(""), st.integers(0, 40)),
    ),
    max_size=30,
)


def expected(steps: list[Step], lateness: int, idle_s: int | None) -> list[int | None]:
    """Return the watermark after each step, from all steps before it."""
    found: list[int | None] = []
    value: int | None = None
    for end in range(1, len(steps) + 1):
        now = 0
        times: dict[str, int] = {}
        seen = dict.fromkeys(SOURCES, 0)
        for source, number in steps[:end]:
            if not source:
                now += number
                continue
            times[source] = max(number, times.get(source, number))
            seen[source] = now
        active = [one for one in SOURCES if idle_s is None or now - seen[one] < idle_s]
        reached: int | None = None
        if active and all(one in times for one in active):
            reached = min(times[one] for one in active) - lateness
        elif not active and times:
            reached = max(times.values()) - lateness
        if reached is not None:
            value = reached if value is None else max(value, reached)
        found.append(value)
    return found


@given(steps, st.integers(0, 20), st.sampled_from((None, 5, 30)))
def test_a_watermark_follows_all_sources(
    steps: list[Step], lateness: int, idle_s: int | None
) -> None:
    idle = None if idle_s is None else timedelta(seconds=idle_s)
    event_time = EventTime(timedelta(microseconds=lateness), idle)
    watermark, now = Watermark(event_time, SOURCES, 0.0), 0.0
    found = []
    for source, number in steps:
        if source:
            watermark.observe(source, number)
        else:
            now += number
            watermark.watch(now)
        found.append(watermark.value)
    assert found == expected(steps, lateness, idle_s)
    again = Watermark(event_time, SOURCES, now)
    again.restore(watermark.to_bytes())
    assert again.value == watermark.value
    assert again.to_bytes() == watermark.to_bytes()


def test_a_source_that_is_gone_is_forgotten_and_a_new_one_holds_back() -> None:
    watermark = Watermark(EventTime(), ("a", "b"), 0.0)
    watermark.observe("a", 10)
    watermark.observe("b", 20)
    again = Watermark(EventTime(), ("b", "new"), 0.0)
    again.restore(watermark.to_bytes())
    again.observe("b", 30)
    assert again.value == 10
    again.observe("new", 15)
    assert again.value == 15


def test_the_next_source_that_becomes_idle_is_known() -> None:
    event_time = EventTime(idle_after=timedelta(seconds=5))
    watermark = Watermark(event_time, ("a", "b"), 100.0)
    assert watermark.next_idle_at == 105.0
    watermark.watch(103.0)
    watermark.observe("a", 1)
    watermark.watch(105.0)
    assert watermark.next_idle_at == 108.0
    watermark.watch(108.0)
    assert watermark.next_idle_at is None
    assert Watermark(EventTime(), ("a",), 0.0).next_idle_at is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"watermark":"a"}', b"\xff"])
def test_a_damaged_state_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        Watermark(EventTime(), (), 0.0).restore(data)


def test_bad_settings_are_refused_by_name() -> None:
    with raises(Invalid, path="lateness"):
        EventTime(lateness=5)  # type: ignore[arg-type]
    with raises(Invalid, path="lateness"):
        EventTime(lateness=timedelta(seconds=-1))
    with raises(Invalid, path="idle_after"):
        EventTime(idle_after=timedelta(0))
