"""Slow operations of a disk, and those that the scheduler has made slow."""

from __future__ import annotations

import threading

import pytest

from gazette.fragment.disk_pace import SLOW_S, Pace, Switches
from gazette.fragment.local_file import thread_switches
from gazette.testing.clock import ManualClock


class Thread:
    """A thread whose context switches are counted by hand."""

    def __init__(self) -> None:
        self.waited = 100
        self.preempted = 10
        self.counted = True

    def switches(self) -> Switches | None:
        return (self.waited, self.preempted) if self.counted else None


@pytest.mark.parametrize(
    ("waited", "preempted", "counted", "is_fast"),
    [
        (0, 1, True, True),  # Another thread had the processor.
        (1, 0, True, False),  # The disk was waited for.
        (1, 1, True, False),
        (0, 0, True, False),  # The system itself was busy with the operation.
        (0, 1, False, False),  # Nothing is known.
    ],
)
def test_operation_that_took_long(
    clock: ManualClock, waited: int, preempted: int, counted: bool, is_fast: bool
) -> None:
    thread = Thread()
    thread.counted = counted
    pace = Pace(clock.monotonic, thread.switches)
    began = pace.begin()
    clock.advance(2 * SLOW_S)
    thread.waited += waited
    thread.preempted += preempted
    pace.note(began, 1)
    assert pace.is_fast is is_fast


def test_switches_of_this_thread() -> None:
    """A wait is counted."""
    before = thread_switches()
    if before is None:
        pytest.skip("this system does not count the switches of a thread")
    event = threading.Event()
    event.wait(0.01)
    after = thread_switches()
    assert after is not None
    assert after[0] > before[0]
