"""Read files of settings in YAML: (``section.key``, text) of each entry."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from gazette.protocol.text import strict_yaml


def yaml_entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield each entry of a YAML file, with its value as written. Raise ``Invalid`` for malformed text."""
    root = strict_yaml.compose(text)
    if root is not None and not strict_yaml.is_null(root):
        yield from _flattened("", root)


def _flattened(prefix: str, node: yaml.Node) -> Iterator[tuple[str, str]]:
    for key, value in strict_yaml.entries(node).items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, yaml.MappingNode):
            yield from _flattened(path, value)
        elif isinstance(value, yaml.SequenceNode):
            yield path, ",".join(strict_yaml.text_of(item) for item in value.value)
        elif not strict_yaml.is_null(value):
            yield path, strict_yaml.text_of(value)
