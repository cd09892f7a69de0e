"""The components that all replicas of one broker, and their pipelines, use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gazette.broker.lease_guard import LeaseGuard
from gazette.broker.settings import BrokerSettings
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import Pool, TaskScope

if TYPE_CHECKING:
    from gazette.blobs.registry import BlobStores
    from gazette.broker.pulser import Pulser
    from gazette.broker.refresher import Refresher
    from gazette.client.rpc.channel import Channels
    from gazette.cluster.allocator.state import State
    from gazette.cluster.etcd.client import Etcd
    from gazette.cluster.keyspace.key_space import KeySpace
    from gazette.fragment.kept_files import KeptFiles
    from gazette.fragment.local_file import Disk
    from gazette.fragment.persister import Persister
    from gazette.fragment.spool_bytes import SpoolMemory


@dataclass(frozen=True, slots=True)
class Pools:
    """Threads that the whole broker shares. Each blob store has threads of its own: see ``BlobStores``."""

    spools: Pool
    """For hashing and compression, with the reads and writes of the local disk that belong to them."""
    writes: Pool
    """For writing to spool files."""
    reads: Pool
    """For reads of bytes of spool files that the page cache lacks."""

    def close(self) -> None:
        self.spools.close()
        self.writes.close()
        self.reads.close()


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """The components that replicas use. Nothing here is replaced while the broker lives.

    ``scope`` owns the daemons and the teardown of the broker's replicas. It is stopped after the stage in
    which spools are persisted.
    """

    clock: Clock
    settings: BrokerSettings
    etcd: Etcd
    lease: LeaseGuard
    key_space: KeySpace
    state: State
    blob_stores: BlobStores
    persister: Persister
    peers: Channels
    pools: Pools
    disk: Disk
    """The disk of spool files."""
    spool_memory: SpoolMemory
    kept_files: KeptFiles
    refresher: Refresher
    pulser: Pulser
    scope: TaskScope
