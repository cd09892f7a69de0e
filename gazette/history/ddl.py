"""Parses columns as in ``CREATE TABLE``, to an Arrow schema. Spark itself does this only in its JVM. Pure."""

from __future__ import annotations

import re
from typing import Final, NoReturn

import pyarrow as pa

from gazette.errors import Invalid

_TYPES: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "tinyint": pa.int8(),
    "short": pa.int16(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "decimal": pa.decimal128(10, 0),
}
_TOKEN = re.compile(r"\s*(?:(?P<name>\w+)|`(?P<quoted>(?:[^`]|``)*+)`|(?P<sign>[<>(),:]))")


def parse_columns(text: str) -> pa.Schema:
    """Return the columns of a text such as ``word string, counts array<long>``, or raise `Invalid`."""
    parser = _Parser(text)
    fields = parser.fields(colon=False)
    parser.end()
    return pa.schema(fields)


class _Parser:
    """A recursive descent parser: the name of each method says what the method parses."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def fields(self, *, colon: bool) -> list[pa.Field]:
        """Parse columns with commas between them. ``colon``: require one between a name and its type."""
        fields = [self._field(colon)]
        while self.peek() == ",":
            self._take(",")
            fields.append(self._field(colon))
        names = [field.name for field in fields]
        for name in names:
            if names.count(name) > 1:
                self.fail(f"there are two columns {name}")
        return fields

    def _field(self, colon: bool) -> pa.Field:
        name = self._name("the name of a column")
        if colon or self.peek() == ":":
            self._take(":")
        return pa.field(name, self._type())

    def _type(self) -> pa.DataType:
        begin = self._at
        name = self._name("a type").lower()
        if name == "array":
            (item,) = self._within("<", ">", 1)
            return pa.list_(item)
        if name == "map":
            key, item = self._within("<", ">", 2)
            return pa.map_(key, item)
        if name == "struct":
            self._take("<")
            fields = self.fields(colon=True)
            self._take(">")
            return pa.struct(fields)
        if name in ("decimal", "numeric", "dec"):
            return self._decimal()
        data_type = _TYPES.get(name)
        if data_type is None:
            self._at = begin
            self.fail(f"there is no type {name} (known: {', '.join(_TYPES)}, array, map, struct)")
        return data_type

    def _within(self, opening: str, closing: str, count: int) -> list[pa.DataType]:
        """Return ``count`` types that commas separate, between ``opening`` and ``closing``."""
        self._take(opening)
        types = [self._type()]
        for _ in range(count - 1):
            self._take(",")
            types.append(self._type())
        self._take(closing)
        return types

    def _decimal(self) -> pa.DataType:
        if self.peek() != "(":
            return pa.decimal128(10, 0)
        self._take("(")
        numbers = [self._name("a number")]
        if self.peek() == ",":
            self._take(",")
            numbers.append(self._name("a number"))
        self._take(")")
        try:
            return pa.decimal128(*map(int, numbers))
        except ValueError as error:
            self.fail(str(error))

    def end(self) -> None:
        if self._text[self._at :].strip():
            self.fail()

    def peek(self) -> str:
        """Return the next token; an empty text at the end, or if no token is there."""
        match = _TOKEN.match(self._text, self._at)
        return "" if match is None else match[0].strip()

    def _take(self, sign: str) -> None:
        if self.peek() != sign:
            self.fail(f"expected {sign}")
        self._next()

    def _name(self, what: str) -> str:
        """Take a name, without its quotes, and return it. ``what`` says in an error what was expected."""
        match = _TOKEN.match(self._text, self._at)
        name = None if match is None else match["name"] or match["quoted"]
        if name is None:
            self.fail(f"expected {what}")
        self._next()
        return name.replace("``", "`")

    def _next(self) -> None:
        match = _TOKEN.match(self._text, self._at)
        assert match is not None, "peeked before"
        self._at = match.end()

    def fail(self, reason: str = "unexpected text") -> NoReturn:
        remaining = self._text[self._at :].strip() or "the end"
        raise Invalid(
            f"not columns ({self._text!r}): {reason} at {remaining[:40]!r}",
            path="fields",
            hint="Give them as in CREATE TABLE: `word string, counts array<long>`.",
        )
