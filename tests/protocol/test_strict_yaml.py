"""YAML of strangers: bounded in time and memory, however its aliases and merge keys multiply."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import yaml

from gazette.config.yaml_file import yaml_entries
from gazette.errors import Invalid
from gazette.protocol.journal_tree import JournalNode
from gazette.protocol.shard_list import ShardList
from gazette.protocol.text import strict_yaml
from gazette.protocol.text.validation import INT32
from gazette.runtime.numbers import is_digits, parse_integer, parse_number

LEVELS = 40
"""Each doubles what is below: without a bound no walk would end."""


def merges() -> Iterator[str]:
    yield "a0: &a0 {x: 1}"
    for level in range(1, LEVELS):
        yield f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}]}}"
    yield f"<<: *a{LEVELS - 1}"


def children() -> Iterator[str]:
    yield "common: &a0 {name: a/journal}"
    for level in range(1, LEVELS):
        yield f"x{level}: &a{level} {{children: [*a{level - 1}, *a{level - 1}]}}"
    yield f"children: [*a{LEVELS - 1}]"


def tree() -> Iterator[str]:
    """Decode as a specification whose fields are known: only what is aliased multiplies."""
    yield "name: a/"
    yield "children:"
    yield "  - &a0 {name: a/b/}"
    for level in range(1, LEVELS):
        yield f"  - &a{level} {{name: a/, children: [*a{level - 1}, *a{level - 1}]}}"


def shard_bomb() -> Iterator[str]:
    yield "common: &a0 {id: a-shard, labels: &l [{name: a, value: b}]}"
    yield "shards:"
    yield "  - &s0 {<<: *a0}"
    for level in range(1, LEVELS):
        yield f"  - &s{level} {{<<: [*s{level - 1}, *s{level - 1}]}}"


def settings() -> Iterator[str]:
    yield "a: &a0 [x]"
    for level in range(1, LEVELS):
        yield f"b{level}: &a{level} [*a{level - 1}, *a{level - 1}]"


def nested_settings() -> Iterator[str]:
    yield "a: &a0 {x: 1}"
    for level in range(1, LEVELS):
        yield f"b{level}: &a{level} {{p: *a{level - 1}, q: *a{level - 1}}}"


INT_FIELD: Final[dict[str, int | None]] = {
    "1_0": 10, "1_000": 1000, "1_": 1, "_1": None, "0x1_0": 16, "0X1F": 31, "0b1_0": 2, "-0b11": -3, "010": 8,
    "0o10": 8, "08": 8, "1:30": None, "190:20:30": None, "+1": 1, "1e3": 1000, "1.0": 1,  "12e03": 12000,
    "\u0661": None, "2147483648": None, "~": 0, "0x": None, "0o8": None, "yes": None, "0B11": 3, "-0o7": -7,
}  # fmt: skip
"""Texts and the int32 that yaml.v2 2.4.0 makes of them. None: an error.

Fractions are errors here. yaml.v2 accepts `1_0.0`, and cuts the fraction of `1.5` off.
"""
BOOL_FIELD: Final[dict[str, bool | None]] = {
    "yes": True, "on": True, "y": True, "Y": True, "TRUE": True, "no": False, "n": False, "N": False,
    "Off": False, "tRuE": None, "'true'": None, "'y'": None, "1": None, "yEs": None,
}  # fmt: skip
"""Texts and the bool that yaml.v2 2.4.0 makes of them. None: an error."""

BOMBS = {
    "merges": "\n".join(merges()),
    "children": "\n".join(children()),
    "tree": "\n".join(tree()),
    "shards": "\n".join(shard_bomb()),
    "settings": "\n".join(settings()),
    "nested settings": "\n".join(nested_settings()),
    "a chain of aliases": "\n".join(
        ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{x: *a{i - 1}}}" for i in range(1, 5000))]
    ),
    "an alias of itself": "children: &a [*a]",
    "a merge of itself": "a: &a {<<: *a}",
    "brackets": "[" * 1_000_000,
    "braces": "{a: " * 100_000,
    "dashes": "- " * 100_000,
    "keys": "? " * 100_000,
    "too many values": "[" + "a," * 1_000_001 + "]",
    "too long": "#" * ((32 << 20) + 1),
}
READERS: dict[str, Callable[[str], Any]] = {
    "journals": JournalNode.parse,
    "shards": ShardList.parse,
    "settings": lambda text: list(yaml_entries(text)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused(bomb: str, reader: str) -> None:
    with pytest.raises(Invalid) as refused:
        READERS[reader](BOMBS[bomb])
    assert len(str(refused.value)) < 500


def test_a_bomb_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Invalid, match="aliases repeat too much"):
            list(yaml_entries(BOMBS["settings"]))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_ordinary_aliases_are_read() -> None:
    """A common fragment of 2,000 journals, by an alias and by a merge key."""
    lines = [
        "name: a/",
        "fragment: &f {length: 1024, compression_codec: GZIP, stores: ['s3://b/']}",
    ]
    lines += ["children:"]
    lines += [f"  - {{name: a/{i}, fragment: {{<<: *f, length: {i + 1}}}}}" for i in range(1000)]
    lines += [f"  - {{name: a/{i}, fragment: *f}}" for i in range(1000, 2000)]
    node = JournalNode.parse("\n".join(lines))
    assert len(node.children) == 2000


def test_settings_are_the_text_that_is_written() -> None:
    text = "a: {port: 0777, on: yes, none: ~, list: [1_0, 2020-01-01, 'x y'], empty: ''}\nb: null"
    assert dict(yaml_entries(text)) == {
        "a.port": "0777",
        "a.on": "yes",
        "a.list": "1_0,2020-01-01,x y",
        "a.empty": "",
    }
    for bad in ("- a", "a", "a: {b: [[1]]}", "a: 1\na: 2", "? [a]\n: b", "a: 1\n--- \nb: 1"):
        with pytest.raises(Invalid):
            list(yaml_entries(bad))


@pytest.mark.parametrize(
    "number", ["1_0.0", "1_0e1", "1:30", "١", "1²", "0x" + "f" * 100, "9" * 5000]
)
def test_numbers_that_are_refused(number: str) -> None:
    with pytest.raises(Invalid) as refused:
        JournalNode.parse(f"{{name: a/b, replication: {number}}}")
    assert len(str(refused.value)) < 300
    assert not is_digits(number)
    with pytest.raises(ValueError, match="expected an integer"):
        parse_integer(number)
    with pytest.raises(ValueError, match="expected an integer"):
        parse_integer("1_0")
    with pytest.raises(ValueError, match="expected a number"):
        parse_number(number)


def test_numbers_that_are_read() -> None:
    for text, value in (("+1", 1), ("-07", -7), ("9" * 19, 10**19 - 1)):
        assert parse_integer(text) == value
    for text, number in (("1.", 1.0), (".5", 0.5), ("-1.5e3", -1500.0), ("1E-2", 0.01)):
        assert parse_number(text) == number
    for text in ("", ".", "e1", "inf", "nan", "1e1000", "0x1p4", " 1", "1 "):
        with pytest.raises(ValueError, match="expected a number"):
            parse_number(text)
    for text, value in (("10", 10), ("0x10", 16), ("010", 8), ("1e1", 10)):
        assert JournalNode.parse(f"{{name: a/b, replication: {text}}}").spec.replication == value


def test_the_root_may_be_empty() -> None:
    assert strict_yaml.compose("") is None
    assert list(yaml_entries("# nothing")) == []


def decode_field(text: str, kind: str) -> int | bool | None:
    def root(node: yaml.Node | None) -> int | bool | None:
        fields = strict_yaml.Fields(node, ("x",))
        return fields.integer("x", INT32) if kind == "int" else fields.boolean("x")

    try:
        return strict_yaml.decode(f"x: {text}", root)
    except Invalid:
        return None


@pytest.mark.parametrize(
    ("kind", "facts"), [("int", INT_FIELD), ("bool", BOOL_FIELD)], ids=["int", "bool"]
)
def test_scalars_are_read_as_the_original_reads_them(
    kind: str, facts: dict[str, int | bool | None]
) -> None:
    assert {text: decode_field(text, kind) for text in facts} == facts
