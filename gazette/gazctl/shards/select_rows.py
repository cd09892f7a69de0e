"""One SQL statement that reads, with limits. Short-lived processes import this: import little here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import apsw

from gazette.errors import Invalid
from gazette.runtime.numbers import bytes_text

OF_THE_DISK: Final = (
    apsw.FullError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.CantOpenError,
    apsw.IOError,
)
_PROGRESS_STEPS: Final = 10_000
"""Steps after which SQLite asks whether the statement's time is over."""


@dataclass(slots=True)
class Rows:
    """The result of a statement. ``truncated`` is True if the statement has more rows than ``rows``."""

    columns: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class ResultBounds:
    """Limits of a result. ``value_bytes`` bounds each value: SQLite refuses to make a longer one."""

    rows: int
    bytes: int
    value_bytes: int


def select(
    connection: apsw.Connection,
    sql: str,
    authorize: Callable[..., int],
    limits: ResultBounds,
    is_over: Callable[[], bool] = lambda: False,
) -> Rows:
    """Run one statement that reads. Blocks.

    Raise ``Invalid`` for SQL that is refused, for a result beyond ``limits``, and soon after ``is_over`` has
    returned True. Only rows beyond their limit are left out. Raise one of `OF_THE_DISK` for a disk that
    fails. ``authorize`` is the authorizer of SQLite.
    """
    result = Rows()
    statements: list[str] = []
    total = 0

    def on_statement(cursor: apsw.Cursor, text: str, _bindings: Any) -> bool:
        if statements and not cursor.get_description():
            return True  # A comment. ``authorize`` refuses anything else that gives no rows.
        statements.append(text)
        if len(statements) > 1:
            raise Invalid("give one statement, and not several", path="SQL")
        result.columns = [column[0] for column in cursor.get_description()]
        return True

    cursor = connection.cursor()
    try:
        connection.limit(apsw.SQLITE_LIMIT_LENGTH, limits.value_bytes)
        connection.authorizer = authorize
        connection.set_progress_handler(is_over, _PROGRESS_STEPS)
        cursor.exec_trace = on_statement
        for row in cursor.execute(sql):
            if len(result.rows) == limits.rows:
                result.truncated = True
                break
            total += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
            if total > limits.bytes:
                raise Invalid(
                    f"the result has more than {bytes_text(limits.bytes)}",
                    path="SQL",
                    hint="Select less: by LIMIT, or by parts of values, as in substr(payload, 1, 100).",
                )
            result.rows.append(row)
    except apsw.TooBigError as error:
        limit = bytes_text(limits.value_bytes)
        raise Invalid(f"a value has more than {limit}", path="SQL") from error
    except UnicodeDecodeError as error:
        hint = "Select it as a blob: CAST(… AS BLOB)."
        raise Invalid("a text of the result is not UTF-8", path="SQL", hint=hint) from error
    except ValueError as error:  # Python's, for text that SQLite cannot take.
        raise Invalid("the SQL is not UTF-8 text, or has a NUL", path="SQL") from error
    except OF_THE_DISK:
        raise
    except apsw.Error as error:
        raise Invalid(f"SQLite refuses the query: {error}", path="SQL") from error
    finally:
        cursor.close(True)  # A statement that goes on would hold the connection.
        connection.set_progress_handler(None)
    if not result.columns:
        raise Invalid("there is no statement that gives rows", path="SQL")
    return result


def only_reads() -> Invalid:
    return Invalid("the statement does not only read", path="SQL")


def json_value(value: Any) -> Any:
    """Return a value of SQL as JSON has it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
