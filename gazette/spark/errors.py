"""Failures of Spark and of its tasks as ours: what a task raised, without Java's stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gazette.errors import Broken

_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""The line of a traceback that names what was raised."""
_OURS: Final = ("py4j", "pyspark")


@contextmanager
def telling() -> Iterator[None]:
    """Around jobs of a backfill. Raises ``Broken`` for what Spark raises, which it is caused by."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _OURS:
            raise
        raise Broken(
            f"Spark could not run the backfill: {cause_in(str(error))}",
            hint="Nothing of it was published. The logs of executors have the rest; run it again with the"
            " same --run-id to keep what is built.",
        ) from error


def cause_in(text: str) -> str:
    """What a Python task raised, in what Java tells of it; else its first line."""
    lines = [line.rstrip() for line in text.splitlines()]
    began = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    if began:
        # Lines of the stack are indented.
        causes = [line for line in lines[began[-1] + 1 :] if _RAISED.match(line)]
        if causes:
            return causes[0]
    return next((line for line in lines if line), "it did not say why")
