"""Specifications of shards, the status of their replicas, and the algebra of specifications."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final

from gazette.errors import Invalid
from gazette.labels import META_SHARD_ID
from gazette.protocol import label_set
from gazette.protocol.ids import (
    JournalName,
    Offset,
    ShardId,
    validate_journal_name,
    validate_shard_id,
)
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.text import duration
from gazette.protocol.text.validation import INT32, UINT32, require_fit, within


@dataclass(frozen=True, slots=True)
class ShardSource:
    """A journal that a shard reads, from ``min_offset`` on."""

    journal: JournalName
    min_offset: Offset = 0

    def validate(self) -> None:
        with within("Journal"):
            validate_journal_name(self.journal)
        if self.min_offset < 0:
            raise Invalid(f"invalid MinOffset ({self.min_offset}; expected > 0)")
        require_fit("MinOffset", self.min_offset)

    def to_pb(self) -> consumer_pb2.ShardSpec.Source:
        return consumer_pb2.ShardSpec.Source(journal=self.journal, min_offset=self.min_offset)

    @classmethod
    def from_pb(cls, pb: consumer_pb2.ShardSpec.Source) -> ShardSource:
        return cls(pb.journal, pb.min_offset)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Specification of a shard. Durations are in nanoseconds. Fields that are zero are unset: each has a
    default, or ``validate`` refuses it."""

    id: ShardId
    sources: tuple[ShardSource, ...] = ()
    recovery_log_prefix: str = ""
    """Prefix of the recovery log. If it is empty, the shard's store must be durable without a log."""
    hint_prefix: str = ""
    hint_backups: int = 0
    max_txn_duration_ns: int = 0
    min_txn_duration_ns: int = 0
    disable: bool = False
    hot_standbys: int = 0
    labels: LabelSet = EMPTY_LABELS
    disable_wait_for_ack: bool = False
    ring_buffer_size: int = 0
    read_channel_size: int = 0

    @property
    def recovery_log(self) -> JournalName:
        """Journal that records the shard's state, or ``""`` if the shard has no log."""
        return f"{self.recovery_log_prefix}/{self.id}" if self.recovery_log_prefix else ""

    @property
    def hint_primary_key(self) -> str:
        """Key of etcd at which the primary keeps hints for the log that it writes."""
        return f"{self.hint_prefix}/{self.id}.primary"

    @property
    def hint_backup_keys(self) -> tuple[str, ...]:
        """Keys of etcd with hints of earlier recoveries, newest first."""
        prefix = f"{self.hint_prefix}/{self.id}.backup."
        return tuple(f"{prefix}{index}" for index in range(self.hint_backups))

    def desired_replication(self, max_hot_standbys: int) -> int:
        """Return the number of replicas that the allocator should assign, including the primary."""
        return 0 if self.disable else 1 + min(self.hot_standbys, max_hot_standbys)

    def labels_with_id(self) -> LabelSet:
        """Return the labels that selectors match: those of the shard, and its id as label ``id``."""
        return label_set.union(LabelSet.of((META_SHARD_ID, self.id)), self.labels)

    def validate(self) -> None:
        """Require a complete specification. Raise ``Invalid`` for the first problem."""
        with within("Id"):
            validate_shard_id(self.id)
        self._validate_recovery()
        if self.min_txn_duration_ns < 0:
            raise Invalid(f"invalid MinTxnDuration ({self.min_txn_duration_ns}; expected >= 0)")
        if self.max_txn_duration_ns <= 0:
            raise Invalid(f"invalid MaxTxnDuration ({self.max_txn_duration_ns}; expected > 0)")
        require_fit("MinTxnDuration", self.min_txn_duration_ns)
        require_fit("MaxTxnDuration", self.max_txn_duration_ns)
        require_fit("HotStandbys", self.hot_standbys, UINT32)
        require_fit("RingBufferSize", self.ring_buffer_size, UINT32)
        require_fit("ReadChannelSize", self.read_channel_size, UINT32)
        with within("LabelSet"):
            self.labels.validate()
            label_set.validate_single_valued(self.labels)
        if self.labels.values_of(META_SHARD_ID):
            raise Invalid(f'Labels cannot include label "{META_SHARD_ID}"')
        for index, source in enumerate(self.sources):
            with within(f"Sources[{index}]"):
                source.validate()
            if index and source.journal <= self.sources[index - 1].journal:
                raise Invalid(
                    f"Sources.Journal not in unique, sorted order (index {index}; "
                    f"{source.journal} <= {self.sources[index - 1].journal})"
                )

    def _validate_recovery(self) -> None:
        if self.recovery_log_prefix:
            with within("RecoveryLogPrefix"):
                validate_journal_name(self.recovery_log)
            # `normpath` keeps two slashes at the start of a path.
            clean = posixpath.normpath(self.hint_prefix) == self.hint_prefix
            if not (clean and self.hint_prefix[0] == "/" and self.hint_prefix[:2] != "//"):
                raise Invalid(
                    f"HintPrefix is not an absolute, clean, non-directory path ({self.hint_prefix})"
                )
        elif self.hint_prefix:
            raise Invalid(
                f"invalid non-empty HintPrefix with empty RecoveryLogPrefix ({self.hint_prefix})"
            )
        if self.hint_backups < 0:
            raise Invalid(f"invalid HintBackups ({self.hint_backups}; expected >= 0)")
        require_fit("HintBackups", self.hint_backups, INT32)

    def to_pb(self) -> consumer_pb2.ShardSpec:
        return consumer_pb2.ShardSpec(
            id=self.id,
            sources=[source.to_pb() for source in self.sources],
            recovery_log_prefix=self.recovery_log_prefix,
            hint_prefix=self.hint_prefix,
            hint_backups=self.hint_backups,
            max_txn_duration=duration.to_pb(self.max_txn_duration_ns),
            min_txn_duration=duration.to_pb(self.min_txn_duration_ns),
            disable=self.disable,
            hot_standbys=self.hot_standbys,
            labels=self.labels.to_pb(),
            disable_wait_for_ack=self.disable_wait_for_ack,
            ring_buffer_size=self.ring_buffer_size,
            read_channel_size=self.read_channel_size,
        )

    @classmethod
    def from_pb(cls, pb: consumer_pb2.ShardSpec) -> ShardSpec:
        return cls(
            id=pb.id,
            sources=tuple(ShardSource.from_pb(source) for source in pb.sources),
            recovery_log_prefix=pb.recovery_log_prefix,
            hint_prefix=pb.hint_prefix,
            hint_backups=pb.hint_backups,
            max_txn_duration_ns=duration.from_pb(pb.max_txn_duration),
            min_txn_duration_ns=duration.from_pb(pb.min_txn_duration),
            disable=pb.disable,
            hot_standbys=pb.hot_standbys,
            labels=LabelSet.from_pb(pb.labels),
            disable_wait_for_ack=pb.disable_wait_for_ack,
            ring_buffer_size=pb.ring_buffer_size,
            read_channel_size=pb.read_channel_size,
        )


class ReplicaCode(IntEnum):
    """Stage of a replica of a shard. Higher codes are later, and FAILED is final."""

    IDLE = 0
    BACKFILL = 100
    """The replica plays its recovery log, and is behind its end. (Not the backfill of docs/glossary.md.)"""
    STANDBY = 200
    PRIMARY = 300
    FAILED = 400


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Status of one replica, or of several replicas together. Only FAILED has errors."""

    code: ReplicaCode = ReplicaCode.IDLE
    errors: tuple[str, ...] = ()

    def reduce(self, other: ReplicaStatus) -> ReplicaStatus:
        """Return the later code of both, and the errors of both."""
        return ReplicaStatus(max(self.code, other.code), self.errors + other.errors)

    def validate(self) -> None:
        if self.code is ReplicaCode.FAILED and not self.errors:
            raise Invalid("expected non-empty Errors with Code FAILED")
        if self.code is not ReplicaCode.FAILED and self.errors:
            raise Invalid("expected Code FAILED with non-empty Errors")

    def to_pb(self) -> consumer_pb2.ReplicaStatus:
        return consumer_pb2.ReplicaStatus(
            code=self.code.value,  # type: ignore[arg-type]
            errors=self.errors,
        )

    @classmethod
    def from_pb(cls, pb: consumer_pb2.ReplicaStatus) -> ReplicaStatus:
        try:
            return cls(ReplicaCode(pb.code), tuple(pb.errors))
        except ValueError:
            raise Invalid(f"invalid code ({pb.code})", path="Code") from None


_UNSET: Final[dict[str, Any]] = {
    "sources": (),
    "recovery_log_prefix": "",
    "hint_prefix": "",
    "hint_backups": 0,
    "max_txn_duration_ns": 0,
    "min_txn_duration_ns": 0,
    "disable": False,
    "hot_standbys": 0,
    "disable_wait_for_ack": False,
    "ring_buffer_size": 0,
    "read_channel_size": 0,
}


def union_shard_specs(a: ShardSpec, b: ShardSpec) -> ShardSpec:
    """Return ``a``, with each unset field taken from ``b``. Labels are united by name.

    Zero is unset: neither ``False`` nor 0 of ``a`` overrides a value of ``b``.
    """
    fields = {field: getattr(a, field) or getattr(b, field) for field in _UNSET}
    return replace(a, labels=label_set.union(a.labels, b.labels), **fields)


def intersect_shard_specs(a: ShardSpec, b: ShardSpec) -> ShardSpec:
    """Return ``a`` without the fields that differ in ``b``."""
    return replace(
        a,
        labels=label_set.intersect(a.labels, b.labels),
        **{f: unset for f, unset in _UNSET.items() if getattr(a, f) != getattr(b, f)},
    )


def subtract_shard_specs(a: ShardSpec, b: ShardSpec) -> ShardSpec:
    """Return ``a`` without the fields that are equal in ``b``."""
    return replace(
        a,
        labels=label_set.subtract(a.labels, b.labels),
        **{f: unset for f, unset in _UNSET.items() if getattr(a, f) == getattr(b, f)},
    )
