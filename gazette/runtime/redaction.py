"""Texts that are known to hold no secret; others are cut. Pure, in time proportional to the text."""

from __future__ import annotations

import re
from typing import Final

CUT: Final = "[cut]"

_SECRET: Final = re.compile(
    r"passw|passphrase|passcode|pwd|secret|token|credential|signature|authorization|cookie|bearer"
    r"|(?:auth|api|access|account|shared|private|signing|encryption|storage|master)[_-]?keys?"
    r"|(?<![a-z])pass(?![a-z])|(?<![a-z0-9])(?:sig|sas|jwt)(?![a-z0-9])|\bbasic ",
    re.IGNORECASE,
)
"""A part of the name of a secret, or of words that precede one."""
_PLAIN: Final = re.compile(r"[\w .,:;/#*+~()\[\]!-]{0,4096}")
"""Words, numbers, lists, names of files, and URLs without user and query."""
_KEY: Final = re.compile(r"(?=[a-zA-Z+]{0,15}\d)(?=[\d+]{0,15}[a-zA-Z])[a-zA-Z0-9+]{16}|\beyJ")
"""A run of letters and digits as long as a key, or the beginning of a token."""
_URL: Final = re.compile(
    r"[a-z][a-z0-9+.-]{0,19}://(?:[\w.-]{0,255}|\[[\da-f:.]{1,50}\])(?::\d{1,5})?(?=[/?#]|\Z)"
)


def is_plain(name: str, text: str) -> bool:
    """Return True if a setting's value may be shown: its name and form are not those of a secret."""
    if _SECRET.search(name) or _PLAIN.fullmatch(text) is None or _KEY.search(text):
        return not text  # An empty text holds no secret.
    # A word such as `secret` may be part of a path, as in /run/secrets/ca. Paths have no colon and no blank.
    return _SECRET.search(text) is None or (":" not in text and " " not in text)


def shown_url(text: str) -> str:
    """Return the scheme and the host of a URL, and `CUT` for its path and query. Return only `CUT` for a URL
    with a user, and for a text that is no URL."""
    origin = None if "@" in text else _URL.match(text)
    if origin is None:
        return CUT
    return text if text[origin.end() :] in ("", "/") else f"{origin[0]}/{CUT}"
