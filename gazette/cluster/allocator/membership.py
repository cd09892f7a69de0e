"""The membership of a process in its cluster: its announcement, its part in the allocation, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gazette.cluster.allocator.allocate import allocate
from gazette.cluster.allocator.drain import Drain
from gazette.cluster.allocator.session import MemberSession
from gazette.cluster.allocator.shutdown import release
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import Pool, TaskScope


class Membership:
    """The local member of ``state``. Its tasks belong to ``daemons``. Loop-bound.

    Call ``join``, ``follow`` and ``allocate``, in this order. At the end, call ``leave`` and
    ``release``, whatever was called before.
    """

    def __init__(
        self,
        etcd: Etcd,
        key_space: KeySpace,
        state: State,
        drain: Drain,
        clock: Clock,
        daemons: TaskScope,
    ) -> None:
        self.drain = drain
        self.session: MemberSession | None = None
        """Set by ``join``."""
        self._etcd = etcd
        self._key_space = key_space
        self._state = state
        self._clock = clock
        self._daemons = daemons
        self._keeping_alive: asyncio.Task[None] | None = None
        self._allocating: asyncio.Task[None] | None = None

    async def join(self, announcement: bytes, lease_ttl_s: float) -> MemberSession:
        """Announce the member, and load the key space. Wait and raise as `MemberSession.start` does."""
        self.session = await MemberSession.start(
            self._etcd,
            self._key_space,
            self._state.local_key,
            announcement,
            lease_ttl_s,
            clock=self._clock,
        )
        return self.session

    def follow(self) -> None:
        """Keep the lease alive, and follow the key space."""
        assert self.session is not None
        self._keeping_alive = self._daemons.daemon(self.session.run(), name="lease")
        self._daemons.daemon(self._key_space.watch(self._etcd), name="watch")

    def allocate(self, pool: Pool) -> None:
        """Take part in the allocation, with a thread of ``pool`` for large problems."""
        self._allocating = self._daemons.spawn(
            allocate(self._etcd, self._key_space, self._state, clock=self._clock, pool=pool),
            name="allocate",
        )

    async def leave(self, exiting: bytes, ends: Mapping[str, asyncio.Event]) -> None:
        """Hand over all items, as `Drain.run` does. Return at once if `allocate` was not called."""
        if self._allocating is not None:
            assert self.session is not None
            await self.drain.run(self.session, exiting, self._allocating, ends)

    async def release(self) -> None:
        """Give the lease back, if there is one. Raise as `MemberSession.close` does."""
        if self.session is not None:
            await release(self.session, self._keeping_alive, self._allocating)
