"""Keep the timers of a shard in memory, for stores that write their whole state at each commit."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Final

import msgspec

from gazette.consumer.timers.timer import BEFORE_ALL, Position, TimeDomain, TimerRow, TimerTable
from gazette.errors import Corrupt
from gazette.runtime.decoders import json_decoder

_DOMAINS: Final = tuple(TimeDomain)


class _Encoded(msgspec.Struct, omit_defaults=True):
    """Timers as lists of domain, time in Unix microseconds, key and payload."""

    timers: list[tuple[int, int, str, bytes]] = []
    event_time: bytes | None = None


class MemoryTimers(TimerTable):
    """Timers in sorted lists, without transactions: the store writes the timers with its state."""

    def __init__(self, data: bytes = b"") -> None:
        """Decode the result of `to_json`. Raise ``Corrupt`` if it does not decode."""
        self._rows: dict[TimeDomain, dict[str, TimerRow]] = {domain: {} for domain in _DOMAINS}
        self._order: dict[TimeDomain, list[Position]] = {domain: [] for domain in _DOMAINS}
        self._event_time: bytes | None = None
        if not data:
            return
        try:
            encoded = json_decoder(_Encoded).decode(data)
            for number, at_us, key, payload in encoded.timers:
                domain = TimeDomain(number)
                self._rows[domain][key] = row = TimerRow(at_us, key, payload)
                self._order[domain].append(row.position)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise Corrupt(f"the timers of the state do not decode: {error}") from error
        for order in self._order.values():
            order.sort()
        self._event_time = encoded.event_time

    def to_json(self) -> bytes:
        """Return all timers and the state of the watermark."""
        timers = [
            (domain.value, at_us, key, self._rows[domain][key].payload)
            for domain, order in self._order.items()
            for at_us, key in order
        ]
        return msgspec.json.encode(_Encoded(timers, self._event_time))

    @property
    def holds_timers(self) -> bool:
        """True if there are timers."""
        return any(self._rows.values())

    @property
    def is_empty(self) -> bool:
        """True if there are no timers and no state of a watermark to write."""
        return self._event_time is None and not self.holds_timers

    def put(self, domain: TimeDomain, row: TimerRow) -> None:
        self.remove(domain, row.key)
        self._rows[domain][row.key] = row
        insort(self._order[domain], row.position)

    def remove(self, domain: TimeDomain, key: str) -> None:
        former = self._rows[domain].pop(key, None)
        if former is not None:
            order = self._order[domain]
            del order[bisect_right(order, former.position) - 1]

    def take(
        self, domain: TimeDomain, after: Position, until_us: int, limit: int
    ) -> Sequence[TimerRow]:
        order, rows = self._order[domain], self._rows[domain]
        begin = bisect_right(order, after)
        end = bisect_right(order, until_us, begin, key=lambda position: position[0])
        end = min(end, begin + limit)
        removed = [rows.pop(key) for _, key in order[begin:end]]
        del order[begin:end]
        return removed

    def first(self, domain: TimeDomain, after: Position = BEFORE_ALL) -> int | None:
        order = self._order[domain]
        index = bisect_right(order, after)
        return order[index][0] if index < len(order) else None

    def event_time(self) -> bytes | None:
        return self._event_time

    def set_event_time(self, value: bytes) -> None:
        self._event_time = value

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]
