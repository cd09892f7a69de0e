"""Converts values of JSON to values of columns, as ``spark.read.json`` does: `JsonRow`. Needs pyarrow.

This module is the specification for JSON. The compiled scanner is faster. It declines some values, and
converts all others to the same result. `tests/spark/test_json_types.py` compares both with Spark by type.

A value that does not fit its column is null, never another number. Three values therefore differ from Spark,
which wraps or guesses: a byte beyond 127, seconds beyond the range of timestamps, and a time without a date.
"""

from __future__ import annotations

import binascii
import datetime
import decimal
import json
import re
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from gazette.errors import Invalid
from gazette.history import lenient_json
from gazette.history.lenient_json import NO_JSON, NOT_FINITE
from gazette.runtime.decoders import json_decoder

Convert = Callable[[bytes, list[str]], Any]
"""Function that converts the text of a value. Raises ``ValueError`` if the value does not fit.

A field of an object that does not fit becomes null. The function appends a description of it to the list. If
an item of a list or map does not fit, the whole list or map does not fit.
"""

EncodeVariant = Callable[[str], dict[str, bytes]]
"""Function from JSON text to value and metadata of a VARIANT. Raises ``ValueError``."""

_NULL: Final = b"null"
_INTEGER: Final = re.compile(rb"-?[0-9]+")
_NUMBER_BEGIN: Final = b"-0123456789"
_DECIMAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE]([+-]?0*\d{1,10}))?", re.ASCII)
_DECIMALS: Final = decimal.Context(
    prec=decimal.MAX_PREC,
    Emin=decimal.MIN_EMIN,
    Emax=decimal.MAX_EMAX,
    rounding=decimal.ROUND_HALF_UP,
)
"""Context of all arithmetic with decimals: the default one would round to 28 digits."""
_EXPONENT_MAX: Final = 400
"""Greatest exponent of a decimal that is expanded. With a greater one, the value is zero or does not fit."""

_BASE64_GROUP: Final = re.compile(r"[A-Za-z0-9+/]{2}(?:[A-Za-z0-9+/]{2}|[A-Za-z0-9+/]=|==)")
# The outer repetition is not possessive: before Python 3.11.5, a possessive one matches wrongly if its group
# must backtrack (gh-106052).
_BASE64: Final = re.compile(rf"(?:[\x00-\x20]*+{_BASE64_GROUP.pattern})*[\x00-\x20]*+")

_DAY: Final = re.compile(
    r"([+-]?\d{4,7})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T].*)?)?)?", re.ASCII | re.DOTALL
)
_DAYS: Final = re.compile(r"[+-]?\d{1,10}", re.ASCII)
_TIME: Final = re.compile(
    r"([+-]?\d{4,6})(?:-(\d{1,2})(?:-(\d{1,2})"
    r"(?:[ T](\d{1,2})(?::(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?(.*))?)?)?)?)?",
    re.ASCII | re.DOTALL,
)
_OFFSET: Final = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2})(?::?(\d{2}))?)?", re.ASCII)
_SHORT_ZONES: Final = {
    "EST": "-05:00",
    "MST": "-07:00",
    "HST": "-10:00",
    "PST": "America/Los_Angeles",
}
_ZERO_OFFSETS: Final = frozenset({"Z", "UTC", "GMT", "UT"})
_OFFSET_MAX_S: Final = 18 * 3600
_DAY_S: Final = 86400
_MICROS: Final = 1_000_000
_ERA_YEARS: Final = 400
_ERA_DAYS: Final = 146_097
_EPOCH: Final = datetime.date(1970, 1, 1).toordinal()
_GREGORIAN_BEGIN: Final = datetime.date(1582, 10, 15).toordinal() - _EPOCH
_INT32: Final = range(-(1 << 31), 1 << 31)
_INT64: Final = range(-(1 << 63), 1 << 63)

_decode_object = json_decoder(dict[str, msgspec.Raw]).decode
_decode_list = json_decoder(list[msgspec.Raw]).decode
_decode_text = json_decoder(str).decode


class JsonRow:
    """Reader of lines of JSON as the fields of a schema. For one thread."""

    def __init__(self, fields: pa.Schema, encode_variant: EncodeVariant | None = None) -> None:
        """Make a reader. Raise ``Invalid`` for a type that no JSON value converts to."""
        self._fields = [
            (field.name, _convert(field.name, field.type, encode_variant)) for field in fields
        ]

    def read(self, line: bytes) -> tuple[list[Any], list[str]]:
        """Return the values of a line, in the order of the schema, and descriptions of misfits.

        A misfit, which does not fit its column, is None. If a line is no JSON object, all values are None.
        """
        misfits: list[str] = []
        try:
            members = _line(line)
        except ValueError as error:
            return [None] * len(self._fields), [str(error)]
        return [
            _member(members.get(name), convert, misfits, name) for name, convert in self._fields
        ], misfits


def value_reader(type_: pa.DataType) -> Callable[[Any], Any]:
    """Return the function that converts a text, number, boolean or bytes to a type, as if read from JSON. The
    function raises ``ValueError`` for a value that does not fit. Raise ``Invalid`` as `JsonRow` does.
    """
    convert = _convert("", type_, None)
    return lambda value: convert(_raw(value), [])


def _raw(value: object) -> bytes:
    """Return the JSON of a value. NaN and infinities, which JSON does not have, are as Spark writes them."""
    return json.dumps(value).encode() if isinstance(value, float) else msgspec.json.encode(value)


def _line(line: bytes) -> Mapping[str, msgspec.Raw | bytes]:
    """Return the unparsed values of a line, by name. Raise ``ValueError`` if the line is no object."""
    try:
        line.decode()  # The parser does not check the bytes of strings that it does not decode.
        return _decode_object(line)
    except NO_JSON:
        return lenient_json.members(line)


def _object(raw: bytes) -> Mapping[str, msgspec.Raw | bytes]:
    try:
        return _decode_object(raw)
    except NO_JSON:
        return lenient_json.members(raw)


def _list(raw: bytes) -> Sequence[msgspec.Raw | bytes]:
    try:
        return _decode_list(raw)
    except NO_JSON:
        return lenient_json.items(raw)


def _text(raw: bytes) -> str:
    try:
        return _decode_text(raw)
    except NO_JSON:
        return lenient_json.string(raw)


def _member(
    raw: msgspec.Raw | bytes | None, convert: Convert, misfits: list[str], name: str
) -> Any:
    """Convert a field of an object. A value that does not fit becomes null, and all other fields keep their
    values."""
    if raw is None:
        return None
    try:
        return convert(bytes(raw), misfits)
    except (ValueError, OverflowError) as error:
        misfits.append(f"{name}: {error}")
        return None


def _convert(path: str, kind: pa.DataType, encode_variant: EncodeVariant | None) -> Convert:
    """Return the function for a type, which returns None for null. Raise ``Invalid`` for a type that no JSON
    value converts to."""
    if is_variant(kind) and encode_variant is not None:
        return _variant(encode_variant)  # A VARIANT encodes null as a value.
    convert = _convert_present(path, kind, encode_variant)
    return lambda raw, misfits: None if raw == _NULL else convert(raw, misfits)


def _convert_present(path: str, kind: pa.DataType, encode_variant: EncodeVariant | None) -> Convert:
    """Return the function for values that are not null. Raise ``Invalid`` for a type without JSON values."""
    if pa.types.is_struct(kind):
        fields = [kind.field(position) for position in range(kind.num_fields)]
        return _struct(
            [
                (field.name, _convert(f"{path}.{field.name}", field.type, encode_variant))
                for field in fields
            ]
        )
    if pa.types.is_list(kind):
        return _array(_convert(path, kind.value_type, encode_variant))
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return _map(_convert(path, kind.item_type, encode_variant))
    if pa.types.is_integer(kind):
        return _integer(kind.bit_width)
    if pa.types.is_decimal(kind):
        return _decimal(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind):
        return _instant if kind.tz else _local
    for matches, convert in _SIMPLE:
        if matches(kind):
            return convert
    raise Invalid(
        f"no JSON value converts to type {kind}",
        path=path,
        hint="Read the field as a string, and convert the string afterwards.",
    )


def is_variant(kind: pa.DataType) -> bool:
    """Return True if a type is Spark's VARIANT: a struct of two fields, one of which has its metadata."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    return any((kind.field(index).metadata or {}).get(b"variant") == b"true" for index in range(2))


def _shown(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return text if len(text) <= 60 else f"{text[:57]}..."


def _misfit(raw: bytes, wanted: str) -> ValueError:
    return ValueError(f"{_shown(raw)} is not {wanted}")


def _is_number(raw: bytes) -> bool:
    return raw[0] in _NUMBER_BEGIN


def _is_text(raw: bytes) -> bool:
    return raw[0] in b"\"'"


def _boolean(raw: bytes, _: list[str]) -> bool:
    if raw not in (b"true", b"false"):
        raise _misfit(raw, "a boolean")
    return raw == b"true"


def _integer(bits: int) -> Convert:
    """Return the function for integers of ``bits`` bits. A fraction, an exponent or quotes do not fit."""
    fit = range(-(1 << (bits - 1)), 1 << (bits - 1))
    # No longer text fits. Do not convert it: a conversion of a million digits takes long.
    digits_max = len(str(fit.start))

    def convert(raw: bytes, _: list[str]) -> int:
        if len(raw) <= digits_max and _INTEGER.fullmatch(raw) and (value := int(raw)) in fit:
            return value
        raise _misfit(raw, f"an integer of {bits} bits")

    return convert


def _double(raw: bytes, _: list[str]) -> float:
    """Return a number. Of texts, only those of `NOT_FINITE` are numbers."""
    # Spark accepts numbers that JSON does not have, such as NaN, with quotes and without.
    text = _text(raw).encode("utf-8", "replace") if _is_text(raw) else raw
    if value := NOT_FINITE.get(text):
        return float(value)
    if _is_number(raw):
        # Spark parses -0 as an integer: a positive zero.
        return 0.0 if raw == b"-0" else float(raw)
    raise _misfit(raw, "a number")


def _single(raw: bytes, misfits: list[str]) -> float:
    """Return a value as a float of 32 bits."""
    if not _is_number(raw) or raw == b"-0" or raw in NOT_FINITE:
        return _double(raw, misfits)
    # Convert from the digits: a conversion through double would round twice.
    value: float = pa.scalar(raw.decode()).cast(pa.float32()).as_py()
    return value


def _decimal(precision: int, scale: int) -> Convert:
    """Return the function for decimals. It takes texts, too, ignores commas in them, and rounds half up."""
    unit = decimal.Decimal((0, (1,), -scale))

    def convert(raw: bytes, _: list[str]) -> decimal.Decimal:
        text = _text(raw).replace(",", "") if _is_text(raw) else raw.decode()
        match = _DECIMAL.fullmatch(text)
        if match is None or int(match[1] or 0) not in _INT32:
            raise _misfit(raw, "a number")
        value = _DECIMALS.create_decimal(text)
        exponent = value.adjusted()
        # Do not expand an extreme exponent, which would take much memory.
        if not value or exponent < -_EXPONENT_MAX:
            value = decimal.Decimal(0)
        elif exponent > precision:
            raise _misfit(raw, f"a decimal({precision},{scale})")
        # Zero has no sign in a column.
        value = _DECIMALS.plus(value.quantize(unit, context=_DECIMALS))
        if value and value.adjusted() >= precision - scale:
            raise _misfit(raw, f"a decimal({precision},{scale})")
        return value

    return convert


def _string(raw: bytes, _: list[str]) -> str:
    """Return the text of a string. Return any other value as the JSON of the message, unchanged."""
    return _text(raw) if _is_text(raw) else raw.decode()


def _binary(raw: bytes, _: list[str]) -> bytes:
    """Return the bytes of a text in base64."""
    if not _is_text(raw):
        raise _misfit(raw, "base64")
    text = _text(raw)
    if not _BASE64.fullmatch(text):
        raise _misfit(raw, "base64")
    # Text may follow after padding: decode each group of four characters separately.
    return b"".join(map(binascii.a2b_base64, _BASE64_GROUP.findall(text)))


def _days(year: int, month: int, day: int) -> int:
    """Return the days since 1970 in the proleptic Gregorian calendar. Raise ``ValueError`` for no date."""
    # Python supports only the years 1 to 9999. The calendar repeats after 400 years, so move the year.
    eras = (year - 2000) // _ERA_YEARS
    year_in_calendar = year - eras * _ERA_YEARS
    return datetime.date(year_in_calendar, month, day).toordinal() - _EPOCH + eras * _ERA_DAYS


def _date(raw: bytes, _: list[str]) -> int:
    """Return the days since 1970 of a date, as Spark reads it. A text of four to seven digits is a year. Any
    other integer in quotes counts days. Raise ``ValueError`` for another value."""
    if not _is_text(raw):
        raise _misfit(raw, "a date")
    text = _text(raw)
    if match := _DAY.fullmatch(text.strip()):
        year, month, day = (int(part or 1) for part in match.groups())
        try:
            days = _days(year, month, day)
        except ValueError as error:
            raise _misfit(raw, "a date") from error
        if days in _INT32:
            return days
    elif _DAYS.fullmatch(text):
        # Refuse days before the Gregorian calendar: Spark counts some of them twice.
        days = int(text)
        if days in _INT32 and days >= _GREGORIAN_BEGIN:
            return days
    raise _misfit(raw, "a date")


def _instant(raw: bytes, _: list[str]) -> int:
    """Return microseconds since 1970. A number counts seconds. A time without a zone is UTC. Raise
    ``ValueError`` for another value."""
    if _is_text(raw):
        return _micros(raw, zoned=True)
    if len(raw) <= 20 and _INTEGER.fullmatch(raw) and (micros := int(raw) * _MICROS) in _INT64:
        return micros
    raise _misfit(raw, "a timestamp")


def _local(raw: bytes, _: list[str]) -> int:
    """Return the microseconds since 1970 of a time without a zone. Raise ``ValueError`` for another value."""
    if not _is_text(raw):
        raise _misfit(raw, "a timestamp without a zone")
    return _micros(raw, zoned=False)


def _micros(raw: bytes, *, zoned: bool) -> int:
    """Return the microseconds since 1970 of a text. ``zoned``: the text may end with a zone. The default is
    UTC. Raise ``ValueError`` for another text."""
    match = _TIME.fullmatch(_text(raw).strip())
    expected = "a timestamp" if zoned else "a timestamp without a zone"
    if match is None:
        raise _misfit(raw, expected)
    year, month, day, hour, minute, second = (
        int(part) if part else default
        for part, default in zip(match.groups()[:6], (1, 1, 1, 0, 0, 0), strict=True)
    )
    fraction, zone = match.group(7) or "", (match.group(8) or "").strip()
    if hour > 23 or minute > 59 or second > 59 or (zone and not zoned):
        raise _misfit(raw, expected)
    try:
        seconds = _days(year, month, day) * _DAY_S + hour * 3600 + minute * 60 + second
        seconds -= _offset_s(zone, seconds) if zone else 0
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError) as error:
        # OSError: zones are files. The name may be the name of a directory, or too long.
        raise _misfit(raw, expected) from error
    # Truncate digits beyond microseconds, as Spark does.
    micros = seconds * _MICROS + int(f"{fraction:0<6}"[:6])
    if micros not in _INT64:
        raise _misfit(raw, expected)
    return micros


def _offset_s(zone: str, local_s: int) -> int:
    """Return the seconds by which a zone is ahead of UTC at a local time. Raise ``ValueError`` for an unknown
    zone."""
    if zone in _ZERO_OFFSETS:
        return 0
    zone = _SHORT_ZONES.get(zone, zone)
    if match := _OFFSET.fullmatch(zone):
        hours, minutes, seconds = (int(part or 0) for part in match.groups()[1:])
        offset_s = hours * 3600 + minutes * 60 + seconds
        if minutes > 59 or seconds > 59 or offset_s > _OFFSET_MAX_S:
            raise ValueError(zone)
        return offset_s if match.group(1) == "+" else -offset_s
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9~/._+-]+", zone):
        raise ValueError(zone)
    time_zone = zoneinfo.ZoneInfo(zone)
    # Of an ambiguous local time, take the first one. Move a skipped local time forward by the gap.
    local_time = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=local_s)  # noqa: DTZ001
    utc_offset = local_time.replace(tzinfo=time_zone).utcoffset()
    return 0 if utc_offset is None else round(utc_offset.total_seconds())


def _struct(fields: Sequence[tuple[str, Convert]]) -> Convert:
    """Return the function for structs. ``fields`` has the function for each field."""

    def convert(raw: bytes, misfits: list[str]) -> dict[str, Any]:
        if raw[0] != 0x7B:
            raise _misfit(raw, "an object")
        raws = _object(raw)
        return {name: _member(raws.get(name), convert, misfits, name) for name, convert in fields}

    return convert


def _array(item: Convert) -> Convert:
    """Return the function for arrays. ``item`` is the function for their items."""

    def convert(raw: bytes, misfits: list[str]) -> list[Any]:
        if raw[0] != 0x5B:
            raise _misfit(raw, "an array")
        return [item(bytes(element), misfits) for element in _list(raw)]

    return convert


def _map(item: Convert) -> Convert:
    """Return the function for maps. ``item`` is the function for their values. Keys stay texts."""

    def convert(raw: bytes, misfits: list[str]) -> list[tuple[str, Any]]:
        if raw[0] != 0x7B:
            raise _misfit(raw, "an object")
        return [(key, item(bytes(value), misfits)) for key, value in _object(raw).items()]

    return convert


def _variant(encode: EncodeVariant) -> Convert:
    def convert(raw: bytes, _: list[str]) -> dict[str, bytes]:
        return encode(lenient_json.strict(raw).decode())

    return convert


_SIMPLE: Final[tuple[tuple[Callable[[pa.DataType], bool], Convert], ...]] = (
    (pa.types.is_boolean, _boolean),
    (pa.types.is_float32, _single),
    (pa.types.is_float64, _double),
    (pa.types.is_string, _string),
    (pa.types.is_binary, _binary),
    (pa.types.is_date32, _date),
)
