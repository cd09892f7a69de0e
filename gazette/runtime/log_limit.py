"""One log line for each cause and minute, with the number of lines that were left out.

A record logged with ``extra={"cause": …}`` has that cause. For the libraries in ``_REPETITIVE``, the cause is
the template of the record and the type of its error. The first line of a cause is written at once. Lines in
the minute after it are counted. At the end of the minute, the last of these lines is written. Its fact
``left_out`` counts the lines that were not written. Without an event loop: see `OncePerMinute`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

INTERVAL_S: Final = 60.0
_CAUSES_MAX: Final = 1_000
_REPETITIVE: Final = ("asyncio", "grpc", "concurrent")
"""Libraries that log each action of many clients and peers."""


class Later(Protocol):
    """Calls a function after ``delay_s`` seconds."""

    def __call__(self, delay_s: float, call: Callable[[], None], /) -> Any: ...


@dataclass(slots=True)
class _Window:
    began: float
    """Unix seconds of the first record of the minute."""
    left_out: int = 0
    last: logging.LogRecord | None = None


class OncePerMinute(logging.Filter):
    """A filter of ``handler``. Any thread.

    The last line of a minute is written when the minute ends, if the first line that was left out came from a
    thread with a running event loop. Otherwise ``left_out`` of the cause's next line counts all these lines.
    ``later`` replaces the loop's timer, for tests.
    """

    def __init__(self, handler: logging.Handler, *, later: Later | None = None) -> None:
        super().__init__()
        self._handler = handler
        self._later = later
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        cause = _cause_of(record)
        if not cause:
            return True
        with self._lock:
            window = self._windows.get(cause)
            if window is not None and 0.0 <= record.created - window.began < INTERVAL_S:
                window.left_out += 1
                window.last = record
                if window.left_out == 1:
                    self._close_later(cause, window, record)
                return False
            if window is not None and window.left_out:
                record.left_out = window.left_out
            self._open(cause, record)
        return True

    def _open(self, cause: str, record: logging.LogRecord) -> None:
        self._windows.pop(cause, None)
        if len(self._windows) >= _CAUSES_MAX:
            del self._windows[next(iter(self._windows))]  # The oldest one.
        self._windows[cause] = _Window(record.created)

    def _close_later(self, cause: str, window: _Window, record: logging.LogRecord) -> None:
        later = self._later
        if later is None:
            try:
                later = asyncio.get_running_loop().call_later
            except RuntimeError:
                return
        delay_s = max(0.0, window.began + INTERVAL_S - record.created)
        later(delay_s, lambda: self._close(cause, window))

    def _close(self, cause: str, window: _Window) -> None:
        """Write the last line of a minute that has ended. No effect if the cause has another window now."""
        with self._lock:
            record, others = window.last, window.left_out - 1  # The last line is written.
            if self._windows.get(cause) is not window or record is None:
                return
            if others:
                record.left_out = others
            self._windows[cause] = _Window(window.began + INTERVAL_S)  # The next minute begins.
        with self._handler.lock or contextlib.nullcontext():
            self._handler.emit(record)


def _cause_of(record: logging.LogRecord) -> str:
    """Return the cause of a record: records of one cause are repetitions. Empty: always write the record."""
    cause: str = getattr(record, "cause", "")
    if cause:
        return f"{record.name} {cause}"
    if record.name.partition(".")[0] in _REPETITIVE:
        error = record.exc_info[1] if record.exc_info else None
        return f"{record.name} {str(record.msg)[:80]} {type(error).__name__}"
    return ""
