"""The log of a process: to stderr, as text, JSON lines or coloured text.

A message names its facts, each once: ``log.warning("pulse of %(journal)s failed: %(error)s", {"journal": …,
"error": …})``. In JSON each fact is a field beside the message. docs/operating.md lists the names. Pass an
error as the exception itself: its hint and facts are then logged too.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO

from gazette.errors import GazetteError, printable
from gazette.runtime.log_limit import OncePerMinute

LEVELS: Final = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "panic": logging.CRITICAL,
}
_NAMES: Final = {5: "trace", 10: "debug", 20: "info", 30: "warning", 40: "error", 50: "fatal"}
_COLORS: Final = {5: "2", 10: "2", 20: "36", 30: "33", 40: "31", 50: "1;31"}
_GONE: Final = "ExecuteBatchError"
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "color_message", "cause"),
}
"""Fields of a record that are not facts: those of `logging`, and ``cause`` (`gazette.runtime.log_limit`)."""


def setup(level: str, log_format: str, *, stream: TextIO | None = None) -> None:
    """Send log lines of the process, from ``level`` on, to ``stream`` (stderr). Replace an earlier setup."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else TextFormatter(color=log_format == "color")
    )
    handler.addFilter(_is_news)
    handler.addFilter(OncePerMinute(handler))
    root = logging.getLogger()
    for former_handler in list(root.handlers):
        root.removeHandler(former_handler)
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    # These libraries log each request. Only their warnings are useful.
    for library in ("asyncio", "botocore", "urllib3"):
        logging.getLogger(library).setLevel(max(LEVELS[level], logging.WARNING))


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for lines that need no attention. gRPC logs a traceback if a caller is gone when its call
    is answered."""
    error = record.exc_info[0] if record.exc_info else None
    return not (record.name.startswith("grpc.") and getattr(error, "__name__", "") == _GONE)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    """Return the named facts of a record: the values of its message and of ``extra``."""
    named = record.args if isinstance(record.args, Mapping) else {}
    return {**named, **_extra(record)}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


def _error(record: logging.LogRecord) -> BaseException | None:
    """Return the error of a record: the exception in its message, or else the handled one."""
    values = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
    named = next((value for value in values if isinstance(value, BaseException)), None)
    if named is not None:
        return named
    return record.exc_info[1] if record.exc_info else None


def _described(error: BaseException) -> str:
    return str(error) or repr(error)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z warning gazette.broker: message key=value``.

    The hint of an error is added if it is not the default hint, or if the error ends the process. The line
    is made `printable`, since it may hold text from outside.
    """

    def __init__(self, *, color: bool) -> None:
        super().__init__()
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        name = _NAMES.get(record.levelno, record.levelname.lower())
        if self._color:
            name = f"\x1b[{_COLORS.get(record.levelno, '0')}m{name}\x1b[0m"
        return f"{_time(record)} {name} {printable(self._text(record))}"

    def _text(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = f"{record.name}: {record.getMessage()}{facts}"
        error = _error(record)
        if isinstance(error, GazetteError) and (
            error.hint != error.default_hint or record.levelno >= logging.CRITICAL
        ):
            line += f". {error.hint}"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``logger``, ``msg``, and all named facts.

    An error adds ``error`` (its message), ``error_type``, ``hint``, its own facts where their names are free,
    and ``traceback`` if it was not expected.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": _NAMES.get(record.levelno, record.levelname.lower()),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        for key, value in _facts(record).items():
            line.setdefault(key, _described(value) if isinstance(value, BaseException) else value)
        error = _error(record)
        if error is not None:
            line.setdefault("error", _described(error))
            line.setdefault("error_type", type(error).__name__)
        if isinstance(error, GazetteError):
            line.setdefault("hint", error.hint)
            for key, value in error.facts.items():
                line.setdefault(key, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return json.dumps(line, default=str, allow_nan=False)
        except (TypeError, ValueError):
            # Keys that are not text, cyclic values, and numbers that JSON lacks must not lose the line.
            return json.dumps({key: _plain(value) for key, value in line.items()})


def _plain(value: object) -> object:
    """Return a value that JSON can surely hold."""
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)
