"""The progress line of a command."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from gazette.gazctl.io.terminal import Terminal
from gazette.gazctl.io.time_args import age_text
from gazette.runtime.clock import Clock
from gazette.runtime.numbers import bytes_text

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE_EVERY_S: Final = 5.0


class ProgressLine:
    """Progress of long work: a bar on a terminal, else a line every few seconds. Use it in a ``with`` block.
    ``update`` is cheap. ``unit`` is "bytes", or a plural noun."""

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
            # Only bars need these modules, whose import takes as long as most commands run.
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
        if self._begun[0] != self.label or done < self._begun[2]:  # Other work, or done again.
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
        """Return a text that says how long the rest takes; empty while there is no estimate."""
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
