"""The components that the parts of one broker share, made once by ``service``."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gazette.auth import Signer, Verifier
from gazette.broker.replica_context import ReplicaContext

if TYPE_CHECKING:
    from gazette.broker.resolver import Resolver


@dataclass(frozen=True, slots=True)
class BrokerContext(ReplicaContext):
    """The components of one broker: those that replicas use, the resolver, and the guards of calls."""

    resolver: Resolver
    rng: random.Random
    signer: Signer
    verifier: Verifier
