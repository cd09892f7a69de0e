"""The values of etcd: keys, revisions, comparisons, operations and their results.

This module does no input or output, so that the mirror and the allocator stay pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

import msgspec

from gazette.errors import Broken, Conflict, Invalid

Key: TypeAlias = str | bytes
"""A key as text or as bytes; etcd itself only knows bytes."""

Relation: TypeAlias = Literal["=", "!=", "<", ">"]

_FROM_KEY = b"\0"  # The least key. As the end of a range it means: up to the last key.


class Compacted(Conflict):
    """The requested revision is gone: load again, and continue from the loaded revision.

    ``compact_revision`` is the oldest revision that etcd still has, or 0 if etcd did not say.
    """

    default_hint = "No action: the keys are loaded again at a newer revision."

    def __init__(self, message: str, *, compact_revision: int = 0, **facts: Any) -> None:
        super().__init__(message, compact_revision=compact_revision, **facts)
        self.compact_revision = compact_revision


class LeaseLost(Broken):
    """The lease expired or was revoked, and all keys that were attached to it are gone."""

    default_hint = (
        "The process must stop serving what it held under the lease: restart it. If this repeats, look for "
        "a paused process or host, or an etcd that is slower than the lease is long."
    )


def key_bytes(key: Key) -> bytes:
    return key.encode() if isinstance(key, str) else key


def prefix_range(prefix: Key) -> tuple[bytes, bytes]:
    """Return ``(key, range_end)`` of all keys that begin with ``prefix``. An empty prefix means all keys."""
    begin = key_bytes(prefix)
    # The end is the least key above all of these: the last byte below 255 plus one, and no bytes after it.
    stem = begin.rstrip(b"\xff")
    end = stem[:-1] + bytes((stem[-1] + 1,)) if stem else _FROM_KEY
    return begin or _FROM_KEY, end


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """The member that answered, and its revision and term when it did."""

    cluster_id: int = 0
    member_id: int = 0
    revision: int = 0
    raft_term: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """A key as of its last write.

    Invariants: ``create_revision <= mod_revision``; ``version`` counts writes since creation, from 1.
    ``lease`` is 0 for a key without a lease.
    """

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


class RangeResult(msgspec.Struct, frozen=True):
    """Keys in ascending order. All of them were read at ``header.revision``."""

    header: ResponseHeader
    kvs: tuple[KeyValue, ...]
    count: int
    """Number of keys in the whole range, even if a limit returned fewer."""


class PutResult(msgspec.Struct, frozen=True):
    header: ResponseHeader


class DeleteResult(msgspec.Struct, frozen=True):
    header: ResponseHeader
    deleted: int


class TxnResult(msgspec.Struct, frozen=True):
    """The result of a transaction. ``results`` has one entry for each operation that ran, in order."""

    header: ResponseHeader
    succeeded: bool
    results: tuple[OpResult, ...]


OpResult: TypeAlias = RangeResult | PutResult | DeleteResult | TxnResult


class MemberStatus(msgspec.Struct, frozen=True):
    """The status that a member reports about itself."""

    header: ResponseHeader
    version: str
    leader: int
    """Member id of the leader, or 0 if there is no leader."""
    db_bytes: int
    errors: tuple[str, ...]
    """Alarms, such as NOSPACE."""


class Target(Enum):
    VERSION = "version"
    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"
    VALUE = "value"
    LEASE = "lease"


class Compare(msgspec.Struct, frozen=True):
    """A condition of a transaction. An absent key has version, revisions and lease 0."""

    target: Target
    key: bytes
    relation: Relation
    operand: int | bytes
    range_end: bytes = b""
    """If set, the condition must hold for all keys of ``[key, range_end)``."""

    def __post_init__(self) -> None:
        if self.relation not in ("=", "!=", "<", ">"):
            raise Invalid("not a relation", path="relation", relation=self.relation)

    @staticmethod
    def version(key: Key, relation: Relation, version: int) -> Compare:
        return Compare(Target.VERSION, key_bytes(key), relation, version)

    @staticmethod
    def create_revision(key: Key, relation: Relation, revision: int) -> Compare:
        return Compare(Target.CREATE_REVISION, key_bytes(key), relation, revision)

    @staticmethod
    def mod_revision(key: Key, relation: Relation, revision: int) -> Compare:
        return Compare(Target.MOD_REVISION, key_bytes(key), relation, revision)

    @staticmethod
    def value(key: Key, relation: Relation, value: bytes) -> Compare:
        return Compare(Target.VALUE, key_bytes(key), relation, value)

    @staticmethod
    def lease(key: Key, relation: Relation, lease: int) -> Compare:
        return Compare(Target.LEASE, key_bytes(key), relation, lease)


class PutOp(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes
    lease: int = 0
    ignore_lease: bool = False


class DeleteOp(msgspec.Struct, frozen=True):
    key: bytes
    range_end: bytes = b""


class GetOp(msgspec.Struct, frozen=True):
    key: bytes
    range_end: bytes = b""


class TxnOp(msgspec.Struct, frozen=True):
    compares: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...]


Operation: TypeAlias = PutOp | DeleteOp | GetOp | TxnOp


class Op:
    """Operations of a transaction."""

    @staticmethod
    def put(key: Key, value: bytes, *, lease: int = 0, ignore_lease: bool = False) -> PutOp:
        """Write ``value``. ``ignore_lease`` keeps the lease of the key, which must exist."""
        return PutOp(key_bytes(key), value, lease, ignore_lease)

    @staticmethod
    def delete(key: Key) -> DeleteOp:
        return DeleteOp(key_bytes(key))

    @staticmethod
    def delete_prefix(prefix: Key) -> DeleteOp:
        return DeleteOp(*prefix_range(prefix))

    @staticmethod
    def get(key: Key) -> GetOp:
        return GetOp(key_bytes(key))

    @staticmethod
    def get_prefix(prefix: Key) -> GetOp:
        return GetOp(*prefix_range(prefix))

    @staticmethod
    def txn(
        compares: tuple[Compare, ...],
        success: tuple[Operation, ...],
        failure: tuple[Operation, ...] = (),
    ) -> TxnOp:
        return TxnOp(compares, success, failure)


def only_reads(operations: tuple[Operation, ...]) -> bool:
    """Return True if ``operations`` only read, and so may be repeated."""
    return all(
        only_reads(op.success) and only_reads(op.failure)
        if isinstance(op, TxnOp)
        else isinstance(op, GetOp)
        for op in operations
    )


def has_reads(operations: tuple[Operation, ...]) -> bool:
    """Return True if one of ``operations`` is a read, including those of nested transactions."""
    return any(
        has_reads(op.success) or has_reads(op.failure)
        if isinstance(op, TxnOp)
        else isinstance(op, GetOp)
        for op in operations
    )


class WatchEvent(msgspec.Struct, frozen=True):
    """A put, or the deletion of a key. A deletion has only the key and ``mod_revision``."""

    kv: KeyValue
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class WatchResponse:
    """One answer of a watch: that it began, that nothing happened (``progress``), or events.

    Events of one revision are never spread over two responses.
    """

    header: ResponseHeader
    events: tuple[WatchEvent, ...] = ()
    created: bool = False

    @property
    def progress(self) -> bool:
        return not self.events and not self.created

    @property
    def resume_revision(self) -> int | None:
        """The revision at which to resume a watch that has seen this response; None if the response has none.

        While a watch catches up, the header is ahead of the events: then only the events count.
        """
        if self.created:
            return None
        if self.events:
            return max(event.kv.mod_revision for event in self.events) + 1
        return self.header.revision + 1
