"""Checks of statements' parameters: a value that the database would not keep is refused with its name."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc

from gazette.errors import InvalidValue
from gazette.message.value_parts import key_step
from gazette.stores.bound_values import (
    Objection,
    ObjectionOf,
    Parameters,
    postgresql_objection,
    require,
    shown_sql,
    sqlite_objection,
    text_objection,
)

_UNADAPTED: Final = re.compile(r"can(?:no|')t adapt type '([^']+)'")
"""Pattern of messages of psycopg and psycopg2 for a class without an adapter. They have no SQLSTATE."""


def require_kept(
    connection: sa.Connection,
    _cursor: object,
    statement: str,
    parameters: Any,
    context: Any,
    executemany: bool,
) -> None:
    """Raise ``InvalidValue`` for a parameter that the database would change, or refuse without naming it.

    This is a listener of ``before_cursor_execute``: SQLAlchemy's types have converted the values before.
    """
    objection_to = _objection_to(connection.dialect.name)
    rows = parameters if executemany else [parameters]
    for number, row in enumerate(rows or ()):
        path = f"parameters[{number}]" if executemany else "parameters"
        require(_named(row, context), objection_to, statement, path)


def unadapted_class(error: object) -> str:
    """Return the name of the class that the driver has refused; empty for an error of another kind."""
    may_be = any(base.__name__ == "ProgrammingError" for base in type(error).__mro__)
    match = _UNADAPTED.search(str(error)) if may_be else None
    return match[1] if match is not None else ""


def unadapted(error: exc.DBAPIError) -> InvalidValue | None:
    """Return the error for a parameter whose class the driver does not know; None for another error."""
    class_name = unadapted_class(error.orig)
    if not class_name:
        return None
    places = _places_within(error.params, class_name.rpartition(".")[2], 2 if error.ismulti else 1)
    return InvalidValue(
        f"the driver of the database cannot adapt a value of class {class_name}",
        path=f"parameters{next(places, '')}",
        hint="Give text, a number, bytes, or another type of the database. Or register an adapter.",
        sql=shown_sql(error.statement or ""),
    )


def _places_within(value: Any, class_name: str, depth: int) -> Iterator[str]:
    """Yield the place of each value of a class, such as ``[2].price``. Do not yield the outermost ``depth``
    containers: lists of rows, and rows."""
    if depth <= 0 and type(value).__name__ == class_name:
        yield ""
    members: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        members = enumerate(value)
    for key, part in members:
        for place in _places_within(part, class_name, depth - 1):
            yield key_step(key) + place


def _objection_to(dialect: str) -> ObjectionOf:
    if dialect == "sqlite":
        return _sqlite_objection
    return postgresql_objection if dialect == "postgresql" else text_objection


def _sqlite_objection(value: Any) -> Objection | None:
    return sqlite_objection(value, _is_adapted)


def _is_adapted(value: Any) -> bool:
    """Return True if the application has registered an adapter. Python's own adapters do not count."""
    adapter = sqlite3.adapters.get((type(value), sqlite3.PrepareProtocol))
    if adapter is None:
        return hasattr(value, "__conform__")
    return adapter.__module__ != "sqlite3.dbapi2"


def _named(row: Any, context: Any) -> Parameters:
    """Return parameters by name, even if SQLAlchemy passes them by position."""
    named: Parameters = row if isinstance(row, Mapping | Sequence) else ()
    names = getattr(getattr(context, "compiled", None), "positiontup", None)
    if names is None or isinstance(row, Mapping) or len(set(names)) != len(named):
        return named
    return dict(zip(names, named, strict=True))
