"""Counts what a run of many seeds has covered, and how much an hour of processor time still adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tools.simulation.coverage import Coverage
from tools.simulation.run import Slice

_HOUR_S: Final = 3_600.0


@dataclass(slots=True)
class _Stretch:
    """Some seeds, one after the other: about as many as all seeds before them."""

    seeds: int = 0
    new: int = 0
    """Branches and pairs that no seed before had covered."""
    seconds: float = 0.0
    """Processor time."""

    @property
    def per_hour(self) -> float:
        return self.new * _HOUR_S / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Progress:
    """The coverage of all seeds so far."""

    coverage: Coverage = field(default_factory=Coverage)
    seconds: float = 0.0
    _stretches: list[_Stretch] = field(default_factory=lambda: [_Stretch()])
    _seeds: int = 0

    def add(self, one: Slice, seeds: int) -> None:
        """Add the coverage of a slice of seeds."""
        self.seconds += one.seconds
        last = self._stretches[-1]
        if last.seeds and last.seeds >= self._seeds - last.seeds:
            last = _Stretch()
            self._stretches.append(last)
        self._seeds += seeds
        last.seeds += seeds
        last.seconds += one.seconds
        last.new += self.coverage.add(one.coverage)

    def describe(self) -> list[str]:
        """Return what to print, one line each."""
        lines, at = self.coverage.describe(), 0
        for one in self._stretches:
            lines.append(
                f"seeds {at + 1} to {at + one.seeds}: {one.new} new branches and pairs, "
                f"{one.per_hour:.0f} per hour of processor time"
            )
            at += one.seeds
        return lines
