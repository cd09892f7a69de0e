"""The same random requests to a real etcd and to the fake: the same answers, errors and events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.cluster.etcd.pb import kv_pb2, rpc_pb2, rpc_pb2_grpc
from gazette.testing.etcd import EtcdServer, etcd_for_tests
from gazette.testing.simulation.etcd.errors import EtcdRefusal
from gazette.testing.simulation.etcd.store import EtcdStore
from gazette.testing.simulation.etcd.watches import WatchStream

Pb = rpc_pb2
KEYS = (b"a", b"b", b"ba", b"c", b"d")
LEASES = (1, 2, 3)
SENTINEL = b"~"
TTL_S = 3600

keys = st.sampled_from(KEYS)
range_ends = st.sampled_from((b"", b"", b"", b"b", b"c", b"z", b"\0"))
values = st.sampled_from((b"", b"1", b"2", b"10"))
lease_ids = st.sampled_from((0, 0, *LEASES))

puts = st.builds(
    Pb.PutRequest,
    key=keys,
    value=values,
    lease=lease_ids,
    prev_kv=st.booleans(),
    ignore_lease=st.sampled_from((False, False, True)),
    ignore_value=st.sampled_from((False, False, False, True)),
)
deletes = st.builds(Pb.DeleteRangeRequest, key=keys, range_end=range_ends, prev_kv=st.booleans())


@dataclass(frozen=True)
class Ago:
    """A range as of some revisions before the present one; it is made when its turn comes."""

    request: Pb.RangeRequest
    revisions: int


@dataclass(frozen=True)
class Watched:
    """A watch from some revisions before the present one."""

    key: bytes
    prev_kv: bool
    revisions: int


ranges = st.builds(
    Pb.RangeRequest,
    key=keys,
    range_end=range_ends,
    limit=st.integers(-1, 4),
    sort_order=st.sampled_from((0, 1, 2)),
    # Values and versions can be equal; etcd does not say in what order such keys come.
    sort_target=st.sampled_from((Pb.RangeRequest.KEY, Pb.RangeRequest.CREATE)),
    keys_only=st.booleans(),
    count_only=st.booleans(),
)
compares = st.builds(
    lambda key, end, result, target: Pb.Compare(
        key=key, range_end=end, result=result, target=target[0], **{target[1]: target[2]}
    ),
    keys,
    range_ends,
    st.sampled_from((0, 1, 2, 3)),
    st.one_of(
        st.tuples(st.just(Pb.Compare.VERSION), st.just("version"), st.integers(0, 2)),
        st.tuples(st.just(Pb.Compare.CREATE), st.just("create_revision"), st.just(0)),
        st.tuples(st.just(Pb.Compare.MOD), st.just("mod_revision"), st.just(0)),
        st.tuples(st.just(Pb.Compare.VALUE), st.just("value"), values),
        st.tuples(st.just(Pb.Compare.LEASE), st.just("lease"), lease_ids),
    ),
)


def operations(nested: st.SearchStrategy[Pb.RequestOp]) -> st.SearchStrategy[Pb.TxnRequest]:
    branch = st.lists(
        st.one_of(
            st.builds(Pb.RequestOp, request_put=puts),
            st.builds(Pb.RequestOp, request_delete_range=deletes),
            st.builds(Pb.RequestOp, request_range=ranges),
            nested,
        ),
        max_size=3,
    )
    conditions = st.lists(compares, max_size=2)
    return st.builds(Pb.TxnRequest, compare=conditions, success=branch, failure=branch)


inner = operations(st.nothing())
txns = operations(st.builds(Pb.RequestOp, request_txn=inner))
steps = st.lists(
    st.one_of(
        puts,
        puts,
        deletes,
        txns,
        txns,
        ranges,
        st.builds(Ago, ranges, st.integers(-2, 12)),
        st.builds(Pb.LeaseGrantRequest, ID=st.sampled_from(LEASES), TTL=st.just(TTL_S)),
        st.builds(Pb.LeaseRevokeRequest, ID=st.sampled_from(LEASES)),
        st.builds(Pb.LeaseKeepAliveRequest, ID=st.sampled_from(LEASES)),
        st.builds(Pb.LeaseTimeToLiveRequest, ID=st.sampled_from(LEASES), keys=st.just(True)),
        st.builds(Pb.CompactionRequest, revision=st.integers(-1, 6), physical=st.just(True)),
        st.builds(Watched, keys, st.booleans(), st.integers(-1, 8)),
    ),
    max_size=30,
)


class RealEtcd:
    """A real etcd, through its stubs."""

    def __init__(self, endpoint: str) -> None:
        stubs: Any = rpc_pb2_grpc
        self._channel = grpc.insecure_channel(endpoint.removeprefix("http://"))
        self._kv = stubs.KVStub(self._channel)
        self._lease = stubs.LeaseStub(self._channel)
        self._watch = stubs.WatchStub(self._channel)
        self._methods: dict[type[Any], Callable[[Any], Any]] = {
            Pb.RangeRequest: self._kv.Range,
            Pb.PutRequest: self._kv.Put,
            Pb.DeleteRangeRequest: self._kv.DeleteRange,
            Pb.TxnRequest: self._kv.Txn,
            Pb.CompactionRequest: self._kv.Compact,
            Pb.LeaseGrantRequest: self._lease.LeaseGrant,
            Pb.LeaseRevokeRequest: self._lease.LeaseRevoke,
            Pb.LeaseTimeToLiveRequest: self._lease.LeaseTimeToLive,
            Pb.LeaseKeepAliveRequest: lambda r: next(self._lease.LeaseKeepAlive(iter([r]))),
        }

    def close(self) -> None:
        self._channel.close()

    def reset(self) -> int:
        """Empty it, compact it, and return its revision."""
        for lease_id in LEASES:
            with contextlib.suppress(grpc.RpcError):
                self._lease.LeaseRevoke(Pb.LeaseRevokeRequest(ID=lease_id))
        self._kv.DeleteRange(Pb.DeleteRangeRequest(key=b"\0", range_end=b"\0"))
        revision = self._kv.Put(Pb.PutRequest(key=SENTINEL)).header.revision
        revision = self._kv.DeleteRange(Pb.DeleteRangeRequest(key=SENTINEL)).header.revision
        self._kv.Compact(Pb.CompactionRequest(revision=revision, physical=True))
        return int(revision)

    def call(self, request: Any) -> Any:
        try:
            response = self._methods[type(request)](request)
        except grpc.RpcError as error:
            return error.code(), error.details()
        return comparable(response)

    def watch(self, request: Pb.WatchCreateRequest) -> Any:
        call = self._watch.Watch(iter([Pb.WatchRequest(create_request=request)]))
        created = next(call)
        assert created.created
        return call


class FakeSide:
    """The state machine of the fake, from the real one's revision on."""

    def __init__(self, revision: int) -> None:
        self.store = EtcdStore(lease_ttl_min_s=1, revision=revision, compacted=revision)
        store = self.store
        self._methods: dict[type[Any], Callable[[Any], Any]] = {
            Pb.RangeRequest: store.range,
            Pb.PutRequest: store.put,
            Pb.DeleteRangeRequest: store.delete_range,
            Pb.TxnRequest: store.txn,
            Pb.CompactionRequest: store.compact,
            Pb.LeaseGrantRequest: lambda request: store.grant(request, 0.0),
            Pb.LeaseRevokeRequest: store.revoke,
            Pb.LeaseTimeToLiveRequest: lambda request: store.time_to_live(request, 0.0),
            Pb.LeaseKeepAliveRequest: lambda request: store.keep_alive(request, 0.0),
        }

    def call(self, request: Any) -> Any:
        try:
            return comparable(self._methods[type(request)](request))
        except EtcdRefusal as error:
            return error.code, error.details

    def watch(self, request: Pb.WatchCreateRequest) -> WatchStream:
        stream = WatchStream(self.store, "test", lambda: 0.0, lambda: None, 600.0)
        self.store.observers.append(stream.observe)
        stream.receive(Pb.WatchRequest(create_request=request))
        assert next(responses(stream)).created
        return stream


def responses(stream: WatchStream) -> Iterator[Pb.WatchResponse]:
    while (due := stream.next()) is not None:
        stream.sent()
        yield due.response


def comparable(response: Any) -> Any:
    """Return the response without the name of its member, and without passing time."""
    response.header.CopyFrom(Pb.ResponseHeader(revision=response.header.revision))
    if isinstance(response, Pb.LeaseTimeToLiveResponse):
        response.header.Clear()  # etcd leaves it out where the lease is unknown
        response.TTL = min(response.TTL, 0)
        in_order = sorted(response.keys)
        del response.keys[:]
        response.keys.extend(in_order)
    return response


@dataclass
class Seen:
    """What a watch was sent in all, in whatever pieces."""

    events: list[kv_pb2.Event] = field(default_factory=list)
    compact_revision: int = 0

    def take(self, watch: Iterator[Pb.WatchResponse]) -> Seen:
        for response in watch:
            self.events.extend(response.events)
            if response.canceled:
                self.compact_revision = response.compact_revision
                break
            if self.events and self.events[-1].kv.key == SENTINEL:
                break
        return self


def check(real: RealEtcd, program: list[Any]) -> None:
    start = real.reset()
    fake = FakeSide(start)
    watches: list[tuple[Any, WatchStream]] = []
    for step in program:
        request = step
        if isinstance(step, Ago):
            request = Pb.RangeRequest()
            request.CopyFrom(step.request)
            request.revision = max(fake.store.revision - step.revisions, 1)
        elif isinstance(step, Pb.CompactionRequest):
            if watches:
                continue  # etcd may or may not have begun to read what would be compacted
            request = Pb.CompactionRequest(revision=start + step.revision, physical=True)
        elif isinstance(step, Watched):
            revision = fake.store.revision - step.revisions
            if revision == fake.store.compacted:
                continue  # versions of etcd differ about deletions at that revision
            create = Pb.WatchCreateRequest(
                key=step.key, range_end=b"\0", prev_kv=step.prev_kv, start_revision=max(revision, 1)
            )
            watches.append((real.watch(create), fake.watch(create)))
            continue
        assert fake.call(request) == real.call(request), request
    everything = Pb.RangeRequest(key=b"\0", range_end=b"\0")
    assert fake.call(everything) == real.call(everything)
    last = Pb.PutRequest(key=SENTINEL, value=b"the end")
    assert fake.call(last) == real.call(last)
    for theirs, ours in watches:
        expected = Seen().take(theirs)
        theirs.cancel()
        assert Seen().take(responses(ours)) == expected


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    server: EtcdServer
    with etcd_for_tests(tmp_path_factory.mktemp("etcd")) as server:
        client = RealEtcd(server.endpoint)
        yield client
        client.close()


FIXTURE_IS_RESET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, suppress_health_check=FIXTURE_IS_RESET)
@given(program=steps)
def test_random_requests_have_the_same_answers(real: RealEtcd, program: list[Any]) -> None:
    check(real, program)


@pytest.mark.long
@settings(max_examples=300, suppress_health_check=FIXTURE_IS_RESET)
@given(program=steps)
def test_many_random_requests_have_the_same_answers(real: RealEtcd, program: list[Any]) -> None:
    check(real, program)
