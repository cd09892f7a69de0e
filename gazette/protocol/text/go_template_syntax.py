"""The syntax of Go's text/template: `parse` gives the nodes that `go_template` executes. Pure.

Definitions of other templates are refused. Nesting is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from gazette.errors import Invalid

DEPTH_MAX: Final = 50

_SPACE: Final = " \t\r\n"
_BEGIN: Final = re.compile(r"{{(-[ \t\r\n])?")
_COMMENT: Final = re.compile(r"/\*(?:[^*]|\*(?!/))*\*/([ \t\r\n]-)?}}")
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<end>-?}})
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<raw>`[^`]*`)
      | (?P<char>'(?:[^'\\\n]|\\.[^']*)')
      | (?P<number>[+-]?(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+
            |(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))
      | (?P<field>\.[A-Za-z_]\w*)
      | (?P<dot>\.)
      | (?P<variable>\$\w*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<assign>:=|=)
      | (?P<mark>[|(),])""",
    re.VERBOSE | re.ASCII,
)
_INT64: Final = range(-(1 << 63), 1 << 63)
_CONTROLS: Final = frozenset(["if", "else", "end", "range", "with", "break", "continue"])
_KEYWORDS: Final = _CONTROLS | {"define", "template", "block"}
_OPERANDS: Final = frozenset(
    ["string", "raw", "char", "number", "field", "dot", "variable", "name"]
)


@dataclass(frozen=True, slots=True)
class Command:
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    variables: tuple[str, ...]
    declares: bool
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """``kind`` is constant, dot, name, variable or pipeline; ``fields`` are looked up in its value."""

    kind: str
    value: Any
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Control:
    keyword: str
    pipeline: Pipeline
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Jump:
    keyword: str


Node = str | Pipeline | Control | Jump


def parse(text: str, functions: Collection[str]) -> tuple[Node, ...]:
    """Read a template. Raise ``Invalid`` at what Go's parser refuses, and at definitions of templates."""
    return _Parser(text, functions).all()


class _Parser:
    """Reads one template, action by action."""

    def __init__(self, text: str, functions: Collection[str]) -> None:
        self._functions = functions
        self._pieces = _pieces(text)
        self._tokens: list[tuple[str, str, bool]] = []
        """Tokens of the present action: kind, text, and True if a space follows; in reverse."""
        self._action = ""
        self._variables = ["$"]
        self._ranges = 0
        self._depth = 0

    def all(self) -> tuple[Node, ...]:
        nodes, keyword = self._body()
        if keyword:
            raise self._fail(f"unexpected {keyword}")
        return nodes

    def _fail(self, problem: str) -> Invalid:
        return Invalid(f"{problem} ({self._action})")

    def _body(self) -> tuple[tuple[Node, ...], str]:
        """Return the nodes up to an ``end`` or ``else`` (whose tokens are left), or to the end of
        the text."""
        nodes: list[Node] = []
        for literal, action, tokens in self._pieces:
            if literal:
                nodes.append(literal)
            if tokens is None:
                continue
            self._action, self._tokens = action, tokens[::-1]
            keyword = self._keyword()
            if keyword in ("end", "else"):
                if keyword == "end":
                    self._end()
                return tuple(nodes), keyword
            nodes.append(self._node(keyword))
        return tuple(nodes), ""

    def _node(self, keyword: str) -> Node:
        if keyword in ("if", "with", "range"):
            return self._control(keyword)
        if keyword in ("break", "continue"):
            if not self._ranges:
                raise self._fail(f"{keyword} outside of range")
            self._end()
            return Jump(keyword)
        if keyword:
            raise self._fail(f"{keyword} is not supported in a path postfix template")
        pipeline = self._pipeline()
        self._end()
        return pipeline

    def _control(self, keyword: str) -> Control:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._fail("nested too deeply")
        opening, scope = self._action, len(self._variables)
        pipeline = self._pipeline(in_range=keyword == "range")
        self._end()
        self._ranges += keyword == "range"
        body, ended = self._body()
        self._ranges -= keyword == "range"
        otherwise: tuple[Node, ...] = ()
        if ended == "else":
            chained = self._keyword()
            if chained and chained == keyword and keyword != "range":
                # `{{else if}}` needs no `{{end}}` of its own.
                otherwise, ended = (self._control(keyword),), "end"
            elif chained:
                raise self._fail(f"unexpected {chained} after else")
            else:
                self._end()
                otherwise, ended = self._body()
        if ended != "end":
            self._action = opening
            raise self._fail("unexpected else" if ended else f"{keyword} without end")
        del self._variables[scope:]
        self._depth -= 1
        return Control(keyword, pipeline, body, otherwise)

    def _keyword(self) -> str:
        if self._tokens and self._tokens[-1][1] in _KEYWORDS and self._tokens[-1][0] == "name":
            return self._tokens.pop()[1]
        return ""

    def _peek(self, *kinds: str) -> bool:
        return bool(self._tokens) and self._tokens[-1][0] in kinds

    def _accept(self, text: str) -> bool:
        if self._tokens and self._tokens[-1][0] == "mark" and self._tokens[-1][1] == text:
            self._tokens.pop()
            return True
        return False

    def _end(self) -> None:
        if self._tokens:
            raise self._fail(f"unexpected {self._tokens[-1][1]}")

    def _pipeline(self, *, in_range: bool = False) -> Pipeline:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._fail("nested too deeply")
        variables, declares = self._assigned(in_range=in_range)
        commands = [self._command()]
        # Go takes a pipe behind which nothing follows.
        while self._accept("|") and self._tokens:
            commands.append(self._command())
            if commands[-1].operands[0].kind == "constant":
                raise self._fail("a constant takes no arguments")
        if declares:
            self._variables += variables
        self._depth -= 1
        return Pipeline(variables, declares, tuple(commands))

    def _assigned(self, *, in_range: bool) -> tuple[tuple[str, ...], bool]:
        """Return the variables that a pipeline sets, and whether it declares them."""
        names: list[str] = []
        at = len(self._tokens)
        while at and self._tokens[at - 1][0] == "variable":
            names.append(self._tokens[at - 1][1])
            at -= 1
            if not (in_range and len(names) == 1 and at and self._tokens[at - 1][1] == ","):
                break
            at -= 1
        if not names or not at or self._tokens[at - 1][0] != "assign":
            return (), False
        declares = self._tokens[at - 1][1] == ":="
        del self._tokens[at - 1 :]
        if not declares:
            for name in names:
                self._require_variable(name)
        return tuple(names), declares

    def _require_variable(self, name: str) -> None:
        if name not in self._variables:
            raise self._fail(f'undefined variable "{name}"')

    def _command(self) -> Command:
        operands: list[Operand] = []
        while (self._tokens and not self._peek("mark")) or self._peek_open():
            operands.append(self._operand())
        if not operands:
            raise self._fail("missing value")
        return Command(tuple(operands))

    def _peek_open(self) -> bool:
        return bool(self._tokens) and self._tokens[-1][:2] == ("mark", "(")

    def _operand(self) -> Operand:
        kind, text, spaced = self._tokens.pop()
        if text == "(":
            pipeline = self._pipeline()
            if not self._tokens or self._tokens[-1][1] != ")":
                raise self._fail("unclosed left parenthesis")
            spaced = self._tokens.pop()[2]
            return self._chained(Operand("pipeline", pipeline), spaced)
        match kind:
            case "field":
                return self._chained(Operand("dot", None, (text[1:],)), spaced)
            case "dot":
                made = Operand("dot", None)
            case "variable":
                self._require_variable(text)
                return self._chained(Operand("variable", text), spaced)
            case "name" if text in ("true", "false"):
                made = Operand("constant", text == "true")
            case "name" if text == "nil":
                made = Operand("constant", None)
            case "name" if text in self._functions:
                made = Operand("name", text)
            case "name":
                raise self._fail(f'function "{text}" not defined')
            case "string" | "raw" | "char" | "number":
                made = Operand("constant", self._constant(kind, text))
            case _:
                raise self._fail(f"unexpected {text}")
        self._require_space(spaced)
        return made

    def _chained(self, operand: Operand, spaced: bool) -> Operand:
        """Return an operand with the fields that follow it without a space."""
        fields = list(operand.fields)
        while not spaced and self._peek("field"):
            _, text, spaced = self._tokens.pop()
            fields.append(text[1:])
        self._require_space(spaced)
        return Operand(operand.kind, operand.value, tuple(fields))

    def _require_space(self, spaced: bool) -> None:
        if not spaced and self._tokens and (self._tokens[-1][0] in _OPERANDS or self._peek_open()):
            raise self._fail(f"unexpected {self._tokens[-1][1]}")

    def _constant(self, kind: str, text: str) -> Any:
        if kind == "raw":
            return text[1:-1]
        if kind == "number":
            return self._number(text)
        value = _ESCAPE.sub(self._unescaped, text[1:-1])
        if kind == "string":
            return value
        if len(value) != 1:
            raise self._fail("malformed character constant")
        return ord(value)

    def _unescaped(self, found: re.Match[str]) -> str:
        escape = found.group(1)
        if escape[0] in "xuU":
            code = int(escape[1:], 16)
        elif escape[0] in "01234567":
            code = int(escape, 8)
        elif escape in _ESCAPES:
            return _ESCAPES[escape]
        else:
            raise self._fail(f"unknown escape \\{escape}")
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._fail(f"escape \\{escape} is no character")
        return chr(code)

    def _number(self, text: str) -> int | float:
        try:
            if re.fullmatch(r"[+-]?0\d[\d_]*", text):
                return int(text, 8) if "_" not in text else int(text.replace("_", ""), 8)
            if re.fullmatch(r"[+-]?(?:0[xXbBoO])?[0-9a-fA-F_]+", text) and not re.fullmatch(
                r"[+-]?\d+[eE]\d+", text
            ):
                number = int(text, 0)
                if number in _INT64:
                    return number
                raise ValueError("integer overflow")
            return float(text)
        except ValueError as error:
            raise self._fail(f"bad number syntax: {text}") from error


_ESCAPE: Final = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{3}|.)", re.DOTALL
)
_ESCAPES: Final = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", '"': '"', "'": "'",
}  # fmt: skip


def _pieces(text: str) -> Iterator[tuple[str, str, list[tuple[str, str, bool]] | None]]:
    """Yield each piece of literal text, with the action that follows it as text and as tokens.

    A comment has None for tokens.
    """
    position, trim = 0, False
    while begin := _BEGIN.search(text, position):
        literal = text[position : begin.start()]
        literal = literal.lstrip(_SPACE) if trim else literal
        literal = literal.rstrip(_SPACE) if begin.group(1) else literal
        if comment := _COMMENT.match(text, begin.end()):
            position, trim = comment.end(), comment.group(1) is not None
            yield literal, "", None
            continue
        tokens, position, trim = _tokens(text, begin)
        yield literal, text[begin.start() : position], tokens
    literal = text[position:]
    yield literal.lstrip(_SPACE) if trim else literal, "", None


def _tokens(text: str, begin: re.Match[str]) -> tuple[list[tuple[str, str, bool]], int, bool]:
    """Return the tokens of an action, the position behind it, and True if it trims what follows."""
    tokens: list[tuple[str, str, bool]] = []
    position, spaced = begin.end(), False
    while token := _TOKEN.match(text, position):
        kind, value = token.lastgroup or "", token.group()
        if kind == "end":
            if value.startswith("-") and not spaced:
                break
            return tokens, token.end(), value.startswith("-")
        position = token.end()
        spaced = kind == "space"
        if spaced:
            if tokens:
                tokens[-1] = (*tokens[-1][:2], True)
        else:
            tokens.append((kind, value, False))
    shown = text[begin.start() :]
    if position == len(text):
        raise Invalid(f"unclosed action ({shown})")
    raise Invalid(f"unexpected {text[position]!r} in an action ({shown})")
