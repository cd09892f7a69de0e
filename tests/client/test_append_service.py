"""The append service against a real, scripted broker: order, dependencies, retries, failure."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService, is_terminal
from gazette.client.client import Client
from gazette.client.rpc.credentials import FRESH_S
from gazette.client.rpc.errors import status_error
from gazette.errors import (
    Broken,
    Bug,
    Closed,
    Conflict,
    Fenced,
    GazetteError,
    Invalid,
    NotAllowed,
    NotFound,
    Unavailable,
)
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.route import Route
from gazette.protocol.status import Status
from gazette.runtime.tasks import OpFuture, TaskScope, await_future, failed
from tests.facts import raises
from tests.support.instant_clock import InstantClock, breathe, eventually
from tests.support.stub_broker import Fail, Hold, LoseReply, Reply, StubBroker

A, B, C = (AppendParams(f"journal/{name}") for name in "ABC")


def put(
    service: AppendService, params: AppendParams, content: bytes, *deps: OpFuture[Any]
) -> OpFuture[Any]:
    with service.start_append(params, deps) as txn:
        txn.write(content)
        return txn.release()


async def test_an_append_is_committed_and_its_future_tells_where(
    service: AppendService, broker: StubBroker
) -> None:
    broker.journal(A.journal).append(b"before")
    result = await await_future(put(service, A, b"hello"))
    assert (result.commit.begin, result.commit.end) == (6, 11)
    assert broker.content_of(A.journal) == b"beforehello"
    assert service.pending_except("") == frozenset()
    assert service.backlog_bytes == 0


async def test_an_empty_append_is_a_barrier_that_learns_the_head(
    service: AppendService, broker: StubBroker
) -> None:
    broker.journal(A.journal).append(b"12345")
    result = await await_future(service.start_append(A).release())
    assert result.commit.begin == result.commit.end == 5


async def test_appends_coalesce_while_another_is_sent(
    service: AppendService, broker: StubBroker
) -> None:
    """What is released during one RPC becomes the next one, in order, with one future."""
    hold = Hold(asyncio.Event())
    broker.on_append(hold)
    first = put(service, A, b"first;")
    await hold.reached.wait()
    rest = [put(service, A, b"%d;" % i) for i in range(100)]
    assert len(set(rest)) == 1
    hold.until.set()
    assert (await await_future(rest[0])).commit.begin == 6
    assert first.done()
    assert len(broker.appends) == 2
    assert broker.content_of(A.journal) == b"first;" + b"".join(b"%d;" % i for i in range(100))


async def test_requests_that_differ_are_rpcs_of_their_own_in_order(
    service: AppendService, broker: StubBroker
) -> None:
    other = AppendParams(A.journal, union_registers=LabelSet.of(("register", "1")))
    for params, content in ((A, b"1"), (A, b"2"), (other, b"3"), (A, b"4")):
        last = put(service, params, content)
    await await_future(last)
    assert [append.content for append in broker.appends] == [b"12", b"3", b"4"]


async def test_an_equal_request_joins_whatever_object_it_is(
    service: AppendService, broker: StubBroker
) -> None:
    put(service, A, b"1")
    await await_future(put(service, AppendParams(A.journal), b"2"))
    assert [append.content for append in broker.appends] == [b"12"]


async def test_an_append_waits_for_its_dependencies(
    service: AppendService, broker: StubBroker
) -> None:
    hold = Hold(asyncio.Event())
    broker.on_append(hold)
    first = put(service, A, b"a")
    second = put(service, B, b"b", first)
    await hold.reached.wait()
    await eventually(lambda: len(broker.appends) == 1)
    assert not second.done()
    hold.until.set()
    await await_future(second)
    assert [append.journal for append in broker.appends] == [A.journal, B.journal]
    assert broker.appends[1].commits_before == 1


async def test_appends_join_only_if_nothing_before_them_waits_for_more(
    service: AppendService, broker: StubBroker
) -> None:
    one: OpFuture[None] = OpFuture()
    two: OpFuture[None] = OpFuture()
    futures = [
        put(service, A, b"1", one),
        put(service, A, b"2", one),
        put(service, A, b"3"),  # Fewer: joins, and so waits.
        put(service, A, b"4", one, two),  # More: must not delay what is before it.
        put(service, A, b"5", two),
    ]
    assert futures[0] is futures[1] is futures[2]
    assert futures[3] is futures[4]
    assert futures[2] is not futures[3]
    one.set_result(None)
    await await_future(futures[0])
    assert broker.content_of(A.journal) == b"123"
    two.set_result(None)
    await await_future(futures[4])
    assert broker.content_of(A.journal) == b"12345"


async def test_a_barrier_holds_back_everything_that_is_released_after_it(
    service: AppendService, broker: StubBroker
) -> None:
    """An append without dependencies does not overtake one that waits."""
    gate: OpFuture[None] = OpFuture()
    barrier = service.append(A, dependencies=[gate])
    later = put(service, A, b"later")
    await await_future(put(service, B, b"unrelated"))
    assert not barrier.done()
    assert not later.done()
    gate.set_result(None)
    await await_future(later)
    assert barrier.done()


async def test_dependencies_that_have_succeeded_already_do_not_matter(
    service: AppendService, broker: StubBroker
) -> None:
    done: OpFuture[None] = OpFuture()
    done.set_result(None)
    assert put(service, A, b"1") is put(service, A, b"2", done)
    await service.flush()


async def test_journals_may_depend_on_each_other_back_and_forth(
    service: AppendService, broker: StubBroker
) -> None:
    """A → B → A → B …: no circle can arise, whatever joins what."""
    last: OpFuture[Any] = put(service, A, b"0")
    for i in range(1, 20):
        last = put(service, (A, B)[i % 2], b"%d," % i, last)
        put(service, (B, A)[i % 2], b"x")
    await await_future(last)
    await service.flush()
    assert service.pending_except("") == frozenset()


async def test_an_append_may_depend_on_its_own_journal(service: AppendService) -> None:
    first = put(service, A, b"1")
    second = put(service, A, b"2", first)
    third = put(service, A, b"3", first, second)
    await await_future(third)
    assert first.done()
    assert second.done()


appends = st.lists(
    st.tuples(
        st.integers(0, 2),  # the journal
        st.lists(st.integers(0, 1000), max_size=3),  # dependencies, counted back
        st.booleans(),  # let the loop run first
    ),
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(plan=appends)
async def test_any_plan_of_appends_keeps_order_and_dependencies(
    plan: list[tuple[int, list[int], bool]],
) -> None:
    """Oracle: per journal the order of release; an RPC begins after its dependencies' commits."""
    async with StubBroker() as broker, Client(broker.endpoint) as client:
        service = AppendService(client)
        futures: list[OpFuture[Any]] = []
        chosen: list[set[int]] = []
        expected: dict[str, list[int]] = {}
        for number, (journal, back, pause) in enumerate(plan):
            deps = {number - 1 - b % number for b in back} if number else set()
            params = (A, B, C)[journal]
            chosen.append(deps)
            expected.setdefault(params.journal, []).append(number)
            futures.append(put(service, params, b"%d " % number, *(futures[d] for d in deps)))
            if pause:
                await breathe()
        await asyncio.gather(*(await_future(future) for future in futures))
        for name, numbers in expected.items():
            assert [int(word) for word in broker.content_of(name).split()] == numbers
        committed: dict[int, int] = {}
        for at, append in enumerate(broker.commits):
            for word in append.content.split():
                committed[int(word)] = at
        for append in broker.commits:
            for word in append.content.split():
                for dep in chosen[int(word)]:
                    assert committed[dep] < append.commits_before
        await service.close()


async def test_a_failed_dependency_fails_the_journal_for_good(
    service: AppendService, broker: StubBroker
) -> None:
    """Nothing of the journal is sent; others and their commits go on to see the failure."""
    cause = NotFound("gone")
    gate: OpFuture[None] = OpFuture()
    waiting = put(service, A, b"1", gate)
    behind = put(service, A, b"2")
    assert service.pending_except(B.journal) == {waiting}
    gate.set_exception(cause)
    with pytest.raises(Broken) as caught:
        await await_future(waiting)
    assert caught.value.__cause__ is cause
    with pytest.raises(Broken):
        await await_future(behind)
    later = put(service, A, b"3")
    assert isinstance(later.exception(), Broken)
    assert broker.appends == []
    (pending,) = service.pending_except(B.journal)
    assert pending.exception() is caught.value
    assert service.pending_except(A.journal) == frozenset()
    await await_future(put(service, B, b"other journals go on"))


async def test_a_dependency_that_failed_before_counts_too(service: AppendService) -> None:
    future = put(service, A, b"1", failed(NotFound("gone")))
    with pytest.raises(Broken, match="gone"):
        await await_future(future)


async def test_a_cancelled_dependency_fails_the_journal(service: AppendService) -> None:
    gate: OpFuture[None] = OpFuture()
    future = put(service, A, b"1", gate)
    assert gate.cancel()
    with pytest.raises(Broken, match="cancelled"):
        await await_future(future)


async def test_a_failed_append_fails_what_depends_on_it(
    service: AppendService, broker: StubBroker
) -> None:
    broker.missing.add(A.journal)
    first = put(service, A, b"1")
    dependent = put(service, B, b"2", first)
    with pytest.raises(NotFound):
        await await_future(first)
    with pytest.raises(Broken):
        await await_future(dependent)
    assert broker.content_of(B.journal) == b""


TERMINAL = {
    Status.JOURNAL_NOT_FOUND: NotFound,
    Status.NOT_ALLOWED: NotAllowed,
    Status.WRONG_APPEND_OFFSET: Conflict,
    Status.REGISTER_MISMATCH: Fenced,
    Status.FRAGMENT_STORE_UNHEALTHY: Unavailable,
}


@pytest.mark.parametrize(
    ("status", "kind"),
    [item for item in TERMINAL.items() if item[1] is not NotFound],
    ids=lambda value: str(value),
)
async def test_what_time_does_not_cure_is_not_retried(
    service: AppendService, broker: StubBroker, status: Status, kind: type[GazetteError]
) -> None:
    broker.on_append(Reply(status))
    future = put(service, A, b"1")
    with pytest.raises(kind) as caught:
        await await_future(future)
    assert caught.value.facts["status"] == status.name
    assert len(broker.appends) == 1


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED]
)
@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
async def test_a_refusal_of_rights_reaches_whoever_waits(
    service: AppendService, broker: StubBroker, code: grpc.StatusCode, checked: bool
) -> None:
    """At once, by name, and also what waits behind the append."""
    params = replace(A, check_registers=LabelSelector()) if checked else A
    hold = Hold(asyncio.Event())
    broker.on_append(hold, Fail(code, "the token does not cover it"))
    first = put(service, params, b"1")
    await hold.reached.wait()
    behind, elsewhere = put(service, params, b"2"), put(service, B, b"3", first)
    hold.until.set()
    await await_future(elsewhere)
    with raises(NotAllowed, journal=A.journal, code=code.name, says="does not cover"):
        await await_future(behind)
    assert len([one for one in broker.appends if one.journal == A.journal]) == 2
    with raises(NotAllowed, code=code.name):
        await await_future(put(service, params, b"4"))


@pytest.mark.parametrize(("lasts_s", "attempts"), [(FRESH_S - 10.0, 1), (FRESH_S, 2)])
async def test_only_a_token_that_may_have_expired_meanwhile_is_replaced(
    service: AppendService,
    broker: StubBroker,
    instant: InstantClock,
    lasts_s: float,
    attempts: int,
) -> None:
    hold = Hold(asyncio.Event(), code=grpc.StatusCode.UNAUTHENTICATED)
    broker.on_append(hold)
    future = put(service, A, b"1")
    await hold.reached.wait()
    await instant.sleep(lasts_s)
    hold.until.set()
    if attempts == 1:
        with raises(NotAllowed, code="UNAUTHENTICATED"):
            await await_future(future)
    else:
        assert (await await_future(future)).commit.end == 1
    assert len(broker.appends) == attempts


RETRIED = (
    Reply(Status.NOT_JOURNAL_PRIMARY_BROKER),
    Reply(Status.NO_JOURNAL_PRIMARY_BROKER, early=True),
    Reply(Status.INSUFFICIENT_JOURNAL_BROKERS),
    Reply(Status.SUSPENDED),
    Fail(),
)


@pytest.mark.parametrize("step", RETRIED, ids=str)
async def test_a_journal_between_owners_is_retried(
    service: AppendService, broker: StubBroker, step: Reply | Fail
) -> None:
    broker.on_append(step, step)
    result = await await_future(put(service, A, b"content"))
    assert result.commit.end == 7
    assert broker.content_of(A.journal) == b"content"
    assert len(broker.appends) == 3


def test_with_registers_to_check_only_the_loss_of_the_journal_is_terminal() -> None:
    terminal = {
        status
        for status in Status
        if status is not Status.OK and is_terminal(status_error(status), checked=True)
    }
    assert terminal == {Status.REGISTER_MISMATCH, Status.JOURNAL_NOT_FOUND}
    assert {
        status
        for status in Status
        if status is not Status.OK and is_terminal(status_error(status), checked=False)
    } == set(TERMINAL)


async def test_a_newer_owner_fences_appends_that_check_registers(
    service: AppendService, broker: StubBroker
) -> None:
    mine, theirs = LabelSet.of(("author", "me")), LabelSet.of(("author", "you"))
    fenced = AppendParams(A.journal, check_registers=LabelSelector(include=mine))
    await await_future(put(service, AppendParams(A.journal, union_registers=mine), b"1"))
    await await_future(put(service, fenced, b"2"))
    broker.journal(A.journal).registers = theirs
    with pytest.raises(Fenced):
        await await_future(put(service, fenced, b"3"))
    assert isinstance(put(service, fenced, b"4").exception(), Fenced)
    assert broker.content_of(A.journal) == b"12"


async def test_appends_wait_with_the_reason_for_an_operator_who_confirms_the_head(
    service: AppendService, broker: StubBroker, instant: InstantClock
) -> None:
    held = Hold(asyncio.Event())
    broker.on_append(*[Reply(Status.INDEX_HAS_GREATER_OFFSET)] * 9, held)
    first, behind = put(service, A, b"1"), put(service, A, b"2")
    await held.reached.wait()
    assert "INDEX_HAS_GREATER_OFFSET" in service.waiting()[A.journal]
    assert "reset-head" in service.waiting()[A.journal]
    assert not first.done()
    assert max(instant.slept) == 5.0
    held.until.set()
    await await_future(first)
    await await_future(behind)
    assert broker.content_of(A.journal) == b"12"


async def test_an_owner_waits_for_an_unhealthy_store(
    service: AppendService, broker: StubBroker
) -> None:
    checked = AppendParams(A.journal, check_registers=LabelSelector())
    broker.on_append(Reply(Status.FRAGMENT_STORE_UNHEALTHY))
    await await_future(put(service, checked, b"1"))
    assert broker.content_of(A.journal) == b"1"


async def test_retries_back_off_as_documented(
    service: AppendService, broker: StubBroker, instant: InstantClock
) -> None:
    broker.on_append(*[Reply(Status.NO_JOURNAL_PRIMARY_BROKER, early=True)] * 8)
    await await_future(put(service, A, b"1"))
    assert instant.slept == [0.05, 0.05, 0.1, 0.1, 1.0, 1.0, 5.0, 5.0]


async def test_a_new_primary_is_asked_again_at_once(
    service: AppendService, broker: StubBroker, instant: InstantClock
) -> None:
    """However long brokers did not answer: it names its ledger, and is there. Two primaries that name other
    ledgers in turn are not asked without a pause."""
    aborted = grpc.StatusCode.ABORTED
    broker.on_append(*[Reply(Status.NO_JOURNAL_PRIMARY_BROKER, early=True)] * 7)
    broker.on_append(*[Fail(aborted, ledger=ledger) for ledger in ("7.1", "8.1", "7.1", "8.1")])
    await await_future(put(service, A, b"1"))
    assert instant.slept == [0.05, 0.05, 0.1, 0.1, 1.0, 1.0, 5.0, 0.0, 0.05, 0.05, 0.1]
    assert broker.content_of(A.journal) == b"1"


async def test_a_break_in_the_middle_commits_nothing_and_is_retried_whole(
    service: AppendService, broker: StubBroker
) -> None:
    content = bytes(range(256)) * 4096
    broker.on_append(Fail(after_bytes=300_000))
    await await_future(put(service, A, content))
    assert broker.content_of(A.journal) == content
    assert len(broker.appends) == 2


async def test_a_batch_whose_reply_is_lost_is_there_twice_in_one_piece(
    service: AppendService, broker: StubBroker
) -> None:
    """At least once: the copies stand before everything behind them."""
    hold = Hold(asyncio.Event())
    broker.on_append(hold, LoseReply())
    put(service, A, b"0")
    await hold.reached.wait()
    for word in (b"ack", b"d1", b"d2"):
        put(service, A, word)
    hold.until.set()
    await service.flush()
    await await_future(put(service, A, b"behind"))
    assert broker.content_of(A.journal) == b"0" + b"ackd1d2" * 2 + b"behind"


async def test_appends_survive_the_end_of_a_broker(
    broker: StubBroker, client: Client, service: AppendService
) -> None:
    """The connection is lost, the default address is down, and comes back as a proxy to another."""
    async with StubBroker("broker-two", journals=broker.journals) as second:
        await await_future(put(service, A, b"1"))
        await broker.stop()
        future = put(service, A, b"2")
        await eventually(lambda: not client._routes.get(A.journal, 0.0))
        route = Route((second.id, broker.id), 0, (second.endpoint, broker.endpoint))
        route.validate()
        broker.routes[A.journal] = second.routes[A.journal] = route
        await broker.start()
        await await_future(future)
        assert [append.content for append in second.appends] == [b"2"]
        assert broker.content_of(A.journal) == b"12"
        # The next goes to the new primary at once.
        refused = len(broker.appends)
        await await_future(put(service, A, b"3"))
        assert len(broker.appends) == refused


async def test_a_roll_back_takes_back_one_append_only(
    service: AppendService, broker: StubBroker
) -> None:
    put(service, A, b"1")
    txn = service.start_append(A)
    txn.write(b"never")
    txn.roll_back()
    with pytest.raises(ZeroDivisionError), service.start_append(A) as txn:
        txn.write(b"nor this")
        raise ZeroDivisionError
    await await_future(put(service, A, b"2"))
    assert broker.content_of(A.journal) == b"12"


async def test_an_append_that_ended_is_not_written_to(service: AppendService) -> None:
    txn = service.start_append(A)
    txn.roll_back()
    with pytest.raises(Bug):
        txn.write(b"x")
    with pytest.raises(Bug):
        txn.release()
    txn.roll_back()


async def test_wrong_parameters_are_refused_at_once(service: AppendService) -> None:
    with pytest.raises(Invalid, match=r"^Journal: "):
        service.start_append(AppendParams("/not/clean"))
    with pytest.raises(Invalid):
        service.append(AppendParams("a/journal", offset=-1))
    with pytest.raises(Invalid, match=r"^Journal: "):
        service.journal(AppendParams("/not/clean"))


async def test_the_loop_is_not_made_to_wait_for_a_thread(
    service: AppendService, broker: StubBroker
) -> None:
    """A thread holds the journal: tasks pass it by."""
    opened, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with service.start_append(A) as txn:
            txn.write(b"thread;")
            opened.set()
            assert go_on.wait(10)

    async with TaskScope("test") as scope:
        thread = scope.spawn(asyncio.to_thread(hold), name="hold")
        await asyncio.to_thread(opened.wait, 10)
        with raises(Bug, journal=A.journal):
            service.start_append(A)
        await await_future(service.append(A, b"beside;"))
        await await_future(service.journal(A).enqueue(b"task;"))
        go_on.set()
        await thread
        await service.flush()
    assert broker.content_of(A.journal) == b"beside;task;thread;"


async def test_a_thread_waits_its_turn(service: AppendService, broker: StubBroker) -> None:
    txn = service.start_append(A)
    started = threading.Event()

    def other() -> None:
        started.set()
        put(service, A, b"second")

    thread = threading.Thread(target=other)
    thread.start()
    await asyncio.to_thread(started.wait, 10)
    txn.write(b"first;")
    txn.release()
    await asyncio.to_thread(thread.join, 10)
    await service.flush()
    assert broker.content_of(A.journal) == b"first;second"


async def test_many_threads_append_each_in_its_own_order(
    service: AppendService, broker: StubBroker
) -> None:
    params = (A, B, C)

    def work(thread: int) -> None:
        for i in range(400):
            txn = service.start_append(params[(thread + i) % 3])
            txn.write(b"%d " % thread)
            if i % 7 == 3:
                txn.write(b"rolled back")
                txn.roll_back()
                continue
            txn.write(b"%d\n" % i)
            txn.release()

    await asyncio.gather(*(asyncio.to_thread(work, thread) for thread in range(4)))
    await service.flush()
    for at, one in enumerate(params):
        seen: dict[int, list[int]] = {}
        for line in broker.content_of(one.journal).splitlines():
            thread, i = map(int, line.split())
            seen.setdefault(thread, []).append(i)
        for thread in range(4):
            wanted = [i for i in range(400) if (thread + i) % 3 == at and i % 7 != 3]
            assert seen[thread] == wanted
    assert len(broker.appends) < 400


async def test_many_threads_make_content_in_place_while_it_is_sent(
    service: AppendService, broker: StubBroker
) -> None:
    """Nothing is lost, doubled or torn, and each thread's content is in its order."""

    def write(item: tuple[int, int], _: int, buffer: bytearray) -> None:
        buffer += b"%d " % item[0]
        buffer += b"%d\n" % item[1]

    appends = service.journal(A)
    copied = 0

    def work(thread: int) -> None:
        nonlocal copied
        for i in range(20_000):
            if appends.in_place(write, (thread, i), 0, 100) is None:
                copied += 1
                appends.enqueue(b"%d %d\n" % (thread, i))

    await asyncio.gather(*(asyncio.to_thread(work, thread) for thread in range(4)))
    await service.flush()
    seen: dict[int, list[int]] = {thread: [] for thread in range(4)}
    for line in broker.content_of(A.journal).splitlines():
        thread, i = map(int, line.split())
        seen[thread].append(i)
    assert all(one == list(range(20_000)) for one in seen.values())
    assert 1 <= copied < 20_000


async def test_pending_except_is_all_that_is_in_flight_elsewhere(
    service: AppendService, broker: StubBroker
) -> None:
    hold = Hold(asyncio.Event())
    broker.on_append(hold)
    gate: OpFuture[None] = OpFuture()
    one = put(service, A, b"1")
    await hold.reached.wait()
    two = put(service, A, b"2")
    three = put(service, B, b"3", gate)
    assert service.pending_except(B.journal) == {two}
    assert service.pending_except(A.journal) == {three}
    assert service.pending_except(C.journal) == {two, three}
    assert not one.done()
    hold.until.set()
    gate.set_result(None)
    await service.flush()
    assert one.done()


async def test_closing_fails_what_waits_and_refuses_what_comes(
    client: Client, broker: StubBroker
) -> None:
    service = AppendService(client)
    hold = Hold(asyncio.Event())
    broker.on_append(hold)
    sent = put(service, A, b"1")
    await hold.reached.wait()
    waiting = put(service, B, b"2", OpFuture())
    await service.close()
    for future in (sent, waiting, put(service, A, b"3")):
        assert isinstance(future.exception(), Closed)
    with pytest.raises(Closed):
        service.start_append(C)
    hold.until.set()


async def test_a_dependency_that_fails_with_the_close_is_not_reported(
    service: AppendService, broker: StubBroker
) -> None:
    """The loop does not report an error that an append waited for which was given up."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    hold = Hold(asyncio.Event())
    broker.on_append(hold)
    first = put(service, A, b"first")
    await hold.reached.wait()
    second = put(service, B, b"second", first)
    for _ in range(10):  # Until it waits for the first: it is that wait which is given up.
        await breathe()
    await service.close()
    assert isinstance(first.exception(), Closed)
    assert isinstance(second.exception(), Closed)
    hold.until.set()
    del first, second
    for _ in range(3):
        await breathe()
        gc.collect()
    assert reported == []


async def test_a_closed_client_ends_its_appends(broker: StubBroker, instant: InstantClock) -> None:
    async with Client(broker.endpoint, clock=instant) as client:
        service = AppendService(client)
        hold = Hold(asyncio.Event())
        broker.on_append(hold)
        future = put(service, A, b"1")
        await hold.reached.wait()
    with pytest.raises(Closed):
        await await_future(future)
    hold.until.set()
    await service.close()


async def test_waiting_for_an_append_can_be_cancelled_the_append_goes_on(
    service: AppendService, broker: StubBroker
) -> None:
    hold = Hold(asyncio.Event())
    broker.on_append(hold)
    future = put(service, A, b"1")
    await hold.reached.wait()
    async with TaskScope("test") as scope:
        waiting = scope.spawn(await_future(future), name="wait")
        await breathe()
        waiting.cancel()
    hold.until.set()
    assert (await await_future(future)).commit.end == 1


async def test_a_caller_that_gives_up_its_wait_leaves_the_append_to_all_others(
    service: AppendService, broker: StubBroker
) -> None:
    """They share its future, and `asyncio.wrap_future` would cancel it for all of them."""
    hold = Hold(asyncio.Event())
    broker.on_append(hold)
    put(service, A, b"1")
    await hold.reached.wait()
    future, shared = put(service, A, b"2"), put(service, A, b"3")
    asyncio.wrap_future(future).cancel()
    await breathe()
    hold.until.set()
    assert (await await_future(shared)).commit.end == 3
    assert (await await_future(put(service, A, b"4"))).commit.end == 4


class Defective(InstantClock):
    async def sleep(self, seconds: float) -> None:
        raise ZeroDivisionError


async def test_a_defect_fails_the_journal_and_reaches_its_watchers(broker: StubBroker) -> None:
    async with Client(broker.endpoint, clock=Defective()) as client:
        service = AppendService(client)
        broker.on_append(Reply(Status.SUSPENDED))
        with pytest.raises(ZeroDivisionError):
            async with TaskScope("test") as scope:
                scope.daemon(service.run(), name="watch")
                future = put(service, A, b"1")
                with pytest.raises(Bug):
                    await await_future(future)
                await asyncio.Event().wait()
        await service.close()
