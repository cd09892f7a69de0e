"""The state machine of etcd: keys with all their revisions, transactions and leases. Pure.

Requests and responses are etcd's own messages. Headers of responses hold the revision only.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gazette.cluster.etcd.pb import kv_pb2, rpc_pb2
from gazette.testing.simulation.etcd import errors
from gazette.testing.simulation.etcd.leases import Leases

TXN_OPS_MAX: Final = 128
REQUEST_BYTES_MAX: Final = 1536 * 1024
FIRST_REVISION: Final = 1
_ENVELOPE_BYTES: Final = 23  # what etcd puts around a request before it measures it
_FROM_KEY: Final = b"\0"

Event: TypeAlias = kv_pb2.Event
KeyValue: TypeAlias = kv_pb2.KeyValue
_Version: TypeAlias = "tuple[int, KeyValue | None]"
"""A revision, and the key with its value at this revision; None if it was deleted."""


class EtcdStore:
    """The keys, revisions and leases of one etcd.

    Every method answers, or raises ``EtcdRefusal`` and changes nothing. ``observers`` are called after each
    write with its revision and events.

    Invariants: one write is one revision; ``compacted`` is below or at ``revision``; ``_keys`` has the keys
    of ``_histories`` in order; versions of a key ascend by revision.
    """

    def __init__(
        self, *, lease_ttl_min_s: int = 2, revision: int = FIRST_REVISION, compacted: int = -1
    ) -> None:
        self.revision = revision
        self.compacted = compacted
        self.leases = Leases(lease_ttl_min_s)
        self.observers: list[Callable[[int, Sequence[Event]], None]] = []
        self.expires = False
        """True if the present write ends a lease because its time is over, and not because it is revoked."""
        self._keys: list[bytes] = []
        self._histories: dict[bytes, list[_Version]] = {}
        self._log: list[tuple[int, tuple[Event, ...]]] = []
        self._changes: list[Event] = []

    # Keys.

    def range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        _check_range(request)
        self._check_revision(request.revision)
        return self._range(request)

    def put(self, request: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        _check_put(request)
        _check_size(request)
        self._check_lease(request)
        self._check_key_exists(request)
        response = self._put(request)
        self._commit()
        return response

    def delete_range(self, request: rpc_pb2.DeleteRangeRequest) -> rpc_pb2.DeleteRangeResponse:
        _check_delete(request)
        response = self._delete_range(request)
        self._commit()
        return response

    def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        _check_txn(request, TXN_OPS_MAX)
        _check_duplicates(request.success)
        _check_duplicates(request.failure)
        _check_size(request)
        # As in etcd: every compare, even of nested transactions, sees the keys before the first write.
        branch = self._decide(request)
        for op in branch.walk():
            if op.HasField("request_put"):
                self._check_key_exists(op.request_put)
                self._check_lease(op.request_put)
        for op in branch.walk():
            if op.HasField("request_range"):
                self._check_revision(op.request_range.revision)
        response = self._run(branch)
        response.header.revision = self._read_revision
        self._commit()
        return response

    def compact(self, request: rpc_pb2.CompactionRequest) -> rpc_pb2.CompactionResponse:
        revision = request.revision
        if revision <= self.compacted:
            raise errors.compacted()
        if revision > self.revision:
            raise errors.future_revision()
        self.compacted = revision
        del self._log[: bisect.bisect_left(self._log, (revision,))]
        for key, versions in list(self._histories.items()):
            first = max(bisect.bisect_left(versions, (revision + 1,)) - 1, 0)
            written, kv = versions[first]
            if kv is None and written <= revision:
                first += 1
            del versions[:first]
            if not versions:
                del self._histories[key]
        self._keys = sorted(self._histories)
        return rpc_pb2.CompactionResponse(header=self.header())

    # Leases. `now` is the time of a monotonic clock, in seconds.

    def grant(self, request: rpc_pb2.LeaseGrantRequest, now: float) -> rpc_pb2.LeaseGrantResponse:
        lease = self.leases.grant(request.ID, request.TTL, now)
        return rpc_pb2.LeaseGrantResponse(header=self.header(), ID=lease.id, TTL=lease.ttl_s)

    def revoke(self, request: rpc_pb2.LeaseRevokeRequest) -> rpc_pb2.LeaseRevokeResponse:
        """End a lease and delete its keys, all at one revision."""
        keys = sorted(self.leases.remove(request.ID))
        for key in keys:
            self._delete(key)
        self._commit()
        return rpc_pb2.LeaseRevokeResponse(header=self.header())

    def keep_alive(
        self, request: rpc_pb2.LeaseKeepAliveRequest, now: float
    ) -> rpc_pb2.LeaseKeepAliveResponse:
        ttl_s = self.leases.keep_alive(request.ID, now)
        return rpc_pb2.LeaseKeepAliveResponse(header=self.header(), ID=request.ID, TTL=ttl_s)

    def time_to_live(
        self, request: rpc_pb2.LeaseTimeToLiveRequest, now: float
    ) -> rpc_pb2.LeaseTimeToLiveResponse:
        lease = self.leases.living(request.ID, now)
        if lease is None:
            return rpc_pb2.LeaseTimeToLiveResponse(header=self.header(), ID=request.ID, TTL=-1)
        return rpc_pb2.LeaseTimeToLiveResponse(
            header=self.header(),
            ID=lease.id,
            TTL=int(lease.expires_at - now),
            grantedTTL=lease.ttl_s,
            keys=sorted(lease.keys) if request.keys else (),
        )

    def expire(self, now: float) -> list[int]:
        """Revoke the leases whose time is over, each at its own revision; return their ids."""
        ids = self.leases.expired(now)
        self.expires = True
        for lease_id in ids:
            self.revoke(rpc_pb2.LeaseRevokeRequest(ID=lease_id))
        self.expires = False
        return ids

    # What watches read.

    def events_from(self, revision: int, limit: int) -> list[tuple[int, tuple[Event, ...]]]:
        """Return at most ``limit`` writes at or after ``revision``, which is not compacted."""
        begin = bisect.bisect_left(self._log, (revision,))
        return self._log[begin : begin + limit]

    def before(self, event: Event) -> KeyValue | None:
        """Return the key before the event, unless it was absent or that revision is compacted."""
        revision = event.kv.mod_revision - 1
        if revision < self.compacted:
            return None
        return _at(self._histories.get(event.kv.key, ()), revision)

    def header(self) -> rpc_pb2.ResponseHeader:
        return rpc_pb2.ResponseHeader(revision=self.revision)

    # Within one transaction.

    @property
    def _read_revision(self) -> int:
        return self.revision + 1 if self._changes else self.revision

    def _select(self, key: bytes, range_end: bytes, revision: int) -> list[KeyValue]:
        if not range_end:
            kv = _at(self._histories.get(key, ()), revision)
            return [] if kv is None else [kv]
        begin = bisect.bisect_left(self._keys, key)
        end = (
            len(self._keys) if range_end == _FROM_KEY else bisect.bisect_left(self._keys, range_end)
        )
        kvs = (_at(self._histories[key], revision) for key in self._keys[begin:end])
        return [kv for kv in kvs if kv is not None]

    def _range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        now = self._read_revision
        kvs = self._select(
            request.key, request.range_end, request.revision if request.revision > 0 else now
        )
        response = rpc_pb2.RangeResponse(
            header=rpc_pb2.ResponseHeader(revision=now), count=len(kvs)
        )
        if request.count_only:
            return response
        limit = request.limit
        if limit > 0:
            response.more = len(kvs) > limit
            if request.sort_order == rpc_pb2.RangeRequest.NONE:
                # As in etcd: without an order, cut the keys to one more than the limit, and sort only these.
                kvs = _sorted(kvs[: limit + 1], request)[:limit]
            else:
                kvs = _sorted(kvs, request)[:limit]
        else:
            kvs = _sorted(kvs, request)
        response.kvs.extend(kvs)
        if request.keys_only:
            for kv in response.kvs:
                kv.ClearField("value")
        return response

    def _put(self, request: rpc_pb2.PutRequest) -> rpc_pb2.PutResponse:
        revision = self.revision + 1
        key = request.key
        versions = self._histories.get(key)
        before = None
        if versions is None:
            versions = self._histories[key] = []
            bisect.insort(self._keys, key)
        else:
            before = versions[-1][1]
        kv = KeyValue(
            key=key,
            value=request.value,
            create_revision=revision,
            mod_revision=revision,
            version=1,
            lease=request.lease,
        )
        response = rpc_pb2.PutResponse(header=rpc_pb2.ResponseHeader(revision=revision))
        if before is not None:
            kv.create_revision = before.create_revision
            kv.version = before.version + 1
            if request.ignore_value:
                kv.value = before.value
            if request.ignore_lease:
                kv.lease = before.lease
            if request.prev_kv:
                response.prev_kv.CopyFrom(before)
        old_lease = 0 if before is None else before.lease
        if old_lease != kv.lease:
            self.leases.move(key, old_lease, kv.lease)
        versions.append((revision, kv))
        self._changes.append(Event(type=kv_pb2.Event.PUT, kv=kv))
        return response

    def _delete_range(self, request: rpc_pb2.DeleteRangeRequest) -> rpc_pb2.DeleteRangeResponse:
        gone = self._select(request.key, request.range_end, self._read_revision)
        for kv in gone:
            self._delete(kv.key)
        return rpc_pb2.DeleteRangeResponse(
            header=rpc_pb2.ResponseHeader(revision=self._read_revision),
            deleted=len(gone),
            prev_kvs=gone if request.prev_kv else (),
        )

    def _delete(self, key: bytes) -> None:
        revision = self.revision + 1
        versions = self._histories[key]
        before = versions[-1][1]
        if before is not None and before.lease:
            self.leases.move(key, before.lease, 0)
        versions.append((revision, None))
        tombstone = KeyValue(key=key, mod_revision=revision)
        self._changes.append(Event(type=kv_pb2.Event.DELETE, kv=tombstone))

    def _commit(self) -> None:
        if not self._changes:
            return
        self.revision += 1
        events = tuple(self._changes)
        self._changes.clear()
        self._log.append((self.revision, events))
        for observer in self.observers:
            observer(self.revision, events)

    # Transactions.

    def _decide(self, request: rpc_pb2.TxnRequest) -> _Branch:
        succeeded = all(self._holds(compare) for compare in request.compare)
        operations = request.success if succeeded else request.failure
        nested = {
            index: self._decide(op.request_txn)
            for index, op in enumerate(operations)
            if op.HasField("request_txn")
        }
        return _Branch(succeeded, operations, nested)

    def _holds(self, compare: rpc_pb2.Compare) -> bool:
        kvs = self._select(compare.key, compare.range_end, self.revision)
        if not kvs:
            # As in etcd: each comparison with the value of an absent key is false.
            if compare.target == rpc_pb2.Compare.VALUE:
                return False
            kvs = [KeyValue()]
        return all(_compares(kv, compare) for kv in kvs)

    def _run(self, branch: _Branch) -> rpc_pb2.TxnResponse:
        response = rpc_pb2.TxnResponse(header=rpc_pb2.ResponseHeader(), succeeded=branch.succeeded)
        for index, op in enumerate(branch.operations):
            result = response.responses.add()
            match op.WhichOneof("request"):
                case "request_range":
                    result.response_range.CopyFrom(self._range(op.request_range))
                case "request_put":
                    result.response_put.CopyFrom(self._put(op.request_put))
                case "request_delete_range":
                    result.response_delete_range.CopyFrom(
                        self._delete_range(op.request_delete_range)
                    )
                case _:
                    result.response_txn.CopyFrom(self._run(branch.nested[index]))
        return response

    # Refusals that depend on the keys.

    def _check_revision(self, revision: int) -> None:
        if revision > self.revision:
            raise errors.future_revision()
        if 0 < revision < self.compacted:
            raise errors.compacted()

    def _check_lease(self, request: rpc_pb2.PutRequest) -> None:
        if request.lease and request.lease not in self.leases:
            raise errors.lease_not_found()

    def _check_key_exists(self, request: rpc_pb2.PutRequest) -> None:
        if (request.ignore_value or request.ignore_lease) and not self._select(
            request.key, b"", self.revision
        ):
            raise errors.key_not_found()


@dataclass(frozen=True, slots=True)
class _Branch:
    """The operations of a transaction that run, and the branches of its nested transactions."""

    succeeded: bool
    operations: Sequence[rpc_pb2.RequestOp]
    nested: dict[int, _Branch]

    def walk(self) -> Iterator[rpc_pb2.RequestOp]:
        for index, op in enumerate(self.operations):
            if index in self.nested:
                yield from self.nested[index].walk()
            else:
                yield op


def _at(versions: Sequence[_Version], revision: int) -> KeyValue | None:
    if not versions:
        return None
    last = versions[-1]
    if last[0] <= revision:
        return last[1]
    index = bisect.bisect_left(versions, (revision + 1,))
    return versions[index - 1][1] if index else None


_SORT_FIELDS: Final = {
    rpc_pb2.RangeRequest.KEY: "key",
    rpc_pb2.RangeRequest.VERSION: "version",
    rpc_pb2.RangeRequest.CREATE: "create_revision",
    rpc_pb2.RangeRequest.MOD: "mod_revision",
    rpc_pb2.RangeRequest.VALUE: "value",
}


def _sorted(kvs: list[KeyValue], request: rpc_pb2.RangeRequest) -> list[KeyValue]:
    descending = request.sort_order == rpc_pb2.RangeRequest.DESCEND
    if request.sort_target == rpc_pb2.RangeRequest.KEY and not descending:
        return kvs
    name = _SORT_FIELDS[request.sort_target]
    return sorted(kvs, key=lambda kv: getattr(kv, name), reverse=descending)


_COMPARE_FIELDS: Final = {
    rpc_pb2.Compare.VERSION: "version",
    rpc_pb2.Compare.CREATE: "create_revision",
    rpc_pb2.Compare.MOD: "mod_revision",
    rpc_pb2.Compare.VALUE: "value",
    rpc_pb2.Compare.LEASE: "lease",
}


def _compares(kv: KeyValue, compare: rpc_pb2.Compare) -> bool:
    name = _COMPARE_FIELDS[compare.target]
    # A compare that lacks the operand of its target compares with the default, 0 or empty.
    left: Any = getattr(kv, name)
    right: Any = getattr(compare, name)
    match compare.result:
        case rpc_pb2.Compare.EQUAL:
            return bool(left == right)
        case rpc_pb2.Compare.NOT_EQUAL:
            return bool(left != right)
        case rpc_pb2.Compare.GREATER:
            return bool(left > right)
        case _:
            return bool(left < right)


# Refusals that the request alone explains.


def _check_size(request: rpc_pb2.PutRequest | rpc_pb2.TxnRequest) -> None:
    if request.ByteSize() + _ENVELOPE_BYTES > REQUEST_BYTES_MAX:
        raise errors.request_too_large()


def _check_range(request: rpc_pb2.RangeRequest) -> None:
    if not request.key:
        raise errors.empty_key()
    if request.sort_order not in (0, 1, 2) or request.sort_target not in _SORT_FIELDS:
        raise errors.invalid_sort_option()


def _check_put(request: rpc_pb2.PutRequest) -> None:
    if not request.key:
        raise errors.empty_key()
    if request.ignore_value and request.value:
        raise errors.value_provided()
    if request.ignore_lease and request.lease:
        raise errors.lease_provided()


def _check_delete(request: rpc_pb2.DeleteRangeRequest) -> None:
    if not request.key:
        raise errors.empty_key()


def _check_txn(request: rpc_pb2.TxnRequest, operations_max: int) -> None:
    operations = max(len(request.compare), len(request.success), len(request.failure))
    if operations > operations_max:
        raise errors.too_many_operations()
    for compare in request.compare:
        if not compare.key:
            raise errors.empty_key()
        if compare.target not in _COMPARE_FIELDS or compare.result not in (0, 1, 2, 3):
            raise errors.unimplemented(
                f"a compare of target {compare.target} and result {compare.result}"
            )
    for branch in (request.success, request.failure):
        for op in branch:
            match op.WhichOneof("request"):
                case "request_range":
                    _check_range(op.request_range)
                case "request_put":
                    _check_put(op.request_put)
                case "request_delete_range":
                    _check_delete(op.request_delete_range)
                case "request_txn":
                    _check_txn(op.request_txn, operations_max - operations)
                case _:
                    raise errors.key_not_found()


_Deletes: TypeAlias = "list[tuple[bytes, bytes]]"


def _check_duplicates(operations: Sequence[rpc_pb2.RequestOp]) -> tuple[set[bytes], _Deletes]:
    """Return the keys that a branch puts and the ranges that it deletes, even in nested branches. Raise
    ``EtcdRefusal`` if the branch puts a key twice, or puts a key that it deletes. As in etcd, a nested branch
    may delete what an earlier one puts, and a deletion may have no end.
    """
    puts: set[bytes] = set()
    deletes: _Deletes = [
        (op.request_delete_range.key, op.request_delete_range.range_end)
        for op in operations
        if op.HasField("request_delete_range")
    ]
    for op in operations:
        if not op.HasField("request_txn"):
            continue
        then, then_deletes = _check_duplicates(op.request_txn.success)
        otherwise, otherwise_deletes = _check_duplicates(op.request_txn.failure)
        children = then | otherwise
        if puts & children or any(_deleted(key, deletes) for key in children):
            raise errors.duplicate_key()
        puts |= children
        deletes += then_deletes + otherwise_deletes
    for op in operations:
        if op.HasField("request_put"):
            key = op.request_put.key
            if key in puts or _deleted(key, deletes):
                raise errors.duplicate_key()
            puts.add(key)
    return puts, deletes


def _deleted(key: bytes, deletes: _Deletes) -> bool:
    return any(key == begin if not end else begin <= key < end for begin, end in deletes)
