"""Errors of a SQL database as ours: which are of the connection, and which of the statement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import sqlalchemy as sa
from sqlalchemy import exc

from gazette.errors import Fenced, GazetteError, Invalid, Unavailable

_SERIALIZATION: Final = frozenset({"40001", "40P01"})
_TERMINATED: Final = "57P01"
"""A session was ended: by an operator, by the server's end, or by a new owner of its shard."""


class TryAgain(Unavailable):
    """Somebody else was faster: the same transaction succeeds the next time."""


@contextlib.contextmanager
def translating(
    engine: sa.Engine,
    what: str,
    *,
    table: str | None = None,
    hint: str | None = None,
    is_fenced: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Errors of the connection, and of nothing else, as ours. ``table``: also those of restoring.

    ``is_fenced`` is asked when the session was ended: that is how a new owner begins, and the error of the
    one before it is ``Fenced`` then. What it raises is taken for a no.
    """
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
        if _sqlstate(error) == _TERMINATED and is_fenced is not None and _agrees(is_fenced):
            raise Fenced(f"{message} (its fence was counted up)", database=_name(engine)) from error
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


def _agrees(is_fenced: Callable[[], bool]) -> bool:
    try:
        return is_fenced()
    except (GazetteError, exc.SQLAlchemyError):
        return False  # A server that ends does not answer: the session's error says it all.


def _sqlstate(error: exc.DBAPIError) -> str | None:
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state
