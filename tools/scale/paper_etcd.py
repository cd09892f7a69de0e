"""An etcd on paper: keys, transactions and watches, with a latency. Its own work takes no time.

`PaperEtcd` is a transport of the true client, so that requests and answers are encoded as for etcd.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from gazette.cluster.etcd.pb import kv_pb2, rpc_pb2
from tools.scale.paper_loop import PaperLoop, sleep

TXN_OPS_MAX: Final = 128
_RELATIONS: Final[dict[int, Callable[[int, int], bool]]] = {
    rpc_pb2.Compare.EQUAL: lambda have, want: have == want,
    rpc_pb2.Compare.LESS: lambda have, want: have < want,
}


class PaperEtcd:
    """All keys, and the events since the start. Leases have no keep-alives: ``end_lease`` ends one.

    An answer takes ``latency_s``; the rate of writes has no limit.
    """

    def __init__(self, loop: PaperLoop, latency_s: float) -> None:
        self.loop = loop
        self.latency_s = latency_s
        self.revision = 1
        self.kvs: dict[bytes, kv_pb2.KeyValue] = {}
        self.transactions = 0
        self.operations = 0
        self.largest = 0
        """Greatest number of operations or comparisons of a transaction."""
        self.event_bytes = 0
        """Bytes of the events that each watch of all keys has got."""
        self.events = 0
        self.changed_at = loop.time()
        self.on_change: Callable[[Iterable[kv_pb2.Event]], None] = lambda events: None
        self._order: list[bytes] = []
        self._items: dict[bytes, dict[bytes, kv_pb2.KeyValue]] = {}
        """The assignments of each item, by the common prefix of their keys."""
        self._watches: list[_WatchCall] = []

    @property
    def value_bytes(self) -> int:
        return sum(len(kv.key) + len(kv.value) for kv in self.kvs.values())

    def channel(self, target: str, credentials: Any, options: Any) -> PaperEtcd:
        """Return the channel of all calls: this is a `gazette.http2.transport.Transport`."""
        del target, credentials, options
        return self

    async def close(self, grace: float | None = None) -> None:
        pass

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        answers: dict[str, Callable[[Any], Any]] = {
            "Txn": self._txn,
            "Range": self._range,
            "Status": self._status,
        }
        answer = answers.get(path.rpartition("/")[2])

        async def call(request: Any, **options: Any) -> Any:
            assert answer is not None, path
            sent = request_serializer(request)
            await sleep(self.latency_s)
            with self.loop.free():
                answered = answer(type(request).FromString(sent)).SerializeToString()
            return response_deserializer(answered)

        return call

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        return lambda **options: _WatchCall(self, response_deserializer)

    def unary_stream(self, path: str, *codecs: Any, **options: Any) -> None:
        return None

    stream_unary = unary_stream

    def put(self, puts: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Write keys, as (key, value, lease), at one revision, in no time."""
        with self.loop.free():
            self._commit([self._put(*put) for put in puts])

    def fill(self, puts: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Write many keys, each at a revision of its own, before anything watches them."""
        with self.loop.free():
            for put in puts:
                self._put(*put)
                self.revision += 1

    def end_lease(self, lease: int) -> None:
        """Delete all keys of a lease at one revision."""
        with self.loop.free():
            keys = [key for key, kv in self.kvs.items() if kv.lease == lease]
            self._commit([self._delete(key) for key in keys])

    def item(self, prefix: bytes) -> dict[bytes, kv_pb2.KeyValue]:
        """Return the assignments of an item, by the prefix of their keys, which ends with ``#``."""
        return self._items.get(prefix, {})

    def watch_from(self, call: _WatchCall) -> None:
        self._watches.append(call)

    def header(self) -> rpc_pb2.ResponseHeader:
        return rpc_pb2.ResponseHeader(
            cluster_id=1, member_id=2, revision=self.revision, raft_term=3
        )

    def _put(self, key: bytes, value: bytes, lease: int, ignore_lease: bool = False) -> Any:
        before = self.kvs.get(key)
        revision = self.revision + 1
        kv = kv_pb2.KeyValue(
            key=key,
            value=value,
            create_revision=revision if before is None else before.create_revision,
            mod_revision=revision,
            version=1 if before is None else before.version + 1,
            lease=before.lease if ignore_lease and before is not None else lease,
        )
        if before is None:
            self._order.append(key)
        self.kvs[key] = kv
        if (prefix := item_prefix(key)) is not None:
            self._items.setdefault(prefix, {})[key] = kv
        return kv_pb2.Event(type=kv_pb2.Event.PUT, kv=kv)

    def _delete(self, key: bytes) -> Any:
        kv = self.kvs.pop(key)
        if (prefix := item_prefix(key)) is not None:
            del self._items[prefix][key]
        tombstone = kv_pb2.KeyValue(key=kv.key, mod_revision=self.revision + 1)
        return kv_pb2.Event(type=kv_pb2.Event.DELETE, kv=tombstone)

    def _commit(self, events: list[Any]) -> None:
        self.revision += 1
        self.changed_at = self.loop.time()
        response = rpc_pb2.WatchResponse(header=self.header(), events=events).SerializeToString()
        self.events += len(events)
        self.event_bytes += len(response)
        for call in self._watches:
            call.deliver(response)
        self.on_change(events)

    def _txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        self.largest = max(self.largest, len(request.compare), len(request.success))
        assert self.largest <= TXN_OPS_MAX
        self.transactions += 1
        self.operations += len(request.success)
        self.changed_at = self.loop.time()
        succeeded = all(map(self._holds, request.compare))
        response = rpc_pb2.TxnResponse(header=self.header(), succeeded=succeeded)
        events = []
        for operation in request.success if succeeded else request.failure:
            answer = response.responses.add()
            if operation.HasField("request_put"):
                put = operation.request_put
                events.append(self._put(put.key, put.value, put.lease, put.ignore_lease))
                answer.response_put.SetInParent()
            elif operation.HasField("request_delete_range"):
                events.append(self._delete(operation.request_delete_range.key))
                answer.response_delete_range.deleted = 1
            else:
                read = operation.request_range
                answer.response_range.kvs.extend(self._read(read.key, read.range_end))
        if events:
            self._commit(events)
            response.header.revision = self.revision
        return response

    def _read(self, key: bytes, range_end: bytes) -> list[kv_pb2.KeyValue]:
        if range_end:  # The allocator compares ranges of one item's assignments only.
            return list(self.item(key).values())
        kv = self.kvs.get(key)
        return [] if kv is None else [kv]

    def _holds(self, compare: rpc_pb2.Compare) -> bool:
        holds = _RELATIONS[compare.result]
        kvs = self._read(compare.key, compare.range_end) or [kv_pb2.KeyValue()]
        if compare.target == rpc_pb2.Compare.MOD:
            return all(holds(kv.mod_revision, compare.mod_revision) for kv in kvs)
        assert compare.target == rpc_pb2.Compare.CREATE
        return all(holds(kv.create_revision, compare.create_revision) for kv in kvs)

    def _range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        if len(self._order) != len(self.kvs):
            self._order = list(self.kvs)
        self._order.sort()
        begin = bisect_left(self._order, request.key)
        end = bisect_left(self._order, request.range_end)
        stop = min(begin + request.limit, end)
        keys = self._order[begin:stop]
        return rpc_pb2.RangeResponse(
            header=self.header(),
            kvs=[self.kvs[key] for key in keys],
            count=end - begin,
            more=stop < end,
        )

    def _status(self, request: rpc_pb2.StatusRequest) -> rpc_pb2.StatusResponse:
        del request
        return rpc_pb2.StatusResponse(header=self.header(), version="3.5.9", leader=2)


class _WatchCall:
    """The stream of one watch of all keys, from the revision at which it begins."""

    def __init__(self, etcd: PaperEtcd, decode: Callable[[bytes], Any]) -> None:
        self._etcd = etcd
        self._decode = decode
        self._due: deque[tuple[float, bytes]] = deque()
        self._arrived = asyncio.Event()

    def deliver(self, response: bytes) -> None:
        self._due.append((self._etcd.loop.time() + self._etcd.latency_s / 2, response))
        self._arrived.set()

    async def write(self, request: Any) -> None:
        del request
        created = rpc_pb2.WatchResponse(header=self._etcd.header(), created=True)
        self.deliver(created.SerializeToString())
        self._etcd.watch_from(self)

    async def read(self) -> Any:
        while not self._due:
            self._arrived.clear()
            await self._arrived.wait()
        due_at, response = self._due.popleft()
        if (early_s := due_at - self._etcd.loop.time()) > 0:
            await sleep(early_s)
        return self._decode(response)

    def cancel(self) -> None:
        pass


def item_prefix(key: bytes) -> bytes | None:
    """Return the common prefix of an item's assignments, by the key of one of these; None for other keys."""
    if b"/assign/" not in key:
        return None
    return key[: key.index(b"#") + 1]
