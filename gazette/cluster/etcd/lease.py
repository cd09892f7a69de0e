"""A lease: the keys attached to it live only as long as a client keeps it alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from gazette.cluster.etcd.connection import Connection, Member, Metadata, exchange
from gazette.cluster.etcd.pb import rpc_pb2
from gazette.cluster.etcd.values import LeaseLost
from gazette.errors import NotFound, Unavailable

_RENEWALS_PER_TTL = 3
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """The state of a lease in etcd. ``remaining_s`` is -1 once the lease is gone."""

    remaining_s: int
    granted_s: int
    keys: tuple[bytes, ...]


class Lease:
    """A lease that etcd granted to this client.

    Invariant: etcd does not expire the lease before ``expires_at``, by the client's monotonic clock. This
    time is ``ttl_s`` after the last successful keep-alive was *sent*: etcd counts from its arrival.
    """

    def __init__(
        self, connection: Connection, lease_id: int, ttl_s: float, expires_at: float
    ) -> None:
        self.connection = connection
        self._clock = connection.clock
        self.id = lease_id
        self.ttl_s = ttl_s
        self.expires_at = expires_at

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease surely holds; at most 0 once it may have expired."""
        return self.expires_at - self._clock.monotonic()

    async def keep_alive(self) -> NoReturn:
        """Renew three times per TTL, for as long as this runs.

        Survive outages of etcd, over all endpoints, until the TTL has passed. Then raise ``LeaseLost``. Raise
        it at once if etcd does not know the lease. Raise ``Closed`` or ``NotAllowed`` if the client was
        closed or its user lost its rights.

        Cancellation: the lease stays until its TTL has passed; ``revoke`` ends it.
        """
        while True:
            await self.until_due()
            await self.renew()

    async def until_due(self) -> None:
        """Wait until the lease must be renewed: a third of its TTL after the last renewal."""
        renew_at = self.expires_at - self.ttl_s * (1 - 1 / _RENEWALS_PER_TTL)
        await self._clock.sleep(max(renew_at - self._clock.monotonic(), 0.0))

    async def renew(self) -> None:
        """Renew the lease once. Raise ``LeaseLost`` if the lease was lost, and the errors of
        ``keep_alive``."""
        request = rpc_pb2.LeaseKeepAliveRequest(ID=self.id)
        sent_at = self._clock.monotonic()

        async def attempt(
            member: Member, metadata: Metadata, timeout_s: float
        ) -> rpc_pb2.LeaseKeepAliveResponse:
            nonlocal sent_at
            call = member.lease.LeaseKeepAlive(metadata=metadata, timeout=timeout_s)
            sent_at = self._clock.monotonic()
            try:
                response: rpc_pb2.LeaseKeepAliveResponse = await exchange(call, request)
            finally:
                call.cancel()
            return response

        failure: Unavailable | None = None
        while True:
            if self.remaining_s <= 0:
                raise self.lost("the lease expired before it could be renewed") from failure
            try:
                response = await self.connection.call(
                    "LeaseKeepAlive",
                    attempt,
                    repeatable=True,
                    timeout_s=self.remaining_s,
                    # No single attempt may use up the remaining time, since the next attempt may succeed.
                    attempt_timeout_s=self.ttl_s / _RENEWALS_PER_TTL,
                )
                break
            except Unavailable as error:
                failure = error
                await self._clock.sleep(min(_RETRY_S, max(self.remaining_s, 0.0)))
            except NotFound as error:
                raise self.lost("etcd does not know the lease any more") from error
        if response.TTL <= 0:
            raise self.lost("etcd does not know the lease any more")
        self.ttl_s = float(response.TTL)
        self.expires_at = sent_at + self.ttl_s

    async def revoke(self) -> None:
        """End the lease now, and delete the keys attached to it. Has no effect if the lease is gone
        already."""
        request = rpc_pb2.LeaseRevokeRequest(ID=self.id)
        try:
            await self.connection.call(
                "LeaseRevoke",
                lambda m, metadata, t: m.lease.LeaseRevoke(request, metadata=metadata, timeout=t),
                repeatable=True,
            )
        except NotFound:
            return

    async def status(self) -> LeaseStatus:
        """Return the remaining time of the lease, and its keys, as etcd has them."""
        request = rpc_pb2.LeaseTimeToLiveRequest(ID=self.id, keys=True)
        response: rpc_pb2.LeaseTimeToLiveResponse = await self.connection.call(
            "LeaseTimeToLive",
            lambda m, metadata, t: m.lease.LeaseTimeToLive(request, metadata=metadata, timeout=t),
            repeatable=True,
        )
        return LeaseStatus(response.TTL, response.grantedTTL, tuple(response.keys))

    def lost(self, message: str) -> LeaseLost:
        """Return the error of a lease that cannot be renewed."""
        return LeaseLost(
            message,
            lease=f"{self.id:x}",
            ttl_s=self.ttl_s,
            late_s=round(max(-self.remaining_s, 0.0), 3),
            endpoints=self.connection.endpoints,
        )
