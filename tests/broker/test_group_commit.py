"""Small appends that wait for their journal are committed along with the one that leads them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
import pytest

from gazette.broker.api.whole_append import SmallAppends
from gazette.broker.append.events import AppendTerms, Outcome
from gazette.broker.append.line import Line, SmallAppend
from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Broken, Bug
from gazette.fragment.metrics import COMMITS
from gazette.http2 import frames as fr
from gazette.protocol.append_session import SessionAppend, ledger_of
from gazette.protocol.fragment import Fragment
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.broker.test_append_api import JOURNAL, Append, append, in_step, until, written
from tests.broker.test_whole_appends import Wire
from tests.facts import call_refused
from tests.support.fixed_cluster import FixedBroker, FixedCluster
from tests.support.metrics import value_of
from tests.support.replicas import replica_of
from tools.bench.load import APPEND

SESSION = "0123456789abcdef" * 2


# --- The line alone


class Small:
    """A small append of a line, with what has become of it."""

    def __init__(self, line: Line, content: bytes = b"x", *, ends_at_once: bool = False) -> None:
        self.line = line
        self.led = 0
        self.outcome: Outcome | None = None
        self._ends_at_once = ends_at_once
        self.small = SmallAppend(AppendTerms(JOURNAL), content, None, 0.0, self._lead, self._settle)

    def _lead(self) -> None:
        self.led += 1
        if self._ends_at_once:
            self.line.leave(self.small)

    def _settle(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def join(self) -> Small:
        self.line.join(self.small)
        return self


def test_one_leads_until_it_has_left() -> None:
    line = Line()
    one, two, three = Small(line).join(), Small(line).join(), Small(line).join()
    assert (one.led, two.led, three.led) == (1, 0, 0)
    assert line.waiting == 3
    line.leave(two.small)  # It gives up.
    line.leave(one.small)
    assert (one.led, two.led, three.led) == (1, 0, 1)
    line.leave(three.small)
    assert line.waiting == 0


def test_many_that_end_at_once_lead_one_after_the_other() -> None:
    """Each is refused as soon as it leads: no deeper stack for that."""
    line = Line()
    many = [Small(line, ends_at_once=True) for _ in range(5_000)]
    line.join(*(one.small for one in many))
    assert [one.led for one in many] == [1] * 5_000
    assert line.waiting == 0


def test_the_leader_takes_those_behind_it_in_order_and_within_bounds() -> None:
    line = Line()
    leader = Small(line).join()
    others = [Small(line, bytes(10)).join() for _ in range(5)]
    taken = line.take_along(35, lambda _: True)
    assert taken == [one.small for one in others[:3]]
    assert not any(line.holds(one) for one in taken)
    assert line.holds(others[3].small)
    line.leave(taken[0])  # Its end depends on the leader alone.
    # What is not permitted keeps its place, and those behind it do not overtake.
    assert line.take_along(100, lambda one: one is not others[3].small) == []
    line.leave(leader.small)
    assert others[3].led == 1


# --- The appends of a broker


BROKERS = 2


@pytest.fixture
async def ready(tmp_path: Path) -> AsyncIterator[FixedCluster]:
    async with await FixedCluster.start(BROKERS, tmp_path) as cluster:
        cluster.create(journal_spec(JOURNAL, replication=2), "a", "b")
        await in_step(cluster)
        take_whole(cluster["a"])
        yield cluster


def take_whole(broker: FixedBroker) -> None:
    broker.server.take_whole_calls(APPEND, SmallAppends(broker.context).take_whole)


class Call:
    """A small append that was sent in one piece."""

    def __init__(self, wire: Wire, stream: int) -> None:
        self._wire, self._stream = wire, stream

    def __await__(self) -> Generator[Any, Any, broker_pb2.AppendResponse]:
        return self._wire.answer(self._stream).__await__()

    async def failed(self, code: grpc.StatusCode, text: str) -> None:
        """Require that the call ends with a code, and a text that has ``text``."""
        got, details = await self._wire.status(self._stream)
        assert got is code
        assert text in details

    def cancel(self) -> None:
        self._wire.writer.write(fr.rst_stream(self._stream, fr.FaultCode.CANCEL))


class Waiting:
    """Small appends that wait, in order, while the pipeline of their journal is held."""

    def __init__(self, cluster: FixedCluster) -> None:
        self.cluster = cluster
        self.replica = cluster["a"].replica(JOURNAL)
        self.calls: list[Call] = []
        self.wire: Any = None
        self._held: Any = None

    async def __aenter__(self) -> Self:
        self.wire = await Wire.connect(self.cluster["a"])
        self._held = await self.replica.pipeline.take()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go()
        self.wire.writer.close()

    async def add(
        self, content: bytes, session: SessionAppend | None = None, **fields: Any
    ) -> Call:
        """Let one more append wait behind the others."""
        count = self.replica.line.waiting
        opening = broker_pb2.AppendRequest(journal=JOURNAL, **fields)
        (stream,) = self.wire.send((opening, content), session=session)
        await until(lambda: self.replica.line.waiting > count)
        self.calls.append(Call(self.wire, stream))
        return self.calls[-1]

    def go(self) -> None:
        """Let go of the pipeline."""
        if self._held is not None:
            self.replica.pipeline.give(self._held)
            self._held = None


def spans(responses: Sequence[Any]) -> list[tuple[int, int]]:
    return [(one.commit.begin, one.commit.end) for one in responses]


async def test_those_that_wait_are_one_commit_with_a_span_each(ready: FixedCluster) -> None:
    assert (await append(ready["a"], b"before ")).commit.end == 7
    before = value_of(COMMITS)
    contents = [b"one ", b"three ", b"five ", b"seven"]
    async with Waiting(ready) as waiting:
        for content in contents:
            await waiting.add(content)
        waiting.go()
        responses = [await call for call in waiting.calls]
    assert [one.status for one in responses] == [Status.OK.value] * 4
    assert spans(responses) == [(7, 11), (11, 17), (17, 22), (22, 27)]
    for content, response in zip(contents, responses, strict=True):
        assert Fragment.from_pb(response.commit).sum == hashlib.sha1(content).digest()
        assert response.HasField("registers")
    for name in "ab":
        assert written(ready, name) == b"before one three five seven"
    assert value_of(COMMITS) == before + BROKERS  # Replicas were sent one proposal.


async def test_no_more_than_a_group_may_have_goes_along(
    ready: FixedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gazette.broker.commit.steady.GROUP_BYTES", 4)
    await append(ready["a"], b"before ")
    before = value_of(COMMITS)
    async with Waiting(ready) as waiting:
        for content in (b"aa", b"bb", b"cc"):
            await waiting.add(content)
        waiting.go()
        responses = [await call for call in waiting.calls]
    assert spans(responses) == [(7, 9), (9, 11), (11, 13)]
    assert written(ready, "b") == b"before aabbcc"
    assert value_of(COMMITS) == before + 2 * BROKERS


async def test_registers_of_the_leader_decide_about_the_others(ready: FixedCluster) -> None:
    """The leader changes a register: a check for the new value goes along, one for the old value not."""
    new, old = LabelSelector.of(author="new"), LabelSelector.of(author="old")
    await append(ready["a"], b".", union_registers=LabelSet.of(("author", "old")).to_pb())
    async with Waiting(ready) as waiting:
        await waiting.add(
            b"L",
            union_registers=LabelSet.of(("author", "new")).to_pb(),
            subtract_registers=LabelSet.of(("author", "old")).to_pb(),
        )
        await waiting.add(b"n", check_registers=new.to_pb())
        await waiting.add(b"o", check_registers=old.to_pb())
        await waiting.add(b"p")
        waiting.go()
        first, second, third, fourth = [await call for call in waiting.calls]
    assert spans([first, second, fourth]) == [(1, 2), (2, 3), (3, 4)]
    assert LabelSet.from_pb(second.registers) == LabelSet.of(("author", "new"))
    assert third.status == Status.REGISTER_MISMATCH.value
    assert written(ready, "b") == b".Lnp"


async def test_an_append_with_an_offset_or_with_registers_leads_itself(ready: FixedCluster) -> None:
    async with Waiting(ready) as waiting:
        await waiting.add(b"one")
        await waiting.add(b"two", offset=3)
        await waiting.add(b"three", offset=99)
        await waiting.add(b"four", union_registers=LabelSet.of(("key", "v")).to_pb())
        waiting.go()
        responses = [await call for call in waiting.calls]
    assert [one.status for one in responses] == [
        Status.OK.value,
        Status.OK.value,
        Status.WRONG_APPEND_OFFSET.value,
        Status.OK.value,
    ]
    assert LabelSet.from_pb(responses[0].registers) == LabelSet.of()
    assert LabelSet.from_pb(responses[3].registers) == LabelSet.of(("key", "v"))
    assert written(ready, "b") == b"onetwofour"


async def test_sessions_hold_for_appends_that_go_along(ready: FixedCluster) -> None:
    """A repeated append gets its former answer, and a late copy is refused, behind any leader."""
    with call_refused(grpc.StatusCode.ABORTED, "ledger") as refused:
        one = Append(ready["a"], session=SessionAppend(SESSION, 1))
        await (await (await one.open()).send(b"1")).commit()
    ledger = ledger_of(refused.value.trailing_metadata())

    def session(sequence: int) -> SessionAppend:
        return SessionAppend(SESSION, sequence, ledger)

    async with Waiting(ready) as waiting:
        await waiting.add(b"L")
        await waiting.add(b"1", session(1))
        waiting.go()
        first = [await call for call in waiting.calls]
    assert spans(first) == [(0, 1), (1, 2)]
    async with Waiting(ready) as waiting:
        await waiting.add(b"M")
        await waiting.add(b"1", session(1))
        await waiting.add(b"2", session(2))
        await waiting.add(b"1", session(1))
        waiting.go()
        _, repeated, second = [await call for call in waiting.calls[:3]]
        await waiting.calls[3].failed(grpc.StatusCode.UNKNOWN, "late copy")
    assert spans([repeated, second]) == [(1, 2), (3, 4)]
    assert written(ready, "b") == b"L1M2"


async def test_an_append_that_is_repeated_while_it_waits_is_committed_once(
    ready: FixedCluster,
) -> None:
    """Its caller has lost the first call, and the broker has not noticed."""
    with call_refused(grpc.StatusCode.ABORTED, "ledger") as refused:
        one = Append(ready["a"], session=SessionAppend(SESSION, 1))
        await (await (await one.open()).send(b"1")).commit()
    session = SessionAppend(SESSION, 1, ledger_of(refused.value.trailing_metadata()))
    await append(ready["a"], b"before ")
    async with Waiting(ready) as waiting:
        await waiting.add(b"L")
        for _ in range(2):
            await waiting.add(b"1", session)
        await waiting.add(b"2")
        waiting.go()
        answers = [await call for call in waiting.calls]
    assert spans(answers) == [(7, 8), (8, 9), (8, 9), (9, 10)]
    assert written(ready, "b") == b"before L12"


async def test_a_leader_that_is_refused_takes_no_other_along(ready: FixedCluster) -> None:
    async with Waiting(ready) as waiting:
        await waiting.add(b"never", offset=99)
        await waiting.add(b"one")
        await waiting.add(b"two")
        waiting.go()
        responses = [await call for call in waiting.calls]
    assert responses[0].status == Status.WRONG_APPEND_OFFSET.value
    assert spans(responses[1:]) == [(0, 3), (3, 6)]
    assert written(ready, "b") == b"onetwo"


async def test_a_caller_that_leaves_the_line_leaves_nothing(ready: FixedCluster) -> None:
    async with Waiting(ready) as waiting:
        for content in (b"one", b"gone", b"two"):
            await waiting.add(content)
        waiting.calls[1].cancel()
        await until(lambda: waiting.replica.line.waiting == 2)
        waiting.go()
        responses = [await waiting.calls[0], await waiting.calls[2]]
    assert spans(responses) == [(0, 3), (3, 6)]
    assert written(ready, "b") == b"onetwo"


async def test_a_leader_whose_caller_leaves_before_it_sends_lets_the_next_one_lead(
    ready: FixedCluster,
) -> None:
    async with Waiting(ready) as waiting:
        for content in (b"gone", b"one", b"two"):
            await waiting.add(content)
        waiting.calls[0].cancel()
        await until(lambda: waiting.replica.line.waiting == 2)
        waiting.go()
        responses = [await call for call in waiting.calls[1:]]
    assert spans(responses) == [(0, 3), (3, 6)]
    assert written(ready, "b") == b"onetwo"


async def test_callers_that_leave_while_replicas_answer_change_nothing(ready: FixedCluster) -> None:
    """The content of all was proposed: it is in the journal, and the others are answered."""
    replica = ready["b"].replica(JOURNAL)
    entered = asyncio.Event()
    held = ready["a"].replica(JOURNAL)
    all_acknowledged = held.all_acknowledged

    await append(ready["a"], b"before ")
    async with Waiting(ready) as waiting:
        for content in (b"leads ", b"leaves ", b"stays"):
            await waiting.add(content)

        def on_acknowledged(end: int, registers: LabelSet) -> None:
            entered.set()
            all_acknowledged(end, registers)

        pipeline = waiting._held
        pipeline._on_acknowledged = on_acknowledged
        peer = pipeline._peers[0]
        gather, peer.on_progress = peer.on_progress, lambda: None
        waiting.go()
        await until(lambda: replica.index.end_offset == len(b"before leads leaves stays"))
        waiting.calls[0].cancel()
        waiting.calls[1].cancel()
        await waiting.wire.ping()
        assert not entered.is_set()
        peer.on_progress = gather
        gather()
        assert spans([await waiting.calls[2]]) == [(20, 25)]
    assert entered.is_set()
    assert written(ready, "a") == b"before leads leaves stays"


async def test_all_that_went_along_fail_with_their_leader(ready: FixedCluster) -> None:
    """The replica does not answer: the outcome of all is unknown."""
    await append(ready["a"], b"before ")
    async with Waiting(ready) as waiting:
        for content in (b"one", b"two", b"three"):
            await waiting.add(content)
        peer = waiting._held._peers[0]
        peer.send_joined = lambda *_: peer.cancel(Broken("the replica is lost"))
        waiting.go()
        for call in waiting.calls:
            await call.failed(grpc.StatusCode.UNKNOWN, "the replica is lost")
    assert waiting.replica.line.waiting == 0
    assert (await append(ready["a"], b" after")).status == Status.OK.value


async def test_all_of_a_group_are_uncertain_when_their_broker_is_torn_down(
    ready: FixedCluster,
) -> None:
    await append(ready["a"], b"before ")
    async with Waiting(ready) as waiting:
        for content in (b"one", b"two"):
            await waiting.add(content)
        waiting._held._peers[0].on_progress = lambda: None  # Answers are not seen.
        waiting.go()
        await until(lambda: written(ready, "b") == b"before onetwo")
        await ready["a"].scope.stop()
        for call in waiting.calls:
            await call.failed(grpc.StatusCode.UNKNOWN, "cut short")
    assert waiting.replica.line.waiting == 0


async def test_an_unexpected_error_of_a_commit_ends_the_broker(etcd: Etcd, tmp_path: Path) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path)
    await broker.create(journal_spec(JOURNAL))
    await broker.client.append(AppendParams(JOURNAL), b"before")
    pipelines = replica_of(broker.service.context.resolver, JOURNAL).pipeline
    await until(lambda: pipelines.free is not None)
    pipeline = await pipelines.take()

    def broken(content: bytes, registers: LabelSet) -> Fragment:
        raise Bug("the spool refused it", content=content, registers=registers)

    assert pipeline is not None
    pipeline.commit_now = broken  # type: ignore[method-assign]
    pipelines.give(pipeline)
    wire = await Wire.connect(broker)
    wire.send((broker_pb2.AppendRequest(journal=JOURNAL), b"x"))
    await until(lambda: broker.service.context.scope.failure is not None)
    wire.writer.close()
    await broker.crash()


async def test_while_spools_take_nothing_into_memory_each_append_waits_for_itself(
    ready: FixedCluster,
) -> None:
    async with Waiting(ready) as waiting:
        for content in (b"one", b"two"):
            await waiting.add(content)
        ready["a"].context.spool_memory.limit = 0
        waiting.go()
        assert spans([await call for call in waiting.calls]) == [(0, 3), (3, 6)]
    assert written(ready, "b") == b"onetwo"


async def test_where_the_rate_is_limited_each_append_waits_for_itself(
    tmp_path: Path,
) -> None:
    async with await FixedCluster.start(1, tmp_path) as cluster:
        cluster.create(journal_spec(JOURNAL, max_append_rate=1 << 20), "a")
        await in_step(cluster)
        take_whole(cluster["a"])
        async with Waiting(cluster) as waiting:
            for content in (b"one", b"two"):
                await waiting.add(content)
            commits: list[int] = []
            waiting.replica.index.spool_commit = lambda local: commits.append(local.end)  # type: ignore[method-assign]
            waiting.go()
            assert spans([await call for call in waiting.calls]) == [(0, 3), (3, 6)]
        assert commits == [3, 6]


async def test_content_that_is_not_small_takes_no_other_along(
    ready: FixedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gazette.broker.api.whole_append.SMALL_BYTES", 3)
    await append(ready["a"], b"before ")
    before = value_of(COMMITS)
    async with Waiting(ready) as waiting:
        for content in (b"large", b"sma"):
            await waiting.add(content)
        waiting.go()
        assert spans([await call for call in waiting.calls]) == [(7, 12), (12, 15)]
    assert value_of(COMMITS) == before + 2 * BROKERS
