"""Errors by their facts: `raises` requires a type, fields and names, and not a sentence.

`call_refused` is the same for a call of gRPC, whose answer has a code and a text. `logged` is the same
for a line of the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from gazette.consumer.contract.callbacks import ApplicationFailed
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


@contextlib.contextmanager
def failed_by_its_message() -> Iterator[None]:
    """Require that the shard fails with the place of a message, and raise the cause."""
    with raises(ApplicationFailed, "journal", "begin", "end", "line") as raised:
        yield
    cause = raised.value.__cause__
    assert cause is not None
    raise cause


@contextlib.contextmanager
def call_refused(
    code: grpc.StatusCode, *says: str
) -> Iterator[pytest.ExceptionInfo[grpc.aio.AioRpcError]]:
    """Require a call to end with that code. ``says`` are names and numbers that its details hold."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        yield raised
    details = raised.value.details() or ""
    assert raised.value.code() is code, f"{raised.value.code()}: {details}"
    assert [one for one in says if one not in details] == [], details


def logged(caplog: pytest.LogCaptureFixture, *names: str, **facts: Any) -> Mapping[str, Any]:
    """Require a line of the package's log. Return the facts of the first such line.

    ``names`` are facts of any value, ``facts`` those of a given one, compared as text.
    """
    lines = [one.args for one in caplog.records if one.name.startswith("gazette.")]
    for found in lines:
        if (
            isinstance(found, Mapping)
            and set(names) <= found.keys()
            and all(
                name in found and str(found[name]) == str(value) for name, value in facts.items()
            )
        ):
            return found
    raise AssertionError(f"logged were {lines}")


def is_advised(error: GazetteError) -> bool:
    """Return True if an error says what to do in this very case, and not only in general."""
    return bool(error.hint) and error.hint != error.default_hint
