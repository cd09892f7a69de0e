"""An event loop in a thread of its own, which other threads use while another one closes it."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from gazette.errors import Closed
from gazette.runtime.tasks import LoopThread

ROUNDS, CALLS = 300, 50


async def answer() -> int:
    return 1


def test_no_call_waits_for_ever_when_another_thread_closes_the_loop() -> None:
    for _ in range(ROUNDS):
        loop = LoopThread("loop")
        futures: list[concurrent.futures.Future[int]] = []

        def call(loop: LoopThread, futures: list[concurrent.futures.Future[int]]) -> None:
            try:
                futures.extend(loop.begin(answer()) for _ in range(CALLS))
            except Closed:
                return

        caller = threading.Thread(target=call, args=(loop, futures))
        caller.start()
        loop.close()
        caller.join()
        assert not concurrent.futures.wait(futures, 20.0).not_done


def test_a_closed_loop_says_so() -> None:
    loop = LoopThread("loop")
    assert loop.run(answer()) == 1
    loop.close()
    loop.close()
    with pytest.raises(Closed, match="the loop was closed"):
        loop.run(answer())
