"""Errors of SQLite: of the disk, of the message, and of statements that end a transaction."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import apsw

from gazette.consumer.contract.error_cause import ErrorCause
from gazette.errors import Broken, GazetteError, NotAllowed
from gazette.recoverylog.disk_errors import damaged_file, disk_error, full_disk
from gazette.stores.transaction_words import ending_words

OF_THE_DISK: Final = (
    apsw.FullError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.CantOpenError,
    apsw.IOError,
    apsw.ReadOnlyError,
    apsw.PermissionsError,
    OSError,
)
_OF_THE_MESSAGE: Final = (apsw.ConstraintError, apsw.MismatchError, apsw.TooBigError)


def of_the_disk(what: str, directory: Path, error: apsw.Error | OSError) -> GazetteError:
    """Return the `GazetteError` for one of `OF_THE_DISK`. ``what`` is the action that failed."""
    if isinstance(error, OSError):
        return disk_error(what, directory, error)
    message = f"SQLite could not {what}: {error}"
    match error:
        case apsw.FullError():
            return full_disk(message, directory)
        case apsw.CorruptError() | apsw.NotADBError():
            return damaged_file(message, directory)
    return Broken(
        message,
        directory=str(directory),
        hint="The process must be able to write the directory for recovered files, and no "
        "other process may.",
    )


def cause_of_error(error: Exception) -> ErrorCause:
    """Return the cause of an error. Errors of values and constraints, and errors that are not SQLite's, are
    the message's. Locks and a full disk are transient. All other errors are the store's."""
    if not isinstance(error, apsw.Error) or isinstance(error, _OF_THE_MESSAGE):
        return ErrorCause.MESSAGE
    # SQLite gives the place of an error in the SQL. An error without a place is about a value.
    of_value = getattr(error, "error_offset", -1) < 0 and not str(error).startswith("no such ")
    if isinstance(error, apsw.SQLError) and of_value:
        return ErrorCause.MESSAGE
    transient = isinstance(error, apsw.BusyError | apsw.LockedError | apsw.FullError)
    return ErrorCause.TRANSIENT if transient else ErrorCause.STORE


class EndsTransaction(NotAllowed):
    """A statement that would end the store's transaction, or begin another one."""

    def __init__(self, words: str) -> None:
        super().__init__(
            f"only the runtime ends a store's transaction: {words} is refused",
            hint="Leave it out; use SAVEPOINT and ROLLBACK TO for what you may want to undo.",
        )

    def as_written(self, sql: str) -> NotAllowed:
        """Return the error with the word of the SQL: SQLite reports END as COMMIT."""
        words = ending_words(sql, "sqlite")
        return self if words is None else EndsTransaction(words)
