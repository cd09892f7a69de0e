"""Measure what NumPy saves brokers and members: ``python benchmarks/bench_arrays.py``.

Beside each function stands the fastest one in plain Python that was found, with the same result. Both take
turns. It prints the least CPU time of many rounds, in nanoseconds per message. For plans of assignments it
prints how many costs they compute: a loop of Python takes 100 ns for each at least.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np

from gazette.cluster.allocator.exchange import Exchange
from gazette.cluster.allocator.flow_network import FlowItem, FlowMember, share_bounds
from gazette.cluster.allocator.solver import Problem, solve
from gazette.message.key_hash import fnv32a_of_all
from gazette.message.uuid import build_uuid, clock_at, parse_columns

MESSAGES: Final = 1_000
ROUNDS: Final = 200
PRODUCER: Final = bytes(range(1, 7))
KEY: Final = "customer-{:06}"


def repeated(lane_bytes: int) -> int:
    """Return a number that has a one in each lane. Times a pattern, it has the pattern in each."""
    return int.from_bytes((bytes(lane_bytes - 1) + b"\1") * MESSAGES, "big")


def uuids() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the parser of UUIDs, and one that does the same by operations on one large integer."""
    begin = clock_at(1_700_000_000 * 10**9)
    raw = b"".join(build_uuid(PRODUCER, begin + 160 * at, 1) for at in range(MESSAGES))
    lanes = repeated(16)
    high, middle, low, sequence = (
        (((1 << (end - at)) - 1) << at) * lanes for at, end in ((52, 64), (36, 52), (4, 36), (0, 4))
    )
    flags, producers = (0x3FF << 48) * lanes, ((1 << 48) - 1) * lanes
    form, ours = ((0xF << 76) | (3 << 62)) * lanes, ((1 << 76) | (2 << 62)) * lanes
    producer = int.from_bytes(PRODUCER, "big") * lanes

    def plain() -> list[int]:
        x = int.from_bytes(raw, "big")
        assert x & form == ours
        assert x & producers == producer
        assert x & flags == (1 << 48) * lanes
        clocks = (x >> 12 & high) | (x >> 44 & middle) | (x >> 92 & low) | (x >> 58 & sequence)
        found = memoryview(clocks.to_bytes(16 * MESSAGES, "little")).cast("Q")
        return found[::2].tolist()[::-1]

    assert plain() == parse_columns(raw).clocks
    return partial(parse_columns, raw), plain


def lines(size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the search for the ends of lines, with the check that each is one object, in both forms."""
    text = b"".join(
        b'{"uuid":"%036d","w":"%s"}\n' % (at, b"x" * (size - 56)) for at in range(MESSAGES)
    )

    def arrays() -> list[int]:
        symbols = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero(symbols == ord("\n"))
        inner = ends[:-1]
        assert (symbols[inner - 1] == ord("}")).all()
        assert (symbols[inner + 1] == ord("{")).all()
        return (ends + 1).tolist()

    def plain() -> list[int]:
        assert text.count(b"}\n{") == MESSAGES - 1
        return list(accumulate(map(len, io.BytesIO(text).readlines())))

    assert arrays() == plain()
    return arrays, plain


def hashes() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the hash of keys of one length, and one by operations on one large integer."""
    numbers = random.Random(7)
    keys = [KEY.format(numbers.randrange(10**6)) for _ in range(MESSAGES)]
    width = len(keys[0])
    lanes = repeated(8)
    begin, low = 0x811C9DC5 * lanes, 0xFFFFFFFF * lanes

    def plain() -> list[int]:
        data, found = "".join(keys).encode(), begin
        for at in range(width):
            column = bytearray(8 * MESSAGES)
            column[::8] = data[at::width]
            found = ((found ^ int.from_bytes(column, "little")) * 0x01000193) & low
        return memoryview(found.to_bytes(8 * MESSAGES, "little")).cast("Q").tolist()

    assert plain() == fnv32a_of_all(keys).tolist()
    return partial(fnv32a_of_all, keys), plain


def compare(name: str, functions: tuple[Callable[[], Any], Callable[[], Any]]) -> None:
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for at, function in enumerate(functions):
            begin = time.process_time_ns()
            function()
            best[at] = min(best[at], time.process_time_ns() - begin)
    arrays, plain = (one / MESSAGES for one in best)
    print(f"{name}: {arrays:.0f} ns with NumPy, {plain:.0f} ns without")


class Counted(Exchange):
    """An exchange that counts the costs it computes."""

    costs = 0

    def _move_costs(self, *args: Any) -> Any:
        return self._count(super()._move_costs(*args))

    def _serve_costs(self, *args: Any) -> Any:
        return self._count(super()._serve_costs(*args))

    def _count(self, found: Any) -> Any:
        type(self).costs += found.size
        return found


def plan(members: int, items: int) -> None:
    network = tuple(FlowMember(at % 3, 10 * items // members) for at in range(members))
    wanted = tuple(FlowItem(3) for _ in range(items))
    begin = time.process_time()
    solve(Problem(network, wanted))
    seconds = time.process_time() - begin
    capacity = sum(member.limit for member in network)
    bounds = [share_bounds(member.limit, 3 * items, capacity) for member in network]
    exchange = Counted(network, wanted, bounds, [() for _ in wanted], ranked=False)
    exchange.improve()
    print(f"plan of {items} journals on {members} brokers: {seconds:.2f} s, {Counted.costs} costs")
    Counted.costs = 0


if __name__ == "__main__":
    compare("UUIDs", uuids())
    compare("lines of 100 bytes", lines(100))
    compare("lines of 200 bytes", lines(200))
    compare("hashes of 15 bytes", hashes())
    plan(20, 10_000)
    plan(100, 10_000)
