"""Errors of a SQL database: their cause, and the `GazetteError` for an error of the connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import sqlalchemy as sa
from sqlalchemy import exc

from gazette.consumer.contract.error_cause import ErrorCause
from gazette.errors import Aborted, Fenced, GazetteError, Invalid, Unavailable
from gazette.stores.sql.parameters import unadapted, unadapted_class

_OF_THE_MESSAGE: Final = frozenset({"21", "22", "23", "44", "P0"})
"""Classes of SQLSTATE that the message causes: cardinality, data, constraints, checks of views, and errors of
the application's SQL code."""
_VALUE_TOO_LARGE: Final = "54000"
"""SQLSTATE of a value that is too large, for example for a key of an index."""
_TRANSIENT: Final = frozenset({"08", "40", "53", "55", "57"})
"""Classes of SQLSTATE: connection, rolled back transactions, resources, locks, shutdown or time-out."""
_TRANSIENT_STATES: Final = frozenset({"25006", "25P03", "25P04"})
"""SQLSTATEs of a server that is read-only since a fail-over, and of transactions that took too long."""
_MESSAGE_KINDS: Final = frozenset({"IntegrityError", "DataError"})
_TRANSIENT_KINDS: Final = frozenset({"OperationalError", "InterfaceError"})
_DRIVER_KINDS: Final = frozenset({"DatabaseError", "InterfaceError"})
"""Names of the error classes that PEP 249 demands of every driver."""
_ABORTED: Final = frozenset({"40001", "40P01"})
"""SQLSTATEs of a transaction that cannot be serialized with another one, and of a deadlock."""
_TERMINATED: Final = "57P01"
"""SQLSTATE of a session that an operator, a shutdown, or a new owner of its shard has ended."""


def classify(error: Exception) -> ErrorCause:
    """Return the cause of an error. See `gazette.consumer.application.Store.classify_error`.

    The SQLSTATE or the class of an error of SQLAlchemy or a driver decides. Otherwise: MESSAGE.
    """
    if isinstance(error, exc.DBAPIError):
        if error.connection_invalidated:
            return ErrorCause.TRANSIENT
        return _of_driver(error.orig) if isinstance(error.orig, Exception) else ErrorCause.STORE
    match error:
        case exc.TimeoutError():
            return ErrorCause.TRANSIENT
        # Rows that the application expected, and values that do not fit a statement.
        case exc.StatementError() | exc.NoResultFound() | exc.MultipleResultsFound():
            return ErrorCause.MESSAGE
        case exc.SQLAlchemyError():
            return ErrorCause.STORE
    if _kinds(error) & _DRIVER_KINDS:
        return _of_driver(error)
    return ErrorCause.MESSAGE


def _of_driver(error: Exception) -> ErrorCause:
    """Return the cause of a driver's error: by its SQLSTATE first, then by the names of its classes."""
    state = _state_of(error) or ""
    if state[:2] in _OF_THE_MESSAGE or state == _VALUE_TOO_LARGE:
        return ErrorCause.MESSAGE
    if state in _ABORTED:
        return ErrorCause.ABORTED
    if state[:2] in _TRANSIENT or state in _TRANSIENT_STATES:
        return ErrorCause.TRANSIENT
    class_names = _kinds(error)
    if class_names & _MESSAGE_KINDS or unadapted_class(error):
        return ErrorCause.MESSAGE
    return ErrorCause.TRANSIENT if class_names & _TRANSIENT_KINDS else ErrorCause.STORE


def _kinds(error: Exception) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}


@contextlib.contextmanager
def translating(
    engine: sa.Engine,
    what: str,
    *,
    table: str | None = None,
    hint: str | None = None,
    is_fenced: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Raise a `GazetteError` for an error of the connection. With ``table``, the table of checkpoints, raise
    one for errors of a restore, too.

    Let other errors pass. Raise ``Unavailable`` if the connection is lost, ``Aborted`` if another transaction
    was faster, and ``Invalid`` if ``table`` is missing. Raise ``InvalidValue`` for a parameter whose class
    the driver does not know, and ``GazetteError`` after an error that the application has caught. If the
    session was ended, call ``is_fenced``: raise ``Fenced`` if a new owner has ended the session. An error of
    ``is_fenced`` counts as False.
    """
    try:
        yield
    except exc.TimeoutError as error:
        raise Unavailable(
            f"no connection to the database was free: {error}",
            database=_name(engine),
            hint="Give the engine a larger pool (pool_size), and end your own transactions.",
        ) from error
    except exc.PendingRollbackError as error:
        raise GazetteError(
            "the transaction has failed already, and its earlier changes are lost",
            hint="Do not catch errors of statements: let them end the shard. Use begin_nested() "
            "for what may fail, and leave commits to the runtime.",
        ) from error
    except exc.DBAPIError as error:
        if (refused := unadapted(error)) is not None:
            raise refused from error
        message = f"the database could not {what}: {error.orig}"
        another_was_faster = table is not None and isinstance(error, exc.IntegrityError)
        if another_was_faster or _sqlstate(error) in _ABORTED:
            raise Aborted(message, database=_name(engine)) from error
        if table is not None and not error.connection_invalidated and _is_missing(engine, table):
            raise Invalid(
                f"the database has no table {table}",
                database=_name(engine),
                hint="Create it: gazette.stores.sql.store.create_checkpoint_table(engine).",
            ) from error
        if _sqlstate(error) == _TERMINATED and is_fenced is not None and _agrees(is_fenced):
            raise Fenced(f"{message} (its fence was counted up)", database=_name(engine)) from error
        is_lost = isinstance(error, exc.OperationalError | exc.InterfaceError)
        if (is_lost or error.connection_invalidated) and classify(error) is not ErrorCause.MESSAGE:
            raise Unavailable(message, database=_name(engine), hint=hint) from error
        raise


def _name(engine: sa.Engine) -> str:
    return engine.url.render_as_string(hide_password=True)


def _is_missing(engine: sa.Engine, table: str) -> bool:
    """Return True if the database lacks a table; False if the table exists, or the database does not say."""
    try:
        return not sa.inspect(engine).has_table(table)
    except exc.SQLAlchemyError:
        return False


def _agrees(is_fenced: Callable[[], bool]) -> bool:
    """Return whether the database, too, says that the session is fenced; False if it does not answer."""
    try:
        return is_fenced()
    except (GazetteError, exc.SQLAlchemyError):
        return False  # A server that shuts down does not answer. Report the session's error only.


def _sqlstate(error: exc.DBAPIError) -> str | None:
    return _state_of(error.orig)


def _state_of(error: object) -> str | None:
    # psycopg2 has another name for the SQLSTATE.
    state: str | None = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state
