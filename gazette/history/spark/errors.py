"""Turns errors of Spark and its tasks into a `GazetteError` with the task's error, without Java's stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gazette.errors import Broken
from gazette.history.spark.error_hints import WHAT_TO_DO

_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""Pattern of the line of a traceback that names the exception."""
_HINT: Final = re.compile(rf"^{WHAT_TO_DO}(.*)", re.MULTILINE)
_CALLING: Final = "An error occurred while calling"
"""Begin of the line with the name of the Java method."""
_SPARK_PACKAGES: Final = ("py4j", "pyspark")


@contextmanager
def wrap_spark_errors() -> Iterator[None]:
    """Wrap jobs of a backfill: turn Spark's exceptions into ``Broken``. Other exceptions pass."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _SPARK_PACKAGES:
            raise
        text = str(error)
        cause = cause_in(text)
        hint = f" {hint_line[1]}" if (hint_line := _HINT.search(text)) else ""
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
    """Return the exception of a Python task from Java's text, or else the first line with a reason."""
    lines = [line.rstrip() for line in text.splitlines()]
    tracebacks = [n for n, line in enumerate(lines) if "Traceback (most recent call" in line]
    if tracebacks:
        # The stack's lines are indented: skip them.
        causes = [line for line in lines[tracebacks[-1] + 1 :] if _RAISED.match(line)]
        if causes:
            return causes[0]
    texts = (line.removeprefix(": ") for line in lines if not line.startswith(_CALLING))
    return next((line for line in texts if line), "it did not say why")
