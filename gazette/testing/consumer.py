"""A consumer in the test's own process, on a real etcd and a `BrokerFixture`."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from gazette.auth import MemberAuth, NoAuth
from gazette.client.client import Client
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardChange, ShardClient
from gazette.cluster.allocator.model import ASSIGNMENTS, Assignment, DecodedKV
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compare, Op
from gazette.cluster.process.membership import MemberEnvironment
from gazette.consumer.application import Application
from gazette.consumer.contract.callbacks import require_callbacks
from gazette.consumer.member import ConsumerMember
from gazette.consumer.settings import ConsumerSettings
from gazette.consumer.shard.shard import Shard
from gazette.errors import Bug, Conflict, GazetteError, NotFound, NotYet, Retryable
from gazette.labels import CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.net.server import Server, ServerSettings
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSource, ShardSpec
from gazette.protocol.text import duration
from gazette.runtime.clock import Clock, SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec, leases_of

LOGS = "recovery/test"
HINTS = "/gazette/hints/test"


def log_spec(shard_id: str, **fields: Any) -> JournalSpec:
    """Return the specification of the recovery log that `shard_spec` names for that id."""
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_RECOVERY_LOG))
    return journal_spec(f"{LOGS}/{shard_id}", labels=labels, **fields)


def shard_spec(shard_id: str, *sources: str, log: bool = True, **fields: Any) -> ShardSpec:
    """Return a valid specification that reads ``sources``. ``fields`` are further fields of
    ``ShardSpec``.

    Without ``log``, the shard's store must be durable without a recovery log.
    """
    defaults: dict[str, Any] = {"max_txn_duration_ns": duration.SECOND}
    if log:
        defaults |= {"recovery_log_prefix": LOGS, "hint_prefix": HINTS, "hint_backups": 2}
    shard_sources = tuple(ShardSource(journal) for journal in sorted(sources))
    return ShardSpec(shard_id, **{"sources": shard_sources, **defaults, **fields})


class ConsumerFixture:
    """A running member of a consumer cluster. ``shards`` is a client of the member, ``etcd``
    the test's own client of etcd.

    Members on the same ``etcd`` and ``root`` are one cluster:

        async with await BrokerFixture.start(etcd, tmp_path) as broker:
            await broker.create(journal_spec("a/source", labels=…), log_spec("a-shard"))
            async with await ConsumerFixture.start(etcd, broker, App(), tmp_path) as consumer:
                await consumer.create(shard_spec("a-shard", "a/source"))
                await broker.client.append(AppendParams("a/source"), b"…")
                await consumer.read_to_heads("a-shard")

    Waits have no bound of their own: the test's timeout bounds them.
    """

    def __init__(self, service: ConsumerMember, shards: ShardClient, etcd: Etcd) -> None:
        self.service = service
        self.shards = shards
        self.etcd = etcd
        self._ended = False

    @classmethod
    async def start(
        cls,
        etcd: Etcd,
        broker: BrokerFixture,
        application: Application[Any],
        tmp_path: Path,
        *,
        zone: str = "local",
        id: str = "consumer-one",
        root: str = "/gazette/consumers/test",
        clock: Clock | None = None,
        auth: MemberAuth | None = None,
        lease_ttl_s: float = 5.0,
        config: Mapping[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """Start a member, and wait until it serves. The member has its own connection to etcd.

        ``settings`` are fields of ``ConsumerSettings``, ``server`` fields of ``ServerSettings``.
        ``config`` has the application's groups of settings. Scratch files are below ``tmp_path``.
        """
        require_callbacks(application)  # Check this before a port is bound.
        clock = SystemClock() if clock is None else clock
        scratch = tmp_path / "scratch" / f"{zone}-{id}"
        scratch.mkdir(parents=True, exist_ok=True)
        listener = Server(
            clock, replace(ServerSettings("127.0.0.1", bind_host="127.0.0.1"), **(server or {}))
        )
        listener.bind()
        defaults = ConsumerSettings(
            zone=zone,
            id=id,
            root=root,
            lease_ttl_s=lease_ttl_s,
            watch_delay_s=0.002,
            scratch_directory=scratch,
            query_timeout_s=20.0,
            graceful_stop_s=2.0,
            drain_timeout_s=0.0,
        )
        client = Client(
            broker.endpoint,
            zone=zone,
            fragments=FragmentAccess(file_root=broker.file_root),
            clock=clock,
        )
        environment = MemberEnvironment(
            clock, random.Random(id), listener, etcd.settings, auth or NoAuth()
        )
        service = ConsumerMember(
            application, environment, replace(defaults, **settings), client, config=config
        )
        try:
            await service.start()
        except BaseException:
            await service.crash()
            raise
        shards = ShardClient(listener.endpoint, zone=zone, signer=auth, clock=clock)
        return cls(service, shards, etcd)

    @property
    def endpoint(self) -> str:
        """URL of the member's gRPC server."""
        return self.service.server.endpoint

    @property
    def http(self) -> str:
        """URL of the member's HTTP server."""
        return self.service.server.http_endpoint

    # -- shards

    async def create(self, *specs: ShardSpec) -> None:
        """Create shards, and wait until each has a primary that serves.

        If a shard fails instead, raise ``GazetteError`` with the errors of its status.
        """
        await self.shards.apply_shards([ShardChange(upsert=spec) for spec in specs])
        for spec in specs:
            await self.await_primary(spec.id)

    async def update(self, spec: ShardSpec) -> None:
        """Replace the specification of a shard, whatever revision it has."""
        await self.shards.apply_shards([ShardChange(upsert=spec, expect_mod_revision=-1)])

    async def delete(self, shard_id: str) -> None:
        """Delete a shard. Its log and hints stay."""
        await self.shards.apply_shards([ShardChange(delete=shard_id, expect_mod_revision=-1)])

    def assignments(self, shard_id: str) -> list[DecodedKV]:
        """Return the shard's assignments as this member knows them, in key order."""
        key_space = self.service.key_space
        return list(key_space.prefixed(f"{key_space.root}{ASSIGNMENTS}{shard_id}#"))

    def status_of(self, shard_id: str, *, of_primary: bool = True) -> ReplicaStatus | None:
        """Return the status of the shard's primary or, without ``of_primary``, of this member's replica.
        Return None without such a replica.
        """
        for kv in self.assignments(shard_id):
            assignment: Assignment = kv.decoded
            is_own = (assignment.zone, assignment.suffix) == (
                self.service.process_id.zone,
                self.service.process_id.suffix,
            )
            if assignment.slot == 0 if of_primary else is_own:
                status: Any = kv.decoded.value
                assert isinstance(status, ReplicaStatus)
                return status
        return None

    async def until(self, predicate: Callable[[], object]) -> None:
        """Wait until ``predicate``, which depends on etcd, is true."""
        while not predicate():
            await self.service.key_space.next_change()

    async def await_status(
        self, shard_id: str, code: ReplicaCode, *, of_primary: bool = True
    ) -> ReplicaStatus:
        """Wait until a replica has that status, and return the status: see `status_of`.

        If the replica has failed and another status was awaited, raise ``GazetteError`` with its errors.
        """
        status: ReplicaStatus | None = None

        def reached() -> bool:
            nonlocal status
            status = self.status_of(shard_id, of_primary=of_primary)
            return status is not None and status.code in (code, ReplicaCode.FAILED)

        await self.until(reached)
        assert status is not None
        if status.code is not code:
            raise GazetteError("; ".join(status.errors), shard=shard_id)
        return status

    async def await_primary(self, shard_id: str) -> None:
        """Wait until the shard's primary, on any member, serves. Raise ``GazetteError`` with the errors of
        its status if it fails."""
        await self.await_status(shard_id, ReplicaCode.PRIMARY)

    async def await_failed(self, shard_id: str, *, of_primary: bool = True) -> str:
        """Wait until the shard has failed, and return the error."""
        status = await self.await_status(shard_id, ReplicaCode.FAILED, of_primary=of_primary)
        return "; ".join(status.errors)

    async def await_standby(self, shard_id: str) -> None:
        """Wait until this member is a standby of the shard that has played its log back. Raise
        ``GazetteError`` with the errors of its status if it fails. If it becomes primary, go on waiting."""
        await self.await_status(shard_id, ReplicaCode.STANDBY, of_primary=False)

    async def await_replicas(self, shard_id: str, count: int) -> None:
        """Wait until the shard has that many replicas, each of which is a standby, is primary, or has
        failed."""

        def ready() -> bool:
            codes = [kv.decoded.value.code for kv in self.assignments(shard_id)]
            return len(codes) == count and all(code >= ReplicaCode.STANDBY for code in codes)

        await self.until(ready)

    def shard(self, shard_id: str) -> Shard:
        """Return this member's replica of a shard. Raise ``NotFound`` if it has no replica."""
        shard = self.service.resolver.local_shards.get(shard_id)
        if shard is None:
            raise NotFound("this member does not hold the shard", shard=shard_id)
        return shard

    def store(self, shard_id: str) -> Any:
        """Return the store of a shard. Raise ``NotFound`` if this member has no replica, or a replica without
        a store, such as a standby."""
        store = self.shard(shard_id).store
        if store is None:
            raise NotFound("this member is not the shard's primary", shard=shard_id)
        return store

    async def promote(self, shard_id: str) -> None:
        """Make this member's standby the primary at once, without the consent of the present primary.
        Wait until it serves.

        This deletes the primary's assignment. Raise ``Conflict`` if the assignments change meanwhile.
        Raise ``Bug`` if this member is not a standby.
        """
        primary = standby = None
        for kv in self.assignments(shard_id):
            if kv.decoded.slot == 0:
                primary = kv
            elif kv.decoded.suffix == self.service.process_id.suffix:
                standby = kv
        if primary is None or standby is None:
            raise Bug(
                "promotion needs a primary on another member and a standby here", shard=shard_id
            )
        target = standby.key.rpartition("#")[0] + "#0"
        result = await self.etcd.txn(
            (
                Compare.mod_revision(primary.key, "=", primary.raw.mod_revision),
                Compare.mod_revision(standby.key, "=", standby.raw.mod_revision),
            ),
            (
                Op.delete(primary.key),
                Op.delete(standby.key),
                Op.put(target, standby.raw.value, lease=standby.raw.lease),
            ),
        )
        if not result.succeeded:
            raise Conflict("assignments changed during the promotion", shard=shard_id)
        await self.until(lambda: self.service.key_space.get(target) is not None)
        await self.await_primary(shard_id)

    async def read_through(self, shard_id: str, offsets: Mapping[str, int]) -> Mapping[str, int]:
        """Wait until the shard's transactions have read through these offsets. Return the shard's
        offsets.

        The wait continues over fail-overs. If the shard has failed, raise the error of the call.
        """
        while True:
            try:
                return (await self.shards.stat(shard_id, read_through=dict(offsets))).read_through
            except Retryable:
                status = self.status_of(shard_id)
                if status is not None and status.code is ReplicaCode.FAILED:
                    raise
            await self.service.clock.sleep(0.02)

    async def read_to_heads(self, shard_id: str) -> Mapping[str, int]:
        """Call ``read_through`` with the present heads of the shard's sources. Raise ``NotFound`` for a shard
        that this member does not know."""
        item = self.service.key_space.get(f"{self.service.key_space.root}/items/{shard_id}")
        if item is None:
            raise NotFound("shard does not exist", shard=shard_id)
        heads: dict[str, int] = {}
        decoded: Any = item.decoded
        for source in decoded.value.spec.sources:
            reader = self.service.client.reader(
                ReadParams(source.journal, offset=-1, block=False, metadata_only=True)
            )
            heads[source.journal] = await _head(reader)
        return await self.read_through(shard_id, heads)

    # -- its end

    async def stop(self) -> None:
        """Stop the member gracefully: other members take its shards over. A second call does nothing."""
        await self._end(self.service.stop)

    async def crash(self) -> None:
        """Stop the member as SIGKILL would: its lease expires, and its shards' appends stop at any byte."""
        await self._end(self.service.crash)

    async def die(self) -> None:
        """Crash the member, and revoke its lease at once. So a test can use long leases.

        On a busy machine, even running members lose a short lease.
        """
        leases = await leases_of(self.etcd, self.service.settings.root, self.service.settings.id)
        await self.crash()
        for lease in leases:
            await lease.revoke()

    async def _end(self, end: Callable[[], Awaitable[None]]) -> None:
        if self._ended:
            return
        self._ended = True
        await self.shards.close()
        await end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


async def _head(reader: Any) -> int:
    """Return the write head of the journal that ``reader`` reads."""
    try:
        await reader.read()
    except NotYet:
        pass  # Expected: no bytes exist after the head.
    finally:
        reader.close()
    head: int = reader.write_head
    return head
