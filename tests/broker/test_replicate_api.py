"""The Replicate call, as a primary sees it. The primaries here are the tests themselves."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.auth import Capability, Claims, KeyedAuth, bearer
from gazette.client.rpc.errors import END_OF_STREAM
from gazette.protocol.content import replicate_content
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import EtcdHeader, Header, Route
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import journal_spec
from gazette.testing.clock import ManualClock
from tests.support.fixed_cluster import ROOT, FixedCluster

JOURNAL = "a/journal"
SPEC = journal_spec(JOURNAL, replication=2)
REGISTERS = LabelSet.of(("author", "me"))


class Primary:
    """A Replicate call to broker ``b``, one message at a time."""

    def __init__(self, cluster: FixedCluster, *, token: str = "", **header: Any) -> None:
        self.cluster = cluster
        a, b = cluster["a"], cluster["b"]
        route = Route((a.id, b.id), 0, (a.endpoint, b.endpoint))
        etcd = b.context.resolver.etcd_header()
        self.header = Header(
            header.get("process_id", b.id),
            header.get("route", route),
            header.get("etcd", etcd),
        )
        method: Any = a.context.peers.grpc_channel(b.endpoint).stream_stream(
            "/protocol.Journal/Replicate",
            request_serializer=None,
            response_deserializer=broker_pb2.ReplicateResponse.FromString,
        )
        self.call: Any = method(metadata=bearer(token))

    async def send(self, message: broker_pb2.ReplicateRequest | bytes) -> None:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self.call.write(data)

    async def open(self, proposal: Fragment, registers: LabelSet = EMPTY_LABELS) -> Any:
        await self.send(self.opening(proposal, registers))
        return await self.call.read()

    def opening(
        self, proposal: Fragment, registers: LabelSet = EMPTY_LABELS
    ) -> broker_pb2.ReplicateRequest:
        return broker_pb2.ReplicateRequest(
            header=self.header.to_pb(),
            deprecated_journal=proposal.journal,
            proposal=proposal.to_pb(),
            registers=registers.to_pb(),
            acknowledge=True,
        )

    async def propose(
        self, proposal: Fragment, registers: LabelSet = EMPTY_LABELS, *, acknowledge: bool = True
    ) -> Any:
        await self.send(
            broker_pb2.ReplicateRequest(
                proposal=proposal.to_pb(), registers=registers.to_pb(), acknowledge=acknowledge
            )
        )
        return await self.call.read() if acknowledge else None

    async def end(self) -> Any:
        """End the stream; the server's status."""
        await self.call.done_writing()
        assert await self.call.read() is END_OF_STREAM
        return await self.call.code()

    async def broken(self) -> grpc.aio.AioRpcError:
        """Return the error with which the server ended the call."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert await self.call.read() is END_OF_STREAM
            raise AssertionError("ended well")
        return caught.value


def fragment(begin: int, end: int, sum: bytes = bytes(20)) -> Fragment:
    return Fragment(JOURNAL, begin, end, sum, Codec.NONE)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FixedCluster]:
    """Yield a cluster where ``a`` is primary and ``b`` replica. ``a`` does not know, and so does nothing."""
    async with await FixedCluster.start(3, tmp_path) as cluster:
        cluster["a"].lagging = []
        cluster.create(SPEC, "a", "b")
        yield cluster


async def spool_of(cluster: FixedCluster, name: str = "b") -> tuple[Fragment, LabelSet, int]:
    """Return the spool, once its holder has given it back."""
    async with cluster[name].replica(JOURNAL).spool.hold() as spool:
        return spool.fragment, spool.registers, spool.delta


async def test_stream_and_commit(cluster: FixedCluster) -> None:
    primary = Primary(cluster)
    opened = await primary.open(fragment(0, 0))
    # Case: the first answer has a header, of the replica's own resolution.
    assert opened.status == Status.OK
    assert Header.from_pb(opened.header) == primary.header
    await primary.send(replicate_content(b"foo", 0))
    await primary.send(broker_pb2.ReplicateRequest(content=b"bar", content_delta=3))
    index = cluster["b"].replica(JOURNAL).index
    assert index.end_offset == 0
    commit = fragment(0, 6, bytes.fromhex("8843d7f92416211de9ebb963ff4ce28125932878"))
    answer = await primary.propose(commit, REGISTERS)
    assert answer == broker_pb2.ReplicateResponse()
    # Case: readers of the replica see it at once.
    assert index.end_offset == 6
    assert await primary.end() is grpc.StatusCode.OK
    assert await spool_of(cluster) == (commit, REGISTERS, 0)


async def test_roll_back_and_unacknowledged_roll(cluster: FixedCluster) -> None:
    primary = Primary(cluster)
    await primary.open(fragment(0, 0))
    await primary.send(replicate_content(b"foo", 0))
    assert (await primary.propose(fragment(0, 0))).status == Status.OK
    await primary.propose(fragment(100, 100), acknowledge=False)
    await primary.send(replicate_content(b"foobar", 0))
    commit = fragment(100, 106, bytes.fromhex("8843d7f92416211de9ebb963ff4ce28125932878"))
    assert (await primary.propose(commit)).status == Status.OK
    await primary.end()
    assert await spool_of(cluster) == (commit, EMPTY_LABELS, 0)


async def test_replica_that_cannot_continue_a_fragment_says_where_it_is(
    cluster: FixedCluster,
) -> None:
    primary = Primary(cluster)
    # Case: it knows nothing of [5, 9). It takes registers and end over, and asks for a roll.
    answer = await primary.open(fragment(5, 9, b"\x01" * 20), REGISTERS)
    assert answer.status == Status.PROPOSAL_MISMATCH
    assert answer.HasField("header")
    assert Fragment.from_pb(answer.fragment) == fragment(9, 9)
    assert LabelSet.from_pb(answer.registers) == REGISTERS
    assert (await primary.propose(fragment(9, 9), REGISTERS)).status == Status.OK
    # Case: it is ahead of the primary.
    answer = await primary.propose(fragment(7, 7), EMPTY_LABELS)
    assert answer.status == Status.PROPOSAL_MISMATCH
    assert Fragment.from_pb(answer.fragment) == fragment(9, 9)
    assert await primary.end() is grpc.StatusCode.OK


async def test_mismatch_that_would_not_be_reported_ends_the_stream(cluster: FixedCluster) -> None:
    primary = Primary(cluster)
    await primary.open(fragment(9, 9))
    await primary.propose(fragment(7, 7), acknowledge=False)
    error = await primary.broken()
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert "proposal=" in (error.details() or "")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"\x22\x03abc", "expected first ReplicateRequest to have Header"),
        (
            broker_pb2.ReplicateRequest(proposal=fragment(0, 0).to_pb()),
            "expected first ReplicateRequest to have Header",
        ),
        (broker_pb2.ReplicateRequest(), "expected Content or Proposal"),
        (
            broker_pb2.ReplicateRequest(proposal=fragment(9, 3).to_pb()),
            "Proposal: expected Begin <= End",
        ),
    ],
)
async def test_bad_opening(cluster: FixedCluster, message: Any, text: str) -> None:
    primary = Primary(cluster)
    await primary.send(message)
    error = await primary.broken()
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert text in (error.details() or "")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (replicate_content(b"xyz", 7), "invalid ContentDelta (7; expected 2)"),
        (broker_pb2.ReplicateRequest(), "expected Content or Proposal"),
        (
            broker_pb2.ReplicateRequest(proposal=Fragment("b/journal", 0, 0).to_pb()),
            "another journal",
        ),
        (broker_pb2.ReplicateRequest(content=b"x", acknowledge=True), "unexpected Acknowledge"),
        (b"\xff\xff\xff", ""),
    ],
)
async def test_bad_message_ends_the_stream_and_is_rolled_back(
    cluster: FixedCluster, message: Any, text: str
) -> None:
    primary = Primary(cluster)
    await primary.open(fragment(0, 0))
    await primary.send(replicate_content(b"ab", 0))
    await primary.send(message)
    error = await primary.broken()
    assert text in (error.details() or "")
    assert await spool_of(cluster) == (fragment(0, 0), EMPTY_LABELS, 0)


async def test_empty_stream(cluster: FixedCluster) -> None:
    primary = Primary(cluster)
    assert await primary.end() is grpc.StatusCode.OK


async def test_wrong_routes(cluster: FixedCluster) -> None:
    a, b, c = (cluster[name].id for name in "abc")
    for route in (Route((a, b), 1), Route((a, b, c), 0), Route((b,), 0)):
        primary = Primary(cluster, route=route)
        answer = await primary.open(fragment(0, 0))
        assert answer.status == Status.WRONG_ROUTE
        header = Header.from_pb(answer.header)
        assert header.route.equivalent(Route((a, b), 0))
        assert header.etcd.revision == cluster.etcd.revision
        assert await primary.call.read() is END_OF_STREAM
    # Case: endpoints are not compared.
    primary = Primary(cluster, route=Route((a, b), 0))
    assert (await primary.open(fragment(0, 0))).status == Status.OK


async def test_primary_of_a_former_life_is_refused(cluster: FixedCluster) -> None:
    """Its journal was deleted and created again, with the same route, and it does not know yet."""
    primary = Primary(cluster)
    cluster.etcd.change({}, [f"{ROOT}/items/{JOURNAL}"])
    cluster.put_spec(SPEC)
    answer = await primary.open(fragment(0, 0))
    assert answer.status == Status.WRONG_ROUTE
    assert Header.from_pb(answer.header).etcd.revision > primary.header.etcd.revision
    assert (await Primary(cluster).open(fragment(0, 0))).status == Status.OK


async def test_replica_without_a_lease_acknowledges_nothing(cluster: FixedCluster) -> None:
    primary = Primary(cluster)
    assert (await primary.open(fragment(0, 0))).status == Status.OK
    cluster["b"].lease.remaining_s = 0.0
    await primary.send(replicate_content(b"content", 0))
    digest = hashlib.sha1(b"content").digest()
    commit = broker_pb2.ReplicateRequest(proposal=fragment(0, 7, digest).to_pb(), acknowledge=True)
    await primary.send(commit)
    error = await primary.broken()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "late_s=" in str(error.details())
    # Nor do its readers get what another broker may have given these offsets to by now.
    assert cluster["b"].replica(JOURNAL).index.end_offset == 0


async def test_broker_that_does_not_have_the_journal(cluster: FixedCluster) -> None:
    cluster.assign(JOURNAL, "a", "c")
    primary = Primary(cluster)
    answer = await primary.open(fragment(0, 0))
    assert answer.status == Status.NOT_JOURNAL_BROKER
    assert Header.from_pb(answer.header).etcd.revision == cluster.etcd.revision
    primary = Primary(cluster)
    answer = await primary.open(Fragment("no/such/journal", 0, 0))
    assert answer.status == Status.JOURNAL_NOT_FOUND
    cluster.put_spec(journal_spec(JOURNAL, replication=2, suspend=Suspend(SuspendLevel.FULL, 5)))
    assert (await Primary(cluster).open(fragment(0, 0))).status == Status.SUSPENDED


async def test_headers_of_other_clusters_and_brokers_are_refused(cluster: FixedCluster) -> None:
    primary = Primary(cluster, process_id=cluster["c"].id)
    await primary.send(primary.opening(fragment(0, 0)))
    assert "(zone#broker-c vs zone#broker-b)" in ((await primary.broken()).details() or "")
    primary = Primary(cluster, etcd=EtcdHeader(99, 22, 1, 33))
    await primary.send(primary.opening(fragment(0, 0)))
    assert "ClusterId doesn't match" in ((await primary.broken()).details() or "")


async def test_revision_of_the_primary_is_waited_for(cluster: FixedCluster) -> None:
    """The replica learns of the route, which the primary knows already, a little later."""
    a, b, c = (cluster[name].id for name in "abc")
    cluster["b"].lagging = []
    revision = cluster.assign(JOURNAL, "a", "b", "c")
    primary = Primary(cluster, route=Route((a, b, c), 0), etcd=EtcdHeader(11, 22, revision, 33))
    await primary.send(primary.opening(fragment(0, 0)))
    cluster["b"].catch_up()
    assert (await primary.call.read()).status == Status.OK


async def test_spool_is_held_for_the_whole_stream(cluster: FixedCluster) -> None:
    """A second pipeline, of whichever primary, is in step only after the first has ended."""
    first, second = Primary(cluster), Primary(cluster)
    await first.open(fragment(0, 0))
    await second.send(second.opening(fragment(0, 0)))
    await first.send(replicate_content(b"never committed", 0))
    assert (await first.propose(fragment(0, 0))).status == Status.OK
    assert not cluster["b"].replica(JOURNAL).spool.idle
    await first.send(replicate_content(b"nor is this", 0))
    await first.end()
    assert (await second.call.read()).status == Status.OK
    await second.send(replicate_content(b"foobar", 0))
    commit = fragment(0, 6, bytes.fromhex("8843d7f92416211de9ebb963ff4ce28125932878"))
    assert (await second.propose(commit)).status == Status.OK


async def test_primary_that_breaks_off_is_rolled_back(cluster: FixedCluster) -> None:
    first, second = Primary(cluster), Primary(cluster)
    await first.open(fragment(0, 0))
    await first.send(replicate_content(b"never committed", 0))
    await second.send(second.opening(fragment(0, 0)))
    first.call.cancel()
    assert (await second.call.read()).status == Status.OK


async def test_route_that_changes_while_the_spool_is_waited_for(cluster: FixedCluster) -> None:
    first, second = Primary(cluster), Primary(cluster)
    await first.open(fragment(0, 0))
    await second.send(second.opening(fragment(0, 0)))
    cluster.assign(JOURNAL, "c", "b")
    answer = await second.call.read()
    assert answer.status == Status.WRONG_ROUTE


GRACE_S = 5.0


class CountingClock(ManualClock):
    """Counts how often a grace was begun: nothing else sleeps for as long."""

    graces = 0

    async def sleep(self, seconds: float) -> None:
        self.graces += seconds == GRACE_S
        await super().sleep(seconds)

    async def until_grace(self, count: int) -> None:
        while self.graces < count:
            await self.sleep(0)


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
async def timed(tmp_path: Path, clock: CountingClock) -> AsyncIterator[FixedCluster]:
    """Yield a cluster as ``cluster`` does; the time of its brokers is ``clock``."""
    timeout_s = 3 * GRACE_S
    async with await FixedCluster.start(
        3, tmp_path, clock=clock, peer_timeout_s=timeout_s
    ) as cluster:
        cluster["a"].lagging = []
        cluster.create(SPEC, "a", "b")
        yield cluster


async def test_stream_of_an_old_route_is_cut_off_once_nothing_happens(
    timed: FixedCluster, clock: CountingClock
) -> None:
    """A dead primary cannot keep its successor from the spool."""
    old = Primary(timed)
    await old.open(fragment(0, 0))
    await old.send(replicate_content(b"never committed", 0))
    timed["c"].lagging = []  # It would take the spool as soon as it can.
    timed.assign(JOURNAL, "c", "b")
    # Case: as long as there are messages, the stream is given another grace.
    for count in (1, 2, 3):
        await clock.until_grace(count)
        assert (await old.propose(fragment(0, 0))).status == Status.OK
        clock.advance(GRACE_S)
    await clock.until_grace(4)
    clock.advance(GRACE_S)
    error = await old.broken()
    assert "grace_s=" in (error.details() or "")
    assert (await spool_of(timed))[2] == 0


async def test_stream_of_a_primary_without_a_lease_is_cut_off_at_once(
    timed: FixedCluster, clock: CountingClock
) -> None:
    """Its successor waits for the spool, and no time passes here."""
    old = Primary(timed)
    await old.open(fragment(0, 0))
    await old.send(replicate_content(b"never committed", 0))
    timed.expire("a")
    assert "primary=zone#broker-a" in ((await old.broken()).details() or "")
    timed.assign(JOURNAL, "c", "b")
    assert (await spool_of(timed))[2] == 0


async def test_a_broker_that_stops_does_not_wait_for_a_primary_that_does_not_know(
    cluster: FixedCluster,
) -> None:
    """Regression: a broker that left with assignments served no call, but kept its lease, for as long as
    their primaries were appending."""
    primary = Primary(cluster)
    await primary.open(fragment(0, 0))
    cluster["b"].context.resolver.stop_serving()
    answered = 0
    async with asyncio.timeout(30):
        while not primary.call.done():
            try:
                assert (await primary.propose(fragment(0, 0))).status == Status.OK
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                break
            answered += 1
            await SystemClock().sleep(0.05)
        code = await primary.call.code()
        assert code is grpc.StatusCode.UNAVAILABLE, await primary.call.details()
    assert answered > 3
    async with asyncio.timeout(30):
        await cluster["b"].context.resolver.wait_torn_down(30)


async def test_change_that_leaves_the_route_alone_is_no_reason(
    timed: FixedCluster, clock: CountingClock
) -> None:
    primary = Primary(timed)
    await primary.open(fragment(0, 0))
    # Case: the primary advertises the route, which changes values of assignments but not the route.
    route = primary.header.route.without_endpoints().to_pb().SerializeToString()
    keys = [key.decode() for key in timed.etcd.kvs if b"/assign/" in key]
    timed.etcd.change(dict.fromkeys(keys, route))
    clock.advance(100.0)
    assert (await primary.propose(fragment(0, 0))).status == Status.OK
    clock.advance(100.0)
    assert (await primary.propose(fragment(0, 0))).status == Status.OK


async def test_stream_of_a_replica_that_was_replaced_ends_although_the_route_stays(
    cluster: FixedCluster,
) -> None:
    """Regression: it went on for ever, and readers of the new replica saw nothing of it."""
    primary = Primary(cluster)
    await primary.open(fragment(0, 0))
    before = cluster["b"].replica(JOURNAL)
    key = next(
        key.decode() for key in cluster.etcd.kvs if b"/assign/" in key and b"broker-b" in key
    )
    cluster.etcd.change({key: b""}, [key])
    assert cluster["b"].replica(JOURNAL) is not before
    assert "was assigned to this broker again" in ((await primary.broken()).details() or "")
    assert (await Primary(cluster).open(fragment(0, 0))).status == Status.OK


async def test_replica_that_is_given_up_gets_its_spool_back(
    timed: FixedCluster, clock: CountingClock
) -> None:
    """By the same grace; then it is shut down, and what was committed is persisted."""
    old = Primary(timed)
    await old.open(fragment(0, 0))
    await old.send(replicate_content(b"foobar", 0))
    commit = fragment(0, 6, bytes.fromhex("8843d7f92416211de9ebb963ff4ce28125932878"))
    assert (await old.propose(commit)).status == Status.OK
    broker = timed["b"]
    timed.assign(JOURNAL, "a", "c")
    assert broker.context.persister.unpersisted == 0
    await clock.until_grace(1)
    clock.advance(GRACE_S)
    assert "grace_s=" in ((await old.broken()).details() or "")
    await broker.context.resolver.wait_torn_down(10.0)
    assert broker.context.persister.unpersisted == 1


async def test_a_stream_ends_with_the_token_that_opened_it(tmp_path: Path) -> None:
    auth = KeyedAuth.parse(SystemClock(), base64.b64encode(b"k" * 32).decode())
    claims = Claims.of_journal(Capability.REPLICATE, JOURNAL)
    async with await FixedCluster.start(2, tmp_path, auth=auth) as cluster:
        cluster["a"].lagging = []
        cluster.create(SPEC, "a", "b")
        # Another waits for the spool, which the first one has. Its token is made first, or it may end later.
        waiting = Primary(cluster, token=auth.sign(claims, 1))
        primary = Primary(cluster, token=auth.sign(claims, 3))
        assert (await primary.open(fragment(0, 0))).status == Status.OK
        await waiting.send(waiting.opening(fragment(0, 0)))
        await primary.send(replicate_content(b"not committed", 0))
        for one in (waiting, primary):
            error = await one.broken()
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "expired" in (error.details() or "")
        # The spool is free again, without what was not committed.
        successor = Primary(cluster, token=auth.sign(claims, 60))
        assert (await successor.open(fragment(0, 0))).status == Status.OK
        assert await successor.end() is grpc.StatusCode.OK
