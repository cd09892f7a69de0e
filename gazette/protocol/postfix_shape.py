"""The shape of a path postfix template: all paths that the template can have written, for any data.

A shape never refuses a path that its template can write. It is exact for literal text, for parts of times and
for numbers. Registers, labels, variables and results of functions may be any text, of several components.
Both sides of a condition are possible. A template that is not understood here may have written any path: the
original supports more of Go's language, and so did earlier versions.

Matching takes time in proportion to the lengths of path and template: authors of templates are not trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from gazette.errors import Invalid
from gazette.protocol.fragment import Codec
from gazette.protocol.ids import JournalName
from gazette.protocol.text import go_template, go_time
from gazette.protocol.text.go_template import Chain, Condition, Expression, Node


@dataclass(frozen=True, slots=True)
class Digits:
    """Decimal digits, from ``least`` to ``most`` of them."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several sequences."""

    choices: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text, with any number of components."""


Part: TypeAlias = "str | Digits | Choice | AnyText"

_ANY: Final = (AnyText(),)
_NUMBER: Final = (Choice(((), ("-",))), Digits(1, 20))
_NUMBERS: Final = frozenset({"Begin", "End", "ModTime", "ContentLength"})
_NUMBERS_OF_TIME: Final = frozenset(
    {"Unix", "UnixMilli", "UnixMicro", "UnixNano", "Year", "Day", "YearDay", "Hour", "Minute"}
    | {"Second", "Nanosecond"}
)
_STRUCTS: Final = frozenset({"Spool", "Fragment", "JournalSpec"})


class PostfixShape:
    """The paths that one template can have written for the fragments of one journal."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def matches(self, path: str) -> bool:
        """Return True if the template can have written ``path``, which is clean."""
        ends = _Path(path).through(self._parts, {(0, True)})
        return any(end == len(path) for end, _ in ends)


@lru_cache(maxsize=256)
def shape_of(template: str, journal: JournalName) -> PostfixShape:
    """Return the shape of a template. Raise ``Invalid`` for an incomplete one, which has written no path."""
    try:
        return PostfixShape(_Shaper(journal).sequence(go_template.parse(template).nodes))
    except Invalid:
        if not go_template.is_complete(template):
            raise
        return PostfixShape(_ANY)


_State: TypeAlias = tuple[int, bool]
"""A position in the path, and True if a component begins there: a clean path has no further slash there."""


class _Path:
    """Matches parts of a shape with one path, from all possible positions at the same time."""

    def __init__(self, path: str) -> None:
        self._path = path

    def through(self, parts: Iterable[Part], states: set[_State]) -> set[_State]:
        """Return the possible states after ``parts`` that begin at ``states``."""
        for part in parts:
            if not states:
                break
            states = self._through_one(part, states)
        return states

    def _through_one(self, part: Part, states: set[_State]) -> set[_State]:
        match part:
            case str():
                for char in part:
                    states = self._slash(states) if char == "/" else self._char(char, states)
                return states
            case Digits(least, most):
                return self._digits(least, most, states)
            case Choice(choices):
                return {end for choice in choices for end in self.through(choice, states)}
        return self._any(states)  # The last kind of part is `AnyText`.

    def _char(self, char: str, states: set[_State]) -> set[_State]:
        return {(end + 1, False) for end, _ in states if self._path.startswith(char, end)}

    def _slash(self, states: set[_State]) -> set[_State]:
        """Pass a slash. A clean path lacks the slash at its begin and end, and after another slash."""
        left_out = {(end, True) for end, at_start in states if at_start or end == len(self._path)}
        return left_out | {(end + 1, True) for end, _ in states if self._path.startswith("/", end)}

    def _digits(self, least: int, most: int, states: set[_State]) -> set[_State]:
        ends: set[_State] = set()
        for count in range(1, most + 1):
            states = {(end + 1, False) for end, _ in states if self._path[end : end + 1] in _DIGITS}
            if not states:
                break
            if count >= least:
                ends |= states
        return ends

    def _any(self, states: set[_State]) -> set[_State]:
        """Pass any text: return these states, and those at all later positions."""
        earliest = min(end for end, _ in states)
        later = range(earliest + 1, len(self._path) + 1)
        ends = {(end, self._path[end - 1] == "/") for end in later}
        return states | ends | {(len(self._path), True)}


_DIGITS: Final = frozenset("0123456789")


class _Shaper:
    """Turns the nodes of a template into parts."""

    def __init__(self, journal: JournalName) -> None:
        self._journal = journal
        self._knows_dot = True
        """False within a ``with``, where ``.`` is not the data of the template."""

    def sequence(self, nodes: Sequence[Node]) -> list[Part]:
        parts: list[Part] = []
        for node in nodes:
            parts += self._node(node)
        return parts

    def _node(self, node: Node) -> Sequence[Part]:
        match node:
            case str():
                # The stored path is clean: it lacks components "." that a template wrote.
                return _ANY if "./" in f"{node}/" else (node,)
            case Condition():
                return self._condition(node)
        return self._value(node)

    def _condition(self, node: Condition) -> Sequence[Part]:
        otherwise = tuple(self.sequence(node.otherwise))
        # A `with` replaces `.` in its body, and not after its `else`.
        outer_knows_dot, self._knows_dot = self._knows_dot, self._knows_dot and node.keyword == "if"
        body = tuple(self.sequence(node.body))
        self._knows_dot = outer_knows_dot
        return (Choice((body, otherwise)),)

    def _value(self, node: Expression) -> Sequence[Part]:
        """Return the shape of the text that an action writes."""
        if not isinstance(node, Chain) or not (node.is_rooted or self._knows_dot):
            return _ANY
        names = [name for name in node.names if name not in _STRUCTS]
        match names, node.arguments:
            case ["FirstAppendTime", *names], arguments:
                return _part_of_time(names, arguments)
            case ["Name" | "Journal"], ():
                return (self._journal,)
            case ["CompressionCodec"], ():
                return (Choice(tuple((codec.name,) for codec in Codec)),)
            case [name], () if name in _NUMBERS:
                return _NUMBER
        return _ANY


def _part_of_time(names: Sequence[str], arguments: Sequence[str]) -> Sequence[Part]:
    """Return the shape of the text that a method of a time writes: ``Year``, ``Format "2006"``, …"""
    *zones, name = names or [""]
    if not all(zone == "UTC" for zone in zones):
        return _ANY  # The broker that wrote the path may have another local zone.
    if not arguments:
        if name in _NUMBERS_OF_TIME:
            return _NUMBER
        return (_choice(go_time.MONTHS),) if name == "Month" else _ANY
    if name != "Format" or len(arguments) > 1:
        return _ANY
    parts: list[Part] = []
    for is_element, text in go_time.elements(arguments[0]):
        parts += _element(text) if is_element else (text,)
    return parts


def _element(element: str) -> Sequence[Part]:
    """Return the shape of one element of a layout of times."""
    if element[0] in ".,":
        if element[1] == "9":  # Nines write no trailing zeros, and no point without digits.
            return (Choice(((), (element[0], Digits(1, len(element) - 1)))),)
        return element[0], Digits(len(element) - 1, len(element) - 1)
    words = go_time.words_of(element)
    if words:
        return (_choice(words),)
    if element == "_2006":  # This element has no padding: its underscore is text.
        return "_", _WIDTHS["2006"]
    padding = element.count("_")
    digits = Digits(1, 3) if padding else _WIDTHS[element]
    return (Choice(tuple((" " * count,) for count in range(3))), digits) if padding else (digits,)


def _choice(words: Iterable[str]) -> Choice:
    return Choice(tuple((word,) for word in words))


_WIDTHS: Final = {
    "2006": Digits(4, 5),
    "06": Digits(2, 2),
    "01": Digits(2, 2),
    "1": Digits(1, 2),
    "02": Digits(2, 2),
    "2": Digits(1, 2),
    "002": Digits(3, 3),
    "15": Digits(2, 2),
    "03": Digits(2, 2),
    "3": Digits(1, 2),
    "04": Digits(2, 2),
    "4": Digits(1, 2),
    "05": Digits(2, 2),
    "5": Digits(1, 2),
}
