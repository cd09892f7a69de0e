"""YAML that is read into typed fields. An unknown or a repeated key is an error.

The type of a field determines how its text is read. So a label's value stays as it is written, such as
``yes``, ``1.10`` or ``2020-01-01``, unlike in plain YAML. Anchors, aliases and merge keys work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, TypeVar

import yaml

from gazette.errors import Invalid
from gazette.protocol.label_set import Label, LabelSet
from gazette.protocol.text.duration import format_go_duration, parse_go_duration
from gazette.protocol.text.validation import INT64, UINT32
from gazette.runtime.numbers import parse_number

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN_INTEGER: Final = re.compile(r"[+-]?[0-9a-zA-Z_]{1,64}")
"""Pattern of a number. Accepts ``1_000``, like the original, but not ``1:30``, which YAML 1.1 reads as 90."""
_PREFIXED_INTEGER: Final = re.compile(r"[+-]?0[oOxXbB][0-9a-fA-F_]{1,64}")
_SHORT_BOOLEANS: Final = {"y": True, "Y": True, "n": False, "N": False}
"""Short booleans of YAML 1.1 and the original. PyYAML does not read them as booleans."""
_NULL: Final = _TAG + "null"
_DEPTH_MAX: Final = 200
_TEXT_MAX: Final = 32 << 20
_NODES_MAX: Final = 1_000_000
_FREE_NODES: Final = 100_000
_ALIAS_RATIO: Final = 10
"""Greatest number of values, aliases included, for each value in the text, beyond `_FREE_NODES` values."""
_SHOWN_MAX: Final = 100
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Item = TypeVar("Item")


class Fields:
    """Fields of one YAML mapping. All of them must be in ``known``.

    For a field that is absent or null, ``boolean`` and ``fields`` return None, and each other accessor
    returns the zero value of its type. Accessors raise ``Invalid`` for a value of another type.
    """

    __slots__ = ("_nodes",)

    def __init__(self, node: yaml.Node | None, known: Iterable[str]) -> None:
        self._nodes: dict[str, yaml.Node] = {}
        if node is None or node.tag == _NULL:
            return
        if not isinstance(node, yaml.MappingNode):
            raise _invalid(node, "expected a mapping")
        nodes = _flattened(node)
        permitted = frozenset(known)
        for name, (key, value) in nodes.items():
            if name not in permitted:
                raise Invalid(
                    f"line {_line(key)}: unknown field {name[:_SHOWN_MAX]}",
                    hint=f"Known fields are {', '.join(known)}.",
                )
            if value.tag != _NULL:
                self._nodes[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def text(self, name: str) -> str:
        node = self._nodes.get(name)
        return "" if node is None else _scalar(node).value

    def integer(self, name: str, bounds: tuple[int, int] = INT64) -> int:
        node = self._nodes.get(name)
        return 0 if node is None else _integer(_scalar(node), bounds)

    def boolean(self, name: str) -> bool | None:
        node = self._nodes.get(name)
        if node is None:
            return None
        if _is_plain(node) and _scalar(node).value in _SHORT_BOOLEANS:
            return _SHORT_BOOLEANS[_scalar(node).value]
        if _scalar(node).tag != _TAG + "bool":
            raise _invalid(node, "expected true or false")
        return yaml.constructor.SafeConstructor().construct_yaml_bool(_scalar(node))

    def duration_ns(self, name: str) -> int:
        """Return a duration in nanoseconds, given as text (``1m0s``) or in nanoseconds; 0 if it is absent.
        Raise ``Invalid`` for another value."""
        node = self._nodes.get(name)
        if node is None:
            return 0
        if node.tag == _TAG + "int":
            return _integer(_scalar(node), INT64)
        try:
            return parse_go_duration(_scalar(node).value)
        except Invalid as error:
            raise _invalid(node, error.message) from None

    def enum(self, name: str, values: type[IntEnum], *, numbers: bool = False) -> int:
        """Return the number of the member of ``values`` with the name that is given; 0 if it is absent.

        With ``numbers``, permit any number of 32 bits. Raise ``Invalid`` for another value.
        """
        node = self._nodes.get(name)
        if node is None:
            return 0
        if numbers and node.tag == _TAG + "int":
            return _integer(_scalar(node), UINT32)
        value = values.__members__.get(_scalar(node).value)
        if value is None:
            options = ", ".join(values.__members__)
            raise _invalid(node, f"not a valid {values.__name__} (options are {options})")
        return value

    def items(self, name: str, decode: Callable[[yaml.Node], Item]) -> tuple[Item, ...]:
        """Return the decoded items of a sequence; () if it is absent. Raise ``Invalid`` for another node."""
        node = self._nodes.get(name)
        if node is None:
            return ()
        if not isinstance(node, yaml.SequenceNode):
            raise _invalid(node, "expected a list")
        return tuple(decode(item) for item in node.value)

    def labels(self, name: str) -> LabelSet:
        """Return labels, sorted. Keep repeated labels: `LabelSet.validate` refuses them."""
        return LabelSet(tuple(sorted(self.items(name, _decode_label))))

    def fields(self, name: str, known: Iterable[str]) -> Fields | None:
        """Return the fields of a nested mapping, or ``None`` if it is absent."""
        node = self._nodes.get(name)
        return None if node is None else Fields(node, known)


def decode(text: str, decode_root: Callable[[yaml.Node | None], Item]) -> Item:
    """Decode the root of one YAML document. The root of an empty document is ``None``.

    Raise ``Invalid`` for text that is not YAML, has several documents, nests too deeply, or grows too large.
    Errors of ``decode_root`` reach the caller.
    """
    try:
        return decode_root(compose(text))
    except RecursionError:
        raise Invalid("not YAML: nested too deeply") from None


def compose(text: str) -> yaml.Node | None:
    """Return the root of one YAML document, or ``None`` if the document is empty.

    Raise ``Invalid`` for text that is not YAML, has several documents, is too large, or nests too deeply.
    Raise it, too, if aliases repeat so many nodes that the tree is much larger than the text.
    """
    if len(text) > _TEXT_MAX:
        raise Invalid(f"not YAML: too long (expected <= {_TEXT_MAX} characters)")
    try:
        nodes = _check_events(text)
        loader = _LOADER(text)
        try:
            root: yaml.Node | None = loader.get_single_node()
        finally:
            loader.dispose()
        if root is not None:
            _check_aliases(root, _FREE_NODES + _ALIAS_RATIO * nodes)
    except yaml.YAMLError as error:
        raise Invalid(f"not YAML: {error}") from error
    except RecursionError:
        raise Invalid("not YAML: nested too deeply") from None
    return root


def _check_events(text: str) -> int:
    """Return the number of nodes, aliases included. Raise ``Invalid`` beyond the limits.

    Without this check, deep nesting would exhaust the stack of the C loader, and end the process.
    """
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        nodes += isinstance(event, yaml.NodeEvent)
        if depth > _DEPTH_MAX or nodes > _NODES_MAX:
            assert event.start_mark is not None
            why = "nested too deeply" if depth > _DEPTH_MAX else f"more than {_NODES_MAX} values"
            raise Invalid(f"line {event.start_mark.line + 1}: {why}")
    return nodes


def _check_aliases(root: yaml.Node, limit: int) -> None:
    """Raise ``Invalid`` if the tree under ``root`` has more than ``limit`` nodes, or contains itself.

    Visit each node once. An aliased node counts as often as it is used.
    """
    sizes: dict[int, tuple[int, int]] = {}
    open_nodes: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Return the number of nodes, and their depth. Raise ``Invalid`` beyond bounds, or for a circle."""
        cached = sizes.get(id(node))
        if cached is not None:
            return cached
        if isinstance(node, yaml.ScalarNode):
            return 1, 0
        if id(node) in open_nodes:
            raise _invalid(node, "holds an alias of itself")
        open_nodes.add(id(node))
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        size, depth = 1, 0
        for child in children:
            child_size, child_depth = measure(child)
            size, depth = size + child_size, max(depth, child_depth + 1)
        if size > limit:
            raise _invalid(node, f"aliases repeat too much (expected <= {limit} values)")
        if depth > _DEPTH_MAX:
            raise _invalid(node, "nested too deeply")
        open_nodes.remove(id(node))
        sizes[id(node)] = size, depth
        return size, depth

    measure(root)


def _decode_label(node: yaml.Node) -> Label:
    fields = Fields(node, ("name", "value", "prefix"))
    return Label(fields.text("name"), fields.text("value"), fields.boolean("prefix") or False)


def text_of(node: yaml.Node) -> str:
    """Return the text of a scalar."""
    text: str = _scalar(node).value
    return text


def dump(value: Mapping[str, Any]) -> str:
    """Return block-style YAML with keys in the order given."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        allow_unicode=True,
        default_flow_style=False,
        sort_keys=False,
        width=math.inf,
    )
    return text


def encode_labels(labels: LabelSet) -> list[dict[str, Any]]:
    """Return the value of a field of labels."""
    return [
        {"name": label.name, "value": label.value} | ({"prefix": True} if label.prefix else {})
        for label in labels.labels
    ]


def encode_duration(ns: int) -> str:
    """Return a duration as the value of a YAML field. Zero becomes ``""``, which is not written."""
    return format_go_duration(ns) if ns else ""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if not text else "|" if "\n" in text else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def entries(node: yaml.Node) -> dict[str, yaml.Node]:
    """Return the values of a mapping by key, including merged values. Raise ``Invalid`` for other nodes and
    repeated keys."""
    if not isinstance(node, yaml.MappingNode):
        raise _invalid(node, "expected a mapping")
    return {name: value for name, (_, value) in _flattened(node).items()}


def is_null(node: yaml.Node) -> bool:
    """Return True if YAML reads the node as null."""
    return bool(node.tag == _NULL)


def _flattened(node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Return key and value of each field by name. Fields of ``node`` itself replace merged fields. Raise
    ``Invalid`` for repeated fields."""
    own_fields: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    merged_fields: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        if key.tag == _TAG + "merge":
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in sources:
                if not isinstance(source, yaml.MappingNode) or source is node:
                    raise _invalid(value, "expected a mapping to merge")
                # If several sources have a field, the first one counts.
                merged_fields = _flattened(source) | merged_fields
            continue
        name = _scalar(key).value
        if name in own_fields:
            raise _invalid(key, f"field {name} is set more than once")
        own_fields[name] = (key, value)
    return merged_fields | own_fields


def _scalar(node: yaml.Node) -> yaml.ScalarNode:
    if not isinstance(node, yaml.ScalarNode):
        raise _invalid(node, "expected a single value")
    return node


def _is_plain(node: yaml.Node) -> bool:
    """Return True for a scalar without quotes."""
    return isinstance(node, yaml.ScalarNode) and not node.style


def _integer(node: yaml.ScalarNode, bounds: tuple[int, int]) -> int:
    """Return the integer of a scalar, in each form that the original accepts. Raise ``Invalid`` for another
    form, or an integer out of ``bounds``."""
    try:
        if node.tag == _TAG + "int":
            if not _PLAIN_INTEGER.fullmatch(node.value):
                raise ValueError(node.value)
            value = yaml.constructor.SafeConstructor().construct_yaml_int(node)
        elif _is_plain(node) and _PREFIXED_INTEGER.fullmatch(node.value):
            value = int(node.value, 0)
        else:
            number = parse_number(node.value)  # Accept 1e9, as Go does.
            value = int(number)
            if value != number:
                raise ValueError(number)
    except (ValueError, OverflowError):
        raise _invalid(node, "expected an integer") from None
    if not bounds[0] <= value <= bounds[1]:
        raise _invalid(node, "the integer is out of range")
    return value


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _invalid(node: yaml.Node, message: str) -> Invalid:
    shown = f" ({node.value[:_SHOWN_MAX]})" if isinstance(node, yaml.ScalarNode) else ""
    return Invalid(f"line {_line(node)}: {message}{shown}")
