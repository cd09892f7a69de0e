"""Workers of simulated shards: one at a time runs, in virtual time, and with its node."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from gazette.errors import Closed
from gazette.runtime.tasks import OpFuture
from gazette.testing.simulation.loop import SimNode, VirtualLoop
from gazette.testing.simulation.storage import SimPool, Threads, TurnThread
from gazette.testing.simulation.workers import SimWorker, Workers


class Machine:
    """A loop, one node on it, and its workers."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.loop = VirtualLoop(self.errors.append)
        self.node = SimNode(self.loop, "node")
        self.workers = Workers()
        self.new = self.workers.of(Threads(self.node, random.Random(1)))
        self.said: list[tuple[str, float]] = []

    def say(self, what: str) -> None:
        self.said.append((what, round(self.loop.now, 1)))

    def run(self, seconds: float = 100.0) -> None:
        self.loop.run(self.loop.now + seconds)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.workers.close()
    assert machine.errors == []
    threads = [one for one in threading.enumerate() if one.name == "simulated"]
    assert len(threads) == len(TurnThread.idle)


def test_functions_run_one_after_the_other_and_block_in_virtual_time(machine: Machine) -> None:
    worker = machine.new("shard")

    def first() -> int:
        worker.sleep(5.0)
        machine.say("first")
        return 1

    done = worker.submit(first)
    other = machine.new("another")
    other.submit(lambda: machine.say("beside it"))
    failed = worker.submit(lambda: 1 // 0)
    worker.close()
    assert machine.said == []
    machine.run()
    assert machine.said == [("beside it", 0.0), ("first", 5.0)]
    assert done.result(0) == 1
    assert isinstance(failed.exception(0), ZeroDivisionError)
    with pytest.raises(Closed):
        worker.submit(first)


def test_a_future_is_waited_for_until_it_is_done_or_the_time_is_over(machine: Machine) -> None:
    worker = machine.new("shard")
    future: OpFuture[None] = OpFuture()

    def wait() -> None:
        machine.say(f"early: {worker.wait(future, 2.0)}")
        machine.say(f"late: {worker.wait(future, None)}")
        machine.say(f"at once: {worker.wait(future, 0.0)}")

    worker.submit(wait)
    machine.loop.call_later(7.0, future.set_result, None, context=machine.node.context)
    machine.run()
    assert machine.said == [("early: False", 2.0), ("late: True", 7.0), ("at once: True", 7.0)]


def test_a_condition_wakes_the_worker(machine: Machine) -> None:
    worker = machine.new("shard")
    condition = worker.condition()

    def wait() -> None:
        with condition:
            machine.say(f"{condition.wait(1.0)}")
            machine.say(f"{condition.wait()}")
            machine.say(f"{condition.wait(0)}")

    def notify() -> None:
        with condition:
            condition.notify_all()

    worker.submit(wait)
    machine.loop.call_later(3.0, notify, context=machine.node.context)
    machine.run()
    assert machine.said == [("False", 1.0), ("True", 3.0), ("False", 3.0)]


def test_a_worker_stands_still_with_its_node(machine: Machine) -> None:
    worker = machine.new("shard")

    def work() -> None:
        worker.sleep(1.0)
        machine.say("slept")
        worker.sleep(1.0)
        machine.say("again")

    worker.submit(work)
    machine.run(0.5)
    machine.node.hold(10.0)
    machine.run(10.8)
    assert machine.said == [("slept", 10.5)]
    # Case: it never goes on once its node is dead.
    machine.node.kill()
    machine.run()
    assert machine.said == [("slept", 10.5)]


def test_threads_end_with_the_run_wherever_they_wait(machine: Machine) -> None:
    """Also those whose code catches everything; the fixture counts threads."""
    for stubborn in (False, True):
        worker = machine.new("shard")

        def work(worker: SimWorker = worker, stubborn: bool = stubborn) -> None:
            try:
                worker.sleep(1e9)
            finally:
                if stubborn:
                    worker.wait(OpFuture(), None)

        worker.submit(work)
    machine.run(1.0)


def test_calls_wait_for_a_lock_in_virtual_time(machine: Machine) -> None:
    """Also a call that would be performed at once, as most are: it could not wait (seed 1104934)."""
    threads = Threads(machine.node, random.Random(1))
    pool, other = SimPool(threads, "pool", 8), SimPool(threads, "other", 8)
    lock = pool.lock()

    def call(name: str, seconds: float) -> None:
        with lock:
            machine.say(f"{name} begins")
            threads.wait(seconds)
            machine.say(f"{name} ends")

    threads.troubled = lambda: True
    pool.submit(call, "slow", 5.0)
    machine.run(1.0)
    threads.troubled = lambda: False
    for one in range(6):
        (other if one % 2 else pool).submit(call, f"quick {one}", 0.0)
    machine.run()
    names = [what.rpartition(" ")[0] for what, _ in machine.said]
    assert len(names) == 14
    assert names[::2] == names[1::2]  # No two are in it at a time.
    assert machine.said[1] == ("slow ends", 5.0)
    assert threads.locked == 0
