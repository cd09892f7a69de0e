"""Errors by their facts: `raises` requires a type, fields and names, and not a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from gazette.errors import GazetteError, Invalid

E = TypeVar("E", bound=GazetteError)


@contextlib.contextmanager
def raises(
    kind: type[E],
    /,
    *names: str,
    path: str | None = None,
    says: str = "",
    advises: str = "",
    **facts: Any,
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Require an error of a kind, with a hint and these facts.

    ``names`` are facts of any value, ``facts`` those of a given one, compared as text. ``path`` is the field
    at fault. ``says`` is a name, number or flag that the text must hold, since no fact has it. ``advises`` is
    one that the hint must hold.
    """
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value
    assert error.hint
    assert advises in error.hint, error.hint
    assert set(names) <= error.facts.keys(), f"{error} has the facts {sorted(error.facts)}"
    found = {name: error.facts.get(name) for name in facts}
    assert {name: str(value) for name, value in found.items()} == {
        name: str(value) for name, value in facts.items()
    }, str(error)
    at_fault = error.path if isinstance(error, Invalid) else error.facts.get("path")
    assert path is None or at_fault == path, str(error)
    assert says in str(error), str(error)


def is_advised(error: GazetteError) -> bool:
    """Return True if an error says what to do in this very case, and not only in general."""
    return bool(error.hint) and error.hint != error.default_hint
