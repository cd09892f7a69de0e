"""A member's session: its lease, its key under that lease, and its wish to leave.

The session is what keeps a member's assignments: they live under its lease. Losing the lease or the key
ends the process, because another member may be serving what this one believes to have.
"""

from __future__ import annotations

import logging
from typing import NoReturn, Self

from gazette.clock import Clock
from gazette.errors import Broken, GazetteError, Unavailable
from gazette.etcd import Etcd, Lease
from gazette.etcd_values import Compare, KeyValue, Op, RangeResult, TxnResult
from gazette.keyspace.key_space import KeySpace
from gazette.tasks import TaskScope

log = logging.getLogger(__name__)

CONFLICT_RETRY_S = 10.0
CONFLICT_RETRY_SOON_S = 1.0
"""A process that was killed and started again waits for its own lease to end, which is soon."""
_UNAVAILABLE_RETRY_S = 1.0


class MemberSession:
    """Made by ``start``; ``run`` it as a daemon at once; ended by ``close``. Loop-bound.

    The order of leaving: ``set_exiting``, wait until ``allocate`` returns, stop serving, ``close``.
    """

    def __init__(self, etcd: Etcd, clock: Clock, key: str, lease: Lease) -> None:
        self.key = key
        self.lease = lease
        self._etcd = etcd
        self._clock = clock
        self._mod_revision = 0
        self._exiting: bytes | None = None

    @classmethod
    async def start(
        cls,
        etcd: Etcd,
        ks: KeySpace,
        spec_key: str,
        spec_value: bytes,
        ttl_s: float,
        *,
        clock: Clock,
    ) -> Self:
        """Announce the member and load ``ks`` as of then: the member is in it.

        While another lease holds the key, this waits and tries again, without end: an earlier
        incarnation of the process may have to time out. The lease is kept alive meanwhile.

        Raises ``LeaseLost`` if etcd cannot be reached for as long as the lease lasts, and what
        ``KeySpace.load`` raises. Cancellation: a lease, and the key, may remain until its TTL is over.
        """
        session = cls(etcd, clock, spec_key, await etcd.grant(ttl_s))
        try:
            async with TaskScope(f"announce {spec_key}") as scope:
                scope.daemon(session.run(), name="lease")
                session._mod_revision = await session._announce(spec_value)
                await ks.load(etcd, session._mod_revision)
                scope.cancel()
        except GazetteError:
            await session.close()
            raise
        return session

    async def run(self) -> NoReturn:
        """Keep the lease alive: a daemon. Raises ``LeaseLost`` when that is no longer possible."""
        await self.lease.keep_alive()

    async def set_exiting(self, exiting_value: bytes) -> None:
        """Replace the member's specification by one that says it is exiting, under the same lease.

        May be called again. Raises ``Broken`` if the key is not as this session left it.
        Cancellation: it may have been written; calling again is safe.
        """
        if self._exiting == exiting_value:
            return
        while True:
            try:
                result = await self._etcd.txn(
                    (Compare.mod_revision(self.key, "=", self._mod_revision),),
                    (Op.put(self.key, exiting_value, ignore_lease=True),),
                    (Op.get(self.key),),
                )
                break
            except Unavailable as error:
                # ``run`` ends the process if this lasts for longer than the lease.
                log.warning(
                    "exiting of %(key)s is announced again: %(error)s",
                    {"key": self.key, "error": error},
                )
                await self._clock.sleep(_UNAVAILABLE_RETRY_S)
        if result.succeeded:
            self._mod_revision = result.header.revision
        else:
            self._mod_revision = self._written_before(_read(result), exiting_value)
        self._exiting = exiting_value

    async def close(self) -> None:
        """Revoke the lease, which deletes the member's key and assignments. Never raises for an
        unreachable etcd: the lease then ends by itself."""
        try:
            await self.lease.revoke()
        except Unavailable as error:
            log.warning(
                "lease %(lease)x was not revoked, and ends in %(seconds).0f s: %(error)s",
                {"lease": self.lease.id, "seconds": max(self.lease.remaining_s, 0), "error": error},
            )

    async def _announce(self, value: bytes) -> int:
        """The revision at which the key is there, under our lease."""
        begun, warned = self._clock.monotonic(), -CONFLICT_RETRY_S
        while True:
            try:
                result = await self._etcd.txn(
                    (Compare.version(self.key, "=", 0),),
                    (Op.put(self.key, value, lease=self.lease.id),),
                    (Op.get(self.key),),
                )
            except Unavailable as error:
                # The lease bounds this: its daemon fails our scope when it is lost.
                log.warning(
                    "announcing %(key)s is tried again: %(error)s",
                    {"key": self.key, "error": error},
                )
                await self._clock.sleep(_UNAVAILABLE_RETRY_S)
                continue
            if result.succeeded:
                return result.header.revision
            holder = _read(result)
            if holder is not None and holder.lease == self.lease.id:
                return holder.mod_revision  # an earlier attempt whose answer did not arrive
            waited = self._clock.monotonic() - begun
            if waited - warned >= CONFLICT_RETRY_S:
                warned = waited
                self._warn_of(holder)
            crashed = waited < 2 * self.lease.ttl_s
            await self._clock.sleep(CONFLICT_RETRY_SOON_S if crashed else CONFLICT_RETRY_S)

    def _warn_of(self, holder: KeyValue | None) -> None:
        log.warning(
            "member key %(key)s is held by another lease (%(lease)x, since revision %(revision)d): trying "
            "again. If another process runs with the same zone and id, give this one an id of its own; if "
            "one has crashed, its lease is about to end",
            {
                "key": self.key,
                "lease": holder.lease if holder is not None else 0,
                "revision": holder.create_revision if holder is not None else 0,
            },
        )

    def _written_before(self, kv: KeyValue | None, value: bytes) -> int:
        if kv is not None and kv.value == value and kv.lease == self.lease.id:
            return kv.mod_revision
        raise Broken(
            "member key was modified or deleted by somebody else",
            hint="Nothing but the process itself may write its member key. Start the process anew.",
            key=self.key,
            expected_revision=self._mod_revision,
            actual_revision=kv.mod_revision if kv is not None else 0,
        )


def _read(result: TxnResult) -> KeyValue | None:
    read = result.results[0]
    return read.kvs[0] if isinstance(read, RangeResult) and read.kvs else None
