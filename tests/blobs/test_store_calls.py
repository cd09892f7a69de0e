from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gazette.errors import Closed, Unavailable
from gazette.runtime.store_calls import StoreCall, StoreCalls, off_store, on_store
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.no_threads import no_thread_starts

HUNG_S = 60.0


class Gate:
    """A call that returns when it may, or takes a step."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.step: Callable[[], None] | None = None
        self.stepped = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        while not self.open.wait(0.01):
            if self.step is not None and not self.stepped.is_set():
                self.step()
                self.stepped.set()
        return "returned"


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    gates = [Gate() for _ in range(5)]
    yield gates
    for gate in gates:
        gate.open.set()


@pytest.fixture
async def calls(clock: ManualClock, gates: list[Gate]) -> AsyncIterator[StoreCalls]:
    calls = StoreCalls(
        "s3://bucket/", BlockingPool("store", 2), 2, clock.monotonic, hung_after_s=HUNG_S
    )
    yield calls
    calls.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await ManualClock().sleep(0)


async def test_calls_beyond_the_threads_wait_in_order(calls: StoreCalls, gates: list[Gate]) -> None:
    """Each result goes to its own caller; errors are raised there."""
    started = [calls.start(gate) for gate in gates[:4]]
    assert calls.in_progress == 2
    assert not gates[2].entered.is_set()
    gates[1].open.set()
    assert await calls.answer(started[1]) == "returned"
    await until(gates[2].entered.is_set)
    assert not gates[3].entered.is_set()
    for gate in gates:
        gate.open.set()
    assert await calls.answer(started[3]) == "returned"
    with pytest.raises(ZeroDivisionError):
        await calls.run(divmod, 1, 0)
    await until(lambda: calls.in_progress == 0)


async def test_while_all_threads_hang_calls_fail_at_once(
    calls: StoreCalls, gates: list[Gate], clock: ManualClock
) -> None:
    """Those that wait are sent away, with the reason; one thread that returns is enough to go on."""
    first, second, queued = (calls.start(gate) for gate in gates[:3])
    clock.advance(HUNG_S - 1)
    assert not calls.watch()
    async with TaskScope("test") as scope:
        waiting = [scope.spawn(_outcome(calls, one), name="wait") for one in (first, queued)]
        await clock.sleep(0)
        clock.advance(1)
        trouble = "2 calls have not returned for 60 s"
        assert calls.watch() == calls.trouble == trouble
        assert calls.hung == 2
        assert "a call has not returned for 60 s" in await waiting[0]
        assert trouble in await waiting[1]
    with raises(Unavailable, store="s3://bucket/", says="2 calls"):
        calls.start(gates[3])
    assert not gates[2].entered.is_set()
    # Case: a caller that must know when the thread ends can wait for that.
    assert not first.future.done()
    gates[0].open.set()
    await until(first.future.done)
    assert first.future.result() == "returned"
    assert not calls.trouble
    gates[3].open.set()
    assert await calls.run(gates[3]) == "returned"
    assert calls.hung == 1
    assert not second.future.done()


async def _outcome(calls: StoreCalls, call: StoreCall[str]) -> str:
    try:
        return await calls.answer(call)
    except Unavailable as error:
        return str(error)


async def test_a_call_that_makes_progress_does_not_hang(
    calls: StoreCalls, gates: list[Gate], clock: ManualClock
) -> None:
    """However long it takes; nor one that is busy elsewhere."""
    calls.start(gates[0])
    calls.start(gates[1])
    clock.advance(HUNG_S - 1)
    gates[0].step, gates[1].step = on_store, off_store
    await until(lambda: gates[0].stepped.is_set() and gates[1].stepped.is_set())
    clock.advance(HUNG_S - 1)
    assert calls.hung == 0
    clock.advance(1)
    assert calls.hung == 1  # The one that has gone back to its store.
    assert not calls.watch()


async def test_what_has_not_begun_is_refused_when_closed(
    calls: StoreCalls, gates: list[Gate]
) -> None:
    running, _, queued = (calls.start(gate) for gate in gates[:3])
    calls.close()
    with pytest.raises(Closed):
        await calls.answer(queued)
    with pytest.raises(Closed):
        calls.start(gates[3])
    gates[0].open.set()
    assert await calls.answer(running) == "returned"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may accept the stack")
async def test_a_call_for_which_no_thread_starts_says_so(calls: StoreCalls) -> None:
    """The store is open: the next call may get a thread."""
    with no_thread_starts(), raises(Unavailable, says="no thread"):
        await calls.run(int)
    assert await calls.run(int) == 0


async def test_a_caller_that_leaves_stops_nothing(calls: StoreCalls, gates: list[Gate]) -> None:
    """Its call runs to its end, and then its thread is free."""
    async with TaskScope("test") as scope:
        call = calls.start(gates[0])
        waiting = scope.spawn(calls.answer(call), name="wait")
        await until(gates[0].entered.is_set)
        waiting.cancel()
    assert calls.in_progress == 1
    gates[0].open.set()
    await until(lambda: calls.in_progress == 0)
    assert call.future.result() == "returned"
