"""What files of settings say: (``group.key``, text) of each entry, in INI or YAML."""

from __future__ import annotations

import configparser
from collections.abc import Iterator, Mapping
from typing import Any

import yaml


def ini_entries(text: str) -> Iterator[tuple[str, str]]:
    """Raises ``configparser.Error``."""
    parser = configparser.ConfigParser(interpolation=None, default_section="\0")
    parser.optionxform = lambda optionstr: optionstr  # type: ignore[method-assign]
    parser.read_string(text)
    for section in parser.sections():
        for key, value in parser.items(section):
            if value:
                quoted = len(value) >= 2 and value[0] == value[-1] == '"'
                yield f"{section}.{key}", value[1:-1] if quoted else value


def yaml_entries(text: str) -> Iterator[tuple[str, str]]:
    """Raises ``yaml.YAMLError``."""
    document = yaml.safe_load(text)
    if document is None:
        return
    if not isinstance(document, dict):
        raise yaml.YAMLError("expected a mapping of groups")
    yield from _flattened("", document)


def _flattened(prefix: str, node: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            yield from _flattened(path, value)
        elif isinstance(value, list):
            yield path, ",".join(str(one) for one in value)
        elif isinstance(value, bool):
            yield path, str(value).lower()
        elif value is not None:
            yield path, str(value)
