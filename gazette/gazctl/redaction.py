"""Takes secrets out of text that leaves the house. Pure.

It errs towards taking too much: what looks like a token, a key or a signature is replaced wherever it
stands. What is not recognised stays, so that whoever passes text on still has to look at it.
"""

from __future__ import annotations

import re
from typing import Final

REDACTED: Final = "[redacted]"

_NAMES: Final = (
    r"(?:[\w.-]*(?:password|passwd|secret|token|auth[_-]?keys?|api[_-]?key|access[_-]?key|"
    r"account[_-]?key|credential|signature)[\w.-]*|sig)"
)
_RULES: Final = (
    # The user of a URL.
    (re.compile(r"(?<=://)[^/@\s\"']+@"), f"{REDACTED}@"),
    # JSON web tokens, wherever they are.
    (re.compile(r"\beyJ[\w-]{5,}\.[\w-]+\.[\w-]*"), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {REDACTED}"),
    # Private keys in PEM form.
    (
        re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL),
        f"-----BEGIN \\1----- {REDACTED} -----END \\1-----",
    ),
    # name=value and "name": "value", of names that say it: arguments of URLs, flags, environments, JSON.
    (re.compile(rf"(?i)({_NAMES}\"?\s*[=:]\s*\"?)[^\s\"'&,;}}]+"), rf"\1{REDACTED}"),
    (re.compile(rf"(?i)(--{_NAMES}\s+)[^\s-][^\s]*"), rf"\1{REDACTED}"),
    # Access keys of AWS.
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), REDACTED),
)


def redact(text: str) -> str:
    """``text`` without what looks like a secret."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
