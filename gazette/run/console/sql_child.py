"""One job on databases, as a child process of the console: `main`. It starts fast: import little here.

One step of SQL, such as a sort of long values, may take any time and memory. The kernel sets the limits of
this process, and the console kills it at its deadline.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import apsw

from gazette.errors import GazetteError, Invalid
from gazette.gazctl.shards.select_rows import ResultBounds, only_reads, select
from gazette.run.console.row_difference import cells, differences
from gazette.runtime.numbers import bytes_text

LIMITS: Final = ResultBounds(rows=1000, bytes=4 << 20, value_bytes=1 << 20)
COLUMNS_MAX: Final = 200
CPU_S: Final = 15
"""A child whose console was killed ends after this processor time."""
MEMORY_MAX: Final = 512 << 20
_READING: Final = frozenset(
    {apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE}
    # Some virtual tables prepare these at their first use. ``query_only`` makes them fail.
    | {apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE}
)
_FLAGS: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI


def main() -> None:
    """Read a job from standard input. Write its answer to standard output."""
    job = json.load(sys.stdin.buffer)
    _limit(resource.RLIMIT_FSIZE, 0)  # The child writes no file.
    _limit(resource.RLIMIT_CPU, CPU_S)
    if sys.platform == "linux":  # Other systems count memory that is never used.
        _limit(resource.RLIMIT_AS, MEMORY_MAX)
    try:
        output = json.dumps({"answer": answer_of(job)})
    except apsw.Error as error:
        hint = "The disk of the console may be full, or damaged."
        output = _refusal(f"the state cannot be read: {error}", hint)
    except MemoryError:
        text = f"it needs more than {bytes_text(MEMORY_MAX)} of memory"
        output = _refusal(text, "Ask for less.", is_invalid=True)
    except GazetteError as error:
        output = _refusal(str(error), error.hint, is_invalid=isinstance(error, Invalid))
    sys.stdout.write(output)


def _refusal(text: str, hint: str, *, is_invalid: bool = False) -> str:
    return json.dumps({"error": text, "hint": hint, "is_invalid": is_invalid})


def _limit(what: int, number: int) -> None:
    _, hard = resource.getrlimit(what)
    number = number if hard == resource.RLIM_INFINITY else min(number, hard)
    resource.setrlimit(what, (number, number))


def answer_of(job: Mapping[str, Any]) -> Any:
    """Return the rows of a job's SQL, or how its two databases differ. Blocks."""
    databases = [f"{Path(path).as_uri()}?immutable=1" for path in job["databases"]]
    connection = apsw.Connection(databases[0] if "sql" in job else ":memory:", flags=_FLAGS)
    connection.execute("PRAGMA temp_store = MEMORY; PRAGMA query_only = ON").fetchall()
    if "sql" not in job:
        for schema, database in zip("ab", databases, strict=True):
            connection.execute(f"ATTACH ? AS {schema}", (database,)).fetchall()
        return [asdict(table) for table in differences(connection, job["own_tables"])]
    # This limit is for results. Existing tables may have more columns.
    connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    connection.limit(apsw.SQLITE_LIMIT_COLUMN, COLUMNS_MAX)
    pragmas = frozenset(job["pragmas"])

    def authorize(action: int, first: str | None, *_: str | None) -> int:
        is_pragma = action == apsw.SQLITE_PRAGMA and (first or "").lower() in pragmas
        if is_pragma or action in _READING:
            return apsw.SQLITE_OK
        raise only_reads()

    result = select(connection, job["sql"], authorize, LIMITS)
    shown = list(map(cells, result.rows))
    return {"columns": result.columns, "rows": shown, "truncated": result.truncated}
