"""Parameters of SQL that a database would change, or refuse without naming the parameter. Pure.

SQLite stores NaN as NULL, and numbers of NumPy as the bytes of their memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import isnan
from typing import Any, Final, NamedTuple, TypeAlias

from gazette.errors import InvalidValue
from gazette.message.value_parts import key_step, shown

Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]

KEPT: Final = frozenset({int, str, bytes, bool, type(None)})
"""Classes of the values that SQLite keeps exactly, or refuses with one of `REFUSALS`."""
REFUSALS: Final = (BufferError, OverflowError, TypeError, UnicodeEncodeError)
"""Errors by which drivers refuse a value. Functions of an application may raise them too."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_BOUND: Final = 1 << 63
_SQL_CHARS: Final = 200


class Objection(NamedTuple):
    """The reason why a database does not keep a value, and the advice for its user."""

    reason: str
    advice: str


ObjectionOf: TypeAlias = Callable[[Any], Objection | None]
Converts: TypeAlias = Callable[[Any], bool]


def sqlite_objection(value: Any, converts: Converts) -> Objection | None:
    """Return why SQLite does not keep a value; None if SQLite keeps it. ``converts`` returns True for a value
    that the application or the driver converts."""
    if isinstance(value, float):
        return (
            Objection("is NaN, which SQLite stores as NULL", "Give None.") if isnan(value) else None
        )
    if isinstance(value, int):
        fits = -_BOUND <= value < _BOUND
        return None if fits else Objection("does not fit into 64 bits", "Store it as a text.")
    if isinstance(value, str):
        return text_objection(value)
    if value is None or isinstance(value, bytes | bytearray) or converts(value):
        return None
    return _object_objection(value)


def text_objection(value: Any) -> Objection | None:
    """Return why no database keeps a text; None for a text that databases keep, and for other values."""
    if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
        return Objection(
            "is no Unicode text: it has half of a surrogate pair", "Store it as bytes."
        )
    return None


def postgresql_objection(value: Any) -> Objection | None:
    """Return why PostgreSQL does not keep a text; None for a text that it keeps, and for other values."""
    if isinstance(value, str) and "\0" in value:
        return Objection("holds a zero character, which PostgreSQL has not", "Store it as bytes.")
    return text_objection(value)


def has_memory(value: Any) -> bool:
    """Return True for an object whose memory SQLite would store, such as an array."""
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def _object_objection(value: Any) -> Objection | None:
    """Return why SQLite does not keep an object; None for a ``memoryview`` of plain bytes."""
    class_name = type(value).__name__
    if not has_memory(value):
        advice = "Give str(…), int(…), float(…) or bytes(…)."
        return Objection(f"is of type {class_name}, which SQLite does not have", advice)
    if isinstance(value, memoryview) and value.format == "B" and value.contiguous:
        return None
    return Objection(
        f"is of type {class_name}, of which SQLite stores the memory", "Give int(…) or bytes(…)."
    )


def require(parameters: Parameters, objection_to: ObjectionOf, sql: str, path: str) -> None:
    """Raise ``InvalidValue`` for the first parameter that is refused."""
    steps: Iterable[tuple[Any, Any]] = enumerate(parameters)
    if isinstance(parameters, Mapping):
        steps = parameters.items()
    for place, value in steps:
        if (objection := objection_to(value)) is not None:
            raise InvalidValue(
                f"{shown(value)} {objection.reason}",
                path=path + key_step(place),
                hint=objection.advice,
                sql=shown_sql(sql),
            )


def shown_sql(sql: str) -> str:
    return sql if len(sql) <= _SQL_CHARS else sql[:_SQL_CHARS] + "..."


def are_rows_kept(rows: Any) -> bool:
    """Return True for a list or tuple of tuples whose values all have classes of `KEPT`. Fast: no loop in
    Python."""
    if not isinstance(rows, list | tuple) or not {tuple}.issuperset(map(type, rows)):
        return False
    return KEPT.issuperset(map(type, chain.from_iterable(rows)))
