"""Integers that a message of gRPC cannot hold: refused before they are sent, by the name of their field.

Fields are found by their types, so a new field is covered at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.journals import FragmentsParams
from gazette.client.read.reader import ReadParams
from gazette.errors import Invalid
from gazette.protocol.journal import JournalSpec
from gazette.protocol.shard import ShardSpec
from gazette.testing.broker import journal_spec
from gazette.testing.consumer import shard_spec

NAME = "test/journal"
NUMBERS = [1 << 63, -(1 << 63) - 1, (1 << 63) - 1, 1 << 32, 1 << 31, -1]

Change = Callable[[int], Any]


def fields_of(value: Any, path: str, rebuild: Callable[[Any], Any]) -> Iterator[tuple[str, Change]]:
    """Yield each integer of a value and of its parts: its path, and how to change it."""
    for field in dataclasses.fields(value):
        part, name = getattr(value, field.name), f"{path}.{field.name}"

        def change(part: Any, field: str = field.name) -> Any:
            return rebuild(dataclasses.replace(value, **{field: part}))

        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            yield from fields_of(part, name, change)
        elif isinstance(part, tuple) and part and dataclasses.is_dataclass(part[0]):
            first, *rest = part
            yield from fields_of(first, name, partial(_with_first, change, rest))
        elif type(part) is int:
            yield name, change


def _with_first(change: Change, rest: list[Any], first: Any) -> Any:
    return change((first, *rest))  # type: ignore[arg-type]


CHANGES = [
    pytest.param(change, id=path)
    for value in (
        ReadParams(NAME),
        AppendParams(NAME),
        FragmentsParams(NAME),
        journal_spec(NAME),
        shard_spec("shard-1", NAME),
    )
    for path, change in fields_of(value, type(value).__name__, lambda changed: changed)
]


def read_back(value: Any) -> Any:
    """Return a value after its message, where we read such messages; otherwise the value."""
    if isinstance(value, JournalSpec | ShardSpec):
        return type(value).from_pb(value.to_pb())  # type: ignore[arg-type]
    assert value.to_pb(0) if isinstance(value, FragmentsParams) else value.to_pb()
    return value


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_number_reads_back_or_is_refused_by_name(change: Change, number: int) -> None:
    value = change(number)
    try:
        value.validate()
    except Invalid:
        return
    assert read_back(value) == value


@pytest.mark.parametrize("ttl_s", [float("nan"), float("inf"), 0.0, -1.0, 1e300])
def test_a_url_is_signed_for_a_bounded_time(ttl_s: float) -> None:
    with pytest.raises(Invalid, match="invalid SignatureTTL"):
        FragmentsParams(NAME, signature_ttl_s=ttl_s).validate()
