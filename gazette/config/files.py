"""Read files of settings: (``section.key``, text) of each entry, in INI or YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator

import yaml

from gazette.errors import Invalid
from gazette.protocol.text import strict_yaml


def ini_entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield each entry of an INI file, as go-flags reads it. Raise ``Invalid`` that names the line.

    Blanks around lines, keys and values do not count. ``;`` and ``#`` begin a comment at the begin
    of a line only. A value in double quotes may hold escapes. A key without a value is left out.
    """
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
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
            # Leave the line itself out: it may hold a secret.
            raise Invalid(f"line {number}: expected key = value, or [section]")
        if value:
            path = f"{section}.{key}" if section else key
            yield path, _unquoted(value, number) if value[0] == '"' else value


def _unquoted(value: str, number: int) -> str:
    try:
        text = json.loads(value)
    except ValueError:
        text = None
    if not isinstance(text, str):
        raise Invalid(f"line {number}: a value that begins with a quote must end with one")
    return text


def ini_value(text: str) -> str:
    """Return text that ``ini_entries`` and go-flags read as ``text``."""
    plain = text and text == text.strip() and text[0] != '"' and text.isprintable()
    return text if plain else json.dumps(text, ensure_ascii=False)


def yaml_entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield each entry of a YAML file; values are text as written. Raise ``Invalid``."""
    root = strict_yaml.compose(text)
    if root is not None and not strict_yaml.is_null(root):
        yield from _flattened("", root)


def _flattened(prefix: str, node: yaml.Node) -> Iterator[tuple[str, str]]:
    for key, value in strict_yaml.entries(node).items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, yaml.MappingNode):
            yield from _flattened(path, value)
        elif isinstance(value, yaml.SequenceNode):
            yield path, ",".join(strict_yaml.text_of(one) for one in value.value)
        elif not strict_yaml.is_null(value):
            yield path, strict_yaml.text_of(value)
