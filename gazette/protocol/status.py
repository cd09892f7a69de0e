"""Statuses of responses: the outcome of a call that was answered."""

from __future__ import annotations

from enum import IntEnum

from gazette.errors import Invalid


class Status(IntEnum):
    """Outcome of a call of the Journal service."""

    OK = 0
    JOURNAL_NOT_FOUND = 1
    """The journal does not exist, or the caller's claims do not cover it."""
    NO_JOURNAL_PRIMARY_BROKER = 2
    NOT_JOURNAL_PRIMARY_BROKER = 3
    INSUFFICIENT_JOURNAL_BROKERS = 4
    NOT_JOURNAL_BROKER = 5
    OFFSET_NOT_YET_AVAILABLE = 6
    WRONG_ROUTE = 7
    PROPOSAL_MISMATCH = 8
    ETCD_TRANSACTION_FAILED = 9
    NOT_ALLOWED = 10
    WRONG_APPEND_OFFSET = 11
    INDEX_HAS_GREATER_OFFSET = 12
    REGISTER_MISMATCH = 13
    SUSPENDED = 14
    FRAGMENT_STORE_UNHEALTHY = 15

    @classmethod
    def from_pb(cls, value: int) -> Status:
        """Return the status of a number. Raise ``Invalid`` for an unknown number."""
        try:
            return cls(value)
        except ValueError:
            raise Invalid(f"invalid status ({value})") from None


class ShardStatus(IntEnum):
    """Outcome of a call of the Shard service."""

    OK = 0
    SHARD_NOT_FOUND = 1
    NO_SHARD_PRIMARY = 2
    NOT_SHARD_PRIMARY = 3
    ETCD_TRANSACTION_FAILED = 4
    SHARD_STOPPED = 5

    @classmethod
    def from_pb(cls, value: int) -> ShardStatus:
        """Return the status of a number. Raise ``Invalid`` for an unknown number."""
        try:
            return cls(value)
        except ValueError:
            raise Invalid(f"invalid status ({value})") from None
