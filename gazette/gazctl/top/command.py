"""``gazctl top``: a screen that is refreshed, or one table."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from gazette.errors import Invalid, printable
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.flags import TopFlags
from gazette.gazctl.io.output import Table
from gazette.gazctl.top.rows import SORTS, Sort, TopRow, in_order
from gazette.gazctl.top.sampler import CALLS_MAX, ONCE_CALLS_MAX, Sampler
from gazette.runtime.tasks import TaskScope

INTERVAL_MIN_S: Final = 0.5
INTERVAL_MAX_S: Final = 3600.0
_LINES_ABOVE: Final = 3
"""Lines of the screen above the rows."""
_NUMBERS: Final = frozenset({"Rate", "Lag", "Age"})
_COLUMNS: Final = (
    (100, ("Kind", "Name", "Status", "Rate", "Lag", "Age", "Note")),
    (72, ("Name", "Status", "Rate", "Lag", "Age", "Note")),
    (48, ("Name", "Rate", "Lag", "Age")),
)
"""Columns by the least width of the terminal. If it is narrower: the name, and the column of the order."""


async def run(context: Context) -> int:
    flags = context.flags(TopFlags)
    selector = parse_selector(flags.selector, required=False)
    if not INTERVAL_MIN_S <= flags.interval <= INTERVAL_MAX_S:
        raise Invalid(
            f"invalid duration ({flags.interval:g} s; expected 0.5 s to 1 h)", path="--interval"
        )
    sort = next(name for name in SORTS if name == flags.sort)
    stdout = io.TextIOWrapper(context.terminal.stdout, "utf-8", "backslashreplace")
    console = Console(file=stdout, highlight=False, _environ=context.environ)
    try:
        has_screen = console.is_terminal and not console.is_dumb_terminal
        if has_screen and not flags.once and not flags.json:
            sampler = Sampler(context, selector, CALLS_MAX)
            return await Top(context, sampler, console, sort, flags.interval).run()
    finally:
        stdout.detach()
    if not flags.once and not flags.json:
        context.terminal.note(
            "standard output is no terminal with a screen: one table, as by --once"
        )
    sampler = Sampler(context, selector, ONCE_CALLS_MAX, twice=True)
    return await _run_once(context, sampler, sort, flags)


async def _run_once(context: Context, sampler: Sampler, sort: Sort, flags: TopFlags) -> int:
    asked = await sampler.refresh([])
    await context.clock.sleep(flags.interval)
    await sampler.refresh(asked)
    now = context.clock.monotonic()
    items = in_order(sampler.rows.values(), sort, now)
    if flags.json:
        document = {
            "time": datetime.fromtimestamp(context.clock.now(), UTC).isoformat(),
            "interval_s": flags.interval,
            "sort": sort,
            "listed": len(items),
            "asked": sampler.asked,
            "items": [item.document(now) for item in items],
        }
        context.terminal.write(json.dumps(document, allow_nan=False) + "\n")
    else:
        table = Table(_COLUMNS[0][1], numbers=_NUMBERS)
        for item in items:
            table.add(*item.cells(now).values())
        context.terminal.write(table.text(context.terminal))
    left = sum(item.position is None and not item.error for item in items)
    if left:
        context.terminal.note(f"{left} of {len(items)} were not asked: choose some by --selector")
    return 0


@dataclass(slots=True)
class Top:
    """The screen. Loop-bound."""

    context: Context
    sampler: Sampler
    console: Console
    sort: Sort
    interval_s: float
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _refreshed: bool = False

    async def run(self) -> int:
        """Refresh the screen until the user ends it."""
        self.context.on_signal = self._on_signal
        live = Live(console=self.console, screen=True, auto_refresh=False, redirect_stderr=False)
        keys = _keys(self.context, lambda pressed: self._on_keys(pressed, live))
        with keys, live, _resizes(lambda: self._draw(live)):
            self._draw(live)
            async with TaskScope("top") as scope:
                scope.daemon(self._refresh(live), name="refresh")
                await self._stopping.wait()
                scope.cancel()
        return 0

    def _on_signal(self) -> bool:
        """End the command. A second signal cancels it."""
        first = not self._stopping.is_set()
        self._stopping.set()
        return first

    def _on_keys(self, keys: str, live: Live) -> None:
        if "q" in keys:
            self._stopping.set()
        for sort in SORTS:
            if sort[0] in keys:
                self.sort = sort
        self._draw(live)

    async def _refresh(self, live: Live) -> None:
        while True:
            await self.sampler.refresh(self._shown())
            self._refreshed = True
            self._draw(live)
            await self.context.clock.sleep(self.interval_s)

    def _shown(self) -> list[TopRow]:
        now = self.context.clock.monotonic()
        count = max(1, self.console.height - _LINES_ABOVE)
        return in_order(self.sampler.rows.values(), self.sort, now)[:count]

    def _draw(self, live: Live) -> None:
        now, sort_column = self.context.clock.monotonic(), self.sort.capitalize()
        shown = self._shown()
        names = self._columns(sort_column, any(item.error for item in shown))
        table = RichTable(box=None, pad_edge=False, expand=True, header_style="reverse")
        for name in names:
            table.add_column(
                Text(f"{name}*" if name == sort_column else name),
                justify="right" if name in _NUMBERS else "left",
                no_wrap=True,
                overflow="ellipsis",
                ratio=1 if name in {"Name", "Note"} else None,
            )
        for item in shown:
            cells = item.cells(now)
            if item.error and "Note" not in names:
                cells["Name"] = f"{item.name}: {item.error}"
            row = [Text(printable(cells[name], one_line=True)) for name in names]
            table.add_row(*row, style="red" if item.error else "")
        live.update(Group(*self._head(), table), refresh=True)

    def _columns(self, sort_column: str, has_errors: bool) -> tuple[str, ...]:
        """Return the columns that fit on the screen, without ``Note`` if there are no errors."""
        width = self.console.width
        names = next((names for least, names in _COLUMNS if width >= least), ("Name", sort_column))
        return names if has_errors else tuple(name for name in names if name != "Note")

    def _head(self) -> Iterator[Text]:
        sampler = self.sampler
        count = len(sampler.rows)
        asked = f"asked each {self.interval_s:g} s: {sampler.asked}"
        summary = f"journals and shards: {count}, {asked}"
        if not self._refreshed:
            summary = "asking …"
        line = f"{summary}. Keys: r rate, l lag, a age, q quit"
        yield Text(line, style="bold", no_wrap=True, overflow="ellipsis")
        problem = printable("; ".join(sampler.problems.values()), one_line=True)
        if self._refreshed and not count and not problem:
            problem = "no journal or shard matches"
        yield Text(problem, style="red", no_wrap=True, overflow="ellipsis")


@contextmanager
def _keys(context: Context, on_keys: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_keys`` with the keys that are pressed, at once and without echo, if stdin is a terminal."""
    if not context.terminal.stdin.isatty():
        yield
        return
    loop, descriptor = asyncio.get_running_loop(), context.terminal.stdin.fileno()

    def ready() -> None:
        try:
            data = os.read(descriptor, 64)
        except OSError:  # The terminal is gone.
            data = b""
        if not data:
            loop.remove_reader(descriptor)
        on_keys(data.decode("ascii", "replace"))

    former = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, ready)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, former)


@contextmanager
def _resizes(on_resize: Callable[[], None]) -> Iterator[None]:
    """Call ``on_resize`` after each change of the terminal's size."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, on_resize)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
