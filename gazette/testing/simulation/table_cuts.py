"""Cuts the input of a `TableApplication` into other tables: results must not depend on where tables end.

A fold makes tables of decoded messages, and a member makes them of columns. So a seed compares both ways.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from gazette.consumer.application import Application
from gazette.consumer.transaction.shard_timers import defines_timers
from gazette.testing.simulation.shard_history import Consumed

_ROWS: Final = (1, 1, 2, 3, 5, 8, 40)
"""Greatest numbers of rows: one of them is drawn for each table."""


def takes_tables(application: Application[Any]) -> bool:
    """Return True for a `TableApplication`."""
    return hasattr(application, "consume_table")


def cut_elsewhere(
    application: Application[Any], steps: Iterable[Consumed], rng: random.Random
) -> Iterator[Consumed]:
    """Yield the steps with other tables: parts of the run's tables, or rows of several tables.

    With timers there are only parts, since rows of other tables were consumed at other times.
    """
    joins = not defines_timers(application)
    rows: Consumed | None = None
    for step in steps:
        if rows is not None and joins and step.journal == rows.journal:
            rows = replace(rows, spans=(*rows.spans, *step.spans))
            continue
        if rows is not None:
            yield from _parts(rows, rng)
        rows = step if step.spans else None
        if rows is None:
            yield step
    if rows is not None:
        yield from _parts(rows, rng)


def _parts(step: Consumed, rng: random.Random) -> Iterator[Consumed]:
    spans = step.spans
    while spans:
        count = rng.choice(_ROWS)
        yield replace(step, spans=spans[:count])
        spans = spans[count:]
