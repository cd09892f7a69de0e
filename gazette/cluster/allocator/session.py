"""A member's session: its lease, its key under that lease, and its announcement that it leaves.

A member's assignments live under its lease. The loss of the lease or of the key ends the process, because
another member may already serve its items.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn, Self

from gazette.cluster.etcd.client import Etcd, Lease
from gazette.cluster.etcd.lease_thread import keep_alive_apart
from gazette.cluster.etcd.values import Compare, KeyValue, Op, RangeResult, TxnResult
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Broken, GazetteError, Unavailable
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

CONFLICT_RETRY_S = 10.0
CONFLICT_RETRY_SOON_S = 1.0
"""Seconds between the first attempts. A restarted process waits for its former lease, which soon expires."""
_UNAVAILABLE_RETRY_S = 1.0


class MemberSession:
    """Session made by ``start`` and ended by ``close``. Run ``run`` as a daemon at once. Loop-bound.

    To leave: call ``set_exiting``, wait until ``allocate`` returns, stop serving, call ``close``.
    """

    def __init__(self, etcd: Etcd, clock: Clock, key: str, lease: Lease) -> None:
        self.key = key
        self.lease = lease
        self._etcd = etcd
        self._clock = clock
        self._mod_revision = 0  # The revision at which we last wrote our key.
        self._exiting: bytes | None = None  # The value of the last `set_exiting`.

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
        """Announce the member, and load ``ks`` at a revision that includes it.

        While another lease holds the key, wait and try again without end: the lease of an earlier process
        with the same id may have to expire. Our lease is kept alive meanwhile.

        Raise ``LeaseLost`` if etcd stays unreachable for the time of the lease. Raise ``Unavailable`` if etcd
        does not grant the lease, or does not answer while ``ks`` is loaded. Cancellation: the lease is given
        back, as by ``close``. A lease without a key may remain.
        """
        session = cls(etcd, clock, spec_key, await etcd.grant(ttl_s))
        try:
            async with TaskScope(f"announce {spec_key}") as scope:
                scope.daemon(session.run(), name="lease")
                session._mod_revision = await session._announce(spec_value)
                await ks.load(etcd, session._mod_revision)
                scope.cancel()
        except (GazetteError, asyncio.CancelledError):
            # The caller has no session to close. The key would block the next process of this id.
            await session.close()
            raise
        return session

    async def run(self) -> NoReturn:
        """Keep the lease alive, as a daemon. Raise ``LeaseLost`` when that is not possible any more."""
        await keep_alive_apart(self.lease)

    async def set_exiting(self, exiting_value: bytes) -> None:
        """Replace the member's specification by one that is exiting, under the same lease.

        May be called again, also after a cancellation, which may have written the specification. Raise
        ``Broken`` if the key has another value than this session wrote.
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
                # ``run`` ends the process if etcd fails for longer than the lease.
                log.warning(
                    "retrying to announce that %(key)s is exiting: %(error)s",
                    {"key": self.key, "error": error},
                )
                await self._clock.sleep(_UNAVAILABLE_RETRY_S)
        if result.succeeded:
            self._mod_revision = result.header.revision
        else:
            self._mod_revision = self._written_before(_read(result), exiting_value)
        self._exiting = exiting_value

    async def close(self) -> None:
        """Revoke the lease, which deletes the member's key and assignments. If etcd is unreachable, log a
        warning and return: the lease then expires."""
        try:
            await self.lease.revoke()
        except Unavailable as error:
            log.warning(
                "lease %(lease)x was not revoked and expires in %(seconds).0f s: %(error)s",
                {"lease": self.lease.id, "seconds": max(self.lease.remaining_s, 0), "error": error},
            )

    async def _announce(self, value: bytes) -> int:
        """Write the key under our lease, and return its revision. Wait while another lease holds the key."""
        began_at, warned_s = self._clock.monotonic(), -CONFLICT_RETRY_S
        while True:
            try:
                result = await self._etcd.txn(
                    (Compare.version(self.key, "=", 0),),
                    (Op.put(self.key, value, lease=self.lease.id),),
                    (Op.get(self.key),),
                )
            except Unavailable as error:
                # The lease limits this wait: when it is lost, its daemon fails this scope.
                log.warning(
                    "retrying to announce member key %(key)s: %(error)s",
                    {"key": self.key, "error": error},
                )
                await self._clock.sleep(_UNAVAILABLE_RETRY_S)
                continue
            if result.succeeded:
                return result.header.revision
            holder = _read(result)
            if holder is not None and holder.lease == self.lease.id:
                return holder.mod_revision  # an earlier attempt succeeded, but its answer was lost
            waited_s = self._clock.monotonic() - began_at
            if waited_s - warned_s >= CONFLICT_RETRY_S:
                warned_s = waited_s
                self._warn_of(holder)
            may_have_crashed = waited_s < 2 * self.lease.ttl_s
            await self._clock.sleep(CONFLICT_RETRY_SOON_S if may_have_crashed else CONFLICT_RETRY_S)

    def _warn_of(self, holder: KeyValue | None) -> None:
        log.warning(
            "another lease holds member key %(key)s (%(lease)x, since revision %(revision)d); retrying. "
            "If another process runs with the same zone and id, give this process another id. If a process "
            "with this id has crashed, its lease will expire soon",
            {
                "key": self.key,
                "lease": holder.lease if holder is not None else 0,
                "revision": holder.create_revision if holder is not None else 0,
            },
        )

    def _written_before(self, kv: KeyValue | None, value: bytes) -> int:
        """Return the key's revision if an earlier attempt, whose answer was lost, has written ``value``.

        Raise ``Broken`` otherwise: then another process has changed the key.
        """
        if kv is not None and kv.value == value and kv.lease == self.lease.id:
            return kv.mod_revision
        raise Broken(
            "another process modified or deleted the member key",
            hint="Only the process that owns a member key may write it. Restart the process.",
            key=self.key,
            expected_revision=self._mod_revision,
            actual_revision=kv.mod_revision if kv is not None else 0,
        )


def _read(result: TxnResult) -> KeyValue | None:
    read = result.results[0]
    return read.kvs[0] if isinstance(read, RangeResult) and read.kvs else None
