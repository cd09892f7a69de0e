"""Templates of the path postfix under which a journal's fragments are persisted.

They are a subset of Go's text/template, wide enough for its documented uses::

    date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}/hour={{ .Spool.FirstAppendTime.Format "15" }}
    region={{ .Spool.Registers.ValueOf "region" }}

An action names a field or method of ``.Spool`` or of the journal's specification, and passes a
method its one string. Comments and trim markers are read too. Pipelines, functions, variables and
control structures are not, and :func:`parse` says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gazette.errors import Invalid
from gazette.protocol.fragment import Fragment
from gazette.protocol.go_time import format_go_time, utc
from gazette.protocol.ids import NAME_BYTES_MAX, validate_path_component
from gazette.protocol.label_set import LabelSet

if TYPE_CHECKING:
    from gazette.protocol.journal import JournalSpec

_SUPPORTED: Final = (
    'Use fields and methods such as {{ .Spool.FirstAppendTime.Format "2006-01-02" }}, '
    '{{ .Spool.Begin }}, {{ .Spool.Registers.ValueOf "name" }}, {{ .Name }} '
    'or {{ .LabelSet.ValueOf "name" }}.'
)


@dataclass(frozen=True, slots=True)
class PostfixContext:
    """What a template is evaluated over.

    ``first_append_time`` is in Unix seconds, of the clock of the broker that persists; ``None``
    reads as the zero time, in the year 1.
    """

    fragment: Fragment
    first_append_time: float | None
    registers: LabelSet
    spec: JournalSpec


@dataclass(frozen=True, slots=True)
class PostfixTemplate:
    """A template that has been read. Its parts are evaluated in turn, and joined."""

    text: str
    parts: tuple[Callable[[PostfixContext], str], ...] = field(repr=False, compare=False)

    def evaluate(self, context: PostfixContext) -> str:
        """The postfix: a path component, or ``""``.

        Empty components, as of a register that is not set, are left out. Raises :class:`Invalid`
        for a path that a fragment could not be found under again: one of ``..`` or of
        symbols that a fragment's path may not have.
        """
        text = "".join(part(context) for part in self.parts)
        components = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in components:
            raise Invalid(f"cannot traverse outside the journal ({text})")
        path = "/".join(components)
        validate_path_component(path, 0, NAME_BYTES_MAX)
        return path


def parse(text: str) -> PostfixTemplate:
    """Read a template. Raises :class:`Invalid` outside of the subset."""
    return PostfixTemplate(text, tuple(_parts(text)))


_Time = Callable[[PostfixContext], str]


def _time_number(layout: str) -> _Time:
    def number(context: PostfixContext) -> str:
        return format_go_time(layout, context.first_append_time)

    return number


_SPOOL: Final[dict[str, Callable[[Fragment], object]]] = {
    "Journal": lambda f: f.journal,
    "Begin": lambda f: f.begin,
    "End": lambda f: f.end,
    "CompressionCodec": lambda f: f.codec.name,
    "BackingStore": lambda f: f.backing_store,
    "ModTime": lambda f: f.mod_time,
    "PathPostfix": lambda f: f.path_postfix,
}
_SPEC: Final[dict[str, Callable[[JournalSpec], object]]] = {
    "Name": lambda s: s.name,
    "Replication": lambda s: s.replication,
    "Flags": lambda s: _flag_name(s.flags),
    "MaxAppendRate": lambda s: s.max_append_rate,
    "Fragment.Length": lambda s: s.fragment.length,
    "Fragment.CompressionCodec": lambda s: s.fragment.codec.name,
}
_TIME: Final[dict[str, _Time]] = {
    "Year": lambda c: str(utc(c.first_append_time).year),
    "YearDay": lambda c: str(utc(c.first_append_time).timetuple().tm_yday),
    "Month": _time_number("January"),
    "Day": _time_number("2"),
    "Weekday": _time_number("Monday"),
    "Hour": lambda c: str(utc(c.first_append_time).hour),
    "Minute": _time_number("4"),
    "Second": _time_number("5"),
}


def _flag_name(flags: int) -> str:
    names = {0: "NOT_SPECIFIED", 1: "O_RDONLY", 2: "O_WRONLY", 4: "O_RDWR"}
    return names.get(flags, str(flags))


def _field(path: str) -> Callable[[PostfixContext], str] | None:
    """The value of a field, or of a method without an argument. ``None`` if there is none."""
    head, _, rest = path.partition(".")
    if head != "Spool":
        spec = _SPEC.get(path.removeprefix("JournalSpec."))
        return None if spec is None else lambda context: str(spec(context.spec))
    if rest.startswith("FirstAppendTime."):
        return _TIME.get(rest.removeprefix("FirstAppendTime.").removeprefix("UTC."))
    fragment = _SPOOL.get(rest.removeprefix("Fragment."))
    return None if fragment is None else lambda context: str(fragment(context.fragment))


def _method(path: str, argument: str) -> Callable[[PostfixContext], str] | None:
    """The value of a method with one string argument. ``None`` if there is none."""
    match path:
        case "Spool.FirstAppendTime.Format" | "Spool.FirstAppendTime.UTC.Format":
            return lambda context: format_go_time(argument, context.first_append_time)
        case "Spool.Registers.ValueOf":
            return lambda context: context.registers.value_of(argument) or ""
        case (
            "ValueOf" | "LabelSet.ValueOf" | "JournalSpec.ValueOf" | "JournalSpec.LabelSet.ValueOf"
        ):
            return lambda context: context.spec.labels.value_of(argument) or ""
    return None


_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<end>-?}})
      | (?P<path>(?:\.\w+)+)(?=[ \t\r\n}])
      | (?P<string>"(?:[^"\\\n]|\\["\\])*")(?=[ \t\r\n}])
      | (?P<raw>`[^`]*`)(?=[ \t\r\n}])""",
    re.VERBOSE,
)
_SPACE: Final = " \t\r\n"
_BEGIN = re.compile(r"{{(-[ \t\r\n])?")
_COMMENT = re.compile(r"/\*(?:[^*]|\*(?!/))*\*/([ \t\r\n]-)?}}")


def _parts(text: str) -> Iterator[Callable[[PostfixContext], str]]:
    position, trim = 0, False
    while begin := _BEGIN.search(text, position):
        literal = text[position : begin.start()]
        literal = literal.lstrip(_SPACE) if trim else literal
        yield _literal(literal.rstrip(_SPACE) if begin.group(1) else literal)
        if comment := _COMMENT.match(text, begin.end()):
            position, trim = comment.end(), comment.group(1) is not None
        else:
            tokens, position, trim = _action(text, begin)
            yield _evaluator(text[begin.start() : position], tokens)
    literal = text[position:]
    yield _literal(literal.lstrip(_SPACE) if trim else literal)


def _action(text: str, begin: re.Match[str]) -> tuple[list[tuple[str, str]], int, bool]:
    """The action's tokens, the position behind it, and whether it trims what follows."""
    tokens: list[tuple[str, str]] = []
    position, spaced = begin.end(), False
    while token := _TOKEN.match(text, position):
        kind, value = token.lastgroup or "", token.group()
        position = token.end()
        if kind == "end":
            if value.startswith("-") and not spaced:
                break
            return tokens, position, value.startswith("-")
        spaced = kind == "space"
        if not spaced:
            tokens.append((kind, value))
    problem = (
        "unclosed action" if position == len(text) else "unsupported in a path postfix template"
    )
    raise Invalid(f"{problem} ({text[begin.start() :]})", hint=_SUPPORTED)


def _evaluator(action: str, tokens: list[tuple[str, str]]) -> Callable[[PostfixContext], str]:
    evaluator: Callable[[PostfixContext], str] | None = None
    match tokens:
        case [("string" | "raw", value)]:
            return _literal(_unquoted(value))
        case [("path", path)]:
            evaluator = _field(path[1:])
        case [("path", path), ("string" | "raw", value)]:
            evaluator = _method(path[1:], _unquoted(value))
    if evaluator is None:
        raise Invalid(f"unsupported in a path postfix template ({action})", hint=_SUPPORTED)
    return evaluator


def _literal(text: str) -> Callable[[PostfixContext], str]:
    return lambda _: text


def _unquoted(literal: str) -> str:
    if literal[0] == "`":
        return literal[1:-1]
    return re.sub(r"\\(.)", r"\1", literal[1:-1])
