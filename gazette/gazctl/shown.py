"""The parts of a cluster's diagnostics that a support bundle shows. Everything else is cut.

A bundle shows:

- of specifications: numbers, durations, enumerations, and names of journals, shards and members; of URLs the
  scheme and the host; of labels the names and values that `gazette.labels` defines;
- of metrics: names, numbers, and labels of our own families. A name in a label is shown as in a log;
- of stacks: files, lines and functions;
- of logs: times, levels, loggers, types of errors, frames of tracebacks, and our own messages. A value in a
  message is cut, unless it is a number, or a name that the specifications show.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from gazette import errors, labels
from gazette.gazctl.io.output import proto_json
from gazette.runtime.redaction import CUT, shown_url

_NAMES: Final = frozenset(
    {
        *("protocol.JournalSpec.name", "protocol.ProcessSpec.ID.zone"),
        *("protocol.ProcessSpec.ID.suffix", "consumer.ShardSpec.id"),
        *("consumer.ShardSpec.Source.journal", "consumer.ShardSpec.recovery_log_prefix"),
        "consumer.ShardSpec.hint_prefix",
    }
)
"""Fields whose text is a name."""
_URLS: Final = frozenset({"protocol.JournalSpec.Fragment.stores", "protocol.Route.endpoints"})
_LABELS: Final = frozenset(text for text in vars(labels).values() if isinstance(text, str) and text)
_ERRORS: Final = frozenset(
    name for home in (errors, builtins) for name, cls in vars(home).items() if isinstance(cls, type)
)

_LINE_MAX: Final = 4096
_NUMBER: Final = r"[-+]?[\d.]{1,30}(?:e[-+]?\d{1,4})?"
_TYPE: Final = re.compile(r"# TYPE [\w:]{1,200} [a-z]{1,20}")
_SAMPLE: Final = re.compile(
    rf"([a-zA-Z_:][\w:]{{0,199}})(?:\{{(.*)\}})?( (?:{_NUMBER}|NaN|[-+]Inf))(?: \d{{1,20}})?"
)
_METRIC_LABEL: Final = re.compile(r'(\w{1,100})="((?:[^"\\]|\\.)*)"')
_OWN_VALUE: Final = re.compile(rf"[A-Za-z_]{{1,40}}|\+Inf|{_NUMBER}")
_NAMING_LABELS: Final = frozenset({"journal", "shard", "store"})
"""Labels of our own families whose values are names that an application or an operator has chosen."""
_OWN_FAMILY: Final = re.compile(r"(?:gazette|grpc|process|python)_")

_FRAME: Final = re.compile(
    r'\s*File "(?:[^"]*?/)?((?:gazette/(?:\w+/){0,6})?[\w.<>-]{1,100})", (line \d+, in [\w.<>]{1,100})'
)
_RAISED: Final = re.compile(r"(?:\w+\.){0,9}(\w{1,60})(?::.*)?")
_COLOR: Final = re.compile(r"\x1b\[[\d;]*m")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[-+]\d\d:\d\d)")
_LEVEL: Final = re.compile(r"trace|debug|info|warn|warning|error|fatal|panic")
_LOGGER: Final = re.compile(r"gazette(?:\.\w{1,40}){0,6}")
_LOGGED: Final = re.compile(rf"({_TIME.pattern}) ({_LEVEL.pattern}) ({_LOGGER.pattern}): (.*)")

_CALL: Final = re.compile(
    r"\blog\.(?:debug|info|warning|error|exception|critical)\(\s*((?:\"(?:[^\"\\]|\\.)*\"\s*)+)"
)
_PLACE: Final = re.compile(r"%(?:\(\w+\))?[-+ #0-9.]*([a-zA-Z%])")


class Shown:
    """Selects the parts that a bundle shows. ``names`` holds the names in the specifications shown so far."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def specifications(self, message: Message) -> str:
        """Return the shown parts of a cluster's answer as JSON."""
        shown = type(message)()
        shown.CopyFrom(message)
        self._cut_fields(shown)
        return proto_json(shown)

    def _cut_fields(self, message: Message) -> None:
        """Cut the texts of a message, and of all messages within it, that are not shown."""
        for field, value in message.ListFields():
            if field.message_type is not None:
                for nested in value if field.is_repeated else (value,):
                    self._cut_fields(nested)
            elif field.cpp_type == field.CPPTYPE_STRING:
                if not field.is_repeated:
                    shown = self._text(field, value)
                    setattr(message, field.name, shown if field.type != field.TYPE_BYTES else b"")
                else:
                    value[:] = [self._text(field, text) for text in value]

    def _text(self, field: Any, text: Any) -> str:
        """Return the shown form of a field's text, or `CUT`. Add names to ``names``."""
        if field.full_name in _NAMES:
            self.names.add(text)
            return str(text)
        if field.full_name in _URLS:
            shown = shown_url(text)
            self.names |= {text} & {shown}
            return shown
        return str(text) if text in _LABELS and "protocol.Label." in field.full_name else CUT

    def metrics(self, text: str) -> str:
        """Return the shown samples in the form of Prometheus, without help texts."""
        return "".join(f"{shown}\n" for line in text.splitlines() if (shown := self._sample(line)))

    def _sample(self, line: str) -> str:
        """Return a line of metrics with its labels cut where needed; empty for a line that is not shown."""
        match = _SAMPLE.fullmatch(line) if len(line) <= _LINE_MAX else None
        if match is None:
            return line if _TYPE.fullmatch(line) else ""
        is_own = _OWN_FAMILY.match(match[1]) is not None

        def shown(label: re.Match[str]) -> str:
            value = label[2]
            is_ours = is_own and label[1] not in _NAMING_LABELS
            is_safe = value in self.names or (is_ours and _OWN_VALUE.fullmatch(value))
            return f'{label[1]}="{value if is_safe else CUT}"'

        label_text = ",".join(shown(label) for label in _METRIC_LABEL.finditer(match[2] or ""))
        return f"{match[1]}{{{label_text}}}{match[3]}"

    def stacks(self, text: str) -> str:
        """Return the frames of tasks and threads. Cut each word of their names that is not in ``names``."""
        return "".join(f"{shown}\n" for line in text.splitlines() if (shown := self._frame(line)))

    def _frame(self, line: str) -> str:
        """Return a line of stacks, with names cut where needed; empty for a line that is not shown."""
        owner, _, name = line.partition(" ")
        if owner in ("task", "thread"):
            return (
                f"{owner} {' '.join(word if word in self.names else CUT for word in name.split())}"
            )
        frame = _FRAME.fullmatch(line) if len(line) <= _LINE_MAX else None
        return "" if frame is None else f'  File "{frame[1]}", {frame[2]}'

    def ready(self, text: str) -> str:
        """Return a text that says whether a member serves, without the reason why it does not."""
        return "ready\n" if text.strip() == "ready" else f"not ready: {CUT}\n"

    def log(self, text: str) -> str:
        """Return the shown parts of a log's lines. The log is text or JSON."""
        return "".join(f"{self._logged(line)}\n" for line in text.splitlines())

    def _logged(self, line: str) -> str:
        line = _COLOR.sub("", line)
        if line.startswith("{"):
            return self._logged_json(line)
        if match := _LOGGED.fullmatch(line):
            return f"{match[1]} {match[2]} {match[3]}: {self._message(match[4])}"
        raised = _RAISED.fullmatch(line[:_LINE_MAX])
        if raised is not None and raised[1] in _ERRORS:
            return f"{raised[1]}: {CUT}"
        return self._frame(line) or CUT

    def _logged_json(self, line: str) -> str:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return CUT
        shown: dict[str, Any] = {}
        for key, pattern in (("time", _TIME), ("level", _LEVEL), ("logger", _LOGGER)):
            shown[key] = value if pattern.fullmatch(value := str(fields.get(key))) else CUT
        shown["msg"] = self._message(str(fields.get("msg")))
        shown["error_type"] = name if (name := str(fields.get("error_type"))) in _ERRORS else None
        shown["traceback"] = self.stacks(str(fields.get("traceback", "")))
        return json.dumps({key: value for key, value in shown.items() if value})

    def _message(self, text: str) -> str:
        """Return one of our own messages, with only names and numbers as values."""
        match = _messages().fullmatch(text) if len(text) <= _LINE_MAX else None
        if match is None:
            return CUT
        parts, copied = [], 0
        for group in range(1, match.re.groups + 1):
            begin, end = match.span(group)
            if begin < end:
                value = match[group]
                parts += [text[copied:begin], value if value in self.names else CUT]
                copied = end
        return "".join([*parts, text[copied:]])


@cache
def _messages() -> re.Pattern[str]:
    """Return the pattern of all messages that our sources log. Each group is a value."""
    sources = (path.read_text() for path in Path(errors.__file__).parent.rglob("*.py"))
    texts = {ast.literal_eval(f"({call[1]})") for code in sources for call in _CALL.finditer(code)}
    # Try the longest texts first: a text of little more than values would match many other messages.
    patterns = ("".join(_pattern(text)) for text in sorted(texts, key=_literals, reverse=True))
    # Facts and hints follow a message.
    return re.compile("|".join(f"{pattern}(.*)" for pattern in patterns))


def _literals(text: str) -> tuple[int, str]:
    """Return the length of a message without its values, and the message, to sort by."""
    return len(_PLACE.sub("", text)), text


def _pattern(text: str) -> Iterator[str]:
    """Yield the pattern of a message, in parts. Texts are groups. Numbers are not: they are always shown."""
    end = 0
    for place in _PLACE.finditer(text):
        yield re.escape(text[end : place.start()])
        yield {"%": "%", "s": "(.*?)", "r": "(.*?)"}.get(place[1], _NUMBER)
        end = place.end()
    yield re.escape(text[end:])
