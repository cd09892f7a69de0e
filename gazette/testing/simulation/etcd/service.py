"""The gRPC services of the fake: they add headers and turn refusals into statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc

from gazette.cluster.etcd.pb import rpc_pb2, rpc_pb2_grpc
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope
from gazette.testing.simulation.etcd import errors
from gazette.testing.simulation.etcd.errors import EtcdRefusal
from gazette.testing.simulation.etcd.store import EtcdStore
from gazette.testing.simulation.etcd.watches import WatchStream

log = logging.getLogger(__name__)

_stubs: Any = rpc_pb2_grpc
_TICK_S: Final = 0.5
_VERSION: Final = "3.5.1"
_NO_PAGE_BYTES: Final = 24_576

R = TypeVar("R")


class EtcdCall(Protocol):
    """The methods of ``grpc.aio.ServicerContext`` that the fake calls."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...
    async def write(self, message: Any) -> None: ...
    def peer(self) -> str: ...


class FakeEtcd:
    """One etcd of one member, in this process. Loop-bound; see the package for its use.

    Times are read from ``clock`` only. ``streams`` are the streams of watches, oldest first.
    ``watch_delay_s`` is the delay with which a stream of watches begins.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lease_ttl_min_s: int = 2,
        progress_interval_s: float = 600.0,
        cluster_id: int = 0x14A7_61E5,
        member_id: int = 0x8E9E_05C5,
    ) -> None:
        self.store = EtcdStore(lease_ttl_min_s=lease_ttl_min_s)
        self.streams: list[WatchStream] = []
        self.watch_delay_s = 0.0
        self._clock = clock
        self._progress_interval_s = progress_interval_s
        self._cluster_id = cluster_id
        self._member_id = member_id
        self._raft_term = 2

    def register(self, server: Any) -> None:
        """Add the services to a ``grpc.aio.Server``, or to an object that takes generic handlers, too."""
        _stubs.add_KVServicer_to_server(_KV(self), server)
        _stubs.add_WatchServicer_to_server(_Watch(self), server)
        _stubs.add_LeaseServicer_to_server(_Lease(self), server)
        _stubs.add_MaintenanceServicer_to_server(_Maintenance(self), server)
        _stubs.add_AuthServicer_to_server(_Auth(), server)

    async def run(self) -> NoReturn:
        """Call ``advance`` every 0.5 s of the clock: a daemon of the caller's task scope."""
        while True:
            await self._clock.sleep(_TICK_S)
            self.advance()

    def advance(self) -> None:
        """Revoke leases whose time is over, and report progress on quiet watches."""
        self.store.expire(self.monotonic())
        for stream in self.streams:
            stream.tick()

    def elect(self) -> None:
        """Begin a new term, as after a change of leader: every lease has its whole TTL again."""
        self._raft_term += 1
        self.store.leases.renew_all(self.monotonic())

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def open_stream(self, peer: str, wake: Callable[[], None]) -> WatchStream:
        """Add a stream of watches; ``close_stream`` removes it."""
        stream = WatchStream(
            self.store, peer, self.monotonic, wake, self._progress_interval_s, self.watch_delay_s
        )
        self.store.observers.append(stream.observe)
        self.streams.append(stream)
        return stream

    def close_stream(self, stream: WatchStream) -> None:
        self.streams.remove(stream)
        self.store.observers.remove(stream.observe)

    def identify(self, header: rpc_pb2.ResponseHeader) -> None:
        """Say in a header which member of which cluster answers, and in what term."""
        header.cluster_id = self._cluster_id
        header.member_id = self._member_id
        header.raft_term = self._raft_term

    async def answer(self, context: EtcdCall, method: Callable[[], R]) -> R:
        """Run a method of the store, or end the call as etcd ends it."""
        try:
            response: Any = method()
        except EtcdRefusal as error:
            await context.abort(error.code, error.details)
        self.identify(response.header)
        answered: R = response
        return answered

    def status(self) -> rpc_pb2.StatusResponse:
        return rpc_pb2.StatusResponse(
            header=self.store.header(),
            version=_VERSION,
            dbSize=_NO_PAGE_BYTES,
            dbSizeInUse=_NO_PAGE_BYTES,
            leader=self._member_id,
            raftIndex=self.store.revision,
            raftAppliedIndex=self.store.revision,
            raftTerm=self._raft_term,
        )


class _KV(_stubs.KVServicer):  # type: ignore[misc]
    def __init__(self, etcd: FakeEtcd) -> None:
        self._etcd = etcd

    async def Range(
        self, request: rpc_pb2.RangeRequest, context: EtcdCall
    ) -> rpc_pb2.RangeResponse:
        return await self._etcd.answer(context, lambda: self._etcd.store.range(request))

    async def Put(self, request: rpc_pb2.PutRequest, context: EtcdCall) -> rpc_pb2.PutResponse:
        return await self._etcd.answer(context, lambda: self._etcd.store.put(request))

    async def DeleteRange(
        self, request: rpc_pb2.DeleteRangeRequest, context: EtcdCall
    ) -> rpc_pb2.DeleteRangeResponse:
        return await self._etcd.answer(context, lambda: self._etcd.store.delete_range(request))

    async def Txn(self, request: rpc_pb2.TxnRequest, context: EtcdCall) -> rpc_pb2.TxnResponse:
        return await self._etcd.answer(context, lambda: self._etcd.store.txn(request))

    async def Compact(
        self, request: rpc_pb2.CompactionRequest, context: EtcdCall
    ) -> rpc_pb2.CompactionResponse:
        return await self._etcd.answer(context, lambda: self._etcd.store.compact(request))


class _Lease(_stubs.LeaseServicer):  # type: ignore[misc]
    def __init__(self, etcd: FakeEtcd) -> None:
        self._etcd = etcd

    async def LeaseGrant(
        self, request: rpc_pb2.LeaseGrantRequest, context: EtcdCall
    ) -> rpc_pb2.LeaseGrantResponse:
        etcd = self._etcd
        return await etcd.answer(context, lambda: etcd.store.grant(request, etcd.monotonic()))

    async def LeaseRevoke(
        self, request: rpc_pb2.LeaseRevokeRequest, context: EtcdCall
    ) -> rpc_pb2.LeaseRevokeResponse:
        return await self._etcd.answer(context, lambda: self._etcd.store.revoke(request))

    async def LeaseKeepAlive(
        self, requests: AsyncIterator[rpc_pb2.LeaseKeepAliveRequest], context: EtcdCall
    ) -> AsyncIterator[rpc_pb2.LeaseKeepAliveResponse]:
        async for request in requests:
            response = self._etcd.store.keep_alive(request, self._etcd.monotonic())
            self._etcd.identify(response.header)
            yield response

    async def LeaseTimeToLive(
        self, request: rpc_pb2.LeaseTimeToLiveRequest, context: EtcdCall
    ) -> rpc_pb2.LeaseTimeToLiveResponse:
        etcd = self._etcd
        return await etcd.answer(
            context, lambda: etcd.store.time_to_live(request, etcd.monotonic())
        )


class _Watch(_stubs.WatchServicer):  # type: ignore[misc]
    def __init__(self, etcd: FakeEtcd) -> None:
        self._etcd = etcd

    async def Watch(self, requests: AsyncIterator[rpc_pb2.WatchRequest], context: EtcdCall) -> None:
        wake = asyncio.Event()
        stream = self._etcd.open_stream(context.peer(), wake.set)
        timer: asyncio.Task[None] | None = None

        async def wake_in(seconds: float) -> None:
            await self._etcd.sleep(seconds)
            wake.set()

        async def send() -> None:
            nonlocal timer
            while True:
                wake.clear()
                due = stream.next()
                if due is None:
                    await wake.wait()
                elif (early_s := due.at - self._etcd.monotonic()) > 0:
                    if timer is None or timer.done():
                        timer = scope.spawn(wake_in(early_s), name="timer")
                    await wake.wait()
                else:
                    stream.sent()
                    self._etcd.identify(due.response.header)
                    await context.write(due.response)

        try:
            async with TaskScope("etcd watch") as scope:
                scope.spawn(send(), name="send")
                async for request in requests:
                    stream.receive(request)
                # As in etcd, a client that has no more requests goes on receiving.
        except EtcdRefusal as error:
            await context.abort(error.code, error.details)
        except grpc.aio.InternalError as error:
            log.debug("the client of a watch is gone: %(error)s", {"error": error})
        finally:
            self._etcd.close_stream(stream)


class _Maintenance(_stubs.MaintenanceServicer):  # type: ignore[misc]
    def __init__(self, etcd: FakeEtcd) -> None:
        self._etcd = etcd

    async def Status(
        self, request: rpc_pb2.StatusRequest, context: EtcdCall
    ) -> rpc_pb2.StatusResponse:
        return await self._etcd.answer(context, self._etcd.status)


class _Auth(_stubs.AuthServicer):  # type: ignore[misc]
    async def Authenticate(
        self, request: rpc_pb2.AuthenticateRequest, context: EtcdCall
    ) -> rpc_pb2.AuthenticateResponse:
        error = errors.auth_not_enabled()
        await context.abort(error.code, error.details)


def _unimplemented(name: str) -> Callable[[Any, Any, EtcdCall], Awaitable[None]]:
    async def method(self: _Auth, request: Any, context: EtcdCall) -> None:
        error = errors.unimplemented(f"Auth.{name}")
        await context.abort(error.code, error.details)

    return method


for _name in (
    "AuthEnable",
    "AuthDisable",
    "UserAdd",
    "UserGrantRole",
    "RoleAdd",
    "RoleGrantPermission",
):
    setattr(_Auth, _name, _unimplemented(_name))
