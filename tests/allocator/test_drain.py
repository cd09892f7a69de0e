"""A member that leaves: what it has left and why, how long it waits, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client import REGISTRY

from gazette.cluster.allocator.drain import Drain
from gazette.cluster.allocator.drain_status import DrainStatus, ItemNames, drain_status
from gazette.cluster.allocator.state import State
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from tests.facts import logged

WORDS = ItemNames("journal", "broker")
ALONE_S, LONG_S = 30.0, 1000.0


@pytest.fixture
def three(paper: Any) -> Any:
    """Build three members. ``a#1`` has a replica of ``all``, which wants three, and of two other items."""
    members = [(f"members/{member}", "9") for member in ("a#1", "b#2", "b#3")]
    items = [("items/all", "3"), ("items/one", "1"), ("items/two", "2")]
    held = ("all#a#1#0", "all#b#2#1", "all#b#3#2", "one#a#1#0", "two#a#1#0", "two#b#2#1")
    return paper([*members, *items, *((f"assign/{key}", "consistent") for key in held)])


def test_what_is_left_is_described_by_what_it_waits_for(three: Any) -> None:
    # Case: that we leave is not known yet.
    assert drain_status(three.state("a#1")).needing_members == ("all",)

    three.put("members/a#1", "9 exiting")
    left = drain_status(three.state("a#1"))
    assert left == DrainStatus(("all",), 3, 3, 0, ("one", "two"), ("b#2", "b#3"))
    assert left.is_stuck
    assert left.describe(WORDS) == (
        "3 journals left; 1 journal waits for another broker to start, as a replication of 3 needs 3 "
        "other brokers, and 2 stay (b#2, b#3): all; 2 journals are being handed over: one, two"
    )

    # Case: another one that leaves does not stay, and gets nothing of ours.
    three.put("members/b#3", "9 exiting")
    left = drain_status(three.state("a#1"))
    assert (left.needing_members, left.staying) == (("all", "two"), ("b#2",))
    assert drain_status(three.state("b#3")).needing_members == ("all",)
    assert drain_status(three.state("b#3")).moving == ()

    # Case: a replacement is there.
    three.put("members/c#4", "9")
    left = drain_status(three.state("a#1"))
    assert (left.needing_members, left.moving) == ((), ("all", "one", "two"))
    assert not left.is_stuck
    assert (
        left.describe(WORDS) == "3 journals left; 3 journals are being handed over: all, one, two"
    )


def test_members_without_room_are_reported(paper: Any) -> None:
    cluster = paper([("members/a#1", "9"), ("members/a#2", "2")])
    for name in "pqr":
        cluster.put(f"items/{name}", 1)
        cluster.put(f"assign/{name}#a#1#0", "consistent")
    cluster.put("members/a#1", "9 exiting")
    left = drain_status(cluster.state("a#1"))
    assert left == DrainStatus((), 0, 0, 1, ("p", "q", "r"), ("a#2",))
    assert left.describe(WORDS) == (
        "3 journals left; the other brokers are at their limits and have no room for 1 journal: raise "
        "limits or start another broker; 2 journals are being handed over"
    )
    # Case: a member that takes nothing is no other member.
    cluster.put("members/a#2", "0")
    left = drain_status(cluster.state("a#1"))
    assert (left.needing_members, left.replicas, left.staying) == (("p", "q", "r"), 1, ())
    text = "a replication of 1 needs 1 other broker, and none stays: p, q, r"
    assert text in left.describe(WORDS)
    # Case: they want different numbers.
    cluster.put("items/q", 2)
    left = drain_status(cluster.state("a#1"))
    text = "replications of 1 to 2 need as many other brokers, and none stays: p, q, r"
    assert text in left.describe(WORDS)


def test_long_lists_are_cut_and_nothing_left_is_said_so() -> None:
    names = tuple(f"j{n}" for n in range(10))
    assert DrainStatus(moving=names).describe(WORDS).endswith("j6, j7 and 2 more")
    assert DrainStatus().describe(WORDS) == "no journal is left"


class Leaving:
    """A drain of ``a#1`` on paper, whose cluster changes at given seconds."""

    def __init__(self, cluster: Any, changes: dict[float, Callable[[], object]]) -> None:
        self.cluster = cluster
        self.changes = dict(sorted(changes.items()))
        self.state: State = cluster.state("a#1")
        self.clock = ManualClock()
        self.hurried = asyncio.Event()
        self.announced: list[bytes] = []
        self.drain = Drain(
            self.clock, self.state, "a/1", WORDS, alone_timeout_s=ALONE_S, timeout_s=LONG_S
        )
        self.described: dict[float, str] = {}

    async def set_exiting(self, value: bytes) -> None:
        self.announced.append(value)
        self.cluster.put("members/a#1", "9 exiting")
        self.observe()

    def observe(self) -> None:
        self.state.ks = self.cluster.state().ks
        self.state.observe()

    async def run(self) -> float:
        """Return the seconds until the drain ended."""
        begun = self.clock.monotonic()
        async with TaskScope("test") as scope:
            allocating = scope.spawn(self.allocate(), name="allocate")
            ends = {"it was asked to hurry": self.hurried}
            running = scope.spawn(self.drain.run(self, b"exiting", allocating, ends), name="drain")
            while not running.done():
                for _ in range(10):  # both tasks come to their next sleep
                    await SystemClock().sleep(0)
                if self.clock.sleepers:
                    now = self.clock.monotonic() - begun
                    self.described[now] = self.drain.describe()
                    due = [at for at in self.changes if at <= now]
                    for at in due:
                        self.changes.pop(at)()
                        self.observe()
                    self.clock.advance(0.25)
            allocating.cancel()
        return self.clock.monotonic() - begun

    async def allocate(self) -> None:
        while not self.state.should_exit():
            await self.clock.sleep(0.25)


async def test_a_member_that_is_relieved_leaves_at_once(paper: Any) -> None:
    cluster = paper([("members/a#1", "9"), ("members/a#2", "9"), ("items/x", "1")])
    leaving = Leaving(cluster, {})
    assert await leaving.run() < 1.0
    assert leaving.announced == [b"exiting"]


async def test_a_drain_waits_briefly_while_nothing_moves_and_long_otherwise(
    three: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Case: no member can take over.
    with caplog.at_level(logging.INFO, logger="gazette.cluster.allocator.drain"):
        leaving = Leaving(three, {})
        assert await leaving.run() == pytest.approx(ALONE_S, abs=0.6)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(
        "a/1 is draining: 3 journals left; 1 journal waits for another broker"
    )
    # At once, after 10 and 20 s, and at the end.
    assert len(lines) == 4
    assert lines[-1].startswith(
        "a/1 leaves because no other broker could take over for 30 s: 3 journals left"
    )
    assert "leaves in 20 s" in leaving.described[10.25]
    assert leaving.described[10.25].startswith("draining: 3 journals left; 1 journal waits for")
    assert REGISTRY.get_sample_value("gazette_draining_items", {"waits_for": "members"}) is None


async def test_what_moves_is_waited_for_although_something_is_stuck(three: Any) -> None:
    changes = {
        20.0: lambda: three.delete("assign/one#a#1#0"),
        45.0: lambda: three.put("assign/two#b#3#2"),
    }
    assert await Leaving(three, changes).run() == pytest.approx(45.0 + ALONE_S, abs=0.6)


async def test_items_that_come_later_do_not_hold_up_a_drain(three: Any) -> None:
    """A leader of an earlier version gives a leaving member one new item a second."""

    def create(name: str) -> None:
        three.put(f"items/{name}", "3")
        for slot, member in enumerate(("a#1", "b#2", "b#3")):
            three.put(f"assign/{name}#{member}#{slot}", "consistent")

    def again() -> None:
        three.delete("items/all")
        three.put("items/all", "3")

    changes: dict[float, Callable[[], object]]
    changes = {float(n): partial(create, f"new-{n}") for n in range(1, 200)}
    assert await Leaving(three, changes).run() == pytest.approx(ALONE_S, abs=0.6)

    # Case: an item of ours that is deleted and created again is a new item.
    changes = {float(n): again for n in range(1, 200)}
    assert await Leaving(three, changes).run() == pytest.approx(1.0 + ALONE_S, abs=0.6)


async def test_room_that_comes_and_goes_does_not_hold_up_a_drain(paper: Any) -> None:
    """Half of each second the others are full, and the leader moves nothing to them in the other half."""
    cluster = paper([("members/a#1", "9"), ("members/a#2", "3")])
    for item, member in (("mine-1", "a#1"), ("mine-2", "a#1"), ("p", "a#2")):
        cluster.put(f"items/{item}", 1)
        cluster.put(f"assign/{item}#{member}#0", "consistent")
    changes: dict[float, Callable[[], object]] = {}
    for n in range(1, 200):
        changes[float(n)] = partial(cluster.put, f"items/new-{n}", 1)
        changes[n + 0.5] = partial(cluster.delete, f"items/new-{n}")
    assert await Leaving(cluster, changes).run() == pytest.approx(2 * ALONE_S, abs=3.0)


async def test_a_replacement_that_comes_in_time_is_waited_for(three: Any) -> None:
    leaving = Leaving(three, {20.0: lambda: three.put("members/c#4", "9")})
    assert await leaving.run() == pytest.approx(LONG_S, abs=0.6)

    # Case: … and leaves again.
    leaving = Leaving(three, {50.0: lambda: three.lose("c#4")})
    assert await leaving.run() == pytest.approx(50.0 + ALONE_S, abs=0.6)


async def test_asking_again_ends_it(three: Any, caplog: pytest.LogCaptureFixture) -> None:
    leaving = Leaving(three, {})
    leaving.changes[5.0] = leaving.hurried.set
    assert await leaving.run() < 6.0
    logged(caplog, member="a/1", reason="it was asked to hurry")


async def test_a_drain_that_waits_for_no_member_ends_with_its_announcement(three: Any) -> None:
    """Check the clock: the announcement takes 50 ms of etcd, and the drain no further second."""
    leaving = Leaving(three, {})
    clock = leaving.clock
    drain = Drain(clock, leaving.state, "a/1", WORDS, alone_timeout_s=0.0, timeout_s=LONG_S)
    begun = clock.monotonic()
    async with TaskScope("test") as scope:
        waiting = scope.spawn(drain.await_timeout(), name="timeout")
        while not waiting.done():
            await SystemClock().sleep(0)
            if clock.sleepers:
                clock.advance(0.01)
                if not leaving.announced and clock.monotonic() - begun >= 0.05:
                    await leaving.set_exiting(b"exiting")
    assert waiting.result() == "no other broker could take over for 0 s"
    assert clock.monotonic() - begun < 0.1
