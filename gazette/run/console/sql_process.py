"""SQL on recovered states, in child processes that can be killed: `SqlProcesses`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gazette.errors import Broken, Closed, Invalid, Unavailable
from gazette.runtime.tasks import BlockingPool
from gazette.stores.sqlite.connections import READING

QUERY_S: Final = 10.0
PROCESSES_MAX: Final = 2
_CHILD: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; from gazette.run.console.sql_child import main; main()"
)


class SqlProcesses:
    """Runs SQL, each in a process of its own. Loop-bound. Close it."""

    def __init__(self) -> None:
        self._pool = BlockingPool("console-sql", PROCESSES_MAX)
        self._children: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for child in list(self._children):
            child.kill()
        self._pool.close()

    async def query(self, database: Path, sql: str) -> dict[str, Any]:
        """Run one statement that reads.

        Raise ``Invalid`` for SQL that is refused, ``Unavailable`` once its time is over.
        """
        job = {"databases": [str(database)], "sql": sql, "pragmas": sorted(READING)}
        answer: dict[str, Any] = await self._pool.run(self._run, "the query", job)
        return answer

    async def difference(
        self, before: Path, after: Path, own_tables: list[str]
    ) -> list[dict[str, Any]]:
        """Return the rows that differ between two databases, by tables. For errors see `query`."""
        job = {"databases": [str(before), str(after)], "own_tables": own_tables}
        tables: list[dict[str, Any]] = await self._pool.run(self._run, "the comparison", job)
        return tables

    def _run(self, what: str, job: Mapping[str, Any]) -> Any:
        # Without the module `site`, which may import much.
        command = [sys.executable, "-I", "-S", "-c", _CHILD, *sys.path]
        pipe = subprocess.PIPE
        try:
            started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise Unavailable(f"{what} has no process: {error.strerror}") from error
        with started as child:
            self._children.add(child)
            try:
                if self._is_closed:
                    raise Closed("the console stops")
                output, log = child.communicate(json.dumps(job).encode(), QUERY_S)
            except subprocess.TimeoutExpired as error:
                raise Unavailable(
                    f"{what} did not end within {QUERY_S:g} s, and was ended",
                    hint="Ask for less by SQL, as by LIMIT or an index. Or: gazctl shards query --timeout.",
                ) from error
            finally:
                child.kill()
                self._children.discard(child)
        if self._is_closed:
            raise Closed("the console stops")
        if child.returncode != 0:
            reason = log[-500:].decode(errors="replace").strip()
            raise Broken(
                f"the process of {what} ended with {child.returncode}: {reason}",
                hint="It may need too much time or memory: ask for less.",
            )
        answer = json.loads(output)
        if "error" in answer:
            error_class = Invalid if answer["is_invalid"] else Broken
            raise error_class(answer["error"], hint=answer["hint"])
        return answer["answer"]
