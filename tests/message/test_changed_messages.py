"""The table of docs/changing-messages.md: which changes of a type its former and new versions read."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gazette import Message
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.framing.framing import framing_of

PAGE = Path(__file__).parents[2] / "docs" / "changing-messages.md"
REFUSED = "refused"


class One(Message):
    a: int


class WithDefault(Message):
    a: int
    b: str = "x"


class WithoutDefault(Message):
    a: int
    b: str


class Renamed(Message):
    new: int = msgspec.field(name="a")


class Real(Message):
    a: float


class Either(Message):
    a: int | str


class Text(Message):
    a: str


class Color(enum.Enum):
    RED = "red"


class MoreColors(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Colored(Message):
    a: Color


class MoreColored(Message):
    a: MoreColors


def read(message_type: type[Any], line: str) -> Any:
    """Return what a source of that type makes of a line, as plain values."""
    codec = framing_of(CONTENT_JSON_LINES, message_type).codec
    try:
        message = codec.decode(line.encode())
    except msgspec.ValidationError:
        return REFUSED
    found = msgspec.to_builtins(message)
    found.pop("uuid")
    return found


ROWS: dict[str, list[tuple[type[Any], str, Any]]] = {
    "a field is added, with a default": [
        (WithDefault, '{"a":1}', {"a": 1, "b": "x"}),
        (One, '{"a":1,"b":"y"}', {"a": 1}),
    ],
    "a field is added, without a default": [
        (WithoutDefault, '{"a":1}', REFUSED),
        (One, '{"a":1,"b":"y"}', {"a": 1}),
    ],
    "a field is removed": [
        (One, '{"a":1,"b":"y"}', {"a": 1}),
        (WithDefault, '{"a":1}', {"a": 1, "b": "x"}),
        (WithoutDefault, '{"a":1}', REFUSED),
    ],
    'a field is renamed, `new: int = field(name="old")`': [
        (Renamed, '{"a":1}', {"a": 1}),
        (One, msgspec.json.encode(Renamed(new=1)).decode(), {"a": 1}),
    ],
    "`int` becomes `float`": [
        (Real, '{"a":1}', {"a": 1.0}),
        (One, '{"a":1.5}', REFUSED),
    ],
    "`int` becomes `int \\| str`": [
        (Either, '{"a":1}', {"a": 1}),
        (One, '{"a":"one"}', REFUSED),
    ],
    "`str` becomes an enumeration": [
        (Colored, '{"a":"red"}', {"a": "red"}),
        (Colored, '{"a":"blue"}', REFUSED),
        (Text, '{"a":"red"}', {"a": "red"}),
    ],
    "a value is added to an enumeration": [
        (MoreColored, '{"a":"red"}', {"a": "red"}),
        (Colored, '{"a":"blue"}', REFUSED),
    ],
}


@pytest.mark.parametrize("change", ROWS)
def test_a_change_is_read_as_the_page_says(change: str) -> None:
    for message_type, line, expected in ROWS[change]:
        assert read(message_type, line) == expected


def test_the_page_has_these_rows_and_no_other() -> None:
    table = PAGE.read_text().partition("| change |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (.*?)(?<!\\) \| ", table, re.MULTILINE)[0:] == list(ROWS)
