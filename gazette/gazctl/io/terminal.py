"""Standard streams of a command, and its exit codes."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import BinaryIO, Final, NamedTuple, Self, TextIO

from gazette.errors import GazetteError, Invalid, printable

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_SIGNAL: Final = 128


class Terminal(NamedTuple):
    """The three standard streams. ``stdout`` gets only results; everything else goes to ``stderr``."""

    stdin: BinaryIO
    stdout: BinaryIO
    stderr: TextIO

    @classmethod
    def system(cls) -> Self:
        stdout: BinaryIO = sys.stdout.buffer
        if isinstance(stdout, io.RawIOBase):
            # PYTHONUNBUFFERED makes stdout a raw file, which may write only a part, without an error.
            stdout = io.BufferedWriter(stdout)
        return cls(sys.stdin.buffer, stdout, sys.stderr)

    def write(self, text: str) -> None:
        """Write a result. Raise ``BrokenPipeError`` if the reader has closed the pipe."""
        self.stdout.write(text.encode("utf-8", "surrogateescape"))
        self.stdout.flush()

    def note(self, text: str) -> None:
        """Print a note for the user on stderr. Make the note `printable`: it may have text of servers."""
        self.stderr.write(f"{printable(text)}\n")
        self.stderr.flush()


def report_error(error: GazetteError, terminal: Terminal) -> int:
    """Print what failed and what to do. Return the exit code."""
    with suppress(BrokenPipeError):
        text = str(error)
        terminal.note(text if text.startswith("gazctl ") else f"gazctl: {text}")
        if error.hint and error.hint != type(error).default_hint:
            terminal.note(error.hint)
    return EXIT_USAGE if isinstance(error, Invalid) else EXIT_FAILED
