"""Types of messages beside flat ones: see `tests.meaning.places`.

Values stand in nested objects, in models of pydantic, in fields of protobuf, and in rows of CSV.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict

import msgspec
import pydantic
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gazette.labels import CONTENT_CSV, CONTENT_PROTO_FIXED
from gazette.message.message import CSVRecord, Message
from gazette.testing.app_driver import AppDriver
from tests.meaning.places import (
    SOURCE,
    StateWriter,
    ValueOf,
    publishes,
)
from tests.meaning.values import INTS, Case, odd, raw, real, text, whole

Shaped = tuple[Case, Any, ValueOf]


class Anything(msgspec.Struct):
    """A nested object that declares nothing of its value."""

    value: Any = None
    name: str = ""


class Holder(Message):
    inner: Anything
    others: list[Anything] = msgspec.field(default_factory=list)


# -- nested objects

_new_named_tuple: Final[Any] = NamedTuple
_new_typed_dict: Final[Any] = TypedDict


def _in_a_struct(case: Case) -> Shaped:
    inner = msgspec.defstruct("Inner", [("value", case.type), ("n", int, 0)])
    outer: Any = msgspec.defstruct("Outer", [("value", inner), ("uuid", str, "")])
    return case, outer(inner(case.value)), attrgetter("value.value")


def _in_undeclared_fields(case: Case) -> Shaped:
    case = case._replace(type=Any, fits=case.fits and case.type is Any)
    message = Holder(inner=Anything(case.value), others=[Anything(case.value)])
    return case, message, lambda found: [found.inner.value, found.others[0].value]


def _in_a_named_tuple(case: Case) -> Shaped:
    pair = _new_named_tuple("Pair", [("first", int), ("second", case.type)])
    made: Any = msgspec.defstruct("Made", [("value", pair), ("uuid", str, "")])
    return case, made(pair(7, case.value)), attrgetter("value")


def _in_a_typed_dict(case: Case) -> Shaped:
    entry = _new_typed_dict("Entry", {"first": int, "second": case.type})
    made: Any = msgspec.defstruct("Made", [("value", entry), ("uuid", str, "")])
    return case, made({"first": 7, "second": case.value}), attrgetter("value")


def _in_a_dataclass(case: Case) -> Shaped:
    below: Any = make_dataclass("Below", [("value", case.type), ("n", int, field(default=0))])
    made: Any = make_dataclass("Made", [("value", list[below]), ("uuid", str, field(default=""))])
    return case, made([below(case.value)]), lambda found: found.value[0].value


_SHAPES: Final[tuple[Callable[[Case], Shaped], ...]] = (
    _in_a_struct,
    _in_undeclared_fields,
    _in_a_named_tuple,
    _in_a_typed_dict,
    _in_a_dataclass,
)


def check_nested(cases: Sequence[Case], directory: Path) -> int:
    """Publish each value as a part of a nested object."""
    with AppDriver(StateWriter(cases), directory, [SOURCE]) as driver:
        shaped = [random.Random(case.seed).choice(_SHAPES)(case) for case in cases]
        return sum(publishes(case, driver, message, of) for case, message, of in shaped)


# -- pydantic


class Flexible(pydantic.BaseModel):
    """A model that declares nothing of its value."""

    value: Any
    uuid: str = ""


def check_models(cases: Sequence[Case], directory: Path) -> int:
    """Publish each value as a field of a model, also as a value that the model did not validate."""
    with AppDriver(StateWriter(cases), directory, [SOURCE]) as driver:
        shaped = [_in_a_model(case) for case in cases]
        return sum(publishes(case, driver, message, of) for case, message, of in shaped)


def _in_a_model(case: Case) -> Shaped:
    # What pydantic makes of a value when it validates it is its own: so nothing has to fit.
    case = case._replace(fits=False)
    try:
        model: Any = pydantic.create_model("Model", value=(case.type, ...), uuid=(str, ""))
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticSchemaGenerationError):
        model = Flexible  # It knows no Struct, for example.
    try:
        message = model(value=case.value)
    except Exception:  # noqa: BLE001 - whatever the model raises.
        message = model.model_construct(value=case.value)
    return case, message, attrgetter("value")


# -- protobuf

_Field: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final[dict[str, Any]] = {
    "double": _Field.TYPE_DOUBLE,
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


@cache
def _protobuf_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="meaning.proto", package="meaning", syntax="proto3"
    )
    kind = file.message_type.add(name="Row")
    kind.field.add(name="uuid", number=1, type=_Field.TYPE_BYTES, label=_Field.LABEL_OPTIONAL)
    for number, (name, scalar) in enumerate(_SCALARS.items(), 2):
        kind.field.add(name=f"{name}s", number=number, type=scalar, label=_Field.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("meaning.Row"))


def check_protobuf(cases: Sequence[Case], directory: Path) -> int:
    """Publish rows of protobuf, which checks values itself, and compare what it has of them."""
    kinds = {f"values/{case.seed}": CONTENT_PROTO_FIXED for case in cases}
    with AppDriver(StateWriter(cases), directory, [SOURCE], content_types=kinds) as driver:
        return sum(publishes(case, driver, row, _fields_of) for case, row in map(_row_of, cases))


def _row_of(case: Case) -> tuple[Case, Any]:
    rng = random.Random(case.seed)
    floats = [real(rng), rng.choice((math.inf, -math.inf, 0.0, -0.0))]
    row = _protobuf_class()(
        doubles=floats,
        int64s=[n for n in (whole(rng), rng.choice(INTS)) if -(2**63) <= n < 2**63],
        uint64s=[n for n in (abs(whole(rng)), rng.choice(INTS)) if 0 <= n < 2**64],
        bools=[bool(rng.randrange(2))],
        strings=[text(rng), text(rng)],
        bytess=[raw(rng), raw(rng)],
    )
    return case._replace(type="protobuf", value=row, fits=True), row


def _fields_of(row: Any) -> list[Any]:
    return [list(getattr(row, f"{name}s")) for name in _SCALARS]


# -- CSV


class Ordered(list[Any]):
    """A row of an application's own type, whose fields `to_csv` writes as they are."""

    __slots__ = ()
    uuid = CSVRecord.uuid

    @classmethod
    def from_csv(cls, fields: list[str]) -> Ordered:
        return cls(fields)

    def to_csv(self) -> list[Any]:
        return list(self)


def check_csv(cases: Sequence[Case], directory: Path) -> int:
    """Publish rows of CSV, of which each has as many fields as the others of its journal."""
    kinds = {f"values/{case.seed}": CONTENT_CSV for case in cases}
    with AppDriver(StateWriter(cases), directory, [SOURCE], content_types=kinds) as driver:
        return sum(_publishes_row(case, driver) for case in cases)


def _publishes_row(case: Case, driver: AppDriver[Any]) -> bool:
    rng = random.Random(case.seed)
    kind: Any = rng.choice((CSVRecord, Ordered))
    fields: list[Any] = [text(rng) for _ in range(rng.randrange(1, 5))]
    case = case._replace(type="csv", value=fields, fits="\r" not in "".join(fields))
    if not rng.randrange(3):
        fields[rng.randrange(len(fields))] = odd(rng)
        case = case._replace(fits=False)
    good = [kind(["", *[text(rng).replace("\r", "") for _ in fields]]) for _ in range(3)]
    return publishes(case, driver, kind(["", *fields]), lambda row: row[1:], *good)


__all__: Final = [
    "check_csv",
    "check_models",
    "check_nested",
    "check_protobuf",
]
