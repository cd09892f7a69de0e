"""A standing suite of hostile input. `make hostile` runs its long form, `make test` the short one.

Each test counts what it tried and how that ended. The counts are printed for each matrix at the end.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from gazette.runtime.log_limit import OncePerMinute

SCALE: Final = int(os.environ.get("GAZETTE_HOSTILE", "1"))
"""How many times more random inputs are tried."""
SEED: Final = int(
    os.environ.get("GAZETTE_HOSTILE_SEED") or (secrets.randbits(32) if SCALE > 1 else 1)
)


class Matrix:
    """Counts of one kind of input, by outcome: ``refused``, ``served`` and the like."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outcomes: Counter[str] = Counter()

    def count(self, outcome: str, number: int = 1) -> None:
        self.outcomes[outcome] += number


@pytest.fixture
def matrix(
    request: pytest.FixtureRequest, record_property: Any
) -> Iterator[Callable[[str], Matrix]]:
    made: list[Matrix] = []

    def make(name: str) -> Matrix:
        made.append(Matrix(name))
        return made[-1]

    yield make
    for one in made:
        record_property("hostile", [one.name, dict(one.outcomes)])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was tried, for each matrix. ``accepted`` would be a hole."""
    totals: dict[str, Counter[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                for name, value in report.user_properties:
                    if name == "hostile":
                        totals.setdefault(value[0], Counter()).update(value[1])
    if SCALE <= 1 or not totals:
        return
    terminalreporter.section(f"hostile input, seed {SEED}")
    for name, outcomes in sorted(totals.items()):
        ends = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
        terminalreporter.write_line(f"{name}: {sum(outcomes.values()):,} tried: {ends}")
    tried = sum(sum(outcomes.values()) for outcomes in totals.values())
    terminalreporter.write_line(f"{tried:,} inputs in {len(totals)} matrices")


@pytest.fixture
def dice() -> random.Random:
    return random.Random(SEED)


@pytest.fixture
def scale() -> int:
    return SCALE


class _Lines(logging.Handler):
    """What a process would write: with the filter of the real handlers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        # The end of a minute never comes.
        self.addFilter(OncePerMinute(self, later=lambda _delay, _call: None))

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("httpx", "httpcore")):  # The callers.
            self.records.append(record)


@pytest.fixture
def log_lines() -> Iterator[Callable[[], list[str]]]:
    """Yield the lines that were logged so far. Fail the test in the end if one of them has a traceback."""
    handler = _Lines()
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield lambda: [one.getMessage() for one in handler.records]
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    traces = [logging.Formatter().format(one) for one in handler.records if one.exc_info]
    assert not traces, "\n".join(traces)


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Return ``data`` with some bytes changed, lost, repeated or added."""
    out = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        at = dice.randint(0, len(out))
        kind = dice.randrange(6)
        if kind == 0 and out:
            out[at % len(out)] = dice.randrange(256)
        elif kind == 1 and out:
            out[at % len(out)] ^= 1 << dice.randrange(8)
        elif kind == 2:
            del out[at : at + dice.choice((1, 2, 8, 64))]
        elif kind == 3:
            out[at:at] = dice.randbytes(dice.choice((1, 2, 8, 64)))
        elif kind == 4:
            out[at:at] = out[at : at + dice.choice((1, 8, 64))]
        else:
            extreme = (b"\xff" * 9 + b"\x01", b"\x00" * 8, b"\x80" * 32, b"\x7f" + b"\xff" * 8)
            out[at:at] = dice.choice(extreme)
    return bytes(out)
