"""Whether a shard is still a member's own, asked of etcd before the member sets a fence.

A fence (that of the recovery log's registers, or of a row in a database) stops whoever set it before, and
knows nothing of assignments: an owner that was replaced a moment ago, and sets it late, would stop its
successor. So before each one there is a linearizable read of the assignment::

    A assigned ─► A asks: still mine ─► A deleted, B assigned ─► B asks: mine ─► B's fence ─► A's fence, late

etcd and the fence cannot be changed in one step, so that the last arrow remains: a fence that was about to
be set when its owner was replaced. There is at most one for each owner, since before the next one it asks
again, and the answer is no. B learns of it at its next commit (``Fenced``), and being assigned is started
again (see `gazette.consumer.shard.restarts`): its new fence is the last one.
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

HEARING_TIMEOUT_S: Final = 60.0
"""How long a shard that was taken away waits for being stopped, which is what its member does when it hears
of that. A member that does not hear of anything loses its lease well before."""


class Ownership:
    """Of one shard on one member. Loop-bound.

    ``assignment_of`` gives the assignment as the member knows it, and ``ended`` is set when the shard ended.
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
        """Return if the shard was assigned to us at some moment since the call. Raises ``Closed`` if not.

        Retried while etcd is away, until the lease ends it. Cancellation: nothing has changed.
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
            # Its member hears of it, too: a shard that is stopped need not be a failed one before.
            try:
                async with asyncio.timeout(HEARING_TIMEOUT_S):
                    await self._ended.wait()
            except TimeoutError:
                pass
        raise Closed("the shard has been assigned to somebody else", shard=self._shard_id)

    def require_running(self) -> None:
        """Raises ``Closed`` if the shard has ended. Any thread."""
        if self._ended.is_set():
            raise Closed("the shard has ended", shard=self._shard_id)
