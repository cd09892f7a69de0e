"""What Gazette depends on in etcd: each test runs against a real etcd and against the fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from gazette.cluster.allocator.session import MemberSession
from gazette.cluster.etcd.client import Compacted, Compare, KeyValue, LeaseLost, Op
from gazette.cluster.etcd.pb import kv_pb2, rpc_pb2
from gazette.cluster.etcd.startup import connect_with_retry
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Invalid, NotFound, NotYet
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from tests.facts import raises
from tests.simulation.conftest import Subject

Pb = rpc_pb2
EOF = grpc.aio.EOF  # type: ignore[attr-defined]


def put(key: bytes, value: bytes = b"", **options: Any) -> Pb.RequestOp:
    return Pb.RequestOp(request_put=Pb.PutRequest(key=key, value=value, **options))


def get(key: bytes, range_end: bytes = b"", **options: Any) -> Pb.RequestOp:
    return Pb.RequestOp(request_range=Pb.RangeRequest(key=key, range_end=range_end, **options))


def delete(key: bytes, range_end: bytes = b"", **options: Any) -> Pb.RequestOp:
    request = Pb.DeleteRangeRequest(key=key, range_end=range_end, **options)
    return Pb.RequestOp(request_delete_range=request)


def nested(
    success: Sequence[Pb.RequestOp] = (), failure: Any = (), compare: Any = ()
) -> Pb.RequestOp:
    request = Pb.TxnRequest(compare=compare, success=success, failure=failure)
    return Pb.RequestOp(request_txn=request)


async def refusal(call: Any) -> tuple[str, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


async def revision_of(subject: Subject) -> int:
    return (await subject.etcd.status()).header.revision


# Keys.


async def test_several_keys_are_read_at_one_revision(subject: Subject) -> None:
    """Also while other clients write and compact."""
    await subject.etcd.txn((), (Op.put("a", b"0"), Op.put("b", b"0")))
    done = False

    async def write() -> None:
        for number in range(1, 30):
            value = str(number).encode()
            written = await subject.etcd.txn((), (Op.put("a", value), Op.put("b", value)))
            await subject.etcd.compact(written.header.revision)

    async with TaskScope("test") as scope:
        writing = scope.spawn(write(), name="write")
        while not done:
            done = writing.done()
            b, none, a = await subject.etcd.get_each("b", "none", "a")
            assert none is None
            assert a is not None
            assert b is not None
            assert (a.value, a.mod_revision) == (b.value, b.mod_revision)
    assert await subject.etcd.get_each() == ()


async def test_a_transaction_that_only_reads_is_refused(subject: Subject) -> None:
    for success in ((Op.get("a"),), (Op.txn((), (), (Op.get("a"),)),)):
        with pytest.raises(Invalid, match="only reads"):
            await subject.etcd.txn((), success)
    # Case: compares alone read nothing.
    assert (await subject.etcd.txn((Compare.version("a", "=", 0),), ())).succeeded


async def test_each_write_is_one_revision(subject: Subject) -> None:
    etcd = subject.etcd
    start = await revision_of(subject)
    first = await etcd.put("a", b"1")
    assert first.header.revision == start + 1
    second = await etcd.put("a", b"2")
    assert await etcd.get("a") == KeyValue(b"a", b"2", start + 1, start + 2, 2)
    assert (await etcd.delete("a")).header.revision == start + 3
    nothing = await etcd.delete("a")
    assert (nothing.deleted, nothing.header.revision) == (0, start + 3)
    # Case: made again, it is another key.
    await etcd.put("a", b"3")
    assert await etcd.get("a") == KeyValue(b"a", b"3", start + 4, start + 4, 1)
    # Case: the past stays.
    assert await etcd.get("a", revision=second.header.revision) == KeyValue(
        b"a", b"2", start + 1, start + 2, 2
    )
    assert await etcd.get("a", revision=start + 3) is None
    assert await etcd.get("a", revision=start) is None


async def test_headers_name_the_cluster_the_member_and_the_term(subject: Subject) -> None:
    status = await subject.etcd.status()
    written = await subject.etcd.put("a", b"")
    txn = await subject.etcd.txn((), (Op.get("a"), Op.delete("b")))
    lease = await subject.stubs.lease.LeaseGrant(Pb.LeaseGrantRequest(TTL=60))
    await subject.stubs.lease.LeaseRevoke(Pb.LeaseRevokeRequest(ID=lease.ID))
    headers = (status.header, written.header, txn.header, lease.header)
    assert len({(h.cluster_id, h.member_id, h.raft_term) for h in headers}) == 1
    assert all((status.header.cluster_id, status.header.member_id, status.header.raft_term))
    assert status.leader == status.header.member_id
    assert status.version.startswith("3.")
    assert status.errors == ()


async def test_ranges_are_bounded_sorted_and_counted(subject: Subject) -> None:
    kv = subject.stubs.kv
    for key, value in ((b"r/b", b"3"), (b"r/a", b"2"), (b"r/c", b"1"), (b"r0", b"9")):
        await subject.etcd.put(key, value)
    await subject.etcd.put(b"r/a", b"2")

    async def keys(
        key: bytes = b"r/", range_end: bytes = b"r0", **options: Any
    ) -> tuple[list[str], bool, int]:
        found = await kv.Range(Pb.RangeRequest(key=key, range_end=range_end, **options))
        return [kv.key[-1:].decode() for kv in found.kvs], found.more, found.count

    order, target = Pb.RangeRequest.SortOrder, Pb.RangeRequest.SortTarget
    assert await keys() == (["a", "b", "c"], False, 3)
    assert await keys(range_end=b"\0") == (["a", "b", "c", "0"], False, 4)
    assert await keys(b"\0", b"\0", limit=1) == (["a"], True, 4)
    assert await keys(b"r/z", b"r/a") == ([], False, 0)
    assert await keys(b"r/b", b"") == (["b"], False, 1)
    assert await keys(limit=2) == (["a", "b"], True, 3)
    assert await keys(limit=3) == (["a", "b", "c"], False, 3)
    assert await keys(limit=-1) == (["a", "b", "c"], False, 3)
    assert await keys(count_only=True, limit=1) == ([], False, 3)
    descending: dict[str, Any] = {"sort_order": order.DESCEND, "limit": 2}
    assert await keys(**descending) == (["c", "b"], True, 3)
    assert await keys(sort_target=target.MOD, **descending) == (["a", "c"], True, 3)
    assert await keys(sort_target=target.CREATE, **descending) == (["c", "a"], True, 3)
    assert await keys(sort_target=target.VALUE, **descending) == (["b", "a"], True, 3)
    assert await keys(sort_target=target.VERSION, **descending) == (["a", "b"], True, 3)
    # Case: without an order, the limit (and one more) comes first.
    assert await keys(sort_target=target.VALUE, limit=1) == (["a"], True, 3)
    only = await kv.Range(Pb.RangeRequest(key=b"r/a", keys_only=True))
    assert (only.kvs[0].value, only.kvs[0].version) == (b"", 2)


async def test_pages_of_a_range_are_all_at_one_revision(subject: Subject) -> None:
    for i in range(7):
        await subject.etcd.put(f"p/{i}", b"")
    revision = await revision_of(subject)
    await subject.etcd.delete("p/3")
    read = await subject.etcd.range("p/", revision=revision, page=2)
    assert [kv.key[-1:] for kv in read.kvs] == [b"%d" % i for i in range(7)]
    assert (read.count, read.header.revision) == (7, revision)
    read = await subject.etcd.range("p/", page=2)
    assert (len(read.kvs), read.header.revision) == (6, revision + 1)


async def test_previous_values_are_returned(subject: Subject) -> None:
    kv = subject.stubs.kv
    first = await kv.Put(Pb.PutRequest(key=b"a", value=b"1", prev_kv=True))
    assert not first.HasField("prev_kv")
    second = await kv.Put(Pb.PutRequest(key=b"a", value=b"2", prev_kv=True))
    assert (second.prev_kv.value, second.prev_kv.version) == (b"1", 1)
    gone = await kv.DeleteRange(Pb.DeleteRangeRequest(key=b"a", range_end=b"\0", prev_kv=True))
    assert [(kv.key, kv.value, kv.version) for kv in gone.prev_kvs] == [(b"a", b"2", 2)]


@pytest.mark.parametrize(
    ("request_", "code", "details"),
    [
        (Pb.PutRequest(), "INVALID_ARGUMENT", "etcdserver: key is not provided"),
        (
            Pb.PutRequest(key=b"a", value=b"1", ignore_value=True),
            "INVALID_ARGUMENT",
            "etcdserver: value is provided",
        ),
        (
            Pb.PutRequest(key=b"a", lease=1, ignore_lease=True),
            "INVALID_ARGUMENT",
            "etcdserver: lease is provided",
        ),
        (
            Pb.PutRequest(key=b"new", ignore_lease=True),
            "INVALID_ARGUMENT",
            "etcdserver: key not found",
        ),
        (
            Pb.PutRequest(key=b"new", ignore_value=True),
            "INVALID_ARGUMENT",
            "etcdserver: key not found",
        ),
        (Pb.PutRequest(key=b"a", lease=77), "NOT_FOUND", "etcdserver: requested lease not found"),
        (
            Pb.PutRequest(key=b"new", lease=77, ignore_value=True),
            "NOT_FOUND",
            "etcdserver: requested lease not found",
        ),
        (
            Pb.PutRequest(key=b"a", value=bytes(1536 * 1024)),
            "INVALID_ARGUMENT",
            "etcdserver: request is too large",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_puts_that_are_refused(
    subject: Subject, request_: Pb.PutRequest, code: str, details: str
) -> None:
    await subject.etcd.put("a", b"1")
    before = await revision_of(subject)
    assert await refusal(subject.stubs.kv.Put(request_)) == (code, details)
    assert await revision_of(subject) == before


async def test_other_requests_that_are_refused(subject: Subject) -> None:
    kv, later = subject.stubs.kv, 1 << 40
    no_key = ("INVALID_ARGUMENT", "etcdserver: key is not provided")
    future = ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision")
    assert await refusal(kv.Range(Pb.RangeRequest())) == no_key
    assert await refusal(kv.DeleteRange(Pb.DeleteRangeRequest())) == no_key
    assert await refusal(kv.Range(Pb.RangeRequest(key=b"a", revision=later))) == future
    assert await refusal(kv.Compact(Pb.CompactionRequest(revision=later))) == future
    assert await refusal(
        subject.stubs.auth.Authenticate(Pb.AuthenticateRequest(name="a", password="b"))
    ) == ("FAILED_PRECONDITION", "etcdserver: authentication is not enabled")


async def test_our_client_maps_what_is_refused(subject: Subject) -> None:
    etcd = subject.etcd
    with raises(Invalid, operation="Txn", says="too many operations in txn"):
        await etcd.txn([], [Op.put(f"k{i}", b"") for i in range(129)])
    with raises(Invalid, operation="Txn", reason="etcdserver: duplicate key given in txn request"):
        await etcd.txn([], [Op.put("k", b""), Op.put("k", b"")])
    with raises(Invalid, operation="Put", says="2097152"):
        await etcd.put("k", bytes(2 << 20))
    with pytest.raises(NotFound, match="lease"):
        await etcd.put("k", b"", lease=12345)
    with raises(Invalid, operation="Put", reason="etcdserver: key not found"):
        await etcd.put("unknown", b"", ignore_lease=True)
    with raises(NotYet, "reason", operation="Range"):
        await etcd.get("k", revision=1 << 40)


async def test_compaction_forgets_what_was_before(subject: Subject) -> None:
    etcd = subject.etcd
    await etcd.put("gone", b"")
    await etcd.delete("gone")
    for i in range(4):
        revision = (await etcd.put("c", b"%d" % i)).header.revision
    await etcd.compact(revision - 1)
    for compacted in (revision - 2, 1):
        with pytest.raises(Compacted):
            await etcd.get("c", revision=compacted)
    with pytest.raises(Compacted):
        await etcd.range("", revision=revision - 2)
    with pytest.raises(Compacted):
        await etcd.compact(revision - 1)
    old = await etcd.get("c", revision=revision - 1)
    assert old is not None
    assert (old.value, old.version) == (b"2", 3)
    assert await etcd.get("gone") is None


# Transactions.


@pytest.fixture
async def compared(subject: Subject) -> Subject:
    lease = await subject.etcd.grant(60)
    await subject.etcd.put("t", b"1")
    await subject.etcd.put("t", b"2", lease=lease.id)
    await subject.etcd.put("t2", b"3")
    return subject


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare.version("t", "=", 2), True),
        (Compare.version("t", ">", 2), False),
        (Compare.version("t", "<", 3), True),
        (Compare.create_revision("t", "<", 1 << 40), True),
        (Compare.create_revision("absent", "=", 0), True),
        (Compare.create_revision("t", "=", 0), False),
        (Compare.mod_revision("t", "!=", 0), True),
        (Compare.mod_revision("t", "=", 0), False),
        (Compare.value("t", "=", b"2"), True),
        (Compare.value("t", "!=", b"2"), False),
        (Compare.value("t", ">", b"10"), True),
        (Compare.value("absent", "!=", b"2"), False),
        (Compare.value("absent", "=", b""), False),
        (Compare.lease("t", "=", 0), False),
        (Compare.lease("t", ">", -(1 << 62)), True),
        (Compare.lease("t2", "=", 0), True),
        (Compare.lease("absent", ">", 0), False),
    ],
)
async def test_compares(compared: Subject, compare: Compare, holds: bool) -> None:
    assert (await compared.etcd.txn([compare], [])).succeeded == holds


async def test_a_compare_of_a_range_holds_for_each_key_of_it(compared: Subject) -> None:
    async def holds(**options: Any) -> bool:
        compare = Pb.Compare(target=Pb.Compare.VERSION, **options)
        return bool((await compared.stubs.kv.Txn(Pb.TxnRequest(compare=[compare]))).succeeded)

    greater = Pb.Compare.GREATER
    assert await holds(key=b"t", range_end=b"u", result=greater, version=0)
    assert not await holds(key=b"t", range_end=b"u", result=greater, version=1)
    assert await holds(key=b"t", range_end=b"\0", result=greater, version=0)
    # Case: no key counts as one that is absent; an operand of another target as none.
    assert await holds(key=b"x", range_end=b"y", version=0)
    assert not await holds(key=b"t", mod_revision=2)


async def test_a_transaction_reads_its_own_writes(subject: Subject) -> None:
    start = (await subject.etcd.put("a", b"1")).header.revision
    done = await subject.stubs.kv.Txn(
        Pb.TxnRequest(
            success=[
                get(b"b"),
                put(b"b", b"x", prev_kv=True),
                get(b"a", b"\0"),
                delete(b"a", prev_kv=True),
                delete(b"absent"),
                nested([get(b"b"), put(b"c")]),
                nested(),
            ]
        )
    )
    assert done.header.revision == start + 1
    before, written, both, deleted, nothing, inner, empty = done.responses
    assert (before.response_range.header.revision, before.response_range.count) == (start, 0)
    assert written.response_put.header.revision == start + 1
    found = [(kv.key, kv.mod_revision) for kv in both.response_range.kvs]
    assert found == [(b"a", start), (b"b", start + 1)]
    assert deleted.response_delete_range.deleted == 1
    assert deleted.response_delete_range.prev_kvs[0].mod_revision == start
    assert nothing.response_delete_range.header.revision == start + 1
    assert inner.response_txn.succeeded
    assert inner.response_txn.responses[0].response_range.kvs[0].value == b"x"
    assert inner.response_txn.header.revision == 0
    assert inner.response_txn.header.cluster_id == 0
    assert empty.response_txn.succeeded


async def test_every_compare_sees_the_keys_before_the_transaction(subject: Subject) -> None:
    inner = Op.txn((Compare.version("n", "=", 0),), (Op.put("n2", b""),))
    done = await subject.etcd.txn((), (Op.put("n", b""), inner))
    results: list[Any] = list(done.results)
    assert results[1].succeeded
    refused: Any = (await subject.etcd.txn((), (inner,))).results[0]
    assert not refused.succeeded


async def test_a_transaction_that_changes_nothing_is_no_revision(subject: Subject) -> None:
    start = await revision_of(subject)
    done = await subject.etcd.txn((), (Op.get("a"), Op.delete("a")))
    assert done.header.revision == start
    assert await revision_of(subject) == start


NO_LEASE = ("NOT_FOUND", "etcdserver: requested lease not found")
DUPLICATE = ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request")
NO_KEY = ("INVALID_ARGUMENT", "etcdserver: key is not provided")
UNKNOWN_KEY = ("INVALID_ARGUMENT", "etcdserver: key not found")
TOO_MANY = ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request")
FUTURE = ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision")


@pytest.mark.parametrize(
    ("request_", "refused"),
    [
        (Pb.TxnRequest(success=[put(b"b"), put(b"k", lease=9)]), NO_LEASE),
        (Pb.TxnRequest(success=[put(b"b"), put(b"k", ignore_lease=True)]), UNKNOWN_KEY),
        (Pb.TxnRequest(success=[put(b"k", lease=9, ignore_value=True)]), UNKNOWN_KEY),
        (
            Pb.TxnRequest(success=[nested([put(b"k")]), nested([put(b"l", ignore_lease=True)])]),
            UNKNOWN_KEY,
        ),
        (Pb.TxnRequest(success=[put(b"b"), get(b"a", revision=1 << 40)]), FUTURE),
        (Pb.TxnRequest(failure=[put(b"b"), put(b"b")]), DUPLICATE),
        (Pb.TxnRequest(success=[put(b"b"), delete(b"b")]), DUPLICATE),
        (Pb.TxnRequest(success=[put(b"b"), delete(b"a", b"c")]), DUPLICATE),
        (Pb.TxnRequest(success=[put(b"b"), nested([], [delete(b"b")])]), DUPLICATE),
        (Pb.TxnRequest(success=[nested([put(b"b")]), nested([], [put(b"b")])]), DUPLICATE),
        (Pb.TxnRequest(success=[nested([delete(b"b")]), nested([put(b"b")])]), DUPLICATE),
        (Pb.TxnRequest(success=[nested([put(b"b")]), delete(b"b")]), DUPLICATE),
        (
            Pb.TxnRequest(success=[put(b"b"), put(b"b")], failure=[put(b"")]),
            NO_KEY,  # what is wrong with one operation comes before duplicates
        ),
        (Pb.TxnRequest(success=[Pb.RequestOp()]), UNKNOWN_KEY),
        (Pb.TxnRequest(compare=[Pb.Compare()]), NO_KEY),
        (Pb.TxnRequest(failure=[put(b"")]), NO_KEY),
        (Pb.TxnRequest(compare=[Pb.Compare(key=b"a")] * 129), TOO_MANY),
        (Pb.TxnRequest(success=[get(b"a")] * 60 + [nested([get(b"a")] * 68)]), TOO_MANY),
    ],
    ids=range(18),
)
async def test_transactions_that_are_refused_change_nothing(
    subject: Subject, request_: Pb.TxnRequest, refused: tuple[str, str]
) -> None:
    start = await revision_of(subject)
    assert await refusal(subject.stubs.kv.Txn(request_)) == refused
    assert await revision_of(subject) == start
    assert (await subject.etcd.range("")).kvs == ()


async def test_transactions_that_are_allowed_though_they_touch_a_key_twice(
    subject: Subject,
) -> None:
    kv = subject.stubs.kv
    either = Pb.TxnRequest(success=[nested([put(b"e")], [put(b"e")])])
    assert (await kv.Txn(either)).succeeded
    put_then_delete = Pb.TxnRequest(success=[nested([put(b"e")]), nested([delete(b"e")])])
    done = await kv.Txn(put_then_delete)
    assert done.responses[1].response_txn.responses[0].response_delete_range.deleted == 1
    from_key = Pb.TxnRequest(success=[delete(b"a", b"\0"), put(b"n")])
    start = done.header.revision
    done = await kv.Txn(from_key)
    assert done.responses[0].response_delete_range.header.revision == start
    assert done.responses[1].response_put.header.revision == start + 1


# Leases.


async def test_keys_end_with_their_lease_at_one_revision(subject: Subject) -> None:
    etcd = subject.etcd
    lease = await etcd.grant(60)
    await etcd.put("m", b"1", lease=lease.id)
    await etcd.put("m", b"2", ignore_lease=True)
    await etcd.put("other", b"", lease=lease.id)
    await etcd.put("freed", b"", lease=lease.id)
    await etcd.put("freed", b"")
    kv = await etcd.get("m")
    assert kv is not None
    assert (kv.value, kv.lease) == (b"2", lease.id)
    status = await lease.status()
    assert (status.granted_s, sorted(status.keys)) == (60, [b"m", b"other"])
    assert 50 <= status.remaining_s <= 60
    start = await revision_of(subject)
    await lease.revoke()
    assert await revision_of(subject) == start + 1
    assert [kv.key for kv in (await etcd.range("")).kvs] == [b"freed"]
    # Case: it is gone, and revoking is fine once more.
    assert (await lease.status()).remaining_s == -1
    await lease.revoke()
    with raises(LeaseLost, "late_s", ttl_s=60.0):
        await lease.renew()
    with pytest.raises(NotFound, match="lease"):
        await etcd.put("m", b"", lease=lease.id)


async def test_revoking_a_lease_without_keys_is_no_revision(subject: Subject) -> None:
    lease = await subject.etcd.grant(60)
    start = await revision_of(subject)
    await lease.revoke()
    assert await revision_of(subject) == start


async def test_a_key_moves_to_another_lease(subject: Subject) -> None:
    """As an assignment does when another member takes it over."""
    etcd = subject.etcd
    first, second = await etcd.grant(60), await etcd.grant(60)
    await etcd.put("m", b"1", lease=first.id)
    moved = await etcd.txn(
        (Compare.lease("m", "=", first.id),), (Op.put("m", b"1", lease=second.id),)
    )
    assert moved.succeeded
    await first.revoke()
    assert await etcd.get("m") is not None
    # Case: deleted and made again without a lease.
    await etcd.delete("m")
    assert (await second.status()).keys == ()
    await etcd.put("m", b"2")
    await second.revoke()
    assert await etcd.get("m") is not None


async def test_leases_with_ids_of_ours(subject: Subject) -> None:
    lease = subject.stubs.lease
    granted = await lease.LeaseGrant(Pb.LeaseGrantRequest(ID=5, TTL=60))
    assert (granted.ID, granted.TTL) == (5, 60)
    again = lease.LeaseGrant(Pb.LeaseGrantRequest(ID=5, TTL=60))
    assert await refusal(again) == ("FAILED_PRECONDITION", "etcdserver: lease already exists")
    await lease.LeaseRevoke(Pb.LeaseRevokeRequest(ID=5))
    assert await refusal(lease.LeaseRevoke(Pb.LeaseRevokeRequest(ID=5))) == NO_LEASE
    long = lease.LeaseGrant(Pb.LeaseGrantRequest(TTL=9_000_000_001))
    assert await refusal(long) == ("OUT_OF_RANGE", "etcdserver: too large lease TTL")
    # Case: the shortest TTL there is, and an id that etcd picks.
    short = await lease.LeaseGrant(Pb.LeaseGrantRequest(TTL=0))
    assert short.TTL == 1
    assert short.ID != 0
    await lease.LeaseRevoke(Pb.LeaseRevokeRequest(ID=short.ID))


async def test_a_stream_of_keep_alives(subject: Subject) -> None:
    lease = await subject.etcd.grant(60)
    call = subject.stubs.lease.LeaseKeepAlive()
    for lease_id, ttl_s in ((lease.id, 60), (12345, 0), (lease.id, 60)):
        await call.write(Pb.LeaseKeepAliveRequest(ID=lease_id))
        response = await call.read()
        assert response == Pb.LeaseKeepAliveResponse(header=response.header, ID=lease_id, TTL=ttl_s)
    await call.done_writing()
    assert await call.read() is EOF
    await lease.renew()
    await lease.revoke()


async def test_a_lease_that_is_not_kept_alive_expires(subject: Subject) -> None:
    etcd = subject.etcd
    ttl_s = 5  # Of the real one: longer than a busy machine makes the first calls wait.
    lease, kept = await etcd.grant(ttl_s), await etcd.grant(60)
    await etcd.put("kept", b"", lease=kept.id)
    revision = (await etcd.put("m", b"", lease=lease.id)).header.revision
    subject.pass_time(0.5 * ttl_s)
    assert (await lease.status()).keys == (b"m",)
    await lease.renew()
    subject.pass_time(0.9 * ttl_s)
    assert await etcd.get("m") is not None
    async with aclosing(etcd.watch("m", start_revision=revision + 1)) as watching:
        assert (await anext(watching)).created
        subject.pass_time(0.2 * ttl_s)
        response = await anext(watching)
        assert [(e.kv.key, e.deleted) for e in response.events] == [(b"m", True)]
    with pytest.raises(LeaseLost):
        await lease.renew()
    assert (await lease.status()).remaining_s == -1
    assert await etcd.get("kept") is not None
    await kept.revoke()


# Watches.


@asynccontextmanager
async def watching(subject: Subject, **options: Any) -> AsyncIterator[Any]:
    """Yield a stream with one watch, whose ``created`` was read."""
    call = subject.stubs.watch.Watch()
    try:
        created = await create(call, **options)
        assert created.created
        assert not created.canceled
        yield call
    finally:
        call.cancel()


async def create(call: Any, **options: Any) -> Pb.WatchResponse:
    await call.write(Pb.WatchRequest(create_request=Pb.WatchCreateRequest(**options)))
    response: Pb.WatchResponse = await call.read()
    return response


def seen(response: Pb.WatchResponse) -> list[tuple[str, str]]:
    kinds = {kv_pb2.Event.PUT: "put", kv_pb2.Event.DELETE: "delete"}
    return [(kinds[event.type], event.kv.key.decode()) for event in response.events]


async def test_events_come_in_order_from_the_given_revision(subject: Subject) -> None:
    etcd = subject.etcd
    first = (await etcd.put("w/a", b"1")).header.revision
    await etcd.put("w/a", b"2")
    await etcd.put("w2", b"a neighbour")
    await etcd.txn([], [Op.put("w/b", b"3"), Op.delete("w/a")])
    async with aclosing(etcd.watch("w/", start_revision=first + 1)) as stream:
        created = await anext(stream)
        assert created.created
        assert created.header.revision == first + 3
        past = await anext(stream)
        assert [(e.kv.key, e.kv.value, e.deleted) for e in past.events] == [
            (b"w/a", b"2", False),
            (b"w/b", b"3", False),
            (b"w/a", b"", True),
        ]
        assert past.resume_revision == first + 4
        # Case: from now on, each write is a response whose header is at its revision.
        await etcd.put("w/c", b"4")
        await etcd.txn([], [Op.put("w/d", b""), Op.put("w/e", b"")])
        await etcd.put("w2", b"")
        await etcd.delete("w/c")
        for revision, keys in ((4, [b"w/c"]), (5, [b"w/d", b"w/e"]), (7, [b"w/c"])):
            live = await anext(stream)
            assert [e.kv.key for e in live.events] == keys
            assert {e.kv.mod_revision for e in live.events} == {first + revision}
            assert live.header.revision == first + revision


async def test_events_carry_what_was_before(subject: Subject) -> None:
    kv = subject.stubs.kv
    start = (await subject.etcd.put("a", b"1")).header.revision
    async with watching(subject, key=b"a", prev_kv=True, start_revision=start) as call:
        assert [e.HasField("prev_kv") for e in (await call.read()).events] == [False]
        await kv.Put(Pb.PutRequest(key=b"a", value=b"2"))
        assert (await call.read()).events[0].prev_kv.value == b"1"
        await kv.DeleteRange(Pb.DeleteRangeRequest(key=b"a"))
        gone = (await call.read()).events[0]
        assert (gone.type, gone.prev_kv.value) == (kv_pb2.Event.DELETE, b"2")
        assert gone.kv == kv_pb2.KeyValue(key=b"a", mod_revision=start + 2)
        await kv.Put(Pb.PutRequest(key=b"a", value=b"3"))
        made = (await call.read()).events[0]
        assert (made.kv.version, made.HasField("prev_kv")) == (1, False)


async def test_what_a_watch_covers(subject: Subject) -> None:
    async with (
        watching(subject, key=b"b") as point,
        watching(subject, key=b"b", range_end=b"c") as some,
        watching(subject, key=b"b", range_end=b"\0") as rest,
        watching(subject, range_end=b"\0") as every,
    ):
        for key in ("a", "b", "ba", "c"):
            await subject.etcd.put(key, b"")

        async def keys(call: Any, count: int) -> str:
            return " ".join([seen(await call.read())[0][1] for _ in range(count)])

        assert await keys(point, 1) == "b"
        assert await keys(some, 2) == "b ba"
        assert await keys(rest, 3) == "b ba c"
        assert await keys(every, 4) == "a b ba c"
        await subject.etcd.put("b", b"again")
        assert await keys(point, 1) == "b"


async def test_a_watch_of_the_future_waits_for_it(subject: Subject) -> None:
    start = await revision_of(subject)
    async with watching(subject, key=b"a", start_revision=start + 3) as call:
        for _ in range(3):
            await subject.etcd.put("a", b"")
        assert [e.kv.mod_revision for e in (await call.read()).events] == [start + 3]


async def test_several_watches_of_one_stream(subject: Subject) -> None:
    start = await revision_of(subject)
    async with watching(subject, key=b"a") as call:
        assert (await create(call, key=b"b", watch_id=7)).watch_id == 7
        assert (await create(call, key=b"c")).watch_id == 1
        twice = await create(call, key=b"c", watch_id=7)
        assert (twice.watch_id, twice.created, twice.canceled) == (-1, True, True)
        assert "duplicate watch ID" in twice.cancel_reason
        empty = await create(call, key=b"c", range_end=b"a")
        assert (empty.watch_id, empty.created, empty.canceled) == (-1, True, True)
        assert "watcher range is empty" in empty.cancel_reason
        assert empty.header.revision == start

        await subject.etcd.put("b", b"")
        assert (await call.read()).watch_id == 7
        await call.write(Pb.WatchRequest(cancel_request=Pb.WatchCancelRequest(watch_id=7)))
        ended = await call.read()
        assert (ended.watch_id, ended.canceled, ended.compact_revision) == (7, True, 0)
        # Case: what is not watched any more, or never was, is not heard of.
        await call.write(Pb.WatchRequest(cancel_request=Pb.WatchCancelRequest(watch_id=99)))
        await subject.etcd.put("b", b"")
        await subject.etcd.put("c", b"")
        assert (await call.read()).watch_id == 1
        # Case: an id is free again.
        assert (await create(call, key=b"b", watch_id=7)).watch_id == 7
        # Case: a client without further requests goes on receiving.
        await call.done_writing()
        await subject.etcd.put("b", b"")
        assert (await call.read()).watch_id == 7


async def test_progress_is_reported_on_demand(subject: Subject) -> None:
    async with watching(subject, key=b"a") as call:
        revision = (await subject.etcd.put("elsewhere", b"")).header.revision
        await call.write(Pb.WatchRequest(progress_request=Pb.WatchProgressRequest()))
        progress = await call.read()
        assert (progress.watch_id, progress.header.revision) == (-1, revision)
        assert not progress.events


async def test_large_responses_come_in_fragments_if_wanted(subject: Subject) -> None:
    start = await revision_of(subject)
    for i in range(5):
        await subject.etcd.put(f"f/{i}", bytes(1 << 20))
    options = {"key": b"f/", "range_end": b"f0", "start_revision": start + 1}
    async with watching(subject, fragment=True, **options) as call:
        fragments = [await call.read()]
        while fragments[-1].fragment:
            fragments.append(await call.read())
        assert len(fragments) == 5
        keys = [key for one in fragments for _, key in seen(one)]
        assert keys == [f"f/{i}" for i in range(5)]
    async with watching(subject, **options) as call:
        whole = await call.read()
        assert (len(whole.events), whole.fragment) == (5, False)
    async with aclosing(subject.etcd.watch("f/", start_revision=start + 1)) as stream:
        await anext(stream)
        assert len((await anext(stream)).events) == 5


async def test_a_watch_from_a_compacted_revision_is_cancelled(subject: Subject) -> None:
    etcd = subject.etcd
    start = await revision_of(subject)
    for _ in range(5):
        revision = (await etcd.put("w", b"")).header.revision
    await etcd.compact(revision - 1)
    async with watching(subject, key=b"w", start_revision=start + 1) as call:
        cancelled = await call.read()
        assert (cancelled.canceled, cancelled.compact_revision) == (True, revision - 1)
        assert not cancelled.created
        # Case: the stream goes on.
        at_it = await create(call, key=b"w", start_revision=revision - 1)
        assert at_it.created
        events = (await call.read()).events
        assert [e.kv.mod_revision for e in events] == [revision - 1, revision]
    with pytest.raises(Compacted) as caught:
        async with aclosing(etcd.watch("w", start_revision=start + 1)) as stream:
            async for _ in stream:
                pass
    assert caught.value.compact_revision == revision - 1


async def test_a_compaction_does_not_harm_a_watch_that_keeps_up(subject: Subject) -> None:
    async with watching(subject, key=b"w") as call:
        for _ in range(3):
            revision = (await subject.etcd.put("w", b"")).header.revision
        await subject.etcd.compact(revision)
        await subject.etcd.put("w", b"")
        for expected in range(revision - 2, revision + 2):
            assert (await call.read()).events[0].kv.mod_revision == expected


# What stands on all of this.


async def test_a_key_space_follows(subject: Subject) -> None:
    etcd = subject.etcd
    await etcd.put("/root/a", b"1")
    ks = KeySpace("/root", lambda kv: kv.value, apply_delay_s=0)
    await ks.load(etcd)
    async with TaskScope("test") as scope:
        scope.daemon(ks.watch(etcd), name="watch")
        await etcd.put("/elsewhere", b"")
        await etcd.txn((), (Op.put("/root/b", b"2"), Op.delete("/root/a")))
        written = await etcd.put("/root/c", b"3")
        async with asyncio.timeout(60):
            await ks.wait_for_revision(written.header.revision)
        assert [(kv.key, kv.decoded) for kv in ks.key_values] == [
            ("/root/b", b"2"),
            ("/root/c", b"3"),
        ]
        scope.cancel()


async def test_a_member_session_announces_itself_and_leaves(subject: Subject) -> None:
    etcd = subject.etcd
    key = "/root/members/a#1"
    ks = KeySpace("/root", lambda kv: kv.value)
    session = await MemberSession.start(etcd, ks, key, b"here", 60, clock=SystemClock())
    kv = await etcd.get(key)
    assert kv is not None
    assert (kv.value, kv.lease) == (b"here", session.lease.id)
    assert ks.get(key) is not None
    await session.set_exiting(b"leaving")
    kv = await etcd.get(key)
    assert kv is not None
    assert (kv.value, kv.lease, kv.version) == (b"leaving", session.lease.id, 2)
    await session.close()
    assert await etcd.get(key) is None


async def test_a_process_connects_at_its_start(subject: Subject) -> None:
    async with await connect_with_retry(subject.etcd.settings, SystemClock()) as etcd:
        assert await etcd.get("a") is None
