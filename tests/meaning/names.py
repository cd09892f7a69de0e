"""Names of fields by a seed, in lines of other programs. See `tests.meaning.places`.

Each class is used here for the first time to decode: no value of it was encoded before. Most names of a seed
are of no other seed.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from keyword import iskeyword
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec
import pyarrow as pa
import pydantic

import gazette
from gazette.testing.app_driver import AppDriver
from gazette.testing.stored import write_journal
from tests.meaning.places import SOURCE, StateWriter
from tests.meaning.values import Case

_NAMES: Final = ("größe", "π", "部分", "ключ", "ñ", "ſ", "ﬁ", "ª", "x", "e\u0301", "𝒳", "İ")
_ODD: Final = (
    *("a b", "a.b", "", "/", "%", "😀", "\u2028", "1", "__x", "UUID", "{", "}", ":", ",", "[", "null"),
    *("class", "self", "f0", "'", "\x7f"),
)  # fmt: skip
_REFUSED_BY_STRUCTS: Final = ('"', "\\", "\0", "a\nb")
_COUNT: Final = 3
_TYPES: Final[dict[type, pa.DataType]] = {
    float: pa.float64(),
    str: pa.string(),
    int: pa.int64(),
    bool: pa.bool_(),
}
_new_typed_dict: Final[Any] = TypedDict

Reader = Callable[[Sequence[str], Sequence[type]], tuple[Any, Callable[[Any], Any]]]
"""Function from names and types of fields to a class, and a function from a message to its values."""


def _names(rng: random.Random, *, identifiers: bool, more: Sequence[str] = ()) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < _COUNT:
        name = "".join(rng.choice(_NAMES) for _ in range(rng.randrange(1, 4)))
        if identifiers:
            name = unicodedata.normalize("NFKC", name)
            if not name.isidentifier() or iskeyword(name):
                continue
        elif rng.randrange(2):
            name = rng.choice((*_ODD, *more)) + rng.choice(("", name))
        found[name] = None
    return list(found)


def _of_dataclass(names: Sequence[str], types: Sequence[type]) -> tuple[Any, Any]:
    fields: Any = [
        (name, kind, field(default=kind())) for name, kind in zip(names, types, strict=True)
    ]
    made = make_dataclass("Made", [*fields, ("uuid", str, field(default=""))])
    return made, attrgetter(*names)


def _of_struct(names: Sequence[str], types: Sequence[type]) -> tuple[Any, Any]:
    attributes = [f"f{n}" for n in range(len(names))]
    fields: Any = [(name, kind, kind()) for name, kind in zip(attributes, types, strict=True)]
    rename = dict(zip(attributes, names, strict=True))
    made = msgspec.defstruct("Made", [*fields, ("uuid", str, "")], rename=rename)
    return made, attrgetter(*attributes)


def _of_model(names: Sequence[str], types: Sequence[type]) -> tuple[Any, Any]:
    attributes = [f"f{n}" for n in range(len(names))]
    fields: Any = {
        attribute: (kind, pydantic.Field(default=kind(), alias=name))
        for attribute, name, kind in zip(attributes, names, types, strict=True)
    }
    return pydantic.create_model("Made", uuid=(str, ""), **fields), attrgetter(*attributes)


def _in_a_typed_dict(names: Sequence[str], types: Sequence[type]) -> tuple[Any, Any]:
    inner = _new_typed_dict("Inner", dict(zip(names, types, strict=True)))
    made = msgspec.defstruct("Made", [("inner", inner), ("uuid", str, "")])
    return made, lambda message: [message.inner[name] for name in names]


_READERS: Final[tuple[Reader, ...]] = (_of_dataclass, _of_struct, _of_model, _in_a_typed_dict)


def check_names(cases: Sequence[Case], directory: Path) -> int:
    """Read a line as a class, as a dict, and as a row of a table."""
    with AppDriver(StateWriter(cases), directory, [SOURCE]) as driver:
        for case in cases:
            _check(case, driver, directory / str(case.seed))
    return len(cases)


def _check(case: Case, driver: AppDriver[Any], directory: Path) -> None:
    rng = random.Random(case.seed)
    reader = rng.choice(_READERS)
    more = () if reader is _of_struct else _REFUSED_BY_STRUCTS
    names = _names(rng, identifiers=reader is _of_dataclass, more=more)
    values = [rng.choice((1.5, "text", 7, True)) for _ in names]
    types = [type(value) for value in values]
    fields = dict(zip(names, values, strict=True))
    is_nested = reader is _in_a_typed_dict
    document = {**({"inner": fields} if is_nested else fields), "uuid": ""}
    line = json.dumps(document, ensure_ascii=bool(rng.randrange(2))).encode() + b"\n"
    case = case._replace(type=reader.__name__, value=line)

    journal = f"values/{case.seed}"
    driver.feed(journal, line)
    made, values_of = reader(names, types)
    (message,) = driver.committed(journal, made)
    assert list(values_of(message)) == values, f"{case}: reads as {message}"
    (read,) = driver.committed(journal, dict)
    assert read == document, f"{case}: reads as {read}"
    if is_nested:
        return
    (directory / "fragments").mkdir(parents=True)
    write_journal(directory, "file:///fragments/", "rows", [line])
    schema = pa.schema([(name, _TYPES[kind]) for name, kind in zip(names, types, strict=True)])
    table = gazette.read_table(
        "rows",
        store=f"{directory}/fragments",
        fields=schema,
        columns=names,
        isolation="read_uncommitted",
    )
    (row,) = table.to_pylist()
    assert list(row.values()) == values, f"{case}: a row of {row}"


__all__: Final = ["check_names"]
