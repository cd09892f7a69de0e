"""Errors of a SQL database as ours: which are of the connection, and which of the statement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa
from sqlalchemy import exc

from gazette.errors import GazetteError, Invalid, Unavailable

_SERIALIZATION: Final = frozenset({"40001", "40P01"})


class TryAgain(Unavailable):
    """Somebody else was faster: the same transaction succeeds the next time."""


@contextlib.contextmanager
def translating(
    engine: sa.Engine, what: str, *, table: str | None = None, hint: str | None = None
) -> Iterator[None]:
    """Errors of the connection, and of nothing else, as ours. ``table``: also those of restoring."""
    try:
        yield
    except exc.TimeoutError as error:
        raise Unavailable(
            f"no connection to the database was free: {error}",
            database=_name(engine),
            hint="Give the engine a larger pool (pool_size), and end transactions of your own.",
        ) from error
    except exc.PendingRollbackError as error:
        raise GazetteError(
            "the transaction has failed already, and what it did before is lost",
            hint="Do not catch errors of statements: let them end the shard. Use begin_nested() for"
            " what may fail, and leave commits to the runtime.",
        ) from error
    except exc.DBAPIError as error:
        message = f"the database could not {what}: {error.orig}"
        if table is not None:
            if isinstance(error, exc.IntegrityError) or _sqlstate(error) in _SERIALIZATION:
                raise TryAgain(message, database=_name(engine)) from error
            if not error.connection_invalidated and _is_missing(engine, table):
                raise Invalid(
                    f"the database has no table {table}",
                    database=_name(engine),
                    hint="Create it: gazette.stores.sql.create_checkpoint_table(engine).",
                ) from error
        lost = isinstance(error, exc.OperationalError | exc.InterfaceError)
        if lost or error.connection_invalidated:
            raise Unavailable(message, database=_name(engine), hint=hint) from error
        raise


def _name(engine: sa.Engine) -> str:
    return engine.url.render_as_string(hide_password=True)


def _is_missing(engine: sa.Engine, table: str) -> bool:
    try:
        return not sa.inspect(engine).has_table(table)
    except exc.SQLAlchemyError:
        return False


def _sqlstate(error: exc.DBAPIError) -> str | None:
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state
