"""Errors of Spark and of its tasks as a `GazetteError`: what a task raised, without Java's stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gazette.errors import Broken
from gazette.history.spark.error_hints import WHAT_TO_DO

_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""Pattern of a traceback's line with the name of the exception."""
_HINT: Final = re.compile(rf"^{WHAT_TO_DO}(.*)", re.MULTILINE)
_CALLING: Final = "An error occurred while calling"
"""Begin of the line with the name of the Java method."""
_OURS: Final = ("py4j", "pyspark")


@contextmanager
def wrap_spark_errors() -> Iterator[None]:
    """Wrap jobs of a backfill: raise ``Broken``, caused by Spark's exception."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _OURS:
            raise
        text = str(error)
        cause = cause_in(text)
        hint = f" {said[1]}" if (said := _HINT.search(text)) else ""
        if cause.startswith(ModuleNotFoundError.__name__):
            hint = (
                " Executors must be able to import it: install it on them, or add it to PYTHONPATH."
            )
        raise Broken(
            f"Spark could not run the backfill: {cause}",
            hint=f"Nothing of it was published.{hint} The logs of executors have the rest; run it "
            "again with the same --run-id to keep what is built.",
        ) from error


def cause_in(text: str) -> str:
    """Return the exception of a Python task from Java's text; else the first line with more facts."""
    lines = [line.rstrip() for line in text.splitlines()]
    began = [n for n, line in enumerate(lines) if "Traceback (most recent call" in line]
    if began:
        # The stack's lines are indented: skip them.
        causes = [line for line in lines[began[-1] + 1 :] if _RAISED.match(line)]
        if causes:
            return causes[0]
    said = (line.removeprefix(": ") for line in lines if not line.startswith(_CALLING))
    return next((line for line in said if line), "it did not say why")
