"""Parameters of statements on their way to a driver: refused by name if the database would not keep them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from gazette.stores.bound_values import (
    Objection,
    ObjectionOf,
    Parameters,
    postgresql_objection,
    require,
    sqlite_objection,
    text_objection,
)


def require_kept(
    connection: sa.Connection,
    _cursor: object,
    statement: str,
    parameters: Any,
    context: Any,
    executemany: bool,
) -> None:
    """Raise ``InvalidValue`` for a parameter that the database would change in silence, or refuse unnamed.

    A listener of ``before_cursor_execute``: it sees what SQLAlchemy's types have made of values.
    """
    objection_to = _objection_to(connection.dialect.name)
    rows = parameters if executemany else [parameters]
    for number, row in enumerate(rows or ()):
        path = f"parameters[{number}]" if executemany else "parameters"
        require(_named(row, context), objection_to, statement, path)


def _objection_to(dialect: str) -> ObjectionOf:
    if dialect == "sqlite":
        return _sqlite_objection
    return postgresql_objection if dialect == "postgresql" else text_objection


def _sqlite_objection(value: Any) -> Objection | None:
    return sqlite_objection(value, _is_adapted)


def _is_adapted(value: Any) -> bool:
    """Return True if the application has registered an adapter. Python's own ones make texts of times."""
    adapter = sqlite3.adapters.get((type(value), sqlite3.PrepareProtocol))
    if adapter is None:
        return hasattr(value, "__conform__")
    return adapter.__module__ != "sqlite3.dbapi2"


def _named(row: Any, context: Any) -> Parameters:
    """Return parameters with their names, if SQLAlchemy numbers those of the statement."""
    named: Parameters = row if isinstance(row, Mapping | Sequence) else ()
    names = getattr(getattr(context, "compiled", None), "positiontup", None)
    if names is None or isinstance(row, Mapping) or len(set(names)) != len(named):
        return named
    return dict(zip(names, named, strict=True))
