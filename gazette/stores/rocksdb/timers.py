"""Timers of a shard as reserved keys of its RocksDB database, in the running transaction.

A timer has two keys: one by time, which has the payload, and one by key, which has the time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeAlias

from gazette.consumer.timers.timer import BEFORE_ALL, Position, TimeDomain, TimerRow, TimerTable
from gazette.recoverylog.rocksdb.keys import EVENT_TIME_KEY, TIMER_AT_PREFIX, TIMER_KEY_PREFIX

Get: TypeAlias = Callable[[bytes], bytes | None]
Set: TypeAlias = Callable[[bytes, bytes | None], None]
Scan: TypeAlias = Callable[[bytes, bytes], Iterator[tuple[bytes, bytes]]]

_AT: Final = struct.Struct(">Q")
_BIAS: Final = 1 << 63
_AT_BEGIN: Final = len(TIMER_AT_PREFIX) + 1
_KEY_BEGIN: Final = _AT_BEGIN + _AT.size


class RocksDBTimers(TimerTable):
    """Timers as reserved keys. ``scan`` yields keys and values from one key up to another, in order."""

    def __init__(self, get: Get, set_key: Set, scan: Scan) -> None:
        self._get = get
        self._set = set_key
        self._scan = scan
        self._floor = dict.fromkeys(TimeDomain, BEFORE_ALL)
        """Positions before the first timers. Scans begin there: RocksDB skips deleted keys one by one."""

    def put(self, domain: TimeDomain, row: TimerRow) -> None:
        self.remove(domain, row.key)  # The former timer has another key by time.
        self._floor[domain] = min(self._floor[domain], (row.at_us, ""))
        self._set(_at_key(domain, row.position), row.payload)
        self._set(_name_key(domain, row.key), _at(row.at_us))

    def remove(self, domain: TimeDomain, key: str) -> None:
        name = _name_key(domain, key)
        former = self._get(name)
        if former is not None:
            self._set(_at_key(domain, (_at_us(former), key)), None)
            self._set(name, None)

    def take(
        self, domain: TimeDomain, after: Position, until_us: int, limit: int
    ) -> Sequence[TimerRow]:
        rows = list(islice(self._rows(domain, after, until_us), limit))
        for row in rows:
            self._set(_at_key(domain, row.position), None)
            self._set(_name_key(domain, row.key), None)
        if rows and after <= self._floor[domain]:
            self._floor[domain] = rows[-1].position  # No earlier timer is left.
        return rows

    def first(self, domain: TimeDomain, after: Position = BEFORE_ALL) -> int | None:
        row = next(self._rows(domain, after, _BIAS - 1), None)
        return None if row is None else row.at_us

    def _rows(self, domain: TimeDomain, after: Position, until_us: int) -> Iterator[TimerRow]:
        """Yield the timers after position ``after`` with times up to ``until_us``, in order."""
        low = _at_key(domain, max(after, self._floor[domain])) + b"\x00"
        prefix = TIMER_AT_PREFIX + bytes((domain.value,))
        # All keys up to `until_us` in the domain are before `high`.
        high = prefix + _at(until_us + 1) if until_us < _BIAS - 1 else prefix + b"\xff" * 9
        for stored_key, payload in self._scan(low, high):
            at_us = _at_us(stored_key[_AT_BEGIN:_KEY_BEGIN])
            yield TimerRow(at_us, stored_key[_KEY_BEGIN:].decode(), payload)

    def event_time(self) -> bytes | None:
        return self._get(EVENT_TIME_KEY)

    def set_event_time(self, value: bytes) -> None:
        self._set(EVENT_TIME_KEY, value)

    def clear(self) -> None:
        for domain in TimeDomain:
            while rows := self.take(domain, BEFORE_ALL, _BIAS - 1, 1 << 10):
                del rows
        self._set(EVENT_TIME_KEY, None)


def _at(at_us: int) -> bytes:
    """Return a time as bytes, which sort as times do. The bias keeps this order for times before 1970."""
    return _AT.pack(at_us + _BIAS)


def _at_us(data: bytes) -> int:
    (biased,) = _AT.unpack(data)
    return int(biased) - _BIAS


def _at_key(domain: TimeDomain, position: Position) -> bytes:
    at_us, key = position
    return b"%b%c%b%b" % (TIMER_AT_PREFIX, domain.value, _at(at_us), key.encode())


def _name_key(domain: TimeDomain, key: str) -> bytes:
    return b"%b%c%b" % (TIMER_KEY_PREFIX, domain.value, key.encode())
