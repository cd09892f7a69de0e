"""JSON text in the form that Go's encoder gives it, and checked access to what was decoded."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, Final

from gazette.errors import Corrupt

INT64: Final = (-(1 << 63), (1 << 63) - 1)
UINT32: Final = (0, (1 << 32) - 1)
UINT64: Final = (0, (1 << 64) - 1)

# Go escapes these wherever they occur, which in JSON is inside of strings only.
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
    """Compact JSON with map keys in the order given."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_ESCAPES).encode()


def loads(data: bytes) -> dict[str, Any]:
    """The object that ``data`` holds. Raises :class:`Corrupt` if it does not hold one."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not JSON: {error}") from error
    return as_object(value)


def omit_zero(value: dict[str, Any], *keep: str) -> dict[str, Any]:
    """``value`` without the members that are zero, other than those of ``keep``."""
    return {key: item for key, item in value.items() if item or key in keep}


def as_object(value: Any) -> dict[str, Any]:
    """``value`` if it is an object; ``null`` is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Corrupt(f"expected a JSON object, not {type(value).__name__}")
    return value


def as_list(value: Any) -> list[Any]:
    """``value`` if it is a list; ``null`` is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Corrupt(f"expected a JSON list, not {type(value).__name__}")
    return value


def as_text(value: str) -> str:
    """``value`` if it can be encoded as UTF-8, which half of a surrogate pair cannot."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Corrupt(f"not text: {error}") from error
    return value


def get_int(value: dict[str, Any], key: str, bounds: tuple[int, int] = INT64) -> int:
    """The integer member of that name; absent is 0."""
    item = value.get(key)
    if item is None:
        return 0
    if not isinstance(item, int) or isinstance(item, bool):
        raise Corrupt(f"expected {key} to be an integer, not {type(item).__name__}")
    if not bounds[0] <= item <= bounds[1]:
        raise Corrupt(f"{key} is out of range ({item})")
    return item


def get_str(value: dict[str, Any], key: str) -> str:
    """The string member of that name; absent is empty."""
    item = value.get(key)
    if item is None:
        return ""
    if not isinstance(item, str):
        raise Corrupt(f"expected {key} to be a string, not {type(item).__name__}")
    return as_text(item)


def encode_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def decode_bytes(value: Any) -> bytes:
    """The bytes of a base64 string; ``null`` is empty."""
    if value is None:
        return b""
    if not isinstance(value, str):
        raise Corrupt(f"expected a base64 string, not {type(value).__name__}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Corrupt(f"not base64: {error}") from error
