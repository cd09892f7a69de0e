"""Replicas that a broker holds, by their journals."""

from __future__ import annotations

from gazette.broker.replica import Replica
from gazette.broker.resolver import Resolver


def replica_of(resolver: Resolver, journal: str) -> Replica:
    """Return the replica that a resolver holds now. There must be one."""
    (found,) = (replica for replica in resolver.replicas if replica.journal == journal)
    return found
