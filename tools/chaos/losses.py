"""Says what is left of a journal once some of its brokers have ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def processes_left(
    members: Iterable[str], pids: Mapping[str, int], started: Mapping[int, float], last: float
) -> set[tuple[str, int]]:
    """Return the processes, by name and number, that hold the bytes of a journal up to its end.

    ``members`` acknowledged its last append, at the time ``last``. ``pids`` has the processes that run now,
    and ``started`` the times at which they were seen first. A process that was not seen yet holds nothing:
    it may have taken the place of one that acknowledged.
    """
    return {
        (name, pids[name])
        for name in members
        if name in pids and pids[name] in started and started[pids[name]] <= last
    }


def merged(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the spans in order, those that touch each other as one."""
    whole: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if whole and begin <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((begin, end))
    return tuple(whole)


def contiguous(spans: tuple[tuple[int, int], ...]) -> int:
    """Return the end of the contiguous bytes from offset 0 on."""
    return spans[0][1] if spans and spans[0][0] == 0 else 0
