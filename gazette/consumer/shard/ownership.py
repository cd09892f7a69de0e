"""Checks in etcd that a shard still belongs to this member, made before it sets a fence.

A fence stops its previous owner, and knows nothing of assignments. It is that of the recovery log's
registers, or of a row in a database. An owner that was replaced a moment ago and sets its fence
late would stop its successor. So a linearizable read of the assignment precedes each fence:

    A assigned ─► A asks: still mine ─► A deleted, B assigned ─► B asks: mine ─► B's fence ─► A's fence, late

etcd and the fence cannot be changed in one step, so the last arrow remains possible. Each owner can
set at most one such late fence: before the next one it asks again, and the answer is no. B learns
of it at its next commit (``Fenced``). B is still assigned and is restarted (see
`gazette.consumer.shard.restarts`): its new fence is the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gazette.allocator.model import DecodedKV
from gazette.consumer.shard.journals import retried
from gazette.errors import Closed
from gazette.etcd.client import Etcd
from gazette.runtime.clock import Clock
from gazette.runtime.timeouts import timeout

HEARING_TIMEOUT_S: Final = 60.0
"""Seconds that a shard that was taken away waits to be stopped.

Its member stops it when the change arrives. A member that gets no changes loses its lease well before.
"""


class Ownership:
    """Checks in etcd that this member still owns a shard. Loop-bound.

    ``assignment_of`` returns the last assignment that the member has seen. ``ended`` is set when the shard
    has ended.
    """

    def __init__(
        self,
        etcd: Etcd,
        clock: Clock,
        shard_id: str,
        assignment_of: Callable[[], DecodedKV],
        ended: asyncio.Event,
    ) -> None:
        self._etcd = etcd
        self._clock = clock
        self._shard_id = shard_id
        self._assignment_of = assignment_of
        self._ended = ended

    async def require(self) -> None:
        """Return if the shard was assigned to us at some moment since the call. Raise ``Closed`` if not.

        Retry while etcd is away, until the lease ends the shard. Cancellation changes nothing.
        """
        assignment = self._assignment_of()
        if not self._ended.is_set():
            kv = await retried(
                lambda: self._etcd.get(assignment.key),
                "asking whether it is still assigned",
                self._shard_id,
                self._clock,
            )
            if kv is not None and kv.create_revision == assignment.raw.create_revision:
                self.require_running()
                return
            # The member learns of it too. Wait for it to stop the shard, which then does not count as failed.
            try:
                async with timeout(HEARING_TIMEOUT_S):
                    await self._ended.wait()
            except TimeoutError:
                pass
        raise Closed("the shard has been assigned to another member", shard=self._shard_id)

    def require_running(self) -> None:
        """Raise ``Closed`` if the shard has ended. Any thread."""
        if self._ended.is_set():
            raise Closed("the shard has ended", shard=self._shard_id)
