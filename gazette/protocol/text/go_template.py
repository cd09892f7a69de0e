"""The language of Go's text/template, as far as path postfixes use it: `parse`, and
`Template.execute`. Pure.

Pipelines, functions, variables and control structures are executed. The author of a template is not
trusted: steps and output are bounded.

Data are Python values: None, bool, int, float, str, list, and `Struct`. Templates see nothing else
of Python. The language is described at pkg.go.dev/text/template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote_plus

from gazette.errors import Invalid
from gazette.protocol.text import go_template_syntax
from gazette.protocol.text.go_format import go_text, sprint, sprintf
from gazette.protocol.text.go_template_syntax import Command, Control, Jump, Node, Operand, Pipeline

STEPS_MAX: Final = 10_000
"""Operands and actions that one execution evaluates."""
OUTPUT_MAX: Final = 1 << 16
"""Characters that one execution writes, and that one value may have."""


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

    def __str__(self) -> str:
        if self.text is None:
            raise Invalid("a struct cannot be written: name one of its fields")
        return self.text()


class _Broken(Exception):
    """``break`` or ``continue``, on its way to its ``range``."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


@dataclass(frozen=True, slots=True)
class Template:
    """A template that has been read."""

    nodes: tuple[Node, ...] = field(repr=False)

    def execute(self, dot: Struct) -> str:
        """Return what the template writes. Raise ``Invalid`` as Go's would fail, and beyond its bounds."""
        run = _Run(dot)
        run.nodes(self.nodes, dot)
        return "".join(run.written)


def parse(text: str) -> Template:
    """Read a template. Raise ``Invalid`` at what Go's parser refuses, and at definitions of templates."""
    return Template(go_template_syntax.parse(text, _FUNCTIONS))


class _Run:
    """One execution."""

    def __init__(self, dot: Struct) -> None:
        self.written: list[str] = []
        self._size = 0
        self._steps = 0
        self._variables: list[tuple[str, Any]] = [("$", dot)]

    def nodes(self, nodes: Sequence[Node], dot: Any) -> None:
        for node in nodes:
            self._step()
            match node:
                case str():
                    self._write(node)
                case Pipeline():
                    value = self._pipeline(node, dot)
                    if not node.variables:
                        self._write(go_text(value))
                case Control():
                    self._control(node, dot)
                case Jump(keyword):
                    raise _Broken(keyword)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise Invalid(f"the template takes more than {STEPS_MAX} steps")

    def _write(self, text: str) -> None:
        self._size += len(text)
        if self._size > OUTPUT_MAX:
            raise Invalid(f"the template writes more than {OUTPUT_MAX} characters")
        self.written.append(text)

    def _control(self, node: Control, dot: Any) -> None:
        scope = len(self._variables)
        if node.keyword == "range":
            self._range(node, dot)
        else:
            value = self._pipeline(node.pipeline, dot)
            if is_true(value):
                self.nodes(node.body, value if node.keyword == "with" else dot)
            else:
                self.nodes(node.otherwise, dot)
        del self._variables[scope:]

    def _range(self, node: Control, dot: Any) -> None:
        pipeline = node.pipeline
        value = self._pipeline(Pipeline((), False, pipeline.commands), dot)
        if isinstance(value, bool) or not isinstance(value, list | int | None):
            raise Invalid(f"range can't iterate over {_kind(value)}")
        items = range(max(value, 0)) if isinstance(value, int) else value or ()
        scope = len(self._variables)
        names = pipeline.variables
        if pipeline.declares:
            self._variables += [(name, None) for name in names]
        inner = len(self._variables)
        for index, item in enumerate(items):
            self._step()
            for name, given in zip(
                names, (index, item)[-len(names) :] if names else (), strict=True
            ):
                self._set(name, given)
            try:
                self.nodes(node.body, item)
            except _Broken as broken:
                if broken.keyword == "break":
                    break
            finally:
                del self._variables[inner:]
        del self._variables[scope:]
        if not len(items):
            self.nodes(node.otherwise, dot)

    def _set(self, name: str, value: Any) -> None:
        at = max(at for at, (known, _) in enumerate(self._variables) if known == name)
        self._variables[at] = (name, value)

    def _pipeline(self, pipeline: Pipeline, dot: Any) -> Any:
        value: tuple[Any, ...] = ()
        for command in pipeline.commands:
            value = (self._command(command, dot, value),)
        for name in pipeline.variables:
            if pipeline.declares:
                self._variables.append((name, value[0]))
            else:
                self._set(name, value[0])
        return value[0]

    def _command(self, command: Command, dot: Any, final: tuple[Any, ...]) -> Any:
        """Return the value of a command. ``final`` is the value of its predecessor in the pipeline,
        if any."""
        first, *rest = command.operands
        if first.kind == "name":
            return self._call(first.value, rest, dot, final)
        if first.fields:
            arguments = [self._operand(one, dot) for one in rest]
            return self._field_chain(first, dot, [*arguments, *final])
        if rest or final:
            raise Invalid("can't give an argument to what is no function")
        if first.kind == "constant" and first.value is None:
            raise Invalid("nil is not a command")
        return self._operand(first, dot)

    def _operand(self, operand: Operand, dot: Any) -> Any:
        self._step()
        if operand.kind == "name":
            return self._call(operand.value, (), dot, ())
        if operand.fields:
            return self._field_chain(operand, dot, [])
        match operand.kind:
            case "constant":
                return operand.value
            case "variable":
                return next(v for n, v in reversed(self._variables) if n == operand.value)
            case "pipeline":
                return self._pipeline(operand.value, dot)
        return dot

    def _field_chain(self, operand: Operand, dot: Any, arguments: list[Any]) -> Any:
        value = self._operand(Operand(operand.kind, operand.value), dot)
        *inner, last = operand.fields
        for name in inner:
            value = _field(value, name, [])
        return _field(value, last, arguments)

    def _call(self, name: str, rest: Sequence[Operand], dot: Any, final: tuple[Any, ...]) -> Any:
        if name in ("and", "or"):
            return self._shortcut(name, rest, dot, final)
        arguments = [*(self._operand(one, dot) for one in rest), *final]
        try:
            value = _FUNCTIONS[name](*arguments)
        except (TypeError, ValueError, OverflowError, IndexError) as error:
            raise Invalid(f"error calling {name}: {error}") from error
        if isinstance(value, str) and len(value) > OUTPUT_MAX:
            raise Invalid(f"{name} gives more than {OUTPUT_MAX} characters")
        return value

    def _shortcut(
        self, name: str, rest: Sequence[Operand], dot: Any, final: tuple[Any, ...]
    ) -> Any:
        if not rest and not final:
            raise Invalid(f"wrong number of args for {name}: want at least 1 got 0")
        value: Any = None
        for one in rest:
            value = self._operand(one, dot)
            if is_true(value) == (name == "or"):
                return value
        return final[0] if final else value


def _field(value: Any, name: str, arguments: list[Any]) -> Any:
    if value is None:
        raise Invalid(f"nil pointer evaluating .{name}")
    found = getattr(value, "go_methods", None) if not isinstance(value, Struct) else value.methods
    if found is not None and (method := found.get(name)) is not None:
        try:
            return method(*arguments)
        except (TypeError, ValueError, OverflowError) as error:
            raise Invalid(f"error calling {name}: {error}") from error
    if isinstance(value, Struct) and (get := value.fields.get(name)) is not None:
        if arguments:
            raise Invalid(f"{name} has arguments but cannot be invoked as function")
        return get()
    raise Invalid(f"can't evaluate field {name} in {_kind(value)}")


def is_true(value: Any) -> bool:
    """Return True if ``if`` takes a value for true: not zero, and not empty. A struct always is."""
    return True if isinstance(value, Struct) else bool(value)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "nil"
        case bool():
            return "a bool"
        case int():
            return "an int"
        case float():
            return "a float64"
        case str():
            return "a string"
        case list():
            return "a list"
    return "a struct"


def _comparable(one: Any, other: Any) -> None:
    kinds = (_kind(one), _kind(other))
    if kinds[0] != kinds[1] or kinds[0] in ("a list", "a struct"):
        raise ValueError(f"incompatible types for comparison: {kinds[0]} and {kinds[1]}")


def _equal(one: Any, *others: Any) -> bool:
    if not others:
        raise ValueError("missing argument for comparison")
    for other in others:
        if one is None or other is None:
            same = one is None and other is None
        else:
            _comparable(one, other)
            same = one == other
        if same:
            return True
    return False


def _less(one: Any, other: Any) -> bool:
    _comparable(one, other)
    if one is None or isinstance(one, bool):
        raise ValueError("invalid type for comparison")
    return bool(one < other)


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, list):
        return len(value)
    raise TypeError(f"len of {_kind(value)}")


def _place(place: Any, end: int) -> int:
    if isinstance(place, bool) or not isinstance(place, int):
        raise TypeError(f"cannot index with {_kind(place)}")
    if not 0 <= place <= end:
        raise ValueError(f"index out of range: {place}")
    return place


def _index(value: Any, *places: Any) -> Any:
    for place in places:
        if isinstance(value, str):
            octets = value.encode()
            value = octets[_place(place, len(octets) - 1)]
        elif isinstance(value, list):
            value = value[_place(place, len(value) - 1)]
        else:
            raise TypeError(f"can't index {_kind(value)}")
    return value


def _slice(value: Any, *places: Any) -> Any:
    if isinstance(value, str):
        held: Any = value.encode()
    elif isinstance(value, list):
        held = value
    else:
        raise TypeError(f"can't slice {_kind(value)}")
    if len(places) > 2:
        raise ValueError("too many slice indexes")
    low = _place(places[0], len(held)) if places else 0
    high = _place(places[1], len(held)) if len(places) > 1 else len(held)
    if low > high:
        raise ValueError(f"invalid slice index: {low} > {high}")
    part = held[low:high]
    return part.decode("utf-8", "replace") if isinstance(part, bytes) else part


_HTML: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;", "\0": "\ufffd"}
_JS: Final = {
    "\\": "\\\\", "'": "\\'", '"': '\\"', "<": "\\u003C", ">": "\\u003E", "&": "\\u0026", "=": "\\u003D",
}  # fmt: skip


def _escaped(table: Mapping[str, str], text: str) -> str:
    return "".join(table.get(char, char) for char in text)


def _js(*values: Any) -> str:
    return "".join(
        f"\\u{ord(char):04X}" if ord(char) < 0x20 else _JS.get(char, char)
        for char in sprint(*values)
    )


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "and": lambda: None,
    "or": lambda: None,
    "not": lambda value: not is_true(value),
    "len": _length,
    "index": _index,
    "slice": _slice,
    "print": sprint,
    "println": lambda *values: " ".join(map(go_text, values)) + "\n",
    "printf": sprintf,
    "html": lambda *values: _escaped(_HTML, sprint(*values)),
    "js": _js,
    "urlquery": lambda *values: quote_plus(sprint(*values), safe="~"),
    "eq": _equal,
    "ne": lambda one, other: not _equal(one, other),
    "lt": _less,
    "le": lambda one, other: _less(one, other) or _equal(one, other),
    "gt": lambda one, other: not (_less(one, other) or _equal(one, other)),
    "ge": lambda one, other: not _less(one, other),
}
