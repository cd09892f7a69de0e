"""Runs commands of ``gazctl`` in the test's own event loop, and keeps what they wrote."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gazette.gazctl.io.terminal import Terminal
from gazette.gazctl.main import run
from gazette.gazctl.perform import run_in_loop


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The cells of a table, without its headers."""
        return [line.split() for line in self.out.splitlines()[1:] if line.strip()]


@dataclass
class Streams:
    """A terminal in memory."""

    stdin: bytes = b""

    def __post_init__(self) -> None:
        self.out, self.err = io.BytesIO(), io.StringIO()
        self.terminal = Terminal(io.BytesIO(self.stdin), self.out, self.err)

    def result(self, code: int) -> Result:
        return Result(code, self.out.getvalue().decode(), self.err.getvalue())


class Runner:
    """``await gazctl("journals", "list")``. ``environ`` is all of the environment it sees."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    async def __call__(self, *argv: str | Path, stdin: bytes = b"", **environ: str) -> Result:
        streams = Streams(stdin)
        words = [str(word) for word in argv]
        code = await run_in_loop(words, self.environ | environ, streams.terminal)
        return streams.result(code)

    async def ok(self, *argv: str | Path, stdin: bytes = b"", **environ: str) -> Result:
        """Run a command that has to succeed."""
        result = await self(*argv, stdin=stdin, **environ)
        assert result.code == 0, (argv, result)
        return result


def offline(*argv: str, stdin: bytes = b"", **environ: str) -> Result:
    """Run a command that needs no server, as a process would."""
    streams = Streams(stdin)
    return streams.result(run(list(argv), environ, streams.terminal))
