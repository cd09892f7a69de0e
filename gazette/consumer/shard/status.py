"""The status of this member's replica of a shard, which other members and operators read in etcd."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gazette.cluster.allocator.model import DecodedKV
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compare, Op
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import GazetteError
from gazette.protocol.shard import ReplicaStatus
from gazette.runtime.clock import Clock

log = logging.getLogger(__name__)


async def update_status(
    etcd: Etcd,
    key_space: KeySpace,
    clock: Clock,
    key_of: Callable[[], str],
    status: ReplicaStatus,
) -> None:
    """Increase the status at an assignment key, and wait until the key space shows it.

    A status never goes down, and a failure stays until the assignment is deleted: write the greater of the
    present and the given status. ``key_of`` returns the key, which a promotion may change meanwhile. Retry
    after any error of etcd, since readers must learn the status. If etcd stays away, the end of the lease
    ends the shard. Return when the status is written or the assignment is gone. A cancelled call may have
    written the status."""
    attempt = 0
    while True:
        key = key_of()
        kv: DecodedKV | None = key_space.get(key)
        if kv is None:
            return
        present: ReplicaStatus = kv.decoded.value
        if status.code <= present.code and set(status.errors) <= set(present.errors):
            return  # It is written already, perhaps by an attempt whose answer was lost.
        combined = present.reduce(status)
        try:
            result = await etcd.txn(
                (Compare.mod_revision(key, "=", kv.raw.mod_revision),),
                (Op.put(key, combined.to_pb().SerializeToString(), ignore_lease=True),),
            )
        except GazetteError as error:
            log.warning(
                "status of %(key)s is written again: %(error)s", {"key": key, "error": error}
            )
        else:
            if result.succeeded:
                await key_space.wait_for_revision(result.header.revision)
                return
        attempt += 1
        await clock.sleep(min(5.0, 0.025 * 2 ** min(attempt, 10)))
