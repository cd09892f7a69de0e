"""The status of our replica of a shard, as the other members and operators see it in etcd."""

from __future__ import annotations

import logging

from gazette.allocator.model import DecodedKV
from gazette.clock import Clock
from gazette.errors import Unavailable
from gazette.etcd import Etcd
from gazette.etcd_values import Compare, Op
from gazette.keyspace.key_space import KeySpace
from gazette.protocol.shard import ReplicaStatus

log = logging.getLogger(__name__)

ERROR_CHARS_MAX = 2048
"""Of an error's text: etcd bounds the size of values."""


def error_text(error: BaseException) -> str:
    """What operators read of a failure."""
    text = str(error) or type(error).__name__
    hint = getattr(error, "hint", "")
    text = f"{text}\n{hint}" if hint else text
    return text if len(text) <= ERROR_CHARS_MAX else text[:ERROR_CHARS_MAX] + " ...[truncated]"


async def update_status(
    etcd: Etcd, key_space: KeySpace, clock: Clock, assignment_key: str, status: ReplicaStatus
) -> None:
    """Raise the status at an assignment key, and wait until the key space shows it.

    A status never goes down, and a failure stays until the assignment is deleted: the new value is
    the greater of both. Retried until it is done; returns when the assignment is gone.
    Cancellation: it may have been written.
    """
    attempt = 0
    while True:
        kv: DecodedKV | None = key_space.get(assignment_key)
        if kv is None:
            return
        present: ReplicaStatus = kv.decoded.value
        reduced = present.reduce(status)
        if reduced == present:
            return
        try:
            result = await etcd.txn(
                (Compare.mod_revision(assignment_key, "=", kv.raw.mod_revision),),
                (Op.put(assignment_key, reduced.to_pb().SerializeToString(), ignore_lease=True),),
            )
        except Unavailable as error:
            log.warning("status of %s is written again: %s", assignment_key, error)
        else:
            if result.succeeded:
                await key_space.wait_for_revision(result.header.revision)
                return
        attempt += 1
        await clock.sleep(min(5.0, 0.025 * 2**attempt))
