"""What is left of a journal once some of its brokers have ended."""

from __future__ import annotations

from tools.chaos.losses import contiguous, merged, processes_left

MEMBERS = ("broker-2", "broker-3")


def test_a_process_that_took_the_place_of_another_holds_nothing() -> None:
    """All brokers end at once, and one has been started again before the end of the others is seen."""
    started = {31: 5.0, 21: 5.0, 32: 60.0}
    assert processes_left(MEMBERS, {"broker-2": 21, "broker-3": 31}, started, 50.0) == {
        ("broker-2", 21),
        ("broker-3", 31),
    }
    assert processes_left(MEMBERS, {"broker-3": 32}, started, 50.0) == set()
    assert processes_left(MEMBERS, {"broker-3": 33}, started, 50.0) == set()  # Not seen yet.
    assert processes_left(MEMBERS, {"broker-1": 21}, started, 50.0) == set()


def test_spans_that_touch_each_other_are_one() -> None:
    assert merged([(5, 9), (0, 3), (3, 4), (1, 2)]) == ((0, 4), (5, 9))
    assert contiguous(((0, 4), (5, 9))) == 4
    assert contiguous(((5, 9),)) == contiguous(()) == 0
