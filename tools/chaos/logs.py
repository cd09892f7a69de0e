"""Finds defects in the logs of brokers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tools.chaos.history import Logged

_RECORD: Final = re.compile(r"^\d{4}-\d\d-\d\dT[0-9:.]+Z (?P<level>[a-z]+) (?P<text>.*)")
_DEFECT: Final = re.compile(
    r"^Traceback \(most recent call last\)|\bBug\b|^Fatal Python error|^Segmentation fault|never awaited"
)
_DIGITS: Final = re.compile(r"[0-9a-f]{8,}|\d+")
_LINES_MAX: Final = 12
_TEXT_MAX: Final = 2_000


def defects(broker: str, path: Path) -> list[Logged]:
    """Return the tracebacks and bugs of a broker's log. Records that differ only in numbers count as one."""
    if not path.exists():
        return []
    with path.open(errors="replace") as lines:
        return find_defects(broker, lines)


def find_defects(broker: str, lines: Iterable[str]) -> list[Logged]:
    """Return the defects of a log's lines."""
    counts: Counter[str] = Counter()
    texts: dict[str, str] = {}
    for record in _records(lines):
        if any(_DEFECT.search(line) for line in record):
            last = record[-1]
            key = _DIGITS.sub("#", f"{record[0]} {last}")
            counts[key] += 1
            shown = (
                [*record[:2], "...", *record[-_LINES_MAX:]]
                if len(record) > _LINES_MAX + 2
                else record
            )
            texts.setdefault(key, "\n".join(shown)[:_TEXT_MAX])
    return [Logged(broker, texts[key], count) for key, count in counts.items()]


def _records(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield each record with the lines that follow it, and what the process printed before the first one."""
    record: list[str] = []
    for line in lines:
        text = line.rstrip("\n")
        if found := _RECORD.match(text):
            if record:
                yield record
            record = [f"{found['level']} {found['text']}"]
        else:
            record.append(text)
    if record:
        yield record
