"""Removes secrets from text that leaves this installation. Pure, in time proportional to the text.

If in doubt it removes too much. It removes the whole value of a name that means a secret
(``password``, ``auth-keys``, ``sig``):

- an unquoted value up to the end of its line;
- a value in the query of a URL up to the next ``&``;
- a value of a flag up to the next ``--flag``;
- lists and quoted values up to their end.

Without such a name it removes the users of URLs, tokens, PEM blocks and keys of AWS.

A secret in plain words (``the password is x``) stays. Read the text before you pass it on.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import Final

REDACTED: Final = "[redacted]"

_NAME_MAX: Final = 64
_QUOTED_MAX: Final = 4096
"""Most characters of a quoted value of several lines. A value whose quote does not end within them
ends with its line.
"""
_BRACKETS_MAX: Final = 256 << 10
"""Most characters of a list. All of them are removed if it has no end."""
_PEM_MAX: Final = 64 << 10

_SECRET: Final = re.compile(
    r"passw|passphrase|passcode|pwd|secret|token|credential|signature|authorization|cookie"
    r"|(?:auth|api|access|account|shared|private|signing|encryption|storage|master)[_-]?keys?"
    r"|(?<![a-z])pass(?![a-z])"
    r"|(?:(?<![a-z0-9])|(?<=%3f)|(?<=%26))(?:sig|sas|jwt)(?![a-z0-9])",
    re.IGNORECASE,
)
"""A part of the name of a secret."""
_CANDIDATE: Final = re.compile(
    r"p(?:ass|wd)|s(?:ecret|ig|as|hared|torage)|token|c(?:redential|ookie)|a(?:uth|pi|ccess|ccount)"
    r"|private|encryption|master|jwt"
)
"""The beginnings of these words, in lower case. A search for them is 30 times as fast, and comes first."""
_LOWER: Final = {ord(upper): upper.lower() for upper in string.ascii_uppercase}
_NAME: Final = re.compile(rf"[\w.-]{{0,{_NAME_MAX}}}")
_NAME_BEFORE: Final = re.compile(rf"[\w.-]{{0,{_NAME_MAX}}}\Z")
_QUOTE_BEFORE: Final = re.compile(r"(\\{0,15})([\"'`])\Z")

_ASSIGNED: Final = re.compile(r"(\\*[\"'`])?[ \t]*(?:=>|:=|=|:|%(?:25)*3[DA])[ \t]*", re.IGNORECASE)
_NAMED_VALUE: Final = re.compile(
    r"(\\*[\"'`])?\s{0,64},?\s{0,64}\\*[\"']?\bvalue\\*[\"']?[ \t]*[:=][ \t]*", re.IGNORECASE
)
"""A value that follows a name which is itself a value: ``name: DB_PASSWORD, value: x``."""
_NEXT_ITEM: Final = re.compile(r"(\\*[\"'`])\s{0,64},\s{0,64}(?=[bru]?\\*[\"'])", re.IGNORECASE)
_NEXT_WORD: Final = re.compile(r"\\*[\"']?[ \t]+(?=\S)")

_QUOTE: Final = re.compile(r"[bBrRuU]{0,2}(\\*)([\"'`])")
_LITERAL: Final = re.compile(r"(?:null|None|true|True|false|False|-?\d[\d.]*)(?=\s*(?:[,}\])]|\Z))")
_STRUCTURE: Final = re.compile(r"(\\*)([\"'])|[\[\](){}]")
_IN_QUERY: Final = re.compile(r"\\*\"|[&\s<>]")
_LEVEL: Final = re.compile(r"%((?:25)*)")
_IN_FLAGS: Final = re.compile(r"\n|[ \t](?=--[A-Za-z])")
_JOINED: Final = re.compile(r"[^\s,;&)\]}\"'\\]+")
_BLOCK: Final = re.compile(r"(?:[|>][+-]?\d?[+-]?)?[ \t]*\r?\Z")

_PEM: Final = re.compile(r"-----(BEGIN|END) ([A-Z0-9][A-Z0-9 ]{0,40})-----")
_PEM_ON: Final = re.compile(
    r"(?:(?:\\r)?\\n[A-Za-z0-9+/=]+)+|(?:\r?\n[A-Za-z0-9+/=]+(?=\r?\n|\Z))+"
)
_PEM_LINE: Final = re.compile(r"[A-Za-z0-9+/=]{1,80}\r?")
_PEM_LONE: Final = re.compile(
    r"(?<![\w+/=-])(?=[A-Za-z0-9+/]{0,63}[a-z])(?=[A-Za-z0-9+/]{0,63}[A-Z])[A-Za-z0-9+/]{64}(?![\w+/=-])"
)

_TOKENS: Final = re.compile(r"[^\s\"<>]+")
_NEXT_URL: Final = re.compile(r"[,;](?=[A-Za-z][\w+.-]{0,32}://)")
_AUTHORITY: Final = re.compile(r"[^/?#]*")
_ENCODED: Final = re.compile(r"%(?:25)*3A(?:%(?:25)*2F){2}", re.IGNORECASE)
_ENCODED_AT: Final = re.compile(r"%(?:25)*40")
_SPACED_USER: Final = re.compile(
    r"(://[^\s/?#@:\"<>]{1,128}:)(?!\d{0,5}(?:[^\w@]|\Z))[^\n\"<>@/]{1,128}@(?=[\w\[])"
)
_DIALLED: Final = re.compile(r"@(?=(?:tcp|tcp4|tcp6|udp|unix|cloudsql)\()")
_DIALLED_USER: Final = re.compile(r"[^\s\"]{1,512}\Z")

_PLAIN: Final = (
    # JSON web tokens.
    (re.compile(r"(?<![\w-])eyJ[\w-]{5,4096}\.[\w-]{1,4096}\.[\w-]{0,4096}"), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic)([ \t]+)[^\s\"'<>]{8,}"), rf"\1\2{REDACTED}"),
    # Access keys of AWS.
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), REDACTED),
    (_SPACED_USER, rf"\1{REDACTED}@"),
    (_PEM_LONE, REDACTED),
)


def redact(text: str) -> str:
    """Return ``text`` without what looks like a secret."""
    text = "".join(_without_named(_without_pem(text)))
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return _TOKENS.sub(_without_users, _without_dialled(text))


def redact_setting(name: str, value: str) -> str:
    """Return the value of a setting without secrets: nothing of it, if the name means a secret."""
    return REDACTED if value and _SECRET.search(name) else redact(value)


# --- Values of names


def _without_named(text: str) -> Iterator[str]:
    done = 0
    lower = text.lower()
    if len(lower) != len(text):  # Some letters of other languages become two.
        lower = text.translate(_LOWER)
    for candidate in _CANDIDATE.finditer(lower):
        if candidate.start() < done:
            continue
        match = _SECRET.match(text, candidate.start())
        found = None if match is None else _value(text, match)
        if found is None:
            continue
        begin, end, quote = found
        if begin < end:
            yield f"{text[done:begin]}{quote}{REDACTED}{quote}"
            done = end
    yield text[done:]


def _value(text: str, match: re.Match[str]) -> tuple[int, int, str] | None:
    """Return begin and end of a name's value, and the quotes to put in place of
    its own. None without a value.
    """
    before = _NAME_BEFORE.search(text, max(0, match.start() - _NAME_MAX), match.start())
    begin = match.start() if before is None else before.start()
    end_of_name = match.end()
    behind = _NAME.match(text, end_of_name)
    if behind is not None:
        end_of_name = behind.end()
    lead, flag = text[begin - 1 : begin], text[begin] == "-"
    if lead == "<" and text.startswith(">", end_of_name):
        return _until(text, end_of_name + 1, "<")
    found = _ASSIGNED.match(text, end_of_name) or _NAMED_VALUE.match(text, end_of_name)
    if found is None:
        found = _NEXT_ITEM.match(text, end_of_name)
        if found is None and flag:
            found = _NEXT_WORD.match(text, end_of_name)
            return None if found is None else _in_line(text, found.end(), flag=True)
        if found is None:
            return None
    at, quote = found.end(), found[1]
    if quote:
        return _structured(text, at, quote)
    if lead in ("?", "&", "%"):
        end = _IN_QUERY.search(text, at)
        stop = len(text) if end is None else end.start()
        if (level := _LEVEL.match(text, begin - 1)) is not None:
            # The query itself is percent-encoded: so its separators have the same level of encoding
            # as its beginning.
            encoded = text.find(f"%{level[1]}26", at, stop)
            stop = stop if encoded < 0 else encoded
        return at, stop, ""
    opened = _QUOTE_BEFORE.search(text, max(0, begin - 16), begin)
    if opened is not None:
        end_of_text = _end_of_string(text, at, opened[1], opened[2])
        if end_of_text is not None:
            return at, end_of_text, ""
    return _in_line(text, at, flag=flag)


def _until(text: str, at: int, mark: str) -> tuple[int, int, str]:
    end = text.find(mark, at, _end_of_line(text, at))
    return at, _end_of_line(text, at) if end < 0 else end, ""


def _structured(text: str, at: int, quote: str) -> tuple[int, int, str] | None:
    """Return begin, end and quotes of a quoted name's value, as of JSON or of Python."""
    if (end := _end_of_structure(text, at, len(quote) - 1, _BRACKETS_MAX)) is not None:
        return at, end, quote
    if (literal := _LITERAL.match(text, at)) is not None:
        return (at, literal.end(), quote) if literal[0][-1].isdigit() else None
    return _in_line(text, at, flag=False)


def _in_line(text: str, at: int, *, flag: bool) -> tuple[int, int, str]:
    """Return begin, end and quotes of a value without quotes. It ends with its line, or with a
    quote or bracket that opens in it and ends later.
    """
    inner = _end_of_structure(text, at, None, _QUOTED_MAX)
    begin = at if inner is None else inner
    end = _end_of_line(text, begin)
    if flag and (next_flag := _IN_FLAGS.search(text, max(at, begin - 1), end)) is not None:
        end = next_flag.start()
    elif inner is None and _BLOCK.match(text, at, end) is not None:
        block = _end_of_block(text, at, end)
        # An empty value is no secret.
        return (at, block, "") if block > end else (at, at, "")
    elif text[end - 1 : end] == ",":  # A list of keys, that goes on in deeper lines.
        end = _end_of_block(text, at, end)
    return at, end, ""


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    if end < 0:
        return len(text)
    return end - 1 if end > at and text[end - 1] == "\r" else end


def _end_of_block(text: str, at: int, end: int) -> int:
    """Return the end of the block of YAML lines that belong to a name: items,
    and lines with more indentation.
    """
    begin = text.rfind("\n", 0, at) + 1
    indent = _indent(text, begin)
    while (next_line := text.find("\n", end)) >= 0:
        line = next_line + 1
        line_end = _end_of_line(text, line)
        inside = _indent(text, line)
        is_item = inside == indent and text.startswith("- ", line + inside)
        if line_end > line and not is_item and inside <= indent:
            break
        end = max(line_end, line)
    return end


def _indent(text: str, at: int) -> int:
    found = at
    while found < len(text) and text[found] == " ":
        found += 1
    return found - at


def _end_of_structure(text: str, at: int, escapes: int | None, most: int) -> int | None:
    """Return the end of quotes or brackets that open at ``at``. None if none
    open, or a quote does not end.
    """
    opened = _QUOTE.match(text, at)
    if opened is not None and (escapes is None or len(opened[1]) == escapes):
        return _end_of_quoted(text, opened)
    if text[at : at + 1] in ("[", "(", "{"):
        return _end_of_brackets(text, at, escapes or 0, most)
    return None


def _end_of_quoted(text: str, opened: re.Match[str] | None) -> int | None:
    """Return the end of a quoted value, with the text that is joined to it as a shell does."""
    end = None
    while opened is not None:
        inner = _end_of_string(text, opened.end(), opened[1], opened[2])
        if inner is None:
            return end
        end = inner + len(opened[1]) + 1
        joined = _JOINED.match(text, end)
        if joined is not None:
            end = joined.end()
        opened = _QUOTE.match(text, end)
    return end


def _end_of_string(text: str, at: int, escapes: str, quote: str) -> int | None:
    """Return the place of the quote that ends a string. ``escapes`` precede its first quote,
    if it is within another string.

    JSON within JSON has 0, 1, 3 or 7 backslashes before a quote, by its level. A quote ends the string if as
    many precede it as the first quote, or more by whole escapes of that level.
    """
    level, stop = len(escapes), at + _QUOTED_MAX
    found = text.find(quote, at, stop)
    while found >= 0:
        slash = found
        while slash > at and text[slash - 1] == "\\":
            slash -= 1
        if (found - slash) % (2 * (level + 1)) == level:
            return found - level
        found = text.find(quote, found + 1, stop)
    return None


def _end_of_brackets(text: str, at: int, escapes: int, most: int) -> int:
    """Return the end of brackets that open at ``at``; without an end, the limit of the search."""
    depth, stop = 0, min(len(text), at + most)
    while (found := _STRUCTURE.search(text, at, stop)) is not None:
        at = found.end()
        if found[2] is not None:
            if len(found[1]) == escapes:
                end = _end_of_string(text, at, found[1], found[2])
                at = at if end is None else end + escapes + 1
        elif found[0] in "[({":
            depth += 1
        else:
            depth -= 1
            if not depth:
                return at
    return stop


# --- Secrets without a name


def _without_pem(text: str) -> str:
    """Replace PEM blocks, also those of which only the begin or the end is there."""
    parts: list[str] = []
    done = 0
    while (mark := _PEM.search(text, done)) is not None:
        begin, end = mark.span()
        if mark[1] == "END":
            begin = _begin_of_pem(text, done, begin)
        else:
            close = text.find(f"-----END {mark[2]}-----", end, end + _PEM_MAX)
            if close >= 0:
                end = close + len(mark[0]) - 2
            elif (lines := _PEM_ON.match(text, end)) is not None:
                end = lines.end()
        parts.append(f"{text[done:begin]}-----{mark[2]} {REDACTED}-----")
        done = end
    return "".join([*parts, text[done:]])


def _begin_of_pem(text: str, least: int, end: int) -> int:
    """Return the place where the lines of a PEM block begin, given the place of its end marker."""
    for mark in ("\\n", "\n"):
        begin = end
        while begin > least and text.startswith(mark, begin - len(mark)):
            line_end = begin - len(mark)
            line = max(least, text.rfind(mark, least, line_end) + len(mark))
            if line >= begin:
                line = least
            if _PEM_LINE.fullmatch(text, line, line_end) is None:
                break
            begin = line
        if begin < end:
            return begin
    return end


def _without_users(match: re.Match[str]) -> str:
    """Replace the users of URLs in one word. A password may hold any character, as ``/`` and ``@``."""
    word = match[0]
    if "://" not in word and _ENCODED.search(word) is None:
        return word
    parts, done = [], 0
    for comma in _NEXT_URL.finditer(word):
        parts += [_without_user(word[done : comma.start()]), comma[0]]
        done = comma.end()
    return "".join([*parts, _without_user(word[done:])])


def _without_user(url: str) -> str:
    last = url.rfind("@")
    at = url.find("://")
    while 0 <= at < last:
        authority = _AUTHORITY.match(url, at + 3)
        if authority is not None and not {":", "@"}.isdisjoint(authority[0]):
            url = f"{url[: at + 3]}{REDACTED}{url[last:]}"
            break
        at = url.find("://", at + 3)
    encoded = _ENCODED.search(url)
    ends = [] if encoded is None else list(_ENCODED_AT.finditer(url, encoded.end()))
    if encoded is not None and ends:
        url = f"{url[: encoded.end()]}{REDACTED}{url[ends[-1].start() :]}"
    return url


def _without_dialled(text: str) -> str:
    """Replace the users of ``user:password@tcp(host)/database``."""
    parts: list[str] = []
    done = 0
    for at in _DIALLED.finditer(text):
        user = _DIALLED_USER.search(text, max(done, at.start() - 512), at.start())
        if user is not None:
            parts.append(f"{text[done : user.start()]}{REDACTED}")
            done = at.start()
    return "".join([*parts, text[done:]])
