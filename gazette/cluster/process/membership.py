"""The membership of a process in its cluster: its announcement, its part in the allocation, and its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from gazette.auth import MemberAuth, NoAuth
from gazette.client.rpc.channel import TlsSettings
from gazette.cluster.allocator.allocate import allocate
from gazette.cluster.allocator.drain import Drain
from gazette.cluster.allocator.drain_status import ItemNames
from gazette.cluster.allocator.model import IsConsistent, Progress, member_key
from gazette.cluster.allocator.session import MemberSession
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.lease import Lease
from gazette.cluster.etcd.startup import connect_with_retry
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.cluster.keyspace.key_values import Decoder
from gazette.cluster.process.member import MemberSettings
from gazette.http2.transport import Transport
from gazette.net.server import Server
from gazette.protocol.process import BrokerSpec, ConsumerSpec
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import BlockingPool, Pool, PoolFactory, TaskScope


@dataclass(frozen=True, slots=True)
class MemberEnvironment:
    """The surroundings of a member, made by its process. Simulations replace ``transport`` and ``pools``.

    ``server`` is bound, so that its endpoint can be announced. ``auth`` signs and verifies calls.
    ``transport`` is the network to peers and etcd. ``pools`` makes threads for blocking calls.
    """

    clock: Clock
    rng: random.Random
    server: Server
    etcd: EtcdSettings
    auth: MemberAuth = field(default_factory=NoAuth)
    peer_tls: TlsSettings | None = None
    private_diagnostics: bool = False
    """True if diagnostics are not served at the ports of the member."""
    transport: Transport | None = None
    pools: PoolFactory = BlockingPool


@dataclass(frozen=True, slots=True)
class MemberRole:
    """The role of a member: broker, or member of an application. It names the items of the cluster."""

    program: str
    """Program that the process runs, such as ``broker``."""
    replicas: str
    """The word for the member's part of its items, such as ``replicas``."""
    names: ItemNames
    spec: BrokerSpec | ConsumerSpec
    decoder: Decoder
    is_consistent: IsConsistent
    progress: Progress

    def announcement(self, *, exiting: bool = False) -> bytes:
        """Return the value of the member's key in etcd."""
        return replace(self.spec, exiting=exiting).to_pb().SerializeToString()


class Membership:
    """The local member of ``state``, once etcd is connected. Its tasks belong to ``daemons``. Loop-bound.

    Call ``join``, ``follow`` and ``allocate``, in this order. At the end, call ``leave``, ``release`` and
    ``close``, whatever was called before.
    """

    def __init__(
        self,
        etcd: Etcd,
        key_space: KeySpace,
        state: State,
        drain: Drain,
        clock: Clock,
        daemons: TaskScope,
        solver: Pool,
    ) -> None:
        self.etcd = etcd
        self.key_space = key_space
        self.state = state
        self.drain = drain
        self.session: MemberSession | None = None
        """Set by ``join``."""
        self._clock = clock
        self._daemons = daemons
        self._solver = solver
        self._keeping_alive: asyncio.Task[None] | None = None
        self._allocating: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        environment: MemberEnvironment,
        settings: MemberSettings,
        role: MemberRole,
        daemons: TaskScope,
    ) -> Self:
        """Return the membership of a process that has not joined yet.

        Until etcd answers, try again without end. Raise ``Invalid`` or ``NotAllowed`` if etcd refuses the
        connection. Cancellation: nothing is left.
        """
        clock = environment.clock
        key_space = KeySpace(settings.root, role.decoder, apply_delay_s=settings.watch_delay_s)
        local_key = member_key(settings.root, settings.zone, settings.id)
        state = State(key_space, local_key, role.is_consistent, role.progress)
        drain = Drain(
            clock,
            state,
            role.spec.id,
            role.names,
            alone_timeout_s=settings.drain_timeout_s,
            timeout_s=settings.drain_timeout_max_s,
        )
        etcd = await connect_with_retry(environment.etcd, clock, transport=environment.transport)
        solver = environment.pools("allocator", 1)
        return cls(etcd, key_space, state, drain, clock, daemons, solver)

    @property
    def lease(self) -> Lease:
        """The lease of the member, once it has joined."""
        assert self.session is not None
        return self.session.lease

    async def join(self, announcement: bytes, lease_ttl_s: float) -> None:
        """Announce the member, and load the key space. Wait while another lease holds the key. Raise
        ``LeaseLost`` if etcd stays unreachable."""
        self.session = await MemberSession.start(
            self.etcd,
            self.key_space,
            self.state.local_key,
            announcement,
            lease_ttl_s,
            clock=self._clock,
        )

    def follow(self) -> None:
        """Keep the lease alive, and follow the key space."""
        assert self.session is not None
        self._keeping_alive = self._daemons.daemon(self.session.run(), name="lease")
        self._daemons.daemon(self.key_space.watch(self.etcd), name="watch")

    def allocate(self) -> None:
        """Take part in the allocation, with a thread for large problems."""
        self._allocating = self._daemons.spawn(
            allocate(self.etcd, self.key_space, self.state, clock=self._clock, pool=self._solver),
            name="allocate",
        )

    async def leave(self, exiting: bytes, ends: Mapping[str, asyncio.Event]) -> None:
        """Hand over all items, as `Drain.run` does. Return at once if `allocate` was not called."""
        if self._allocating is not None:
            assert self.session is not None
            await self.drain.run(self.session, exiting, self._allocating, ends)

    async def release(self) -> None:
        """Give the lease back, if there is one. If etcd does not answer, the lease expires."""
        if self.session is not None:
            await release(self.session, self._keeping_alive, self._allocating)

    async def close(self) -> None:
        """Close the connection to etcd. A lease that was not released expires."""
        self._solver.close()
        await self.etcd.close()


class Leased(Protocol):
    """The method of `MemberSession` that gives the lease back."""

    async def close(self) -> None: ...


async def release(leased: Leased, *watchers: asyncio.Task[Any] | None) -> None:
    """End the tasks that watch a membership, then give its lease back.

    For the watchers, the end of the membership would be a failure. Cancellation: the lease may remain.
    """
    for task in watchers:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
    await leased.close()
