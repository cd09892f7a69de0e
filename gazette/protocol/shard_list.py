"""Shard specifications as a list, with a common part for the fields that all shards share.

Operators read and write this form as YAML. A shard's specification is its own fields, and the common fields
where its own are absent. A field of a single value that is present but ``false``, 0 or ``""`` also replaces
the common field. (The original treats it as absent.) Empty ``sources`` and ``labels`` count as absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

import yaml

from gazette.errors import Invalid
from gazette.protocol.ids import Revision
from gazette.protocol.shard import (
    ShardSource,
    ShardSpec,
    intersect_shard_specs,
    subtract_shard_specs,
    union_shard_specs,
)
from gazette.protocol.text import strict_yaml
from gazette.protocol.text.strict_yaml import Fields
from gazette.protocol.text.validation import INT32, UINT32

_COMMON_FIELDS: Final = (
    "sources",
    "recovery_log_prefix",
    "hint_prefix",
    "hint_backups",
    "max_txn_duration",
    "min_txn_duration",
    "disable",
    "hot_standbys",
    "labels",
    "disable_wait_for_ack",
    "ring_buffer_size",
    "read_channel_size",
)
_SHARD_FIELDS: Final = ("comment", "delete", "id", *_COMMON_FIELDS, "revision")

_NOTHING: Final = ShardSpec("")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard of the list. ``spec`` may be partial.

    ``revision`` is the etcd revision at which the shard was read; 0: create it; -1: compare no revision.
    """

    spec: ShardSpec
    comment: str = ""
    delete: bool | None = None
    revision: Revision = 0
    zeros: frozenset[str] = frozenset()
    """Names of fields of ``spec`` that are zero on purpose, and so do not take the common value."""


@dataclass(frozen=True, slots=True)
class ShardList:
    """Shards, and the common fields of their specifications."""

    common: ShardSpec = _NOTHING
    shards: tuple[ShardEntry, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ShardList:
        """Parse YAML, without validating the list. Raise ``Invalid``, with the line, for a field that is
        unknown or malformed."""
        return strict_yaml.decode(text, _decode_list)

    @classmethod
    def of(cls, specs: Iterable[tuple[ShardSpec, Revision]]) -> ShardList:
        """Return the list of complete specifications with revisions. Move shared fields to ``common``."""
        ordered = sorted(specs, key=lambda pair: pair[0].id)
        return cls(
            shards=tuple(ShardEntry(spec, revision=revision) for spec, revision in ordered)
        ).hoist()

    def validate(self) -> None:
        """Raise ``Invalid`` unless ids are in strictly ascending order. Specifications are not checked."""
        for index in range(1, len(self.shards)):
            previous, current = self.shards[index - 1].spec.id, self.shards[index].spec.id
            if previous >= current:
                raise Invalid(
                    f"expected Shards to be ordered (ind {index}; {previous} vs {current})"
                )

    def push_down(self) -> ShardList:
        """Return this list with complete shards, and without common fields."""
        return ShardList(
            shards=tuple(
                replace(shard, spec=_inherited(shard, self.common), zeros=frozenset())
                for shard in self.shards
            )
        )

    def hoist(self) -> ShardList:
        """Return this list with each field that all shards share moved to the common fields.

        This is the inverse of ``push_down``. Call ``push_down`` first: the common fields are replaced.
        """
        if not self.shards:
            return self
        common = reduce(intersect_shard_specs, (shard.spec for shard in self.shards))
        return ShardList(
            common=replace(common, id=""),
            shards=tuple(
                replace(shard, spec=subtract_shard_specs(shard.spec, common))
                for shard in self.shards
            ),
        )

    def to_yaml(self) -> str:
        """Return the YAML that ``parse`` reads, without unset fields, and without ``zeros``."""
        shards = [_encode_shard(shard) for shard in self.shards]
        return strict_yaml.dump({"common": _encode_spec(self.common), "shards": shards})


_SCALARS: Final = {
    "recovery_log_prefix": "recovery_log_prefix",
    "hint_prefix": "hint_prefix",
    "hint_backups": "hint_backups",
    "max_txn_duration": "max_txn_duration_ns",
    "min_txn_duration": "min_txn_duration_ns",
    "disable": "disable",
    "hot_standbys": "hot_standbys",
    "disable_wait_for_ack": "disable_wait_for_ack",
    "ring_buffer_size": "ring_buffer_size",
    "read_channel_size": "read_channel_size",
}
"""Fields with a single value: the name in a specification, by the name in YAML."""


def _inherited(shard: ShardEntry, common: ShardSpec) -> ShardSpec:
    """Return a shard's specification, with common fields where its own are absent."""
    zeros: dict[str, Any] = {name: getattr(_NOTHING, name) for name in shard.zeros}
    return replace(union_shard_specs(shard.spec, common), **zeros)


def _decode_list(node: yaml.Node | None) -> ShardList:
    fields = Fields(node, ("common", "shards"))
    common = fields.fields("common", _COMMON_FIELDS)
    return ShardList(
        common=_NOTHING if common is None else _decode_spec(common),
        shards=fields.items("shards", _decode_shard),
    )


def _decode_shard(node: yaml.Node) -> ShardEntry:
    fields = Fields(node, _SHARD_FIELDS)
    spec = _decode_spec(fields)
    return ShardEntry(
        spec=spec,
        zeros=frozenset(
            name for key, name in _SCALARS.items() if key in fields and not getattr(spec, name)
        ),
        comment=fields.text("comment"),
        delete=fields.boolean("delete"),
        revision=fields.integer("revision"),
    )


def _decode_spec(fields: Fields) -> ShardSpec:
    return ShardSpec(
        id=fields.text("id"),
        sources=fields.items("sources", _decode_source),
        recovery_log_prefix=fields.text("recovery_log_prefix"),
        hint_prefix=fields.text("hint_prefix"),
        hint_backups=fields.integer("hint_backups", INT32),
        max_txn_duration_ns=fields.duration_ns("max_txn_duration"),
        min_txn_duration_ns=fields.duration_ns("min_txn_duration"),
        disable=fields.boolean("disable") or False,
        hot_standbys=fields.integer("hot_standbys", UINT32),
        labels=fields.labels("labels"),
        disable_wait_for_ack=fields.boolean("disable_wait_for_ack") or False,
        ring_buffer_size=fields.integer("ring_buffer_size", UINT32),
        read_channel_size=fields.integer("read_channel_size", UINT32),
    )


def _decode_source(node: yaml.Node) -> ShardSource:
    fields = Fields(node, ("journal", "min_offset"))
    return ShardSource(fields.text("journal"), fields.integer("min_offset"))


def _encode_shard(shard: ShardEntry) -> dict[str, Any]:
    value: dict[str, Any] = {"comment": shard.comment} if shard.comment else {}
    if shard.delete is not None:
        value["delete"] = shard.delete
    value |= _encode_spec(shard.spec)
    return value | ({"revision": shard.revision} if shard.revision else {})


def _encode_spec(spec: ShardSpec) -> dict[str, Any]:
    value = {
        "id": spec.id,
        "sources": [
            {"journal": source.journal}
            | ({"min_offset": source.min_offset} if source.min_offset else {})
            for source in spec.sources
        ],
        "recovery_log_prefix": spec.recovery_log_prefix,
        "hint_prefix": spec.hint_prefix,
        "hint_backups": spec.hint_backups,
        "max_txn_duration": strict_yaml.encode_duration(spec.max_txn_duration_ns),
        "min_txn_duration": strict_yaml.encode_duration(spec.min_txn_duration_ns),
        "disable": spec.disable,
        "hot_standbys": spec.hot_standbys,
        "labels": strict_yaml.encode_labels(spec.labels),
        "disable_wait_for_ack": spec.disable_wait_for_ack,
        "ring_buffer_size": spec.ring_buffer_size,
        "read_channel_size": spec.read_channel_size,
    }
    return {key: field for key, field in value.items() if field}
