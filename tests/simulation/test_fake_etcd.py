"""What simulations do to the fake of etcd, and what no real one does on request."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gazette.cluster.etcd.pb import rpc_pb2
from gazette.testing.clock import ManualClock
from gazette.testing.simulation.etcd.errors import EtcdRefusal
from gazette.testing.simulation.etcd.service import FakeEtcd
from gazette.testing.simulation.etcd.watches import WatchStream

Pb = rpc_pb2
KEY = b"w"


@pytest.fixture
def etcd(clock: ManualClock) -> FakeEtcd:
    return FakeEtcd(clock, lease_ttl_min_s=1, progress_interval_s=10.0)


def write(etcd: FakeEtcd, count: int = 1) -> int:
    for _ in range(count):
        etcd.store.put(Pb.PutRequest(key=KEY))
    return etcd.store.revision


def watch(etcd: FakeEtcd, **options: Any) -> WatchStream:
    stream = etcd.open_stream("test", lambda: None)
    request = Pb.WatchCreateRequest(key=KEY, **options)
    stream.receive(Pb.WatchRequest(create_request=request))
    (created,) = received(stream, etcd)
    assert created.created
    return stream


def received(stream: WatchStream, etcd: FakeEtcd) -> list[Pb.WatchResponse]:
    """Return everything that is to be sent by now."""
    taken = []
    while (due := stream.next()) is not None and due.at <= etcd.monotonic():
        stream.sent()
        taken.append(due.response)
    return taken


def revisions(responses: list[Pb.WatchResponse]) -> list[list[int]]:
    return [[event.kv.mod_revision for event in one.events] for one in responses]


def test_a_stream_that_is_held_catches_up_in_one_response(etcd: FakeEtcd) -> None:
    stream = watch(etcd)
    stream.hold()
    last = write(etcd, 3)
    assert received(stream, etcd) == []
    stream.release()
    (missed,) = received(stream, etcd)
    assert revisions([missed]) == [[last - 2, last - 1, last]]
    # Case: it keeps up again.
    write(etcd, 2)
    assert revisions(received(stream, etcd)) == [[last + 1], [last + 2]]


def test_a_stream_that_is_held_over_a_compaction_is_cancelled(etcd: FakeEtcd) -> None:
    stream = watch(etcd)
    stream.hold()
    last = write(etcd, 3)
    etcd.store.compact(Pb.CompactionRequest(revision=last))
    stream.release()
    (cancelled,) = received(stream, etcd)
    assert (cancelled.canceled, cancelled.compact_revision) == (True, last)
    write(etcd)
    assert received(stream, etcd) == []


def test_events_can_be_late(etcd: FakeEtcd, clock: ManualClock) -> None:
    stream = watch(etcd)
    stream.delay_s = 2.0
    last = write(etcd, 2)
    stream.delay_s = 0.0
    write(etcd)  # never before those which were written before it
    clock.advance(1.9)
    assert received(stream, etcd) == []
    # Case: answers to requests are not.
    stream.receive(Pb.WatchRequest(create_request=Pb.WatchCreateRequest(key=b"x")))
    assert [one.created for one in received(stream, etcd)] == [True]
    clock.advance(0.1)
    assert revisions(received(stream, etcd)) == [[last - 1], [last], [last + 1]]


def test_progress_on_demand_follows_what_is_owed(etcd: FakeEtcd) -> None:
    stream = watch(etcd)
    stream.hold()
    last = write(etcd)
    stream.receive(Pb.WatchRequest(progress_request=Pb.WatchProgressRequest()))
    assert received(stream, etcd) == []
    stream.release()
    events, progress = received(stream, etcd)
    assert revisions([events]) == [[last]]
    assert (progress.watch_id, progress.header.revision) == (-1, last)


def test_a_quiet_watch_reports_progress_if_it_wants_to(etcd: FakeEtcd, clock: ManualClock) -> None:
    wanting, other = watch(etcd, progress_notify=True), watch(etcd)
    clock.advance(9.9)
    etcd.advance()
    assert received(wanting, etcd) == []
    etcd.store.put(Pb.PutRequest(key=b"elsewhere"))
    clock.advance(0.1)
    etcd.advance()
    etcd.advance()
    (progress,) = received(wanting, etcd)
    assert (progress.watch_id, progress.header.revision) == (0, etcd.store.revision)
    assert not progress.events
    assert received(other, etcd) == []


def test_a_stream_that_is_not_read_does_not_grow_for_ever(etcd: FakeEtcd) -> None:
    stream = watch(etcd)
    last = write(etcd, 1_000)
    responses = received(stream, etcd)
    assert len(responses) < 200
    assert [at for one in revisions(responses) for at in one] == list(range(last - 999, last + 1))


def test_leases_end_at_the_first_advance_after_their_time(
    etcd: FakeEtcd, clock: ManualClock
) -> None:
    store = etcd.store
    for lease_id, ttl_s in ((2, 3), (1, 2)):
        store.grant(Pb.LeaseGrantRequest(ID=lease_id, TTL=ttl_s), etcd.monotonic())
        store.put(Pb.PutRequest(key=b"%d" % lease_id, lease=lease_id))
    start = store.revision
    clock.advance(3.0)
    assert store.revision == start
    # Case: until then its keys stay, but it cannot be renewed.
    renewed = store.keep_alive(Pb.LeaseKeepAliveRequest(ID=2), etcd.monotonic())
    assert renewed.TTL == 0
    etcd.advance()
    # Each at its own revision, the earliest first.
    writes = store.events_from(start + 1, 10)
    assert [[event.kv.key for event in events] for _, events in writes] == [[b"1"], [b"2"]]


def test_a_new_leader_gives_leases_their_whole_time(etcd: FakeEtcd, clock: ManualClock) -> None:
    store = etcd.store
    store.grant(Pb.LeaseGrantRequest(ID=1, TTL=2), etcd.monotonic())
    term = etcd.status().raftTerm
    clock.advance(1.5)
    etcd.elect()
    assert etcd.status().raftTerm == term + 1
    clock.advance(1.5)
    etcd.advance()
    assert 1 in store.leases
    clock.advance(0.5)
    etcd.advance()
    assert 1 not in store.leases


def test_what_it_does_not_do_is_refused_by_name(etcd: FakeEtcd) -> None:
    stream = watch(etcd)
    filters = Pb.WatchCreateRequest(key=KEY)
    filters.MergeFromString(b"\x2a\x01\x00")  # etcd's field 5: filters
    for request, name in (
        (filters, "filters"),
        (Pb.WatchCreateRequest(key=KEY, start_revision=-1), "negative revision"),
    ):
        with pytest.raises(EtcdRefusal, match=f"UNIMPLEMENTED.*{name}"):
            stream.receive(Pb.WatchRequest(create_request=request))
    with pytest.raises(EtcdRefusal, match="INVALID_ARGUMENT"):
        etcd.store.range(Pb.RangeRequest(key=KEY, sort_target=cast("Any", 9)))
