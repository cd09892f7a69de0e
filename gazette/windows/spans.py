"""Spans of windows: they say to which windows a time belongs. Pure.

Times are Unix microseconds. A window includes its begin, but not its end. Windows of fixed size are aligned
to the Unix epoch, in UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias

from gazette.consumer.timers.timer import duration_us
from gazette.errors import Invalid

HOPPING_MAX: Final = 1_000
"""Greatest number of windows of one message."""
_MICROSECOND: Final = timedelta(microseconds=1)

Span: TypeAlias = tuple[int, int]
"""Begin and end of a window, in Unix microseconds."""


@dataclass(frozen=True, slots=True)
class Hopping:
    """Windows of ``size``. A window begins every ``step``. If ``step`` is shorter than ``size``, a message
    belongs to several windows."""

    size: timedelta
    step: timedelta

    def __post_init__(self) -> None:
        duration_us("size", self.size, _MICROSECOND)
        duration_us("step", self.step, _MICROSECOND)
        if self.step > self.size:
            raise Invalid(
                f"the step ({self.step}) is longer than the size ({self.size})",
                path="step",
                hint="Messages between two windows would belong to neither.",
            )
        if -(-self.size // self.step) > HOPPING_MAX:  # The quotient is rounded up.
            raise Invalid(
                f"a message would belong to more than {HOPPING_MAX} windows",
                path="step",
                hint="Make the step longer, or the windows smaller.",
            )

    def __str__(self) -> str:
        return f"hopping: {self.size} every {self.step}"

    def spans_of(self, at_us: int) -> Sequence[Span]:
        """Return the windows of a time, in order."""
        size_us, step_us = self.size // _MICROSECOND, self.step // _MICROSECOND
        last = at_us // step_us * step_us
        # The first begin after `at_us - size_us`: this window ends after `at_us`.
        first = (at_us - size_us) // step_us * step_us + step_us
        return [(begin, begin + size_us) for begin in range(first, last + 1, step_us)]


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Windows of ``size``, one after the other. A message belongs to one window."""

    size: timedelta

    def __post_init__(self) -> None:
        duration_us("size", self.size, _MICROSECOND)

    def __str__(self) -> str:
        return f"tumbling: {self.size}"

    def spans_of(self, at_us: int) -> Sequence[Span]:
        """Return the window of a time."""
        size_us = self.size // _MICROSECOND
        begin = at_us // size_us * size_us
        return [(begin, begin + size_us)]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Windows that end ``gap`` after their last message. A message between two windows may merge them."""

    gap: timedelta

    def __post_init__(self) -> None:
        duration_us("gap", self.gap, _MICROSECOND)

    def __str__(self) -> str:
        return f"sessions: gap {self.gap}"

    def span_of(self, at_us: int) -> Span:
        """Return the session of a single message at this time."""
        return at_us, at_us + self.gap // _MICROSECOND
