"""Parses lines that are not strict JSON, but that ``spark.read.json`` reads. Pure.

Such lines may have strings in single quotes, NaN and infinities, a byte order mark, halves of surrogate
pairs, and text after the object. Values are cut out unchanged, so that this module can read them again. The
module is slow: use it only for lines that the fast parsers refuse. It reads lines of strict JSON as these
parsers do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

NOT_FINITE: Final = {
    b"NaN": "nan",
    b"Infinity": "inf",
    b"+Infinity": "inf",
    b"+INF": "inf",
    b"-Infinity": "-inf",
    b"-INF": "-inf",
}
"""Numbers that JSON does not have, in Spark's spelling, and their spelling in Python."""

NO_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of the fast parsers for text that is not strict JSON."""

_SPELT: Final = {"nan": b'"NaN"', "inf": b'"Infinity"', "-inf": b'"-Infinity"'}

_decode_any = msgspec.json.Decoder().decode
_MARK: Final = b"\xef\xbb\xbf"
_BLANKS: Final = b" \t\r\n"
_DEPTH_MAX: Final = 1000
_CLOSING: Final = {"{": "}", "[": "]"}
_ESCAPE = rb"\\(?:[\"'\\/bfnrt]|u[0-9a-fA-F]{4})"
# The groups are not possessive, since they may have to backtrack in an escape: see `json_values`.
_STRING = rb'"(?:[^"\\\x00-\x1f]++|%b)*"|\'(?:[^\'\\\x00-\x1f]++|%b)*\'' % (_ESCAPE, _ESCAPE)
_NUMBER = rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?(?![0-9.])"
_WORD = rb"true|false|null|NaN|[+-]?Infinity|[+-]INF"
_TOKEN = re.compile(rb"[ \t\r\n]*+(%b|%b|%b|[{}\[\]:,])" % (_WORD, _NUMBER, _STRING))
_LOOSE_TOKEN = re.compile(
    rb"(?P<blanks>\s++)|\"(?:[^\"\\]|\\.)*+\"|'(?:[^'\\]|\\.)*+'|[{}\[\]:,]"
    rb"|[^\s{}\[\]:,\"'][^\s{}\[\]:,]*+|(?P<open>[\"'].*+)",
    re.DOTALL,
)
_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_MEANT: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class _Token(NamedTuple):
    sign: str
    """First character of the token."""
    begin: int
    end: int


def is_blank(line: bytes) -> bool:
    """Return True if a line has no token."""
    return not line.removeprefix(_MARK).strip(_BLANKS)


def is_array(line: bytes) -> bool:
    """Return True if a line is exactly one array."""
    begin = _begin(line)
    try:
        return _token(line, begin).sign == "[" and is_blank(line[_value_end(line, begin) :])
    except ValueError:
        return False


def members(text: bytes) -> dict[str, bytes]:
    """Return the unchanged text of an object's values, by name. Of equal names, the last one counts.

    Ignore text after the object. Raise ``ValueError`` if no object is there, or if the object is not UTF-8.
    """
    token = _token(text, _begin(text))
    if token.sign != "{":
        raise ValueError("not an object")
    values: dict[str, bytes] = {}
    position = token.end
    token = _token(text, position)
    while token.sign != "}":
        name, position = _key(text, position)
        begin, end = _token(text, position).begin, _value_end(text, position)
        values[name] = text[begin:end]
        token = _token(text, end)
        position = token.end
        if token.sign not in ",}":
            raise _unexpected(text, token.begin)
    text[: token.end].decode()  # Raise for bytes that are not UTF-8.
    return values


def items(text: bytes) -> list[bytes]:
    """Return the unchanged texts of an array's items. Raise ``ValueError`` if the text is no array."""
    token = _token(text, 0)
    if token.sign != "[":
        raise ValueError("not an array")
    values: list[bytes] = []
    position = token.end
    token = _token(text, position)
    while token.sign != "]":
        begin, end = _token(text, position).begin, _value_end(text, position)
        values.append(text[begin:end])
        token = _token(text, end)
        position = token.end
        if token.sign not in ",]":
            raise _unexpected(text, token.begin)
    return values


def string(text: bytes) -> str:
    """Return the characters of a string in quotes. A half of a surrogate pair becomes ``?``."""
    return _unescaped(text).encode("utf-8", "replace").decode()


def strict(text: bytes, *, kinds_only: bool = False) -> bytes:
    """Return a value as strict JSON. Numbers that JSON does not have become strings.

    With ``kinds_only``, only the kinds of values are right, which is enough to infer columns. Raise
    ``ValueError`` for text that is no value and, without ``kinds_only``, for halves of surrogate pairs.
    """
    try:
        _decode_any(text)
    except NO_JSON:
        return _repaired(text, kinds_only)
    return text


def _repaired(text: bytes, kinds_only: bool) -> bytes:
    """Return the first value of a text as strict JSON, token by token: see `strict`."""
    begin = _begin(text)
    end = _value_end(text, begin)
    return b"".join(
        [_strict_token(match[1], kinds_only) for match in _TOKEN.finditer(text, begin, end)]
    )


def find_string(line: bytes, path: Sequence[str]) -> str | None:
    """Return the string at a path of names in a line; None if no string is there. The line need not be JSON:
    read it as far as possible."""
    raw: bytes | None = None
    wanted_path = list(path)
    names: list[str | None] = []
    """The last name in each open object and list, the outermost first."""
    is_value_next = False
    for match in _LOOSE_TOKEN.finditer(line):
        if match["blanks"]:
            continue
        if match["open"]:
            break  # A string without an end.
        token, sign = match[0], match[0][:1]
        if sign in (b"{", b"["):
            names.append(None)
            is_value_next = False
        elif sign in (b"}", b"]"):
            if len(names) <= 1:
                break
            names.pop()
        elif not names:
            continue  # Text before the object.
        elif sign == b":":
            is_value_next = True
        elif is_value_next:
            if sign in (b'"', b"'") and names == wanted_path:
                raw = token
            is_value_next = False
        elif sign in (b'"', b"'"):
            names[-1] = token[1:-1].decode("utf-8", "replace")
    return None if raw is None else raw[1:-1].decode("utf-8", "replace")


def _begin(line: bytes) -> int:
    return len(_MARK) if line.startswith(_MARK) else 0


def _unexpected(text: bytes, at: int) -> ValueError:
    return ValueError(f"not JSON at {text[at : at + 20]!r}")


def _token(text: bytes, at: int) -> _Token:
    match = _TOKEN.match(text, at)
    if match is None:
        raise _unexpected(text, at)
    begin, end = match.span(1)
    return _Token(chr(text[begin]), begin, end)


def _key(text: bytes, at: int) -> tuple[str, int]:
    """Return the name at ``at``, and the position after its colon."""
    token = _token(text, at)
    colon = _token(text, token.end)
    if token.sign not in "\"'" or colon.sign != ":":
        raise _unexpected(text, token.begin)
    name = _unescaped(text[token.begin : token.end])
    name.encode()  # A name has no halves of surrogate pairs.
    return name, colon.end


def _value_end(text: bytes, at: int) -> int:
    """Return the end of the value at ``at``. Raise ``ValueError`` if no value is there."""
    closing: list[str] = []
    """Signs that close the objects and lists around position ``at``, the innermost last."""
    while True:  # Take a value without parts, or go into an object or list.
        token = _token(text, at)
        at = token.end
        if token.sign in _CLOSING:
            closing.append(_CLOSING[token.sign])
            if len(closing) > _DEPTH_MAX:
                raise ValueError("nested too deeply")
            following = _token(text, at)
            if following.sign != closing[-1]:
                at = _key(text, at)[1] if token.sign == "{" else at
                continue
            closing.pop()
            at = following.end
        elif token.sign in ":,}]":
            raise _unexpected(text, token.begin)
        while closing:  # After a value: leave what ends here, or go to the next value.
            token = _token(text, at)
            at = token.end
            if token.sign == closing[-1]:
                closing.pop()
                continue
            if token.sign != ",":
                raise _unexpected(text, token.begin)
            at = _key(text, at)[1] if closing[-1] == "}" else at
            break
        else:
            return at


def _unescaped(text: bytes) -> str:
    """Return the characters of a string in quotes, including halves of surrogate pairs."""

    def meant(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _MEANT.get(code, code)

    characters = _ESCAPED.sub(meant, text[1:-1].decode())
    # Two escapes that are a surrogate pair become one character.
    return characters.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _strict_token(token: bytes, kinds_only: bool) -> bytes:
    """Return a token as strict JSON. With ``kinds_only``, NaN and infinities become 0.5."""
    if token in NOT_FINITE:
        return b"0.5" if kinds_only else _SPELT[NOT_FINITE[token]]
    if token[:1] not in b"\"'":
        return token
    characters = string(token) if kinds_only else _unescaped(token)
    characters.encode()  # Raise for halves of surrogate pairs.
    return msgspec.json.encode(characters)
