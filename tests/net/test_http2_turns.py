"""The work of connections in a turn of the loop, and which calls make room for others: without sockets."""

from __future__ import annotations

import random
from collections.abc import Callable

import grpc
import pytest

from gazette.http2.connection import FIRST_BYTES, STREAM_BYTES
from gazette.net.grpc.held_memory import HELD_MAX, HeldMemory
from gazette.net.grpc.turns import SHARE, TURN_S, WORK_MAX, WORK_MIN, Turns
from gazette.net.grpc.unfinished import FIRST_MESSAGE_S, UNFINISHED_MAX, Unfinished
from gazette.runtime.clock import SystemClock
from tests.support.loop_time import LoopClock, LoopTime, turns


class Loop:
    """A loop whose turns take as long as is said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[Callable[[], None]] = []
        self.turns = Turns(lambda: self.now, self.calls.append)

    def turn(self, seconds: float = 0.0) -> bool:
        """Let a turn begin after ``seconds``. Return False if none was asked for."""
        self.now += seconds
        calls, self.calls[:] = list(self.calls), []
        for call in calls:
            call()
        return bool(calls)


class Peer:
    """A connection of which bytes are units of work."""

    def __init__(self, loop: Loop, log: list[tuple[str, int]], name: str) -> None:
        self.loop = loop
        self.log = log
        self.name = name
        self.left = 0
        self.reads = True

    @property
    def has_backlog(self) -> bool:
        return self.left > 0

    def work(self, data: bytes, units_max: int) -> int:
        self.left += len(data)
        done = min(self.left, units_max)
        self.left -= done
        self.log.append((self.name, done))
        return done

    def keep(self, data: bytes) -> None:
        self.left += len(data)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def send(self, work: int) -> None:
        self.loop.turns.arrived(self, bytes(work))


def peers(count: int) -> tuple[Loop, list[tuple[str, int]], list[Peer]]:
    loop, log = Loop(), list[tuple[str, int]]()
    return loop, log, [Peer(loop, log, str(n)) for n in range(count)]


def test_little_is_done_at_once() -> None:
    loop, log, (one, other) = peers(2)
    one.send(20)
    other.send(30)
    assert log == [("0", 20), ("1", 30)]
    assert not loop.calls


def test_a_peer_that_asks_for_much_reads_nothing_until_that_is_done() -> None:
    loop, log, (one,) = peers(1)
    one.send(10 * WORK_MAX)
    assert log == [("0", SHARE)]
    assert not one.reads
    turns = 0
    while loop.turn():
        turns += 1
        assert one.reads == (not one.left)
    assert turns >= 10
    assert one.reads
    # Case: it goes on afterwards as any other.
    one.send(5)
    assert log[-1] == ("0", 5)


def test_what_is_new_goes_before_what_has_had_a_share() -> None:
    """However much others ask for, and however many they are."""
    loop, log, (*greedy, modest) = peers(21)
    for one in greedy:
        one.send(100 * WORK_MAX)
    while len({name for name, _ in log}) < len(greedy):
        loop.turn()
    for _ in range(5):
        log.clear()
        modest.send(10)
        assert log == []  # The turn has no work left.
        loop.turn()
        assert log[0] == ("20", 10)
        assert sum(done for _, done in log) <= WORK_MAX
    # Case: the greedy ones have equal shares.
    shares = [one.left for one in greedy]
    assert max(shares) - min(shares) <= SHARE


def test_turns_that_take_long_have_less_work_and_short_ones_more() -> None:
    loop, log, (one,) = peers(1)
    one.send(1_000 * WORK_MAX)

    def work(seconds: float) -> int:
        log.clear()
        loop.turn(seconds)
        return sum(done for _, done in log)

    assert work(0.0) == WORK_MAX
    assert work(4 * TURN_S) == WORK_MAX // 4
    assert work(100.0) == WORK_MIN
    grown = [work(TURN_S / 2) for _ in range(40)]
    assert grown == sorted(grown)
    assert grown[-1] == WORK_MAX


@pytest.mark.parametrize("seed", range(10))
def test_all_work_is_done_once(seed: int) -> None:
    """And connections that end in between are forgotten."""
    dice = random.Random(seed)
    loop, log, several = peers(8)
    asked = dict.fromkeys((one.name for one in several), 0)
    gone: set[str] = set()
    for _ in range(300):
        one = dice.choice(several)
        if one.reads and one.name not in gone:
            work = dice.choice((0, 1, 10, SHARE, 3 * WORK_MAX))
            asked[one.name] += work
            one.send(work)
        elif one.name not in gone and dice.random() < 0.02:
            gone.add(one.name)
            loop.turns.forget(one)
            asked[one.name] -= one.left
        if dice.random() < 0.5:
            loop.turn(dice.choice((0.0, TURN_S, 1.0)))
    while loop.turn():
        pass
    done = dict.fromkeys(asked, 0)
    for name, work in log:
        done[name] += work
    assert done == asked
    assert all(one.reads or one.name in gone for one in several)


# Memory.


class Holds:
    def __init__(self) -> None:
        self.given_up = False

    def give_up_messages(self) -> None:
        self.given_up = True


def test_memory_that_is_short_is_taken_from_those_that_hold_some_for_longest() -> None:
    memory = HeldMemory(100)
    stuck, moving, late = Holds(), Holds(), Holds()
    memory.hold(stuck, 40)
    for _ in range(50):
        memory.hold(moving, 30)
        memory.hold(moving, 60)
        memory.hold(moving, 0)
    memory.hold(moving, 60)
    assert memory.total == 100
    memory.hold(late, 1)
    assert (stuck.given_up, moving.given_up, late.given_up) == (True, False, False)
    assert memory.total == 61
    # Case: no other can give any.
    memory.hold(moving, 0)
    memory.hold(late, 101)
    assert late.given_up
    assert memory.total == 0


def test_calls_may_send_less_ahead_while_memory_is_short() -> None:
    memory, one = HeldMemory(), Holds()
    assert memory.ahead_bytes == STREAM_BYTES
    memory.hold(one, HELD_MAX // 2)
    assert memory.ahead_bytes == FIRST_BYTES
    memory.hold(one, 0)
    assert memory.ahead_bytes == STREAM_BYTES


# Calls without a message.


class Begun:
    def __init__(self, connection: str = "") -> None:
        self.connection = connection
        self.ended: grpc.StatusCode | None = None

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        del details
        self.ended = code


async def test_calls_without_a_message_are_bounded_in_number() -> None:
    calls = [Begun(str(n % 3)) for n in range(UNFINISHED_MAX + 5)]
    watched = Unfinished(SystemClock().monotonic)
    for call in calls[:UNFINISHED_MAX]:
        watched.add(call)
    watched.discard(calls[1])
    assert watched.by_connection().total() == UNFINISHED_MAX - 1
    for call in calls[UNFINISHED_MAX:]:
        watched.add(call)
    assert [call.ended is not None for call in calls[:8]] == [
        True,
        False,
        *(3 * [True]),
        *(3 * [False]),
    ]
    assert {call.ended for call in calls} == {None, grpc.StatusCode.UNAVAILABLE}
    assert len(watched) == UNFINISHED_MAX


async def test_calls_without_a_message_are_bounded_in_time() -> None:
    time, watched = LoopTime(), Unfinished(LoopClock().monotonic)
    assert FIRST_MESSAGE_S == 10.0
    for _ in range(2):
        late, in_time = Begun(), Begun()
        watched.add(late)
        watched.add(in_time)
        watched.discard(in_time)
        time.advance(0.9 * FIRST_MESSAGE_S)
        await turns()
        assert late.ended is None
        time.advance(0.1 * FIRST_MESSAGE_S)
        await turns()
        assert late.ended is grpc.StatusCode.DEADLINE_EXCEEDED
        assert in_time.ended is None
        assert len(watched) == 0
