"""The part of Go's text/template that path postfixes use: `parse`, and `Template.execute`. Pure.

Templates have text, fields and methods, constants, ``if``, ``with``, and the functions ``and``, ``or``,
``not``, ``eq`` and ``ne``. All else of Go is refused, and named. So a template writes the same here as in Go.

Data are Python values: None, bool, int, str, list, and `Struct`. Templates see nothing else of Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

from gazette.errors import Invalid

DEPTH_MAX: Final = 50

_SPACE: Final = " \t\r\n"
_BEGIN: Final = re.compile(r"{{(-[ \t\r\n])?")
_COMMENT: Final = re.compile(r"/\*(?:[^*]|\*(?!/))*\*/([ \t\r\n]-)?}}")
_STRING: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`')
_TOKEN: Final = re.compile(
    r"""[ \t\r\n]*(?:(?P<end>(?:(?<=[ \t\r\n])-)?}})
      | (?P<open>\()
      | (?P<close>\)(?=[ \t\r\n)]|}}))
      | (?:(?P<string>"(?:[^"\\\n]|\\["\\])*"|`[^`\r]*`)
        | (?P<number>0|-?[1-9][0-9]{0,17})
        | (?P<chain>\$?(?:\.[A-Za-z_][A-Za-z0-9_]*)+|[.$])
        | (?P<name>[A-Za-z_][A-Za-z0-9_]*))(?=[ \t\r\n)]|}}))""",
    re.VERBOSE,
)
"""The next token of an action. The group that matches is its symbol; ``end`` is the end of the action."""
_FUNCTIONS: Final = {"and": (1, 64), "or": (1, 64), "not": (1, 1), "eq": (2, 64), "ne": (2, 2)}
"""The least and the greatest number of arguments of each function."""


class NamedInt(int):
    """An integer of a Go type that is written as a name, such as a month, a codec, or a duration."""

    name: str

    def __new__(cls, value: int, name: str) -> Self:
        named_int = super().__new__(cls, value)
        named_int.name = name
        return named_int

    def __str__(self) -> str:
        return self.name


class Struct:
    """A Go struct: fields by name, and methods. A field may be of an embedded struct."""

    def __init__(
        self,
        fields: Mapping[str, Callable[[], Any]],
        methods: Mapping[str, Callable[..., Any]] = {},
        text: Callable[[], str] | None = None,
    ) -> None:
        """Create a struct. ``text`` returns its printed form; without ``text`` it cannot be printed."""
        self.fields = fields
        self.methods = methods
        self.text = text


@dataclass(frozen=True, slots=True)
class Constant:
    value: str | int | bool


@dataclass(frozen=True, slots=True)
class Chain:
    """Fields of the template's data if ``is_rooted`` (``$``), else of the value of the innermost ``with``."""

    is_rooted: bool
    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    """Arguments of the last name, which is a method. Only constant texts are supported."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    function: str
    arguments: tuple[Expression, ...]


Expression: TypeAlias = "Constant | Chain | FunctionCall"


@dataclass(frozen=True, slots=True)
class Condition:
    keyword: str
    value: Expression
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...]


Node: TypeAlias = "str | Expression | Condition"


@dataclass(frozen=True, slots=True)
class Template:
    """A template that was parsed."""

    nodes: tuple[Node, ...] = field(repr=False)

    def execute(self, data: Struct) -> str:
        """Return the output of the template. Raise ``Invalid`` where Go would fail, and for a list or nil,
        which a path cannot have."""
        return "".join(_written(self.nodes, data, data))


def parse(text: str) -> Template:
    """Parse a template. Raise ``Invalid`` for a text that Go's parser refuses, or that is not supported."""
    return Template(_Parser(text).all())


def is_complete(text: str) -> bool:
    """Return False for a template with an action that has no end: no process can have used the template.

    Return True for every template that can be parsed here. In another text, compare the numbers of ``{{`` and
    ``}}``, with and without its constants.
    """
    try:
        parse(text)
    except Invalid:
        texts = (text, _STRING.sub("", text))
        return any(part.count("{{") <= part.count("}}") for part in texts)
    return True


class _Parser:
    """Parses one template, action by action."""

    def __init__(self, text: str) -> None:
        self._pieces = _pieces(text)
        self._tokens: list[tuple[str, str]] = []
        """Unread tokens of the current action, in reverse: symbol and text."""
        self._action = ""  # The current action, for errors.
        self._depth = 0

    def all(self) -> tuple[Node, ...]:
        nodes, keyword = self._body()
        if keyword:
            raise self._fail(f"unexpected {keyword}")
        return nodes

    def _fail(self, problem: str) -> Invalid:
        return Invalid(f"{problem} ({self._action})")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._fail("nested too deeply")

    def _body(self) -> tuple[tuple[Node, ...], str]:
        """Return the nodes before the next ``end`` or ``else``, and that keyword; without a keyword, all
        nodes and ""."""
        nodes: list[Node] = []
        for literal, action, tokens in self._pieces:
            if literal:
                nodes.append(literal)
            if tokens is None:
                continue
            self._action, self._tokens = action, tokens[::-1]
            keyword = self._keyword("end", "else", "if", "with")
            if keyword == "end":
                self._end()
            if keyword in ("end", "else"):
                return tuple(nodes), keyword
            nodes.append(self._condition(keyword) if keyword else self._whole())
        return tuple(nodes), ""

    def _condition(self, keyword: str) -> Condition:
        """Read an ``if`` or ``with``, from after its keyword to its ``end``."""
        self._deeper()
        opening, value = self._action, self._whole()
        body, ended = self._body()
        otherwise: tuple[Node, ...] = ()
        if ended == "else":
            if self._keyword(keyword):
                # `{{else if}}` needs no `{{end}}` of its own.
                otherwise, ended = (self._condition(keyword),), "end"
            else:
                self._end()
                otherwise, ended = self._body()
        if ended != "end":
            self._action = opening
            raise self._fail("unexpected else" if ended else f"{keyword} without end")
        self._depth -= 1
        return Condition(keyword, value, body, otherwise)

    def _keyword(self, *words: str) -> str:
        """Take and return the next token of the action if it is one of ``words``. Otherwise return ""."""
        if self._tokens and self._tokens[-1] in [("name", word) for word in words]:
            return self._tokens.pop()[1]
        return ""

    def _end(self) -> None:
        """Raise ``Invalid`` if the action has more tokens."""
        if self._tokens:
            raise self._fail(f"unexpected {self._tokens[-1][1]}")

    def _whole(self) -> Expression:
        """Read all tokens of the action as one expression."""
        value = self._command()
        self._end()
        return value

    def _command(self) -> Expression:
        """Read a value, or a call of a function or a method."""
        symbol, text = self._tokens[-1] if self._tokens else ("", "")
        if symbol == "name" and text in _FUNCTIONS:
            self._tokens.pop()
            arguments = self._arguments()
            least, most = _FUNCTIONS[text]
            if not least <= len(arguments) <= most:
                raise self._fail(f"wrong number of args for {text}: {len(arguments)}")
            return FunctionCall(text, arguments)
        value = self._operand()
        arguments = self._arguments()
        if not arguments:
            return value
        if not isinstance(value, Chain) or not value.names or symbol == "open":
            raise self._fail("can't give an argument to what is no function")
        texts = tuple(
            argument.value
            for argument in arguments
            if isinstance(argument, Constant) and isinstance(argument.value, str)
        )
        if len(texts) != len(arguments):
            raise self._fail("only a constant text is supported as an argument of a method")
        return Chain(value.is_rooted, value.names, texts)

    def _arguments(self) -> tuple[Expression, ...]:
        arguments: list[Expression] = []
        while self._tokens and self._tokens[-1][0] != "close":
            arguments.append(self._operand())
        return tuple(arguments)

    def _operand(self) -> Expression:
        if not self._tokens:
            raise self._fail("missing value")
        symbol, text = self._tokens.pop()
        match symbol:
            case "open":
                self._deeper()
                value = self._command()
                if not self._tokens:
                    raise self._fail("unclosed left parenthesis")
                self._tokens.pop()
                self._depth -= 1
                return value
            case "string" if text[0] == "`":
                return Constant(text[1:-1])
            case "string":
                return Constant(re.sub(r"\\(.)", r"\1", text[1:-1]))
            case "number":
                return Constant(int(text))
            case "chain":
                return Chain(text[0] == "$", tuple(filter(None, text.strip("$").split("."))))
            case "name" if text in ("true", "false"):
                return Constant(text == "true")
        raise self._fail(f"{text} is not supported in a path postfix template")


def _pieces(text: str) -> Iterator[tuple[str, str, list[tuple[str, str]] | None]]:
    """Yield each piece of literal text, with the action that follows it as text and as tokens.

    Tokens are None for a comment, and at the end of the text. Raise ``Invalid`` at an action that has no end,
    or is not supported.
    """
    # `{{-` trims white space from the text before the action, and `-}}` from the text after it.
    position, trim = 0, False
    while begin := _BEGIN.search(text, position):
        literal = text[position : begin.start()]
        literal = literal.lstrip(_SPACE) if trim else literal
        literal = literal.rstrip(_SPACE) if begin.group(1) else literal
        if comment := _COMMENT.match(text, begin.end()):
            position, trim = comment.end(), comment.group(1) is not None
            yield literal, "", None
            continue
        tokens: list[tuple[str, str]] = []
        position = begin.end()
        while (token := _TOKEN.match(text, position)) and token.lastgroup != "end":
            symbol = str(token.lastgroup)
            tokens.append((symbol, token[symbol]))
            position = token.end()
        if token is None:
            unread, closed, _ = text[position:].partition("}}")
            problem = f"{unread.strip()} is not supported" if closed else "unclosed action"
            raise Invalid(f"{problem} in a path postfix template ({text[begin.start() :]})")
        position, trim = token.end(), token["end"].startswith("-")
        yield literal, text[begin.start() : position], tokens
    literal = text[position:]
    yield literal.lstrip(_SPACE) if trim else literal, "", None


def _written(nodes: Sequence[Node], root: Struct, dot: Any) -> Iterator[str]:
    """Yield the output of nodes. ``root`` is the value of ``$``, and ``dot`` is the value of ``.``."""
    for node in nodes:
        match node:
            case str():
                yield node
            case Condition(keyword, condition, body, otherwise):
                value = _value(condition, root, dot)
                if is_true(value):
                    yield from _written(body, root, value if keyword == "with" else dot)
                else:
                    yield from _written(otherwise, root, dot)
            case _:
                yield _text(_value(node, root, dot))


def _value(expression: Expression, root: Struct, dot: Any) -> Any:
    match expression:
        case Constant(value):
            return value
        case FunctionCall(function, arguments):
            return _called(function, (_value(argument, root, dot) for argument in arguments))
        case Chain(is_rooted, names, arguments):
            target = root if is_rooted else dot
            for count, name in enumerate(names, 1):
                target = _field(target, name, arguments if count == len(names) else ())
            return target


def _called(function: str, arguments: Iterator[Any]) -> Any:
    """Return the result of a function. As in Go, ``and`` and ``or`` stop at the argument that decides."""
    if function in ("and", "or"):
        for value in arguments:
            if is_true(value) == (function == "or"):
                return value
        return value
    first = next(arguments)
    if function == "not":
        return not is_true(first)
    # As in Go, evaluate all arguments, but compare none after the first that is equal.
    is_equal = any(_is_equal(first, other) for other in list(arguments))
    return is_equal == (function == "eq")


def _is_equal(one: Any, other: Any) -> bool:
    kinds = [_kind(one), _kind(other)]
    if kinds[0] != kinds[1] or kinds[0] not in ("a bool", "an int", "a string"):
        raise Invalid(f"incompatible types for comparison: {kinds[0]} and {kinds[1]}")
    return bool(one == other)


def _field(value: Any, name: str, arguments: Sequence[str]) -> Any:
    """Return a field of a struct, or the result of a method. Raise ``Invalid`` if the struct has neither."""
    if isinstance(value, Struct):
        if (method := value.methods.get(name)) is not None:
            try:
                return method(*arguments)
            except (TypeError, ValueError, OverflowError) as error:
                raise Invalid(f"error calling {name}: {error}") from error
        if (get := value.fields.get(name)) is not None:
            if arguments:
                raise Invalid(f"{name} has arguments but cannot be invoked as function")
            return get()
    raise Invalid(f"can't evaluate field {name} in {_kind(value)}")


def is_true(value: Any) -> bool:
    """Return True if ``if`` takes a value for true: any struct, or a value that is not zero or empty."""
    return True if isinstance(value, Struct) else bool(value)


def _kind(value: Any) -> str:
    type_names = (
        (bool, "a bool"),
        (int, "an int"),
        (str, "a string"),
        (list, "a list"),
        (Struct, "a struct"),
    )
    return next((name for python_type, name in type_names if isinstance(value, python_type)), "nil")


def _text(value: Any) -> str:
    """Return a value as ``%v`` writes it. Raise ``Invalid`` for a value that a path cannot have."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int():
            return str(value)
        case Struct(text=text) if text is not None:
            return text()
    raise Invalid(f"{_kind(value)} cannot be written: name one of its fields")
