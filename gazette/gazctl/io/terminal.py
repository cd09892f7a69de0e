"""Standard streams of a command, and its progress line."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Final, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gazette.errors import printable
from gazette.gazctl.io.time_args import age_text
from gazette.runtime.clock import Clock
from gazette.runtime.numbers import bytes_text

_LINE_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Terminal:
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


class ProgressLine:
    """Progress of long work: a bar on a terminal, else a line every few seconds.

    Use it in a ``with`` block. ``update`` is cheap. ``unit`` is "bytes", or a plural noun.
    """

    def __init__(self, terminal: Terminal, clock: Clock, label: str, unit: str = "bytes") -> None:
        self._terminal = terminal
        self._clock = clock
        self.label = label
        """Name of the present work. Change it before `update`, together with ``unit``."""
        self.unit = unit
        self._bar: Progress | None = None
        self._written_at = clock.monotonic()
        self._begun = (label, self._written_at, 0)
        """Begin of the estimate: the work, a time, and the units done then."""

    def __enter__(self) -> Self:
        if self._terminal.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(file=self._terminal.stderr),
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(self.label, total=None, text="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units are done, and how long the rest may take. ``total`` may
        grow."""
        now = self._clock.monotonic()
        if self._begun[0] != self.label or done < self._begun[2]:
            self._begun = (self.label, now, done)
            if self._bar is not None:
                self._bar.reset(self._bar.task_ids[0])
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                description=self.label,
                completed=done,
                total=total,
                text=self._amounts(done, total),
            )
            return
        if now - self._written_at >= _LINE_EVERY_S:
            self._written_at = now
            text = f"{self.label}: {self._amounts(done, total)}"
            self._terminal.note(text + self._left(now, done, total))

    def _left(self, now: float, done: int, total: int) -> str:
        _, since, before = self._begun
        if done <= before or total <= done or now - since < _LINE_EVERY_S:
            return ""
        return f", about {age_text((total - done) * (now - since) / (done - before))} left"

    def _amounts(self, done: int, total: int) -> str:
        if not done and not total:
            return "…"  # The total is unknown.
        if self.unit == "bytes":
            return f"{bytes_text(done)} of {bytes_text(total)}"
        return f"{done} of {total} {self.unit}"
