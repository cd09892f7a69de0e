"""A typed asyncio client of etcd v3: keys, transactions, leases and watches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self, TypeVar

from gazette.cluster.etcd.connection import Connection, EtcdSettings
from gazette.cluster.etcd.failures import ResponseTooLarge
from gazette.cluster.etcd.lease import Lease, LeaseStatus
from gazette.cluster.etcd.pb import rpc_pb2
from gazette.cluster.etcd.values import (
    Compacted,
    Compare,
    DeleteOp,
    DeleteResult,
    Key,
    KeyValue,
    LeaseLost,
    MemberStatus,
    Op,
    Operation,
    PutResult,
    RangeResult,
    ResponseHeader,
    TxnOp,
    TxnResult,
    WatchEvent,
    WatchResponse,
    has_reads,
    key_bytes,
    only_reads,
    prefix_range,
)
from gazette.cluster.etcd.watch import watch
from gazette.cluster.etcd.wire import (
    delete_from_pb,
    delete_to_pb,
    header_from_pb,
    kv_from_pb,
    put_from_pb,
    put_to_pb,
    status_from_pb,
    txn_from_pb,
    txn_to_pb,
)
from gazette.errors import Invalid
from gazette.http2.transport import Transport
from gazette.runtime.clock import Clock

__all__ = [
    "Compacted",
    "Compare",
    "Etcd",
    "EtcdSettings",
    "Key",
    "KeyValue",
    "Lease",
    "LeaseLost",
    "LeaseStatus",
    "MemberStatus",
    "Op",
    "Operation",
    "ResponseHeader",
    "TxnResult",
    "WatchEvent",
    "WatchResponse",
]

R = TypeVar("R")

_PAGE = 1_000


class Etcd:
    """A client of one etcd cluster. Loop-bound; made by ``connect``, ended by ``close``.

    Each call has a deadline, ``EtcdSettings.request_timeout_s``, and fails over between endpoints within it.
    Calls raise ``Unavailable`` if no endpoint succeeds in time, ``NotAllowed`` if etcd refuses the
    credentials, ``Invalid`` if it rejects the request, ``Closed`` after ``close``.

    A write of keys with an unknown outcome is never repeated: it raises ``Unavailable`` with
    the fact ``outcome="unknown"``.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    async def connect(
        cls,
        settings: EtcdSettings,
        clock: Clock,
        *,
        transport: Transport | None = None,
        answer_s: float = math.inf,
    ) -> Self:
        """Connect, and return once a member that has a leader answered.

        Raise ``Unavailable``, which names the endpoints, if no endpoint answers within ``request_timeout_s``,
        or within ``answer_s`` if that is less.
        Raise ``NotAllowed`` if etcd does not accept the user and password. Cancellation: nothing is left.
        """
        first_s = min(answer_s, settings.request_timeout_s)
        first = dataclasses.replace(settings, request_timeout_s=first_s)
        client = cls(connection := Connection(first, clock, transport))
        try:
            await client.status()
        except BaseException:
            await client.close()
            raise
        connection.settings = settings
        return client

    async def close(self) -> None:
        """Close all connections. Calls, watches and keep-alives in flight raise ``Closed``."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def settings(self) -> EtcdSettings:
        return self._connection.settings

    @property
    def clock(self) -> Clock:
        return self._connection.clock

    async def get(self, key: Key, *, revision: int = 0) -> KeyValue | None:
        """Return the key as of ``revision`` (0: now), or None if it does not exist.

        Raise ``Compacted`` if the revision is gone, ``NotYet`` if it is still to come.
        """
        request = rpc_pb2.RangeRequest(key=key_bytes(key), revision=revision)
        response = await self._range(request)
        return kv_from_pb(response.kvs[0]) if response.kvs else None

    async def get_each(self, *keys: Key) -> tuple[KeyValue | None, ...]:
        """Return the values of ``keys`` in their order, all at one revision; None for keys that do not exist.

        Read the keys one after the other: `txn` says why one transaction must not read them. If etcd compacts
        the revision meanwhile, read all of them again.
        """
        while True:
            values: list[KeyValue | None] = []
            revision = 0
            try:
                for key in keys:
                    request = rpc_pb2.RangeRequest(key=key_bytes(key), revision=revision)
                    response = await self._range(request)
                    revision = revision or response.header.revision
                    values.append(kv_from_pb(response.kvs[0]) if response.kvs else None)
            except Compacted:
                continue
            return tuple(values)

    async def range(
        self,
        prefix: Key,
        *,
        range_end: Key | None = None,
        revision: int = 0,
        page: int = _PAGE,
        keys_only: bool = False,
    ) -> RangeResult:
        """Return all keys that begin with ``prefix``; with ``range_end``, the keys in ``[prefix,
        range_end)``.

        Read in pages, all at ``revision`` (0: the first page's), which is ``header.revision`` of the result.
        Raise ``Compacted`` if the revision is compacted before the last page, ``NotYet`` if it is still to
        come, `ResponseTooLarge` if a single key exceeds the limit of this client.
        """
        begin, end = prefix_range(prefix)
        if range_end is not None:
            begin, end = key_bytes(prefix), key_bytes(range_end)
        header: ResponseHeader | None = None
        kvs: list[KeyValue] = []
        count = 0
        while True:
            request = rpc_pb2.RangeRequest(
                key=begin, range_end=end, limit=page, revision=revision, keys_only=keys_only
            )
            try:
                response = await self._range(request)
            except ResponseTooLarge:
                if page == 1:
                    raise
                page = max(page // 4, 1)
                continue
            if header is None:
                revision = revision or response.header.revision
                header = dataclasses.replace(header_from_pb(response.header), revision=revision)
                count = response.count
            kvs.extend(map(kv_from_pb, response.kvs))
            if not response.more:
                return RangeResult(header, tuple(kvs), count)
            begin = kvs[-1].key + b"\0"

    async def put(
        self, key: Key, value: bytes, *, lease: int = 0, ignore_lease: bool = False
    ) -> PutResult:
        """Write one key. Attach it to ``lease``, or keep its present lease with ``ignore_lease``.

        Raise ``NotFound`` if the lease does not exist. Cancellation: the key may have been written.
        """
        request = put_to_pb(Op.put(key, value, lease=lease, ignore_lease=ignore_lease))
        response = await self._connection.call(
            "Put",
            lambda m, metadata, t: m.kv.Put(request, metadata=metadata, timeout=t),
            repeatable=False,
        )
        return put_from_pb(response)

    async def delete(self, key: Key) -> DeleteResult:
        """Delete one key, if it exists. Cancellation: the key may have been deleted."""
        return await self._delete(Op.delete(key))

    async def delete_prefix(self, prefix: Key) -> DeleteResult:
        """Delete all keys that begin with ``prefix``. Cancellation: the keys may have been deleted."""
        return await self._delete(Op.delete_prefix(prefix))

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """Run ``success`` if all ``compares`` hold, else ``failure``: atomically, at one revision.

        If a compare does not hold, that is no error: see ``succeeded`` of the result. By default, etcd limits
        each of the three arguments to 128 entries. etcd refuses a key twice in one branch (``Invalid``).

        Raise ``Invalid`` if there are reads and no writes: use `get_each`. If a caller cancels such a
        transaction while it runs, etcd from before 2023 (tried: 3.5.1) ends with a panic.

        Cancellation: the transaction may have run.
        """
        op = TxnOp(tuple(compares), tuple(success), tuple(failure))
        if only_reads((op,)) and has_reads((op,)):
            raise Invalid(
                "a transaction that only reads may end the process of etcd",
                path="txn",
                hint="Use Etcd.get_each.",
            )
        request = txn_to_pb(op)
        response = await self._connection.call(
            "Txn",
            lambda m, metadata, t: m.kv.Txn(request, metadata=metadata, timeout=t),
            repeatable=only_reads((op,)),
        )
        return txn_from_pb(response)

    async def grant(self, ttl_s: float) -> Lease:
        """Return a new lease of ``ttl_s`` (rounded up to seconds; etcd may grant a longer one).

        Cancellation: a lease without an owner may remain until it expires.
        """
        request = rpc_pb2.LeaseGrantRequest(TTL=max(math.ceil(ttl_s), 1))
        clock = self.clock
        sent_at = clock.monotonic()

        async def attempt(m: Any, metadata: Any, timeout_s: float) -> Any:
            nonlocal sent_at
            sent_at = clock.monotonic()
            return await m.lease.LeaseGrant(request, metadata=metadata, timeout=timeout_s)

        # A grant may be repeated: a lease without a user does no harm, and expires.
        response = await self._connection.call("LeaseGrant", attempt, repeatable=True)
        ttl_s = float(response.TTL)
        return Lease(self._connection, response.ID, ttl_s, sent_at + ttl_s)

    def watch(
        self, prefix: Key, *, start_revision: int, progress: bool = True
    ) -> AsyncGenerator[WatchResponse, None]:
        """Yield events of all keys that begin with ``prefix``, from ``start_revision`` on (0: from now).

        The first response is ``created``. With ``progress``, etcd sends its revision about every ten
        minutes while no key changes.

        The watch is one stream to one endpoint, and does not resume. Iterate under ``contextlib.aclosing``.
        Raise ``Unavailable`` if the stream breaks, or if etcd's member has lost its leader. Then watch again,
        from the last ``resume_revision`` of a response: the new watch uses the next endpoint.

        Raise ``Compacted`` if ``start_revision`` is gone, ``NotAllowed`` if etcd refuses the user, ``Broken``
        if etcd cancels the watch for another reason. Cancellation: the watch ends.
        """
        begin, end = prefix_range(prefix)
        return watch(self._connection, begin, end, start_revision=start_revision, progress=progress)

    async def compact(self, revision: int) -> None:
        """Forget all revisions before ``revision``. Raise ``Compacted`` if etcd has forgotten them
        already."""
        request = rpc_pb2.CompactionRequest(revision=revision, physical=True)
        await self._connection.call(
            "Compact",
            lambda m, metadata, t: m.kv.Compact(request, metadata=metadata, timeout=t),
            repeatable=True,
        )

    async def status(self) -> MemberStatus:
        """Return the status of the first endpoint that answers, from the preferred one on."""
        response = await self._connection.call(
            "Status",
            lambda m, metadata, t: m.maintenance.Status(
                rpc_pb2.StatusRequest(), metadata=metadata, timeout=t
            ),
            repeatable=True,
        )
        return status_from_pb(response)

    async def _range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        response: rpc_pb2.RangeResponse = await self._connection.call(
            "Range",
            lambda m, metadata, t: m.kv.Range(request, metadata=metadata, timeout=t),
            repeatable=True,
        )
        return response

    async def _delete(self, op: DeleteOp) -> DeleteResult:
        request = delete_to_pb(op)
        response = await self._connection.call(
            "DeleteRange",
            lambda m, metadata, t: m.kv.DeleteRange(request, metadata=metadata, timeout=t),
            repeatable=False,
        )
        return delete_from_pb(response)
