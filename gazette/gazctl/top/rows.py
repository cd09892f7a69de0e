"""Journals and shards as rows of ``gazctl top``. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from gazette.errors import printable
from gazette.gazctl.io.time_args import age_text
from gazette.runtime.numbers import bytes_text

Sort = Literal["rate", "lag", "age"]
SORTS: Final[tuple[Sort, ...]] = ("rate", "lag", "age")
UNKNOWN: Final = "?"


@dataclass(slots=True)
class TopRow:
    """A journal or a shard, as of the last answer about it. Times are seconds of one clock."""

    family: Literal["journal", "shard"]
    name: str
    status: str = ""
    error: str = ""
    position: int | None = None
    """Head of the journal, or the sum of the offsets that the shard has read; None before the first
    answer."""
    asked_at: float = 0.0
    rate: float | None = None
    """Bytes that the position moved in a second, between the last two answers."""
    lag: int | None = None
    """Bytes of its sources that a shard has not read."""
    moved_at: float | None = None
    """Time at which the position last moved, or a later time: the move was before it."""
    moved_before: bool = True
    """True if the position moved last at ``moved_at`` or before."""

    def note(self, position: int, now: float, moved_by: float | None = None) -> None:
        """Note an answer. ``moved_by`` is a time after the last move of the position, if one is known."""
        if self.moved_at is None:
            self.moved_at = now
        elif position != self.position:
            self.moved_at, self.moved_before = now, False
        elif moved_by is not None and self.moved_before:
            self.moved_at = min(self.moved_at, moved_by)
        if self.position is not None and now > self.asked_at:
            self.rate = max(0, position - self.position) / (now - self.asked_at)
        self.position, self.asked_at, self.error = position, now, ""

    def fail(self, error: str) -> None:
        """Note that the item did not answer. Rate and lag are not known then."""
        self.error, self.rate, self.lag = printable(error, one_line=True), None, None

    def age(self, now: float) -> float | None:
        """Return the seconds since the position moved; None if it was not asked."""
        return None if self.moved_at is None else max(0.0, now - self.moved_at)

    def cells(self, now: float) -> dict[str, str]:
        """Return the texts of the row, by column."""
        age = self.age(now)
        rate = UNKNOWN if self.rate is None else f"{bytes_text(round(self.rate))}/s"
        lag = "" if self.family == "journal" else UNKNOWN
        return {
            "Kind": self.family,
            "Name": self.name,
            "Status": self.status,
            "Rate": rate,
            "Lag": lag if self.lag is None else bytes_text(self.lag),
            "Age": UNKNOWN if age is None else f"{'>' if self.moved_before else ''}{age_text(age)}",
            "Note": self.error,
        }

    def document(self, now: float) -> dict[str, Any]:
        """Return the row for programs."""
        return {
            "kind": self.family,
            "name": self.name,
            "status": self.status,
            "rate_bytes_per_s": self.rate,
            "lag_bytes": self.lag,
            "age_s": self.age(now),
            "age_is_at_least": self.moved_before,
            "error": self.error,
        }


def in_order(items: Iterable[TopRow], sort: Sort, now: float) -> list[TopRow]:
    """Return items, by ``sort`` from the greatest value on, with unknown values last."""

    def order(item: TopRow) -> tuple[float, str, str]:
        amount = {"rate": item.rate, "lag": item.lag, "age": item.age(now)}[sort]
        return (1.0 if amount is None else -amount), item.family, item.name

    return sorted(items, key=order)
