"""The life of a member of a cluster, which brokers share with members that run an application.

docs/architecture.md has the phases, and what ends each of them. Each stage of the stop runs even if an
earlier one took too long, or failed by a ``GazetteError``. The loss of the lease, or of the member's key, is
a failure like that of any daemon. `failure` has the member's first error, and `stop` raises it at the end.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from starlette.applications import Starlette
from starlette.routing import Route

from gazette.auth import Verifier
from gazette.client.rpc.channel import Channels
from gazette.cluster.process.member import MemberSettings
from gazette.cluster.process.membership import MemberEnvironment, MemberRole, Membership
from gazette.errors import GazetteError
from gazette.net.diagnostics import diagnostic_routes
from gazette.net.http_guard import GuardRules, HttpGuard
from gazette.net.server import Server
from gazette.protocol.ids import ProcessId
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope, first_of

log = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=MemberSettings)

CANCEL_S: Final = 10.0
"""Seconds that tasks may take to end once they are cancelled."""
_HURRIED_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class MemberScopes:
    """The tasks of a member, in the order in which they end. A failure of one fails the member."""

    daemons: TaskScope
    items: TaskScope
    servers: TaskScope

    @classmethod
    def of(cls, role: MemberRole, on_failure: Callable[[BaseException], None]) -> Self:
        names = ("daemons", role.replicas, "servers")
        return cls(*(TaskScope(f"{role.program}-{name}", on_failure=on_failure) for name in names))


class ClusterMember(ABC, Generic[SettingsT]):
    """A member of a cluster in this process. Loop-bound.

    Call ``start``, then ``wait``, then ``stop``; or ``crash``. A subclass serves the items, by hooks whose
    names begin with an underscore. Hooks are called in the order in which they stand here.
    """

    def __init__(
        self, environment: MemberEnvironment, settings: SettingsT, role: MemberRole
    ) -> None:
        role.spec.validate()
        self.environment = environment
        self.settings = settings
        self.role = role
        self.peers = Channels(
            settings.zone,
            environment.peer_tls,
            environment.auth,
            clock=environment.clock,
            transport=environment.transport,
        )
        """Channels to the other members."""
        self.scopes = MemberScopes.of(role, self.fail)
        self.stopping = asyncio.Event()
        """Event that is set when this member is asked to stop: long-running calls should end."""
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        """The error that made the member fail; None while it works."""
        self.phase = "starting"
        self.membership: Membership | None = None
        """None until etcd is connected."""
        self._hurried = asyncio.Event()

    @abstractmethod
    async def _prepare(self) -> None:
        """Serve HTTP, which says that the member is not ready. Do all other work that must precede etcd."""

    @abstractmethod
    async def _set_up(self, membership: Membership) -> None:
        """Put the parts together, and have them observe the key space. Nothing is announced yet."""

    @abstractmethod
    def _serve(self, membership: Membership) -> None:
        """Begin to serve items: the member is announced, and its key space loaded."""

    @abstractmethod
    def _stages(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the stages between the drain and the release of the lease. Each limits its own time."""

    @abstractmethod
    async def _abandon(self) -> None:
        """End items and calls as a crash does. Daemons are cancelled already."""

    @abstractmethod
    async def _end_calls(self) -> None:
        """End calls for which tasks may wait, such as calls of blob stores. Tasks are cancelled next."""

    @abstractmethod
    async def _close(self) -> None:
        """Close clients and pools, once tasks have ended."""

    @property
    def process_id(self) -> ProcessId:
        """Zone and name of the member."""
        return self.role.spec.id

    @property
    def clock(self) -> Clock:
        return self.environment.clock

    @property
    def daemons(self) -> TaskScope:
        return self.scopes.daemons

    @property
    def server(self) -> Server:
        return self.environment.server

    @property
    def verifier(self) -> Verifier:
        """Verifier of the tokens of requests to this member."""
        return self.environment.auth

    @property
    def guard_rules(self) -> GuardRules:
        """The requests that the HTTP servers of this member accept."""
        return GuardRules.of(
            keyless=self.environment.auth.keyless,
            endpoint=self.server.endpoint,
            hosts=self.settings.allow_hosts,
            origins=self.settings.allow_origins,
        )

    def diagnostics(self) -> list[Route]:
        """Return the routes that show how this process is."""
        return diagnostic_routes(self.not_ready)

    def not_ready(self) -> str:
        """Return why the member is not ready now; empty while it is. While it drains, it serves, and is not
        ready."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self.membership is not None and self.membership.drain.is_running:
            return self.membership.drain.describe()
        if self.phase != "ready":
            return self.phase
        assert self.membership is not None
        if self.membership.state.local_member is None:
            return f"this {self.role.names.member} is not in etcd"
        return ""

    async def start(self) -> None:
        """Join the cluster. Return once this member serves.

        Wait for etcd without bound, and for another member of the same id to leave. Raise an error that
        waiting cannot cure. After a cancellation, call ``stop``.
        """
        await self._prepare()
        self.phase = "connecting to etcd"
        membership = self.membership = await Membership.connect(
            self.environment, self.settings, self.role, self.daemons
        )
        self.phase = "announcing itself"
        await self._set_up(membership)
        await membership.join(self.role.announcement(), self.settings.lease_ttl_s)
        membership.follow()
        self._serve(membership)
        membership.allocate()
        await self.server.start_grpc()
        self.phase = "ready"

    def stop_soon(self) -> None:
        """Ask for a graceful stop. A second call ends the wait for others to take over."""
        (self._hurried if self.stopping.is_set() else self.stopping).set()

    def fail(self, error: BaseException) -> None:
        """Record that the member has failed: ``wait`` returns; call ``stop`` next. Keep the first error."""
        if self.failure is None:
            self.failure = error
        self.failed.set()

    async def wait(self) -> None:
        """Return when a stop was asked for, or the member has failed."""
        await first_of(self.stopping, self.failed)

    async def stop(self) -> None:
        """Leave, stage by stage. Each stage is bounded, and runs even if an earlier stage raised a
        ``GazetteError``.

        1. *Drain*: say in etcd that this member is exiting, and serve until others have its items
           (``drain.py`` says for how long). Skipped if the member has failed, or has not begun to serve.
        2. The stages of the subclass.
        3. *Release* the lease, not before: until then, other members do not consider items abandoned.
        4. *Cancel* the tasks that are left.

        At the end, raise the error that made the member fail, or else the first error of a stage.
        Cancellation: work that the stages did not end is lost with this process.
        """
        self.stopping.set()
        stages = {
            "draining": self._drain,
            **self._stages(),
            "releasing its lease": self._release,
            "cancelling": self._cancel,
        }
        first_error = await leave(self.process_id, stages, self._enter)
        self.phase = "stopped"
        if self.failure is not None:
            raise self.failure
        if first_error is not None:
            raise first_error

    async def crash(self) -> None:
        """End as if the process was killed, for tests: hand over and finish nothing, keep the lease."""
        self.phase = "crashed"
        self.stopping.set()
        self.daemons.cancel()
        try:
            await self._abandon()
        finally:
            await self._cancel()

    @property
    def _grace_s(self) -> float:
        """Seconds that accepted calls may take to end."""
        return _HURRIED_GRACE_S if self._hurried.is_set() else self.settings.graceful_stop_s

    def _start_http(self, app: Starlette) -> None:
        self.server.start_http(self.scopes.servers, HttpGuard(app, self.guard_rules))

    def _enter(self, phase: str) -> None:
        self.phase = phase

    async def _drain(self) -> None:
        if self.failure is None and self.membership is not None:
            ends = {"it was asked to hurry": self._hurried, "it is broken": self.failed}
            await self.membership.leave(self.role.announcement(exiting=True), ends)

    async def _release(self) -> None:
        if self.membership is not None:
            await self.membership.release()

    async def _cancel(self) -> None:
        scopes = (self.scopes.daemons, self.scopes.items, self.scopes.servers)
        try:
            await end_all(self._end_calls(), *(scope.stop(CANCEL_S) for scope in scopes))
        finally:
            await self.peers.close()
            await self._close()
            if self.membership is not None:
                await self.membership.close()


async def leave(
    member: object,
    stages: Mapping[str, Callable[[], Awaitable[None]]],
    entering: Callable[[str], None],
) -> GazetteError | None:
    """Run the stages in order. Return the first error of a stage, or None.

    Keys of ``stages`` are phrases for the log. Call ``entering`` with each key. Each stage limits its own
    time. Raise any error that is not a ``GazetteError``: after such a defect, the state is unknown.
    Cancellation cancels the present stage.
    """
    first_error: GazetteError | None = None
    for name, stage in stages.items():
        entering(name)
        log.info("%(member)s is %(phase)s", {"member": member, "phase": name})
        try:
            await stage()
        except GazetteError as error:
            log.error(  # noqa: TRY400 - expected, and said in full
                "%(member)s, while %(phase)s: %(error)s",
                {"member": member, "phase": name, "error": error},
            )
            first_error = first_error or error
    return first_error


async def end_all(*endings: Awaitable[None]) -> None:
    """Await all in order. If some fail with a ``GazetteError``, raise the first error at the end. Each step
    limits its own time."""
    first_error: GazetteError | None = None
    for ending in endings:
        try:
            await ending
        except GazetteError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
