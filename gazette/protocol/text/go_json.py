"""JSON text in the form of Go's encoder, and checked access to decoded JSON."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, Final

from gazette.errors import Corrupt
from gazette.protocol.text.validation import INT64

# Go escapes these characters everywhere. In JSON they occur only inside of strings.
_ESCAPES: Final = str.maketrans(
    {
        "<": "\\u003c",
        ">": "\\u003e",
        "&": "\\u0026",
        "\u2028": "\\u2028",
        "\u2029": "\\u2029",
    }
)


def dumps(value: Any) -> bytes:
    """Return compact JSON with map keys in the order given."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_ESCAPES).encode()


def loads(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``. Raise ``Corrupt`` for other bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not JSON: {error}") from error
    return as_object(value)


def omit_zero(value: dict[str, Any], *keep: str) -> dict[str, Any]:
    """Return ``value`` without the members that are zero, except those of ``keep``."""
    return {key: member for key, member in value.items() if member or key in keep}


def as_object(value: Any) -> dict[str, Any]:
    """Return ``value`` if it is an object, or an empty object for ``null``. Raise ``Corrupt`` otherwise."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Corrupt(f"expected a JSON object, not {type(value).__name__}")
    return value


def as_list(value: Any) -> list[Any]:
    """Return ``value`` if it is a list, or an empty list for ``null``. Raise ``Corrupt`` otherwise."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Corrupt(f"expected a JSON list, not {type(value).__name__}")
    return value


def as_text(value: str) -> str:
    """Return ``value`` if it can be encoded as UTF-8. Raise ``Corrupt`` for half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Corrupt(f"not valid text: {error}") from error
    return value


def get_int(value: dict[str, Any], key: str, bounds: tuple[int, int] = INT64) -> int:
    """Return the integer of the member ``key``, or 0 if it is absent. Raise ``Corrupt`` for another value."""
    member = value.get(key)
    if member is None:
        return 0
    if not isinstance(member, int) or isinstance(member, bool):
        raise Corrupt(f"expected {key} to be an integer, not {type(member).__name__}")
    if not bounds[0] <= member <= bounds[1]:
        raise Corrupt(f"{key} is out of range ({member})")
    return member


def get_str(value: dict[str, Any], key: str) -> str:
    """Return the string at ``key``, or "" if it is absent or null. Raise ``Corrupt`` for another value."""
    member = value.get(key)
    if member is None:
        return ""
    if not isinstance(member, str):
        raise Corrupt(f"expected {key} to be a string, not {type(member).__name__}")
    return as_text(member)


def encode_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def decode_bytes(value: Any) -> bytes:
    """Return the bytes of a base64 string, or no bytes for ``null``. Raise ``Corrupt`` for another value."""
    if value is None:
        return b""
    if not isinstance(value, str):
        raise Corrupt(f"expected a base64 string, not {type(value).__name__}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Corrupt(f"not base64: {error}") from error
