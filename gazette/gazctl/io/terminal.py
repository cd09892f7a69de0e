"""Where a command reads, writes, and says how far it is."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Final, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gazette.runtime.clock import Clock

_LINE_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Terminal:
    """The three standard streams. ``stdout`` carries results only; all else goes to ``stderr``."""

    stdin: BinaryIO
    stdout: BinaryIO
    stderr: TextIO

    @classmethod
    def system(cls) -> Self:
        stdout: BinaryIO = sys.stdout.buffer
        if isinstance(stdout, io.RawIOBase):
            # With PYTHONUNBUFFERED. Such a file may write a part of what it is given, and not say so.
            stdout = io.BufferedWriter(stdout)
        return cls(sys.stdin.buffer, stdout, sys.stderr)

    def write(self, text: str) -> None:
        """Write a result. Raises ``BrokenPipeError`` when nobody reads it any more."""
        self.stdout.write(text.encode("utf-8", "surrogateescape"))
        self.stdout.flush()

    def note(self, text: str) -> None:
        """Tell the user something beside the result."""
        self.stderr.write(f"{text}\n")
        self.stderr.flush()


class ProgressLine:
    """How far something is: a bar where a person looks on, else a line every few seconds.

    Use as ``with``; ``update`` is cheap. ``unit`` is "bytes" or the noun of what is counted.
    """

    def __init__(self, terminal: Terminal, clock: Clock, label: str, unit: str = "bytes") -> None:
        self._terminal = terminal
        self._clock = clock
        self.label = label
        """What is done. May be changed before `update`."""
        self._unit = unit
        self._bar: Progress | None = None
        self._told_at = clock.monotonic()

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
        """``total`` may grow."""
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                description=self.label,
                completed=done,
                total=total,
                text=self._amounts(done, total),
            )
            return
        now = self._clock.monotonic()
        if now - self._told_at >= _LINE_EVERY_S:
            self._told_at = now
            self._terminal.note(f"{self.label}: {self._amounts(done, total)}")

    def _amounts(self, done: int, total: int) -> str:
        if not done and not total:
            return "…"  # How much it is, nobody knows.
        if self._unit == "bytes":
            return f"{bytes_text(done)} of {bytes_text(total)}"
        return f"{done} of {total} {self._unit}"


def bytes_text(count: int) -> str:
    """A number of bytes for people: ``0 B``, ``640 B``, ``1.5 MiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} EiB"
