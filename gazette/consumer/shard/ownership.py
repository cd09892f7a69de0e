"""Checks in etcd that a shard still belongs to this member, made before it sets a fence.

A fence, in the registers of a recovery log or in a row of a database, stops the former owner. A fence does
not depend on assignments: a replaced owner that sets its fence late would stop its successor. So each owner
makes a linearizable read of its assignment before it sets its fence:

    A assigned ─► A asks: still mine ─► A deleted, B assigned ─► B asks: mine ─► B's fence ─► A's fence, late

etcd and the fence cannot be changed in one step, so the last arrow remains possible. Each owner can set at
most one late fence: before its next fence it asks again, and the answer is no. B fails with ``Fenced`` at its
next commit. B is still assigned, and so is restarted (see `gazette.consumer.shard.restarts`). Its new fence
is the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gazette.cluster.allocator.model import DecodedKV
from gazette.cluster.etcd.client import Etcd
from gazette.consumer.shard.journals import retried
from gazette.errors import Closed
from gazette.runtime.clock import Clock
from gazette.runtime.timeouts import timeout

HEARING_TIMEOUT_S: Final = 60.0
"""Greatest number of seconds for which a shard that has lost its assignment waits for its member to stop it.

The member stops the shard when it sees the change in etcd. A member that sees no changes loses its lease
before this time is over.
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
        """Raise ``Closed`` unless the shard runs, and etcd says during this call that it is assigned to this
        member.

        Retry while etcd does not answer, until the end of the lease ends the shard. Before ``Closed``, wait
        up to `HEARING_TIMEOUT_S` for the end of the shard. Cancellation has no effect.
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
            # Wait until the member sees the change and stops the shard, so that it does not count as failed.
            try:
                async with timeout(HEARING_TIMEOUT_S):
                    await self._ended.wait()
            except TimeoutError:
                pass
        raise Closed("the shard has been assigned to another member", shard=self._shard_id)

    def require_running(self) -> None:
        """Raise ``Closed`` if the shard has ended. Any thread may call this."""
        if self._ended.is_set():
            raise Closed("the shard has ended", shard=self._shard_id)
