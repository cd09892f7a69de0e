"""Metrics of brokers and members, read from the text format of Prometheus. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Final, TypeAlias

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values of labels, by name."""
Samples: TypeAlias = Mapping[str, Mapping[Labels, float]]
"""Numbers, by the name of a metric and by its labels."""

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SHOWN: Final = re.compile(
    r"gazette_build_info|gazette_shard_\w+_total|process_(cpu_seconds_total|resident_memory_bytes)"
)
"""The metrics that the console shows."""


def samples_in(text: str) -> Samples:
    """Return the samples that are shown. Ignore lines of another form, and numbers that JSON lacks."""
    samples: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        if not _SHOWN.match(line):
            continue
        match = _SAMPLE.match(line)
        try:
            number = float(match[3]) if match is not None else None
        except ValueError:
            continue
        if match is not None and number is not None and isfinite(number):
            labels = tuple(sorted(_LABEL.findall(match[2] or "")))
            samples.setdefault(match[1], {})[labels] = number
    return samples


def by_shard(samples: Samples) -> Mapping[str, Samples]:
    """Return samples by id of a shard, by name, and by other labels.

    The label of a shard is its key in etcd, which ends with its id.
    """
    shards: dict[str, dict[str, dict[Labels, float]]] = {}
    for name, by_labels in samples.items():
        if not name.startswith("gazette_shard_"):
            continue
        for labels, number in by_labels.items():
            shard = dict(labels).get("shard", "").rpartition("/items/")[2]
            others = tuple(label for label in labels if label[0] != "shard")
            shards.setdefault(shard, {}).setdefault(name, {})[others] = number
    return shards
