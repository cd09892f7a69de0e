"""Read and write files of settings in INI: (``section.key``, text) of each entry."""

from __future__ import annotations

import json
from collections.abc import Iterator

from gazette.errors import Invalid


def ini_entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield each entry of an INI file, as go-flags reads it. Raise ``Invalid`` for a line of another form.

    Blanks around lines, keys and values are ignored. ``;`` and ``#`` begin a comment only at the begin of a
    line. A value in double quotes may hold escapes. A key without a value is left out.
    """
    section = ""
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if not line or line[0] in ";#":
            continue
        if line[0] == "[":
            section = line[1:-1].strip()
            if line[-1] != "]" or not section:
                raise Invalid(f"line {number}: expected [section], not {line}")
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals:
            # Do not show the line: it may hold a secret.
            raise Invalid(f"line {number}: expected key = value, or [section]")
        if value:
            path = f"{section}.{key}" if section else key
            yield path, _unquoted(value, number) if value[0] == '"' else value


def _unquoted(value: str, number: int) -> str:
    """Return the text of a value in double quotes, read as JSON. Raise ``Invalid`` if it is not valid."""
    try:
        text = json.loads(value)
    except ValueError:
        text = None
    if not isinstance(text, str):
        raise Invalid(f"line {number}: a value that begins with a quote must end with one")
    return text


def ini_value(text: str) -> str:
    """Return the value to write into an INI file, which ``ini_entries`` and go-flags read as ``text``."""
    plain = text and text == text.strip() and text[0] != '"' and text.isprintable()
    return text if plain else json.dumps(text, ensure_ascii=False)
