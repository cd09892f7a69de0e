"""The answers of an application as JSON, for clients in any language. Pure.

A value of Python becomes the nearest value of JSON: a key becomes text, a tuple an array. A value is refused,
with its path, if its JSON would be ambiguous: two keys with the same text, bytes, a set, NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from gazette.errors import InvalidValue
from gazette.message.value_parts import Misfit, attributes_of, key_step, shown

ENCODE_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of the encoder, and of methods of the application's classes that the encoder calls."""
_SELF: Final = Misfit([], "is nested too deeply, or holds itself", "Return a flat value.")
_decode: Final = msgspec.json.Decoder().decode


def answer_json(value: Any) -> bytes:
    """Return an answer as JSON. Raise ``InvalidValue``, with its path, for a part that JSON cannot hold."""
    try:
        body = msgspec.json.encode(value)
        # Most answers read back equal. A comparison costs a tenth of a walk through the value.
        if _decode(body) == value:
            return body
    except ENCODE_ERRORS:
        body = b""
    try:
        misfit = _misfit(value, declared=False)
    except RecursionError:
        misfit = _SELF
    if misfit is None and not body:
        misfit = Misfit([], "cannot be written as JSON", "Return values that JSON has.")
    if misfit is not None:
        raise InvalidValue(misfit.reason, path=misfit.path("answer"), hint=misfit.advice)
    return body  # The decoded copy differs only in a permitted way, such as a list for a tuple.


def _misfit(value: Any, *, declared: bool) -> Misfit | None:
    """Return the first part that JSON cannot represent; None if there is no such part.

    With ``declared``, a class says the type of the part: then bytes are permitted. Raise ``RecursionError``
    for a value that holds itself.
    """
    if isinstance(value, float):
        return None if math.isfinite(value) else _not_finite(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return None if declared else _bytes_misfit(value)
    if isinstance(value, set | frozenset):
        advice = "Return sorted(…) of it."
        return Misfit([], "is a set, whose order differs from answer to answer", advice)
    if isinstance(value, dict):
        return _dict_misfit(value, declared=declared)
    if isinstance(value, list | tuple):
        return _first_misfit(
            ((f"[{index}]", part) for index, part in enumerate(value)), declared=declared
        )
    if isinstance(value, Enum):
        return _misfit(value.value, declared=declared)
    if (attributes := attributes_of(value)) is not None:
        return _first_misfit(
            ((f".{n}", part) for n, part in zip(*attributes, strict=True)), declared=True
        )
    return _leaf_misfit(value)


def _first_misfit(parts: Iterable[tuple[str, Any]], *, declared: bool) -> Misfit | None:
    """Return the first misfit of some parts. Each part comes with its step, which leads to it."""
    for step, part in parts:
        if (misfit := _misfit(part, declared=declared)) is not None:
            return misfit.below(step)
    return None


def _dict_misfit(value: dict[Any, Any], *, declared: bool) -> Misfit | None:
    """Return the first misfit of a key or its value. A key with the text of a former key is a misfit, too."""
    texts: dict[str, Any] = {}
    for key, part in value.items():
        misfit = _misfit(key, declared=declared)
        if misfit is None and type(key) is not str:
            misfit = _key_misfit(key)
        if misfit is not None:
            return Misfit([key_step(key)], f"has a key that {misfit.reason}", misfit.advice)
        text = key if type(key) is str else _text_of_key(key)
        if text in texts:
            reason = f"has the text {text!r}, as the key {shown(texts[text])} has"
            return Misfit([key_step(key)], reason, "Return a list of pairs, or keys of one type.")
        texts[text] = key
        if (misfit := _misfit(part, declared=declared)) is not None:
            return misfit.below(key_step(key))
    return None


def _key_misfit(key: Any) -> Misfit | None:
    try:
        _text_of_key(key)
    except ENCODE_ERRORS:
        type_name = type(key).__name__
        return Misfit([], f"is of type {type_name}, and has no text", "Return a list of pairs.")
    return None


def _text_of_key(key: Any) -> str:
    """Return the text that msgspec writes for a key. Raise one of `ENCODE_ERRORS` if a key has no text."""
    (text,) = msgspec.to_builtins({key: None}, str_keys=True)
    return str(text)


def _leaf_misfit(value: Any) -> Misfit | None:
    if value is msgspec.UNSET:
        return None
    try:
        msgspec.json.encode(value)
    except RecursionError:
        raise
    except ENCODE_ERRORS as error:
        return Misfit(
            [],
            f"of type {type(value).__name__} cannot be written as JSON: {error}",
            "Convert it to a value that JSON has.",
        )
    return None


def _not_finite(value: float) -> Misfit:
    return Misfit([], f"is {value}, which JSON cannot hold", "Leave it out, or write None.")


def _bytes_misfit(value: Sequence[int]) -> Misfit:
    return Misfit(
        [],
        f"is of type {type(value).__name__}, whose base64 in JSON looks like any text",
        "Return text, such as base64.b64encode(value).decode(). Or declare the field of a class as bytes.",
    )
