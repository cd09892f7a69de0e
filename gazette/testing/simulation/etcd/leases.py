"""Leases and the keys attached to them. Pure: the caller says what time it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gazette.testing.simulation.etcd import errors

TTL_MAX_S = 9_000_000_000
_FIRST_ID = 0x694D_0000_0000_0001


@dataclass(slots=True)
class EtcdLease:
    """One lease. ``keys`` are attached to it, in order of attachment."""

    id: int
    ttl_s: int
    expires_at: float
    keys: dict[bytes, None] = field(default_factory=dict)


class Leases:
    """The leases of one etcd, by id. Times are seconds of a monotonic clock."""

    def __init__(self, ttl_min_s: int) -> None:
        self._ttl_min_s = ttl_min_s
        self._leases: dict[int, EtcdLease] = {}
        self._next_id = _FIRST_ID

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def grant(self, lease_id: int, ttl_s: int, now: float) -> EtcdLease:
        """Add a lease; ``lease_id`` 0 picks an id. Raise ``EtcdRefusal``."""
        if ttl_s > TTL_MAX_S:
            raise errors.lease_ttl_too_large()
        if lease_id in self._leases:
            raise errors.lease_exists()
        ttl_s = max(ttl_s, self._ttl_min_s)
        lease = EtcdLease(lease_id or self._new_id(), ttl_s, now + ttl_s)
        self._leases[lease.id] = lease
        return lease

    def living(self, lease_id: int, now: float) -> EtcdLease | None:
        """Return the lease, or None if it is unknown or has expired."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and now < lease.expires_at else None

    def keep_alive(self, lease_id: int, now: float) -> int:
        """Renew the lease and return its TTL in seconds; 0 if it is unknown or has expired."""
        lease = self.living(lease_id, now)
        if lease is None:
            return 0
        lease.expires_at = now + lease.ttl_s
        return lease.ttl_s

    def renew_all(self, now: float) -> None:
        """Give every lease its whole TTL again, as a new leader of etcd does."""
        for lease in self._leases.values():
            lease.expires_at = now + lease.ttl_s

    def expired(self, now: float) -> list[int]:
        """Return ids of the leases whose time is over, the earliest first."""
        due = [lease for lease in self._leases.values() if lease.expires_at <= now]
        return [lease.id for lease in sorted(due, key=lambda lease: lease.expires_at)]

    def remove(self, lease_id: int) -> Iterable[bytes]:
        """Forget the lease and return the keys attached to it. Raise ``EtcdRefusal``."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            raise errors.lease_not_found()
        return lease.keys

    def move(self, key: bytes, before: int, after: int) -> None:
        """Detach ``key`` from one lease and attach it to another; 0 is no lease."""
        if before and (lease := self._leases.get(before)) is not None:
            lease.keys.pop(key, None)
        if after:
            self._leases[after].keys[key] = None

    def _new_id(self) -> int:
        while self._next_id in self._leases:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1
