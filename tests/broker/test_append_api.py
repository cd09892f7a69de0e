"""The Append call, as clients see it, on brokers with real replicas and real gRPC between them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.auth import Capability, Claims
from gazette.broker.append import line as append_line
from gazette.broker.append import rules as append_rules
from gazette.broker.append.events import AppendTerms, Ending
from gazette.broker.append.fsm import State
from gazette.broker.commit.driver import AppendCall, AppendDriver
from gazette.broker.pulse import NoContent
from gazette.broker.replication.pipeline import Pipeline
from gazette.client.rpc.errors import rpc_error
from gazette.client.rpc.stream_call import StreamCall
from gazette.errors import Broken, Invalid
from gazette.fragment.index import AT_WRITE_HEAD
from gazette.fragment.local_file import LocalDisk
from gazette.protocol.append_session import SessionAppend, ledger_of
from gazette.protocol.content import COMMIT, append_content, encode_append
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import JournalFlag
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_append_response
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import journal_spec
from gazette.testing.clock import ManualClock
from tests.facts import call_refused
from tests.support.fixed_cluster import FixedBroker, FixedCluster

JOURNAL = "a/journal"
SPEC = journal_spec(JOURNAL, replication=3)


class Append:
    """An Append call to one broker, one message at a time."""

    def __init__(
        self,
        broker: FixedBroker,
        via: FixedBroker | None = None,
        session: SessionAppend | None = None,
    ) -> None:
        channel = (via or broker).context.peers.grpc_channel(broker.endpoint)
        method: Any = channel.stream_unary(
            "/protocol.Journal/Append",
            request_serializer=encode_append,
            response_deserializer=broker_pb2.AppendResponse.FromString,
        )
        self.call: Any = method(metadata=None if session is None else session.metadata())

    async def open(self, journal: str = JOURNAL, **fields: Any) -> Append:
        await self.call.write(broker_pb2.AppendRequest(journal=journal, **fields))
        return self

    async def send(self, *contents: bytes) -> Append:
        for content in contents:
            await self.call.write(append_content(content))
        return self

    async def commit(self) -> broker_pb2.AppendResponse:
        """Ask for the commit; the validated response."""
        try:
            await self.call.write(COMMIT)
            await self.call.done_writing()
        except asyncio.InvalidStateError:
            pass  # It was answered already.
        response: broker_pb2.AppendResponse = await self.call
        validate_append_response(response)
        return response

    async def failed(self) -> grpc.aio.AioRpcError:
        """Return the error with which the broker ended the call."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call
        return caught.value


async def append(broker: FixedBroker, content: bytes, **fields: Any) -> Any:
    one = await Append(broker).open(**fields)
    if content:
        await one.send(content)
    return await one.commit()


@pytest.fixture(autouse=True)
def _nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let appends take their turn without content, so that tests can stop in the middle of one."""
    monkeypatch.setattr(append_line, "AHEAD_BYTES", 0)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FixedCluster]:
    async with await FixedCluster.start(3, tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def ready(cluster: FixedCluster) -> FixedCluster:
    """Return a cluster where ``b`` is primary of a journal with three replicas, all of them in step."""
    cluster.create(SPEC, "b", "a", "c")
    await in_step(cluster)
    return cluster


async def in_step(cluster: FixedCluster, journal: str = JOURNAL) -> None:
    while not cluster.consistent(journal):
        await cluster["a"].context.key_space.next_change()


async def until(condition: Callable[[], object]) -> None:
    """Let the brokers run until it holds. Bounded by the test's timeout."""
    while not condition():
        await SystemClock().sleep(0)


async def pipeline_of(broker: FixedBroker) -> Pipeline:
    """Return the pipeline of a primary, once no append holds it."""
    pipeline = await broker.replica(JOURNAL).pipeline.take()
    assert pipeline is not None
    broker.replica(JOURNAL).pipeline.give(pipeline)
    return pipeline


def written(cluster: FixedCluster, name: str) -> bytes:
    """Return what readers find at one broker."""
    index = cluster[name].replica(JOURNAL).index
    content = b""
    while True:
        at, found = index._set.longest_overlapping(len(content))
        if not found:
            return content
        span = index._set[at]
        if isinstance(span, Fragment):
            store = cluster[name].context.blob_stores.get(span.backing_store).store
            with store.open(span.content_path()) as source:
                content += source.read()[len(content) - span.begin :]
        else:
            content += span.pread(len(content), 1 << 30)


async def test_append_gets_to_all_replicas(ready: FixedCluster) -> None:
    one = await Append(ready["b"]).open()
    response = await (await one.send(b"hello, ", b"world")).commit()
    assert response.status == Status.OK.value
    assert Fragment.from_pb(response.commit) == Fragment(
        JOURNAL, 0, 12, hashlib.sha1(b"hello, world").digest(), Codec.NONE
    )
    header = Header.from_pb(response.header)
    assert header.process_id == ready["b"].id
    assert header.etcd == ready["b"].context.resolver.etcd_header()
    assert response.total_chunks == 3
    assert response.delayed_chunks == 0
    for name in "abc":
        assert written(ready, name) == b"hello, world"


async def test_sum_is_of_the_append_alone(ready: FixedCluster) -> None:
    begin = 0
    for content in (b"one", b"two", b"three"):
        commit = Fragment.from_pb((await append(ready["b"], content)).commit)
        assert (commit.begin, commit.end) == (begin, begin + len(content))
        assert commit.sum == hashlib.sha1(content).digest()
        begin = commit.end
    # Case: a barrier is an append of nothing.
    commit = Fragment.from_pb((await append(ready["b"], b"")).commit)
    assert (commit.begin, commit.end, commit.sum) == (begin, begin, bytes(20))


async def test_one_pipeline_serves_many_appends(ready: FixedCluster) -> None:
    pipeline = await pipeline_of(ready["b"])
    for _ in range(3):
        await append(ready["b"], b"x")
    assert await pipeline_of(ready["b"]) is pipeline
    assert ready.etcd.transactions == [True]


async def test_registers(ready: FixedCluster) -> None:
    """Checked once there are any; subtracted, then united."""
    check = LabelSelector.of(author="me").to_pb()
    first = await append(
        ready["b"],
        b"x",
        check_registers=check,
        union_registers=LabelSet.of(("author", "you"), ("other", "one")).to_pb(),
    )
    assert LabelSet.from_pb(first.registers) == LabelSet.of(("author", "you"), ("other", "one"))
    refused = await append(ready["b"], b"x", check_registers=check)
    assert refused.status == Status.REGISTER_MISMATCH
    assert LabelSet.from_pb(refused.registers) == LabelSet.of(("author", "you"), ("other", "one"))
    assert not refused.HasField("commit")
    third = await append(
        ready["b"],
        b"y",
        check_registers=LabelSelector.of(author="you").to_pb(),
        subtract_registers=LabelSet.of(("other", "one")).to_pb(),
        union_registers=LabelSet.of(("author", "me")).to_pb(),
    )
    assert LabelSet.from_pb(third.registers) == LabelSet.of(("author", "me"))
    assert written(ready, "c") == b"xy"


def _registers(count: int, value: str = "v" * 1000) -> Any:
    return LabelSet.of(*((f"register-{index:05d}", value) for index in range(count))).to_pb()


async def test_registers_beyond_the_limit_are_refused_and_change_nothing(
    ready: FixedCluster,
) -> None:
    """Three unions of 1.7 MB used to make proposals that no replica could receive."""
    await append(ready["b"], b"one", union_registers=_registers(50))
    pipeline = await pipeline_of(ready["b"])
    for broker, count in (("b", 1_700), ("a", 1_700), ("b", 70), ("a", 70)):
        one = await Append(ready[broker]).open(union_registers=_registers(count))
        await one.send(b"never")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.commit()
        error = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "limit_bytes=65536" in (error.details() or "")
        assert rpc_error(error, "Append").__class__ is Invalid  # which no client repeats
    assert await pipeline_of(ready["b"]) is pipeline
    response = await append(ready["b"], b" two")
    assert response.registers == _registers(50)
    assert written(ready, "c") == b"one two"


async def test_registers_that_an_older_broker_let_grow_can_be_used_and_shrunk(
    ready: FixedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(append_rules, "REGISTERS_BYTES_MAX", 1 << 30)
        await append(ready["b"], b"1", union_registers=_registers(1000))
    assert (await append(ready["b"], b"2")).registers == _registers(1000)
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        await append(ready["b"], b"x", union_registers=LabelSet.of(("more", "x")).to_pb())
    drop = broker_pb2.LabelSet(labels=_registers(1000).labels[40:80])
    response = await append(ready["b"], b"3", subtract_registers=drop)
    assert len(response.registers.labels) == 960
    assert response.commit.end == 3


@pytest.mark.parametrize("name", ["a", "c"])
async def test_other_brokers_proxy_to_the_primary(ready: FixedCluster, name: str) -> None:
    """Also of a journal with a metadata segment, which is no part of its name."""
    response = await append(ready[name], b"hello", journal=f"{JOURNAL};meta/data")
    assert Header.from_pb(response.header).process_id == ready["b"].id
    assert response.commit.journal == JOURNAL
    # Case: statuses, errors and early answers of the primary are passed on.
    wrong = await append(ready[name], b"hello", offset=3)
    assert wrong.status == Status.WRONG_APPEND_OFFSET
    one = await (await Append(ready[name]).open()).send(b"never")
    await one.call.done_writing()
    error = await one.failed()
    assert (error.code(), error.details()) == (
        grpc.StatusCode.UNKNOWN,
        "append stream: unexpected EOF",
    )
    assert written(ready, "a") == b"hello"
    # Case: unless that is not wanted.
    refused = await append(ready[name], b"x", do_not_proxy=True)
    assert refused.status == Status.NOT_JOURNAL_PRIMARY_BROKER
    assert Header.from_pb(refused.header).process_id == ready[name].id


async def test_proxied_append_whose_caller_leaves_is_rolled_back(ready: FixedCluster) -> None:
    pipeline = await pipeline_of(ready["b"])
    one = await (await Append(ready["a"]).open()).send(b"never")
    await until(lambda: pipeline.delta)
    one.call.cancel()
    assert (await append(ready["b"], b"x")).commit.begin == 0
    assert written(ready, "c") == b"x"


async def test_primary_that_cannot_be_reached(ready: FixedCluster) -> None:
    await ready["b"].server.stop(0)
    one = await Append(ready["a"]).open()
    error = await one.failed()
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_statuses(ready: FixedCluster) -> None:
    b = ready["b"]
    missing = await append(b, b"x", journal="no/such")
    assert missing.status == Status.JOURNAL_NOT_FOUND
    assert Header.from_pb(missing.header).process_id == b.id
    wrong = await append(b, b"x", offset=12)
    assert wrong.status == Status.WRONG_APPEND_OFFSET
    ready.put_spec(replace(SPEC, flags=JournalFlag.O_RDONLY))
    assert (await append(b, b"x")).status == Status.NOT_ALLOWED
    assert (await append(b, b"")).status == Status.OK
    ready.put_spec(replace(SPEC, replication=5))
    assert (await append(b, b"x")).status == Status.INSUFFICIENT_JOURNAL_BROKERS
    # Case: none of them keeps the pipeline.
    assert b.replica(JOURNAL).pipeline.idle


async def test_index_has_a_greater_offset(cluster: FixedCluster, tmp_path: Path) -> None:
    """All brokers that knew of a fragment are gone; an operator says where to go on."""
    directory = tmp_path / "root" / "fragments" / JOURNAL
    directory.mkdir(parents=True)
    name = Fragment(JOURNAL, 0, 7, hashlib.sha1(b"content").digest(), Codec.NONE).content_name()
    (directory / name).write_bytes(b"content")
    cluster.create(SPEC, "a", "b", "c")
    refused = await append(cluster["a"], b"x")
    assert refused.status == Status.INDEX_HAS_GREATER_OFFSET
    wrong = await append(cluster["a"], b"x", offset=6)
    assert wrong.status == Status.WRONG_APPEND_OFFSET
    # Case: the reset needs no content.
    assert (await append(cluster["a"], b"", offset=7)).commit.begin == 7
    assert (await append(cluster["b"], b"x")).commit.begin == 7


async def test_store_that_cannot_be_used(tmp_path: Path) -> None:
    async with await FixedCluster.start(1, tmp_path, store_check_timeout_s=0.2) as cluster:
        cluster.create(journal_spec(JOURNAL, stores=("file:///missing/",)), "a")
        response = await append(cluster["a"], b"x")
        assert response.status == Status.FRAGMENT_STORE_UNHEALTHY
        assert "missing" in response.store_health_error
        assert cluster["a"].replica(JOURNAL).pipeline.idle


async def test_other_change_of_the_assignments_wins(cluster: FixedCluster) -> None:
    """The primary advertises a route that has changed meanwhile, of which it hears a little later; and
    etcd's own revision, which counts the changes of others too, is far ahead."""
    cluster["a"].lagging = []
    cluster.create(SPEC, "a", "b", "c")
    cluster.etcd.revision += 1_000
    cluster["a"].catch_up()
    cluster["a"].lagging = []
    cluster.assign(JOURNAL, "a", "c", "b")
    cluster.etcd.revision += 1_000
    appending = asyncio.gather(append(cluster["a"], b"x"))
    await until(lambda: False in cluster.etcd.transactions)
    cluster["a"].catch_up()
    assert (await appending)[0].status == Status.OK
    assert cluster.consistent(JOURNAL)


async def test_journal_without_stores(cluster: FixedCluster) -> None:
    cluster.create(journal_spec(JOURNAL, replication=1, stores=()), "a")
    assert (await append(cluster["a"], b"x")).status == Status.OK


async def test_first_append_becomes_a_fragment_of_its_own(ready: FixedCluster) -> None:
    for content in (b"first", b"second", b"third"):
        await append(ready["b"], content)
    for name in "abc":
        fragments = ready[name].replica(JOURNAL).index.fragments()
        assert [(one.begin, one.end) for one in fragments] == [(0, 5), (5, 16)]


BAD_STREAMS: list[tuple[list[Any], str]] = [
    ([broker_pb2.AppendRequest()], "Journal: invalid length (0; expected 4 <= length <= 512)"),
    ([append_content(b"x")], "Journal: invalid length"),
    ([broker_pb2.AppendRequest(journal="bad name")], "Journal: not a valid token (bad name)"),
    ([broker_pb2.AppendRequest(journal=JOURNAL, offset=-1)], "invalid Offset"),
    ([broker_pb2.AppendRequest(journal=JOURNAL, suspend=99)], "Suspend"),  # type: ignore[arg-type]
    ([broker_pb2.AppendRequest(journal=JOURNAL)] * 2, "append stream: unexpected Journal"),
    (
        [broker_pb2.AppendRequest(journal=JOURNAL), append_content(b"x"), COMMIT, COMMIT],
        "append stream: expected EOF after empty Content chunk",
    ),
    (
        [
            broker_pb2.AppendRequest(journal=JOURNAL),
            broker_pb2.AppendRequest(content=b"x", do_not_proxy=True),
        ],
        "append stream: unexpected DoNotProxy",
    ),
    (
        [broker_pb2.AppendRequest(journal=JOURNAL), append_content(b"x"), b"\xff\xff"],
        "append stream: ",
    ),
    ([b"\xff\xff"], ""),
    (
        [broker_pb2.AppendRequest(journal=JOURNAL), append_content(b"x")],
        "append stream: unexpected EOF",
    ),
    ([broker_pb2.AppendRequest(journal=JOURNAL)], "append stream: unexpected EOF"),
    ([], "unexpected EOF"),
    (
        [
            broker_pb2.AppendRequest(
                journal=JOURNAL, union_registers=LabelSet.of(("kk", "v")).to_pb()
            ),
            COMMIT,
        ],
        "register modification requires non-empty Append",
    ),
]


@pytest.mark.parametrize(("messages", "text"), BAD_STREAMS)
async def test_bad_streams(ready: FixedCluster, messages: list[Any], text: str) -> None:
    one = Append(ready["b"])
    for message in messages:
        if message is not None:
            await one.call.write(message)
    await one.call.done_writing()
    error = await one.failed()
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert text in (error.details() or "")
    # Case: nothing of it is anywhere, and the next append is as good as any.
    assert (await append(ready["b"], b"after")).commit.begin == 0
    for name in "abc":
        assert written(ready, name) == b"after"


async def test_bad_header(ready: FixedCluster) -> None:
    """A broker refuses a call that was meant for another one."""
    resolved = Header.from_pb((await append(ready["b"], b"")).header)
    header = replace(resolved, process_id=ProcessId("zone", "other"))
    one = await Append(ready["b"]).open(header=header.to_pb())
    await one.call.done_writing()
    assert "(zone#other vs zone#broker-b)" in ((await one.failed()).details() or "")


async def test_caller_that_leaves_is_rolled_back_on_all_replicas(ready: FixedCluster) -> None:
    """In the middle of its content, when replicas hold a part of it."""
    pipeline = await pipeline_of(ready["b"])
    one = await (await Append(ready["b"]).open()).send(b"never", b"ever")
    await until(lambda: pipeline.delta == len(b"neverever"))
    one.call.cancel()
    response = await append(ready["b"], b"x")
    assert response.commit.begin == 0
    # Case: the pipeline has survived it.
    assert ready.etcd.transactions == [True]
    for name in "abc":
        assert written(ready, name) == b"x"


async def test_caller_that_leaves_while_it_waits_for_its_turn(ready: FixedCluster) -> None:
    replica = ready["b"].replica(JOURNAL)
    pipeline = await replica.pipeline.take()
    waiting = await Append(ready["b"]).open()
    await until(lambda: replica.pipeline._waiters)
    waiting.call.cancel()
    await until(lambda: not replica.pipeline._waiters)
    replica.pipeline.give(pipeline)
    assert (await append(ready["b"], b"x")).status == Status.OK


async def test_appends_of_one_journal_do_not_mix(ready: FixedCluster) -> None:
    """Many at once, through all brokers: each is contiguous, and every replica has the same bytes."""
    contents = [bytes([65 + i]) * (i + 1) * 100 for i in range(20)]

    async def one(index: int) -> Fragment:
        call = await Append(ready["abc"[index % 3]], via=ready["c"]).open()
        half = len(contents[index]) // 2
        await call.send(contents[index][:half], contents[index][half:])
        return Fragment.from_pb((await call.commit()).commit)

    commits = await asyncio.gather(*(one(index) for index in range(20)))
    everything = written(ready, "a")
    assert len(everything) == sum(map(len, contents))
    for content, commit in zip(contents, commits, strict=True):
        assert everything[commit.begin : commit.end] == content
    assert written(ready, "b") == written(ready, "c") == everything


async def test_append_streams_while_an_earlier_one_waits_for_its_acknowledgement(
    ready: FixedCluster,
) -> None:
    """A replica that is slow to answer costs latency, not throughput.

    Readers at the primary get nothing of these appends before they are acknowledged. In a soak a primary was
    killed just then: its reader went on in the middle of what the next primary had at these offsets.
    """
    replica = ready["b"].replica(JOURNAL)
    await append(ready["b"], b"first")
    await append(
        ready["b"], b""
    )  # The first fragment is complete behind it: that waits for answers.
    pipeline = await replica.pipeline.take()
    assert pipeline is not None
    hold = pipeline.take_turn()  # As of an append before, which no peer has answered yet.
    replica.pipeline.give(pipeline)
    calls = []
    for index in range(3):
        one = await (await Append(ready["b"]).open()).send(b"x%d" % index)
        calls.append(asyncio.gather(one.commit()))
        await until(lambda end=5 + 2 * (index + 1): replica.index.end_offset == end)  # type: ignore[misc]
    assert not any(call.done() for call in calls)
    hidden = await replica.index.query(5)
    assert (hidden.status, hidden.write_head) == (Status.OFFSET_NOT_YET_AVAILABLE, 5)
    assert (await replica.index.query(AT_WRITE_HEAD)).offset == 5
    assert [one.end for one in replica.index.fragments()] == [5]
    # Case: a pipeline that is built again shows nothing, either.
    replica.lead(11, EMPTY_LABELS, replica._upload_gate.tenure)
    assert (await replica.index.query(5)).status is Status.OFFSET_NOT_YET_AVAILABLE
    follower = ready["a"].replica(JOURNAL).index
    await until(lambda: follower.end_offset == 11)
    assert (await follower.query(5)).status is Status.OK
    async with hold:
        pass
    begins = [(await call)[0].commit.begin for call in calls]
    assert begins == [5, 7, 9]
    shown = await replica.index.query(5)
    assert (shown.fragment is not None and shown.fragment.end, shown.write_head) == (11, 11)


async def test_no_fragment_is_completed_while_a_replica_may_lack_its_end(
    cluster: FixedCluster,
) -> None:
    """If its append fails, a new pipeline sends peers the open fragment, and none that is complete.

    Simulated seed 721234: disks of both peers were full, and then the primary was lost. The journal went
    on behind fragments that only the primary had held.
    """
    cluster.create(journal_spec(JOURNAL, replication=3, length=1024), "b", "a", "c")
    await in_step(cluster)
    await append(cluster["b"], b"first")
    await append(cluster["b"], b"")  # The first fragment is complete behind it, in any case.
    await append(cluster["b"], bytes(1025))
    pipeline = await pipeline_of(cluster["b"])
    hold = pipeline.take_turn()  # As of an append before, which no peer has answered yet.
    last = await (await Append(cluster["b"]).open()).send(b"last")
    answered = asyncio.gather(last.commit())
    for _ in range(300):
        await SystemClock().sleep(0)
    assert (pipeline.spool.fragment.begin, pipeline.spool.fragment.end) == (5, 1030)
    async with hold:
        pass
    assert (await answered)[0].commit.begin == 1030
    assert pipeline.spool.fragment.begin == 1030


async def test_lost_acknowledgement_fails_the_append_and_those_behind_it(tmp_path: Path) -> None:
    """A replica stops answering: the outcome is uncertain, the pipeline is given up."""
    async with await FixedCluster.start(2, tmp_path, peer_timeout_s=0.3) as cluster:
        spec = journal_spec(JOURNAL, replication=2)
        cluster.create(spec, "a", "b")
        await in_step(cluster)
        await append(cluster["a"], b"before")
        peer = (await pipeline_of(cluster["a"]))._peers[0]

        class Lost(deque[Any]):
            def append(self, item: Any) -> None:
                """Drop the answers of a peer."""

        peer._answers.arrived = Lost()
        first = await (await Append(cluster["a"]).open()).send(b"one")
        second = await (await Append(cluster["a"]).open()).send(b"two")
        outcomes = await asyncio.gather(first.commit(), second.commit(), return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, grpc.aio.AioRpcError)
            # Not UNAVAILABLE, which clients would blindly repeat.
            assert outcome.code() is grpc.StatusCode.UNKNOWN
            assert "timeout_s=0.3" in (outcome.details() or "")
        # Case: the next append builds a new pipeline. No offset that any replica committed is reused.
        response = await append(cluster["a"], b"after")
        assert response.commit.begin == len(b"beforeonetwo")
        assert written(cluster, "b").endswith(b"after")


@pytest.mark.timeout(30)
async def test_an_append_waits_for_a_silent_replica_until_its_lease_ends(tmp_path: Path) -> None:
    """Its acknowledgement is never taken for granted, and not waited for after that."""
    async with await FixedCluster.start(3, tmp_path, peer_timeout_s=300.0) as cluster:
        cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
        await in_step(cluster)
        await append(cluster["a"], b"before")
        peer = (await pipeline_of(cluster["a"]))._peers[0]

        class Lost(deque[Any]):
            def append(self, item: Any) -> None:
                """Drop the answers of a peer."""

        peer._answers.arrived = Lost()
        peer.close_send = lambda: None  # type: ignore[method-assign]  # Frozen, it would not hear.
        waiting = await (await Append(cluster["a"]).open()).send(b"one")
        await waiting.call.write(COMMIT)
        await waiting.call.done_writing()
        index = cluster["a"].replica(JOURNAL).index
        await until(lambda: index.end_offset == len(b"beforeone"))
        assert not waiting.call.done()
        cluster["b"].lagging = []  # Frozen, it knows of nothing.
        cluster.expire("b")
        assert (await waiting.failed()).code() is grpc.StatusCode.UNKNOWN
        cluster.assign(JOURNAL, "a", "c")
        await in_step(cluster)
        response = await append(cluster["a"], b"after")
        assert response.commit.begin == len(b"beforeone")


@pytest.mark.timeout(30)
async def test_a_synchronization_goes_on_without_a_silent_replica_whose_lease_ended(
    tmp_path: Path,
) -> None:
    async with await FixedCluster.start(3, tmp_path, peer_timeout_s=300.0) as cluster:
        cluster["b"].lagging = []  # It waits for the revision of the proposal, and does not answer.
        cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
        a = cluster["a"]
        call = AppendCall(AppendTerms(JOURNAL), Claims.of_journal(Capability.APPEND, JOURNAL))
        driver = AppendDriver(a.context, call, NoContent())
        running = a.scope.spawn(driver.run(), name="before the first pulse")
        await until(lambda: driver._fsm.state is State.RECV_PIPELINE_SYNC)
        cluster.expire("b")
        cluster.assign(JOURNAL, "a", "c")
        assert (await running).ending is Ending.COMMITTED


async def test_broken_replica_is_found_out_before_content_is_taken(ready: FixedCluster) -> None:
    """The stream to it has ended between appends: the next append just builds another."""
    await append(ready["b"], b"x")
    peer = (await pipeline_of(ready["b"]))._peers[0]
    peer._call.cancel()
    await peer.wait_end()
    response = await append(ready["b"], b"y")
    assert response.status == Status.OK.value
    assert written(ready, "c") == b"xy"


async def test_new_primary_continues_where_the_old_one_was(ready: FixedCluster) -> None:
    """Appends go to any broker; offsets never repeat; registers are kept."""
    registers = LabelSet.of(("author", "me"))
    await append(ready["b"], b"one ", union_registers=registers.to_pb())
    for primary, others in (("a", "bc"), ("c", "ab"), ("c", "a"), ("b", "ac")):
        spec = replace(SPEC, replication=1 + len(others))
        ready.put_spec(spec)
        ready.assign(JOURNAL, primary, *others)
        response = await append(ready["a"], b"x")
        assert response.status == Status.OK.value
        assert Header.from_pb(response.header).process_id == ready[primary].id
        assert LabelSet.from_pb(response.registers) == registers
    assert response.commit.end == 8


async def test_append_in_progress_ends_under_its_route(ready: FixedCluster) -> None:
    """The journal is assigned again in the middle of content: it commits, then the pipeline changes."""
    pipeline = await pipeline_of(ready["b"])
    one = await (await Append(ready["b"]).open()).send(b"first ")
    await until(lambda: pipeline.delta)
    ready.assign(JOURNAL, "a", "b", "c")
    queued = asyncio.gather(append(ready["c"], b"second"))
    await one.send(b"still ")
    response = await one.commit()
    assert (response.commit.begin, response.commit.end) == (0, 12)
    after = (await queued)[0]
    assert after.commit.begin == 12
    assert Header.from_pb(after.header).process_id == ready["a"].id


async def test_queued_append_follows_its_journal(ready: FixedCluster) -> None:
    """It waits at a broker which loses the journal meanwhile, and is proxied to the new one."""
    pipeline = await pipeline_of(ready["b"])
    one = await (await Append(ready["b"]).open()).send(b"first")
    await until(lambda: pipeline.delta)
    queued = await (await Append(ready["b"]).open()).send(b"second")
    await until(lambda: ready["b"].replica(JOURNAL).pipeline._waiters)
    ready.put_spec(replace(SPEC, replication=2))
    ready.assign(JOURNAL, "a", "c")
    assert (await one.commit()).commit.end == 5
    response = await queued.commit()
    assert response.commit.begin == 5
    assert Header.from_pb(response.header).process_id == ready["a"].id


async def test_slow_client_is_aborted(tmp_path: Path) -> None:
    async with await FixedCluster.start(1, tmp_path, min_append_rate=1 << 40) as cluster:
        # So much idle time is used up by a few milliseconds at most a thousand times.
        cluster.create(journal_spec(JOURNAL), "a")
        one = await (await Append(cluster["a"]).open()).send(b"x")
        error = await one.failed()
        assert error.code() is grpc.StatusCode.UNKNOWN
        assert "didn't sustain the minimum append data rate" in (error.details() or "")
    async with await FixedCluster.start(1, tmp_path, min_append_rate=0) as cluster:
        cluster.create(journal_spec(JOURNAL), "a")
        assert (await append(cluster["a"], b"x")).status == Status.OK


async def test_fast_client_is_held_back(tmp_path: Path, clock: ManualClock) -> None:
    """The journal's rate, or that of the broker, whichever is lower."""
    async with await FixedCluster.start(
        1, tmp_path, clock=clock, max_append_rate=1 << 20
    ) as cluster:
        cluster.create(journal_spec(JOURNAL, max_append_rate=100_000), "a")
        one = await Append(cluster["a"]).open()
        async with TaskScope("client") as scope:
            # No time passes for the broker but when it holds something back, which it does in short steps.
            await one.send(bytes(100_000), bytes(2_000), bytes(1))
            committing = scope.spawn(one.commit(), name="commit")
            while not committing.done():
                if clock.next_s <= 0.05:
                    clock.advance(0.05)
                await SystemClock().sleep(0.001)
            response = committing.result()
        assert response.status == Status.OK.value
        assert response.total_chunks == 4
        assert response.delayed_chunks >= 1


async def test_change_of_the_route_ends_throttling(tmp_path: Path) -> None:
    """A minute of debt is forgiven, so that the pipeline comes free for the new route."""
    async with await FixedCluster.start(2, tmp_path) as cluster:
        cluster.create(journal_spec(JOURNAL, max_append_rate=1_000), "a")
        one = await (await Append(cluster["a"]).open()).send(bytes(61_000), b"x")
        await until(lambda: cluster["a"].replica(JOURNAL).rate.credit < 0)
        cluster.put_spec(journal_spec(JOURNAL, max_append_rate=1_000, replication=2))
        cluster.assign(JOURNAL, "a", "b")
        assert (await one.commit()).commit.end == 61_001


async def test_expired_claims_end_an_append(ready: FixedCluster) -> None:
    b = ready["b"]

    class Expiring:
        def verify(self, authorization: str | None, require: int) -> Claims:
            return Claims(require, expires_at=b.context.clock.now() + 0.05)

    object.__setattr__(b.context, "verifier", Expiring())
    one = await (await Append(b).open()).send(b"never")
    error = await one.failed()
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "authorization expired" in (error.details() or "")
    assert b.replica(JOURNAL).index.end_offset == 0


async def test_claims_to_another_journal_do_not_help(ready: FixedCluster) -> None:
    b = ready["b"]

    class Other:
        def verify(self, authorization: str | None, require: int) -> Claims:
            return Claims.of_journal(require, "b/journal")

    object.__setattr__(b.context, "verifier", Other())
    assert (await append(b, b"x")).status == Status.JOURNAL_NOT_FOUND


@pytest.mark.parametrize("steps", range(0, 60, 5))
async def test_append_that_is_cut_short_pins_nothing(ready: FixedCluster, steps: int) -> None:
    """Cancelled after any number of turns of the loop, as when the broker is torn down: the append that comes
    next gets the pipeline, and no replica keeps what was not committed."""
    b = ready["b"]
    call = AppendCall(AppendTerms(JOURNAL), Claims.of_journal(Capability.APPEND, JOURNAL))
    gate = asyncio.Event()

    chunks = [b"ever", b"never"]

    class Content:
        async def next(self) -> bytes | None:
            if not chunks:
                await gate.wait()
            return chunks.pop()

    driver = AppendDriver(b.context, call, Content())
    running = b.scope.spawn(driver.run(), name="cut short")
    for _ in range(steps):
        await SystemClock().sleep(0)
    running.cancel()
    await asyncio.wait({running})
    response = await append(b, b"x")
    assert response.commit.begin == 0
    for name in "abc":
        assert written(ready, name) == b"x"


@pytest.mark.parametrize("steps", range(0, 40, 4))
async def test_append_that_is_interrupted_ends_in_good_order(
    cluster: FixedCluster, steps: int
) -> None:
    """After any number of turns of the loop, from the first resolution of a fresh journal on."""
    cluster.create(SPEC, "b", "a", "c")
    b = cluster["b"]
    call = AppendCall(AppendTerms(JOURNAL), Claims.of_journal(Capability.APPEND, JOURNAL))
    driver = AppendDriver(b.context, call, NoContent())
    running = b.scope.spawn(driver.run(), name="interrupted")
    for _ in range(steps):
        await SystemClock().sleep(0)
    driver.interrupt(Broken("gone"))
    outcome = await running
    assert outcome.ending in (Ending.FAILED, Ending.COMMITTED)
    if outcome.ending is Ending.FAILED:
        assert str(outcome.error) == "gone"
    assert (await append(b, b"x")).status == Status.OK


@pytest.fixture
def full(ready: FixedCluster) -> Callable[[bool], None]:
    """Let the spool of ``c`` take nothing, as on a full disk; or let it take bytes again."""
    context = ready["c"].context
    assert isinstance(context.disk, LocalDisk)
    disk, directory = context.disk, context.disk.directory

    def change(is_full: bool) -> None:
        disk.directory = directory / "gone" if is_full else directory
        context.spool_memory.failing = is_full

    return change


@pytest.mark.parametrize("first", [b"", b"first "])
@pytest.mark.parametrize("primary", ["b", "a"])
async def test_bytes_that_were_not_acknowledged_get_to_replicas_that_lack_them(
    ready: FixedCluster, first: bytes, primary: str, full: Callable[[bool], None]
) -> None:
    """Of a replica whose disk was full: it does not go on behind them. ``a`` is a primary that has only
    followed, and cannot know which replica lacks what."""
    await append(ready["b"], b"a fragment of its own ")
    if first:
        await append(ready["b"], first)
    full(True)
    one = await (await Append(ready["b"]).open()).send(b"not acknowledged ")
    with pytest.raises(grpc.aio.AioRpcError):
        await one.commit()
    full(False)

    ready.assign(JOURNAL, primary, *{"a", "b", "c"} - {primary})
    response = await append(ready[primary], b"next")
    assert response.status == Status.OK.value
    content = b"a fragment of its own " + first + b"not acknowledged next"
    assert response.commit.end == len(content)
    # Replicas that stayed need not wait for a listing of the store.
    assert [written(ready, name) for name in (primary, "c")] == [content] * 2


async def test_a_replica_with_other_bytes_goes_on_behind_them(
    ready: FixedCluster, full: Callable[[bool], None]
) -> None:
    await append(ready["b"], b"a fragment of its own ")
    await append(ready["b"], b"one ")
    full(True)
    one = await (await Append(ready["b"]).open()).send(b"not acknowledged ")
    with pytest.raises(grpc.aio.AioRpcError):
        await one.commit()
    full(False)
    spool = await ready["c"].replica(JOURNAL).spool.take()
    spool._sum = hashlib.sha1(b"other bytes", usedforsecurity=False)
    spool._pending_sum = spool._sum
    ready["c"].replica(JOURNAL).spool.give(spool)

    with call_refused(grpc.StatusCode.UNKNOWN, "journal=a/journal", "peer="):
        await append(ready["b"], b"next")
    response = await append(ready["b"], b"next")
    assert response.commit.begin == len(b"a fragment of its own one not acknowledged ")


async def test_a_primary_without_a_lease_shows_its_readers_nothing_new(ready: FixedCluster) -> None:
    """One that was paused beyond its lease, and finds a whole append when it wakes up."""
    ready["b"].replica(
        JOURNAL
    ).stop_daemons()  # A pulse would meet the end of the lease as well, and break the pipeline.
    await append(ready["b"], b"before")
    pipeline = await pipeline_of(ready["b"])
    one = Append(ready["b"])
    one.call = StreamCall(one.call)  # It keeps the reason of a refusal before all was sent.
    await (await one.open()).send(b"behind")
    await until(lambda: pipeline.delta)
    ready["b"].lease.remaining_s = 0.0
    with call_refused(grpc.StatusCode.UNKNOWN, "late_s="):
        await one.commit()
    assert [written(ready, name) for name in "abc"] == [b"before"] * 3


@pytest.mark.parametrize("via", ["a", "b"])
async def test_a_primary_without_a_lease_refuses_no_append_for_what_it_has(
    ready: FixedCluster, via: str
) -> None:
    """One that was paused beyond its lease: others may have changed the registers, and appended."""
    ready["b"].replica(JOURNAL).stop_daemons()
    await append(ready["b"], b"before", union_registers=LabelSet.of(("lock", "mine")).to_pb())
    other = LabelSelector.parse("lock = other").to_pb()
    unlike = {"check_registers": other}, {"offset": 7}
    for terms in unlike:
        response = await append(ready[via], b"x", **terms)
        assert response.status in (Status.REGISTER_MISMATCH.value, Status.WRONG_APPEND_OFFSET.value)
    ready["b"].lease.remaining_s = 0.0
    for terms in unlike:
        with call_refused(grpc.StatusCode.UNAVAILABLE, "lease may have ended"):
            await append(ready[via], b"x", **terms)


SESSION = "5" * 32


async def refused(broker: FixedBroker, append: SessionAppend) -> grpc.aio.AioRpcError:
    """Return the error of a whole append of a session."""
    one = Append(broker, session=append)
    one.call = StreamCall(one.call)  # It keeps the reason of a refusal before all was sent.
    await (await one.open()).send(b"refused")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await one.commit()
    return caught.value


async def introduced(broker: FixedBroker) -> str:
    """Return the ledger that a broker names to a session which is not known at the primary."""
    error = await refused(broker, SessionAppend(SESSION, 1))
    assert error.code() is grpc.StatusCode.ABORTED
    ledger = ledger_of(error.trailing_metadata())
    assert ledger, error
    return ledger


async def of_session(
    broker: FixedBroker, sequence: int, ledger: str, content: bytes
) -> broker_pb2.AppendResponse:
    one = await Append(broker, session=SessionAppend(SESSION, sequence, ledger)).open()
    return await (await one.send(content)).commit()


@pytest.mark.parametrize("name", ["a", "b"])
async def test_late_copies_of_a_session_are_refused(ready: FixedCluster, name: str) -> None:
    """At the primary, and by way of a broker that proxies to it."""
    broker = ready[name]
    ledger = await introduced(broker)
    first = await of_session(broker, 1, ledger, b"first")
    assert (first.commit.begin, first.commit.end) == (0, 5)
    again = await of_session(broker, 1, ledger, b"first")
    assert again.commit == first.commit, "answered as before"
    await of_session(broker, 2, ledger, b"second")

    error = await refused(broker, SessionAppend(SESSION, 1, ledger))
    assert "sequence=1, last_sequence=2" in str(error.details())
    assert not ledger_of(error.trailing_metadata())
    third = Fragment.from_pb((await append(broker, b"third")).commit)
    assert (third.begin, third.end) == (11, 16)


async def test_a_copy_that_comes_while_the_first_waits_for_its_acknowledgement_is_not_appended(
    ready: FixedCluster,
) -> None:
    """The caller has lost the first call, and repeats it. Later it gets the answer of the first."""
    broker, ledger = ready["b"], await introduced(ready["b"])
    await append(broker, b"before ")
    await append(broker, b"")  # The first fragment is complete behind it: that waits for answers.
    hold = (await pipeline_of(broker)).take_turn()  # As of one before, which no peer has answered.
    first = asyncio.gather(of_session(broker, 1, ledger, b"once"))
    await until(lambda: written(ready, "a") == b"before once")
    error = await refused(broker, SessionAppend(SESSION, 1, ledger))
    assert error.code() is grpc.StatusCode.UNAVAILABLE, error
    assert "waits for its acknowledgements" in str(error.details())
    async with hold:
        pass
    committed = (await first)[0].commit
    assert (await of_session(broker, 1, ledger, b"once")).commit == committed
    assert written(ready, "a") == b"before once"


async def test_a_new_primary_refuses_late_copies_of_what_another_has_appended(
    ready: FixedCluster,
) -> None:
    ledger = await introduced(ready["b"])
    await of_session(ready["b"], 1, ledger, b"first")
    await of_session(ready["b"], 2, ledger, b"second")
    ready.assign(JOURNAL, "a", "b", "c")
    await append(ready["a"], b"")
    error = await refused(ready["a"], SessionAppend(SESSION, 1, ledger))
    named = ledger_of(error.trailing_metadata())
    assert named not in ("", ledger)
    # The session itself goes on.
    response = await of_session(ready["a"], 3, named, b"third")
    assert (response.commit.begin, response.commit.end) == (11, 16)


async def test_metadata_of_a_session_that_is_not_understood_is_refused(ready: FixedCluster) -> None:
    error = await refused(ready["b"], SessionAppend("not hex", 1))
    assert "gazette-append-session" in str(error.details())


@pytest.mark.parametrize("sent", [1, 2])
async def test_a_caller_that_goes_is_no_error_and_its_append_is_rolled_back(
    ready: FixedCluster, sent: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a member that was killed in the middle of an append: wherever its messages ended."""
    messages = [
        broker_pb2.AppendRequest(journal=JOURNAL).SerializeToString(),
        append_content(b"lost"),
    ]
    target = ready["b"].endpoint.removeprefix("http://")
    async with grpc.aio.insecure_channel(target) as channel:
        method: Any = channel.stream_unary("/protocol.Journal/Append", None, None)
        call = method()
        for message in messages[:sent]:
            await call.write(message)
    # The channel is closed in the middle of its call.
    commit = Fragment.from_pb((await append(ready["b"], b"next")).commit)
    assert (commit.begin, commit.end) == (0, 4)
    assert not [one for one in caplog.records if one.exc_info]
