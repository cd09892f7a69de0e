"""Pipelines, to real and to scripted peers, over real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.auth import NoAuth
from gazette.broker.replica_context import Pools, ReplicaContext
from gazette.broker.replication.peer_stream import OUTBOX_BYTES_MAX, PeerStream
from gazette.broker.replication.pipeline import Pipeline, open_pipeline
from gazette.broker.settings import BrokerSettings
from gazette.client.rpc.channel import Channels
from gazette.errors import Broken, Bug, Unavailable
from gazette.fragment.completed_spool import CompletedSpool
from gazette.fragment.local_file import LocalDisk, LocalFragment
from gazette.fragment.spool_file import Spool
from gazette.protocol.content import (
    ProposalEncoder,
    ReplicateContent,
    decode_append,
    decode_replicate,
    replicate_content,
)
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import EtcdHeader, Header, Route
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.runtime.timeouts import timeout
from gazette.testing.broker import journal_spec
from tests.broker.test_append_api import until
from tests.facts import raises
from tests.support.fixed_cluster import FixedCluster
from tests.support.loop_time import LoopTime, turns

JOURNAL = "a/journal"
ETCD = EtcdHeader(11, 22, 33, 44)
OK = broker_pb2.ReplicateResponse()


class ScriptedPeer:
    """A server whose Replicate call records what it receives, and answers on request."""

    def __init__(self, name: str) -> None:
        self.id = ProcessId("zone", f"peer-{name}")
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.ended = asyncio.Event()
        """The primary has ended its stream, or it is broken."""
        self.clean = False
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self._replicate, decode_replicate, broker_pb2.ReplicateResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("protocol.Journal", {"Replicate": handler}),)
        )
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def answer(self, *answers: Any) -> None:
        """Send responses; None ends the stream, a code aborts it."""
        for answer in answers:
            self._answers.put_nowait(answer)

    async def _replicate(self, requests: AsyncIterator[Any], call: Any) -> None:
        async def receive() -> None:
            while True:
                await self.reads.wait()
                request = await anext(requests, None)
                if request is None:
                    self.clean = not call.cancelled()
                    self.ended.set()
                    self.answer(None)
                    return
                if isinstance(request, bytes):
                    request = broker_pb2.ReplicateRequest.FromString(request)
                self.received.put_nowait(request)

        try:
            async with TaskScope("scripted") as scope:
                scope.spawn(receive(), name="receive")
                while (answer := await self._answers.get()) is not None:
                    if isinstance(answer, grpc.StatusCode):
                        await call.abort(answer, "scripted")
                    await call.write(answer)
                scope.cancel()
        finally:
            self.ended.set()


class Bench:
    """A primary's side: a context to open pipelines with, a spool, and its peers."""

    def __init__(self, tmp_path: Path, timeout_s: float) -> None:
        self.scope = TaskScope("bench")
        self.pools = Pools(
            BlockingPool("spools", 1),
            BlockingPool("spool writes", 1),
            BlockingPool("spool reads", 1),
        )
        self.channels = Channels("zone", signer=NoAuth())
        self.peers: list[ScriptedPeer] = []
        self.commits: list[LocalFragment] = []
        self.completed: list[CompletedSpool] = []
        self.defect = False
        """True if ``on_acknowledged`` raises an error that is not expected."""
        self.agreed: list[int] = []
        """Ends that all peers have acknowledged, as the pipelines reported."""
        clock = SystemClock()
        absent: Any = None
        self.context = ReplicaContext(
            clock=clock,
            settings=BrokerSettings(peer_timeout_s=timeout_s),
            etcd=absent,
            key_space=absent,
            state=absent,
            lease=absent,
            blob_stores=absent,
            persister=absent,
            peers=self.channels,
            pools=self.pools,
            disk=absent,
            spool_memory=absent,
            kept_files=absent,
            refresher=absent,
            pulser=absent,
            scope=self.scope,
        )
        self.spool = Spool(
            JOURNAL,
            cast("Any", self),
            clock=clock,
            pool=self.pools.spools,
            disk=LocalDisk(tmp_path),
        )

    def spool_commit(self, local: LocalFragment) -> None:
        self.commits.append(local)

    def spool_complete(self, spool: CompletedSpool, *, primary: bool) -> None:
        assert primary
        self.completed.append(spool)

    async def peer(self, name: str) -> ScriptedPeer:
        peer = ScriptedPeer(name)
        await peer.start()
        self.peers.append(peer)
        return peer

    def open(self) -> Pipeline:
        us = ProcessId("zone", "a-primary")
        members = (us, *(peer.id for peer in self.peers))
        route = Route(members, 0, ("http://127.0.0.1:1", *(peer.endpoint for peer in self.peers)))
        return open_pipeline(
            self.context,
            Header(us, route, ETCD),
            JOURNAL,
            self.spool,
            on_acknowledged=self._on_acknowledged,
        )

    def _on_acknowledged(self, end: int, registers: LabelSet) -> None:
        if self.defect:
            raise KeyError("defect")
        assert registers == self.spool.registers
        self.agreed.append(end)

    async def in_step(self) -> Pipeline:
        """Return a pipeline that all peers have agreed to."""
        pipeline = self.open()
        await pipeline.sync(self.spool.fragment, self.spool.registers, opening=True)
        for peer in self.peers:
            peer.answer(OK)
            await peer.received.get()
        async with pipeline.take_turn():
            answers, error = await pipeline.gather_sync()
        assert error is None
        assert {answer.status for answer in answers} <= {Status.OK}
        return pipeline

    async def append(self, pipeline: Pipeline, content: bytes) -> Fragment:
        """Send content and its commit."""
        await pipeline.content(content, 0)
        proposal = await pipeline.next()
        await pipeline.propose(proposal, EMPTY_LABELS, acknowledge=True)
        return proposal

    async def stop(self) -> None:
        for peer in self.peers:
            await peer.stop()
        await self.scope.stop()
        await self.channels.close()
        self.pools.close()
        assert self.scope.failure is None


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, timeout_s=10.0)
    yield bench
    await bench.stop()


@pytest.fixture
async def hasty(tmp_path: Path) -> AsyncIterator[Bench]:
    """Give peers a tenth of a second only."""
    bench = Bench(tmp_path, timeout_s=0.1)
    yield bench
    await bench.stop()


@pytest.mark.long
async def test_what_all_replicas_have_is_reported(bench: Bench) -> None:
    """With each turn, up to where its append ended, although the next one has been sent."""
    first, second = await bench.peer("1"), await bench.peer("2")
    pipeline = await bench.in_step()
    assert bench.agreed == [0]
    turns = []
    for content in (b"one", b"three"):
        await bench.append(pipeline, content)
        turns.append(pipeline.take_turn())
    for peer in (first, second):
        peer.answer(OK, OK)
    for turn, end in zip(turns, (3, 8), strict=True):
        async with turn:
            await pipeline.gather_acks()
        assert bench.agreed[-1] == end
    # Case: one of them refuses.
    await bench.append(pipeline, b"x")
    first.answer(OK)
    second.answer(
        broker_pb2.ReplicateResponse(
            status=Status.PROPOSAL_MISMATCH.value,  # type: ignore[arg-type]
            fragment=Fragment(JOURNAL, 0, 0).to_pb(),
            registers=EMPTY_LABELS.to_pb(),
        )
    )
    async with pipeline.take_turn():
        await pipeline.gather_acks()
    # Case: nor when the pipeline that follows is not agreed to.
    await pipeline.release_spool()
    pipeline = bench.open()
    await pipeline.sync(bench.spool.fragment, bench.spool.registers, opening=True)
    first.answer(OK)
    second.answer(grpc.StatusCode.UNAVAILABLE)
    async with pipeline.take_turn():
        _, error = await pipeline.gather_sync()
    assert error is not None
    assert bench.agreed == [0, 3, 8]


async def test_what_replicas_are_sent(bench: Bench) -> None:
    """The opening proposal is addressed to each peer; content and commit are the same to all."""
    one, two = await bench.peer("one"), await bench.peer("two")
    pipeline = bench.open()
    await pipeline.sync(bench.spool.fragment, bench.spool.registers, opening=True)
    for peer in (one, two):
        opening = await peer.received.get()
        assert ProcessId.from_pb(opening.header.process_id) == peer.id
        assert Route.from_pb(opening.header.route) == pipeline.route
        assert EtcdHeader.from_pb(opening.header.etcd) == ETCD
        assert (opening.deprecated_journal, opening.proposal.journal) == (JOURNAL, JOURNAL)
        assert opening.acknowledge
        assert opening.HasField("registers")
        peer.answer(OK)
    async with pipeline.take_turn():
        answers, error = await pipeline.gather_sync()
    assert error is None
    assert [(answer.peer, answer.status) for answer in answers] == [
        (one.id, Status.OK),
        (two.id, Status.OK),
    ]

    await pipeline.content(b"hello ", 0)
    await pipeline.content(b"world", 6)
    commit = await pipeline.next()
    await pipeline.propose(commit, LabelSet.of(("a", "b")), acknowledge=True)
    assert bench.spool.fragment == commit
    turn = pipeline.take_turn()
    for peer in (one, two):
        assert await peer.received.get() == ReplicateContent(b"hello ", 0)
        assert await peer.received.get() == ReplicateContent(b"world", 6)
        proposal = await peer.received.get()
        assert Fragment.from_pb(proposal.proposal) == commit
        assert proposal.acknowledge
        assert not proposal.HasField("header")
        assert not proposal.deprecated_journal
        peer.answer(OK)
    async with turn:
        assert {answer.status for answer in await pipeline.gather_acks()} == {Status.OK}


async def test_next_append_streams_while_this_one_waits(bench: Bench) -> None:
    """Acknowledgements are gathered in the order of appends, whichever asks first."""
    peer = await bench.peer("one")
    pipeline = await bench.in_step()
    order: list[str] = []

    async def gather(name: str, turn: Any) -> None:
        async with turn:
            await pipeline.gather_acks()
            order.append(name)

    turns = {}
    for name in ("first", "second", "third"):
        await bench.append(pipeline, name.encode())
        turns[name] = pipeline.take_turn()
    async with TaskScope("gather") as scope:
        for name in ("third", "second", "first"):
            scope.spawn(gather(name, turns[name]), name=name)
        for _ in range(6):  # content and commit of each
            await peer.received.get()
        assert order == []
        peer.answer(OK, OK, OK)
    assert order == ["first", "second", "third"]


async def test_missing_acknowledgement_fails_all_that_was_built_on_it(hasty: Bench) -> None:
    silent, other = await hasty.peer("one"), await hasty.peer("two")
    pipeline = await hasty.in_step()
    await hasty.append(pipeline, b"first")
    first = pipeline.take_turn()
    await hasty.append(pipeline, b"second")
    second = pipeline.take_turn()
    other.answer(OK, OK)
    with raises(Unavailable, timeout_s=0.1, says=str(silent.id)):
        async with first:
            await pipeline.gather_acks()
    with raises(Unavailable, timeout_s=0.1, says=str(silent.id)):
        async with second:
            await pipeline.gather_acks()
    # Case: both peers are let go, so that they roll back and can serve another pipeline.
    await silent.ended.wait()
    await other.ended.wait()
    with pytest.raises(Unavailable):
        await pipeline.content(b"third", 0)
    assert not pipeline.usable(0.0)


async def test_refused_commit_breaks_the_pipeline(bench: Bench) -> None:
    one, two = await bench.peer("one"), await bench.peer("two")
    pipeline = await bench.in_step()
    await bench.append(pipeline, b"x")
    turn = pipeline.take_turn()
    later = pipeline.take_turn()
    refusal = broker_pb2.ReplicateResponse(
        status=broker_pb2.PROPOSAL_MISMATCH,
        fragment=Fragment(JOURNAL, 0, 0).to_pb(),
        registers=EMPTY_LABELS.to_pb(),
    )
    one.answer(refusal)
    two.answer(OK)
    async with turn:
        answers = await pipeline.gather_acks()
    assert [answer.status for answer in answers] == [Status.PROPOSAL_MISMATCH]
    assert answers[0].fragment == Fragment(JOURNAL, 0, 0)
    with pytest.raises(Broken, match="PROPOSAL_MISMATCH"):
        async with later:
            await pipeline.gather_acks()


async def test_answer_that_came_before_the_end_still_counts(bench: Bench) -> None:
    """A peer which knows a newer route says so and closes its stream; another may be down."""
    one, two = await bench.peer("one"), await bench.peer("two")
    pipeline = bench.open()
    await pipeline.sync(bench.spool.fragment, EMPTY_LABELS, opening=True)
    header = Header(one.id, Route((one.id,), 0), EtcdHeader(11, 22, 99, 44))
    one.answer(
        broker_pb2.ReplicateResponse(status=broker_pb2.WRONG_ROUTE, header=header.to_pb()), None
    )
    two.answer(grpc.StatusCode.UNAVAILABLE)
    await one.ended.wait()
    await two.ended.wait()
    async with pipeline.take_turn():
        answers, error = await pipeline.gather_sync()
    assert isinstance(error, Unavailable)
    (answer,) = answers
    assert (answer.status, answer.route, answer.revision) == (
        Status.WRONG_ROUTE,
        Route((one.id,), 0),
        99,
    )


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (None, Broken, "unexpected EOF"),
        (grpc.StatusCode.UNAVAILABLE, Unavailable, "scripted"),
        (grpc.StatusCode.UNKNOWN, Broken, "scripted"),
        (broker_pb2.ReplicateResponse(status="WRONG_ROUTE"), Broken, "expected Header"),
    ],
)
async def test_failures_of_a_peer(bench: Bench, answer: Any, kind: Any, text: str) -> None:
    peer = await bench.peer("one")
    pipeline = bench.open()
    await pipeline.sync(bench.spool.fragment, EMPTY_LABELS, opening=True)
    await peer.received.get()
    peer.answer(answer)
    async with pipeline.take_turn():
        answers, error = await pipeline.gather_sync()
    assert answers == ()
    assert type(error) is kind
    assert text in str(error)


async def test_peer_that_cannot_be_reached(bench: Bench) -> None:
    peer = await bench.peer("one")
    await peer.stop()
    pipeline = bench.open()
    await pipeline.sync(bench.spool.fragment, EMPTY_LABELS, opening=True)
    async with pipeline.take_turn():
        _, error = await pipeline.gather_sync()
    assert isinstance(error, Unavailable)
    assert str(peer.id) in str(error)


async def test_peer_that_goes_away_is_noticed_while_idle(bench: Bench) -> None:
    """So that the next append finds out before it has sent anything."""
    peer = await bench.peer("one")
    pipeline = await bench.in_step()
    assert pipeline.usable(0.0)
    peer.answer(grpc.StatusCode.UNAVAILABLE)
    await pipeline._peers[0].wait_end()
    assert not pipeline.usable(0.0)
    with pytest.raises(Unavailable):
        await pipeline.content(b"x", 0)


async def test_peer_that_takes_nothing_is_given_up(hasty: Bench) -> None:
    """What is kept for it is bounded, and so is the wait."""
    peer = await hasty.peer("one")
    pipeline = await hasty.in_step()
    peer.reads.clear()
    chunk, delta = bytes(1 << 18), 0
    with raises(Unavailable, timeout_s=0.1, says=str(peer.id)):
        while delta < 1 << 30:
            await pipeline.content(chunk, delta)
            delta += len(chunk)
            assert pipeline._peers[0]._outbox_bytes <= OUTBOX_BYTES_MAX + 2 * len(chunk)
    assert pipeline.failure is not None


async def test_pipeline_is_replaced_before_its_tokens_expire(bench: Bench) -> None:
    await bench.peer("one")
    pipeline = await bench.in_step()
    now = bench.context.clock.monotonic()
    assert pipeline.usable(now + 10 * 3600)
    assert not pipeline.usable(now + 12 * 3600)


async def test_closing_ends_streams_and_releases_the_spool(bench: Bench) -> None:
    peer = await bench.peer("one")
    pipeline = await bench.in_step()
    await bench.append(pipeline, b"committed")
    turn = pipeline.take_turn()
    await pipeline.content(bytes(1 << 20), 0)
    await pipeline.content(b"pending", 1 << 20)
    assert await pipeline.release_spool() is bench.spool
    assert bench.spool.delta == 1 << 20
    closing = bench.scope.spawn(pipeline.close(), name="close")
    # Case: the peer sees the end at once, but the turn of the append comes first.
    await peer.received.get()
    await peer.received.get()
    await peer.received.get()
    peer.answer(OK)
    async with turn:
        await pipeline.gather_acks()
    await closing
    assert peer.clean


async def test_peer_that_does_not_end_its_stream_is_cut_off(hasty: Bench) -> None:
    peer = await hasty.peer("one")
    pipeline = await hasty.in_step()
    peer.reads.clear()
    await pipeline.release_spool()
    await pipeline.close()
    await peer.ended.wait()


async def test_turn_that_is_not_used_breaks_the_pipeline_in_order(bench: Bench) -> None:
    """The answers that are owed to it would be taken for those of the next append."""
    peer = await bench.peer("one")
    pipeline = await bench.in_step()
    await bench.append(pipeline, b"first")
    first = pipeline.take_turn()
    await bench.append(pipeline, b"second")
    second = pipeline.take_turn()
    third = pipeline.take_turn()

    async def wait() -> None:
        async with second:
            raise AssertionError

    waiting = bench.scope.spawn(wait(), name="second")
    peer.answer(OK, OK)
    await peer.received.get()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pipeline.failure is not None
    # Case: the third is still behind the first.
    assert not second.done.done()
    for turn in (first, third):
        with raises(Broken) as raised:
            async with turn:
                await pipeline.gather_acks()
        assert raised.value is pipeline.failure


async def test_replication_without_peers(bench: Bench) -> None:
    pipeline = bench.open()
    await pipeline.sync(bench.spool.fragment, EMPTY_LABELS, opening=True)
    async with pipeline.take_turn():
        assert await pipeline.gather_sync() == ((), None)
    commit = await bench.append(pipeline, b"alone")
    async with pipeline.take_turn():
        assert await pipeline.gather_acks() == ()
    assert bench.commits[-1].fragment == commit
    await pipeline.release_spool()
    await pipeline.close()


async def test_disk_of_the_primary_fails(bench: Bench) -> None:
    """Content of ours that is out of order stands for it: peers have it, our spool does not."""
    peer = await bench.peer("one")
    pipeline = await bench.in_step()
    await pipeline.content(b"x", 5)
    with pytest.raises(Exception, match="ContentDelta"):
        await pipeline.next()
    assert await peer.received.get() == ReplicateContent(b"x", 5)


@pytest.mark.parametrize(
    ("chunks", "messages"),
    [
        ([1], [1]),
        ([1 << 17] * 4, [1 << 17, 3 << 17]),
        ([1 << 17] * 8, [1 << 17, 7 << 17]),
        ([1 << 17] * 10, [1 << 17, 8 << 17, 1 << 17]),
        ([1 << 19, 1 << 20, 1], [1 << 19, 1 << 20, 1]),
        ([(1 << 20) + 1], [1 << 20, 1]),
        ([5 << 19, 7], [1 << 20, 1 << 20, 1 << 19, 7]),
    ],
)
async def test_chunks_travel_in_batches(
    bench: Bench, chunks: list[int], messages: list[int]
) -> None:
    """Never beyond what peers take, whatever the client sent."""
    peer = await bench.peer("one")
    pipeline = await bench.in_step()
    content = random.Random(1).randbytes(sum(chunks))
    delta = 0
    for length in chunks:
        await pipeline.content(content[delta : delta + length], delta)
        delta += length
        assert pipeline.delta == delta
    await pipeline.propose(await pipeline.next(), EMPTY_LABELS, acknowledge=True)
    sent, lengths = b"", []
    while isinstance(message := await peer.received.get(), ReplicateContent):
        assert message.delta == len(sent)
        sent += message.content
        lengths.append(len(message.content))
    assert lengths == messages
    assert sent == content == bench.commits[-1].pread(0, len(content))


async def test_real_replicas_end_up_equal(tmp_path: Path) -> None:
    """Three brokers, one route: content, roll, roll-back and registers get to all of them."""
    async with await FixedCluster.start(3, tmp_path) as cluster:
        spec = journal_spec(JOURNAL, replication=3, codec=Codec.GZIP)
        cluster.create(spec, "b", "a", "c")
        replica = cluster["b"].replica(JOURNAL)
        while not cluster.consistent(JOURNAL):
            await cluster["b"].context.key_space.next_change()
        pipeline = await replica.pipeline.take()
        assert pipeline is not None
        replica.stop_daemons()  # No pulse takes the spools again, to complete the first fragment.
        await pipeline.content(b"never", 0)
        spool = pipeline.spool
        await pipeline.propose(spool.fragment, spool.registers, acknowledge=True)
        await pipeline.content(b"content", 0)
        registers = LabelSet.of(("kk", "v"))
        await pipeline.propose(await pipeline.next(), registers, acknowledge=True)
        rolled = Fragment(JOURNAL, 7, 7, codec=Codec.GZIP)
        await pipeline.propose(rolled, registers, acknowledge=False)
        await pipeline.content(b"x", 0)
        await pipeline.propose(await pipeline.next(), registers, acknowledge=True)
        for _ in range(3):
            async with pipeline.take_turn():
                answers = await pipeline.gather_acks()
            assert [answer.status for answer in answers] == [Status.OK, Status.OK]
        expected = spool.fragment
        await replica.tear_down(pipeline)
        replica.pipeline.give(None)
        for broker in cluster.brokers.values():
            async with broker.replica(JOURNAL).spool.hold() as held:
                assert (held.fragment, held.registers, held.delta) == (expected, registers, 0)
        assert expected.begin == 7


@pytest.mark.parametrize("delta", [0, 1, 127, 128, 1 << 40])
@pytest.mark.parametrize("length", [1, 127, 128, 1 << 17])
def test_content_is_encoded_as_the_generated_code_does(length: int, delta: int) -> None:
    content = bytes(length)
    request = broker_pb2.ReplicateRequest(content=content, content_delta=delta)
    encoded = replicate_content(content, delta)
    assert encoded == request.SerializeToString()
    assert decode_replicate(encoded) == ReplicateContent(content, delta)
    # Case: anything cut off is not taken for content.
    for cut in range(1, min(len(encoded), 5)):
        decoded = decode_replicate(encoded[:-cut])
        assert not isinstance(decoded, ReplicateContent) or decoded.delta < delta


async def test_small_commits_are_answered_in_order_when_the_last_peer_has_answered(
    bench: Bench,
) -> None:
    """No task waits for the answers. A refusal fails its commit, and all that were built on it."""
    one, two = await bench.peer("one"), await bench.peer("two")
    pipeline = await bench.in_step()
    answered: list[tuple[int, Any]] = []

    def commit(number: int) -> None:
        assert pipeline.is_idle(0.0)
        pipeline.commit_now(b"x", EMPTY_LABELS)
        pipeline.when_answered(lambda answer: answered.append((number, answer)))

    for number in range(4):
        commit(number)
    tasks = bench.scope.children
    one.answer(OK, OK, OK, OK)
    two.answer(OK)
    await until(lambda: answered == [(0, EMPTY_LABELS)])
    mismatch = broker_pb2.ReplicateResponse(
        status=Status.PROPOSAL_MISMATCH.value,  # type: ignore[arg-type]
        fragment=bench.spool.fragment.to_pb(),
        registers=EMPTY_LABELS.to_pb(),
    )
    two.answer(OK, mismatch)
    await until(lambda: len(answered) == 4)
    assert bench.scope.children == tasks
    assert answered[1] == (1, EMPTY_LABELS)
    assert [number for number, _ in answered] == [0, 1, 2, 3]
    refusals = [str(answer) for _, answer in answered[2:]]
    assert refusals == [refusals[0]] * 2
    assert "unexpected PROPOSAL_MISMATCH" in refusals[0]
    assert bench.agreed == [0, 1, 2]


async def test_a_small_commit_is_answered_behind_a_turn_that_ends_late(bench: Bench) -> None:
    """Its answer has arrived by then: the end of the turn before it is all that it waits for."""
    peer = await bench.peer("one")
    pipeline = await bench.in_step()
    answered: list[str] = []
    pipeline.commit_now(b"1", EMPTY_LABELS)
    pipeline.when_answered(lambda _: answered.append("small"))
    await bench.append(pipeline, b"22")
    turn = pipeline.take_turn()

    async def gather() -> None:
        async with turn:
            await pipeline.gather_acks()
            await until(lambda: pipeline._peers[0].answer is not None)  # The last one has arrived.
            answered.append("long")

    async with TaskScope("gather") as scope:
        scope.spawn(gather(), name="long")
        await until(lambda: pipeline.is_idle(0.0))
        pipeline.commit_now(b"3", EMPTY_LABELS)
        pipeline.when_answered(lambda _: answered.append("last"))
        peer.answer(OK, OK, OK)
        async with timeout(5.0):
            await until(lambda: len(answered) == 3)
    assert answered == ["small", "long", "last"]


class Answers:
    """A call whose answers a test gives to its stream."""

    def __init__(self) -> None:
        self.give: Any = None
        self.is_cancelled = False

    def listen(self, sink: Any) -> None:
        self.give = sink

    def on_end(self, callback: Any) -> None:
        """Drop the callback: a test ends nothing here."""

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_peer_that_has_answered_is_not_silent_while_another_is_late(bench: Bench) -> None:
    """Its answers wait to be taken. It is cut off once it owes one, and does not give it in time."""
    call: Any = Answers()
    peer = PeerStream(ProcessId("zone", "quick"), call, bench.scope, timeout_s=10.0)
    time = LoopTime()
    for _ in range(2):
        peer.expect()
        call.give(OK)
    peer.drop_answer()
    time.advance(11.0)
    await turns()
    assert peer.failure is None
    peer.drop_answer()
    peer.expect()
    for _ in range(2):
        time.advance(11.0)
        await turns()
    assert isinstance(peer.failure, Unavailable)
    assert call.is_cancelled
    time.go_on()


async def test_a_defect_of_an_acknowledgement_fails_its_append(bench: Bench) -> None:
    """It does not reach the connection, which other journals use, too."""
    peer = await bench.peer("one")
    pipeline = await bench.in_step()
    answered: list[Any] = []
    bench.defect = True
    pipeline.commit_now(b"1", EMPTY_LABELS)
    pipeline.when_answered(answered.append)
    peer.answer(OK)
    await until(lambda: bool(answered))
    assert isinstance(answered[0], Bug)
    assert "defect" in str(answered[0])


async def test_a_peer_that_does_not_answer_a_small_commit_is_cut_off(hasty: Bench) -> None:
    peer = await hasty.peer("silent")
    pipeline = await hasty.in_step()
    answered: list[Any] = []
    for _ in range(2):
        pipeline.commit_now(b"x", EMPTY_LABELS)
        pipeline.when_answered(answered.append)
    await until(lambda: len(answered) == 2)
    for answer in answered:
        assert isinstance(answer, Unavailable)
        assert f"{peer.id} does not answer" in str(answer)
    assert not pipeline.usable(0.0)
    await peer.ended.wait()


_ENDS = st.integers(0, (1 << 63) - 1)
_SUMS = st.one_of(
    st.binary(min_size=20, max_size=20), st.just(bytes(20)), st.just(bytes(19) + b"x")
)
_PROPOSALS = st.builds(
    Fragment,
    st.sampled_from([JOURNAL, "b", "c" * 200]),
    _ENDS,
    _ENDS,
    _SUMS,
    st.sampled_from(Codec),
)
_REGISTERS = st.sampled_from([EMPTY_LABELS, LabelSet.of(("a", "b")), LabelSet.of(("a", "c" * 300))])


@given(st.lists(st.tuples(_PROPOSALS, _REGISTERS), min_size=1, max_size=5))
def test_proposals_are_encoded_as_the_generated_code_does(
    proposals: list[tuple[Fragment, LabelSet]],
) -> None:
    """Also behind any other proposal: the encoder keeps the parts that stay."""
    encoder = ProposalEncoder()
    for fragment, registers in proposals:
        request = broker_pb2.ReplicateRequest(
            proposal=fragment.to_pb(), registers=registers.to_pb(), acknowledge=True
        )
        assert encoder.encode(fragment, registers) == request.SerializeToString()
        grown = replace(fragment, end=fragment.end // 2)
        request.proposal.end = grown.end
        assert encoder.encode(grown, registers) == request.SerializeToString()


def test_other_messages_take_the_generated_path() -> None:
    proposal = broker_pb2.ReplicateRequest(proposal=Fragment(JOURNAL, 0, 0).to_pb())
    both = broker_pb2.ReplicateRequest(content=b"x", acknowledge=True)
    for request in (proposal, both, broker_pb2.ReplicateRequest()):
        encoded = request.SerializeToString()
        assert decode_replicate(encoded) == encoded
    opening = broker_pb2.AppendRequest(journal=JOURNAL)
    assert decode_append(opening.SerializeToString()) == opening
    assert decode_append(b"") == b""
    chunk = broker_pb2.AppendRequest(content=b"abc")
    assert decode_append(chunk.SerializeToString()) == b"abc"
    odd = broker_pb2.AppendRequest(content=b"abc", offset=3)
    assert decode_append(odd.SerializeToString()) == odd
    # Case: an explicit empty content field alone is no intent, but reads the same.
    empty = decode_append(b"\x22\x00")
    assert isinstance(empty, broker_pb2.AppendRequest)
    assert empty.content == b""
