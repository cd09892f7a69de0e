"""What to do about an error, told to people who see nothing of it but its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gazette.errors import GazetteError


@contextmanager
def with_hints() -> Iterator[None]:
    """Has errors show their hint below their message, in Python's tracebacks and so in Spark's.

    A decorator too, but not of generators.
    """
    try:
        yield
    except GazetteError as error:
        note = f"What to do: {error.hint}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
