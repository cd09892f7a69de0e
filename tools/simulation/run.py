"""Runs seeds, in this process or in several, and reports the violations of each."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final, TypeVar

from tools.simulation import consumer_plants, plants
from tools.simulation.checker import check
from tools.simulation.consumer_scenario import ConsumerScenario
from tools.simulation.coverage import PROBES, Coverage
from tools.simulation.other_version import OtherVersion
from tools.simulation.scenario import Scenario
from tools.simulation.steady_check import CHECK

T = TypeVar("T")

_HUNG_S: Final = 300.0
"""Seconds of real time after which a seed counts as hung. Most take a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    consumers: bool
    violations: tuple[str, ...]
    digest: int
    virtual_s: float
    steps: int
    appends: int
    """Number of appends of writers; with consumers, of the messages that writers published."""
    acknowledged: int
    """Number of these appends that were acknowledged; with consumers, of messages that were committed."""
    trace: tuple[tuple[float, str, str], ...] = ()


def run_seed(
    seed: int,
    *,
    trace: bool = False,
    consumers: bool = False,
    timers: bool = False,
    other: OtherVersion | None = None,
) -> Outcome:
    """Simulate one seed: brokers and their clients.

    With ``consumers``, also simulate members of an application. With ``timers``, that application publishes
    by timers. With ``other``, about half of the processes are of that version.

    The same seed gives the same outcome in any process of this code. Garbage is not collected. So a process
    should simulate a few seeds, and end.
    """
    gc.disable()
    if consumers or timers:
        return _run_consumers(seed, trace=trace, timers=timers, other=other)
    return _run(seed, trace=trace, other=other)


def _run(seed: int, *, trace: bool, other: OtherVersion | None) -> Outcome:
    scenario = Scenario(seed, trace=trace, other=other)
    world = scenario.world
    PROBES.begin(world.history, world.loop.time)
    CHECK.begin(world.history.violations)
    scenario.run()
    world.close()
    violations = check(world.history)
    appends = world.history.appends
    return Outcome(
        seed,
        False,
        tuple(violations),
        world.loop.digest & 0xFFFF_FFFF_FFFF_FFFF,
        world.loop.now,
        world.loop.steps,
        len(appends),
        sum(append.acknowledged for append in appends),
        tuple(world.trace or ()),
    )


def _run_consumers(seed: int, *, trace: bool, timers: bool, other: OtherVersion | None) -> Outcome:
    scenario = ConsumerScenario(seed, trace=trace, timers=timers, other=other)
    world = scenario.world
    PROBES.begin(world.history, world.loop.time)
    CHECK.begin(world.history.violations)
    try:
        scenario.run()
    finally:
        world.close()
    return Outcome(
        seed,
        True,
        tuple(world.history.violations),
        world.loop.digest & 0xFFFF_FFFF_FFFF_FFFF,
        world.loop.now,
        world.loop.steps,
        scenario.numbers,
        scenario.committed,
        tuple(world.trace or ()),
    )


def quiet() -> None:
    """Silence logs: what matters is in the history."""
    logging.disable(logging.CRITICAL)


@contextmanager
def watched(seed: int, hung_s: float = _HUNG_S) -> Iterator[None]:
    """End this process if a seed takes longer than ``hung_s``. First print the stacks of its threads."""
    timer = threading.Timer(hung_s, _end_hung, (seed, hung_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_hung(seed: int, hung_s: float) -> None:
    sys.stderr.write(f"seed {seed} has not ended after {hung_s:g} s, and hangs here:\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def report(outcome: Outcome) -> str:
    """Return the trace of a seed, and what it violated."""
    lines = [f"{when:10.4f}  {node:8}  {what}" for when, node, what in outcome.trace]
    lines += [f"seed {outcome.seed}: {one}" for one in outcome.violations]
    return "\n".join(lines)


def plants_of(consumers: bool, timers: bool = False) -> Mapping[str, Callable[[], object]]:
    """Return the defects that a simulation can plant, by name: of brokers, of consumers, or of timers."""
    if timers:
        return consumer_plants.TIMER_PLANTS
    return consumer_plants.PLANTS if consumers else plants.PLANTS


@dataclass(frozen=True, slots=True)
class Slice:
    """Seeds that were simulated one after the other."""

    failed: list[Outcome]
    """Those with violations."""
    seconds: float
    """Processor time."""
    coverage: Coverage


def simulate(
    seeds: range,
    *,
    consumers: bool = False,
    timers: bool = False,
    plant: str = "",
    keep_going: bool = True,
    other: OtherVersion | None = None,
    run: Callable[..., Outcome] | None = None,
    hung_s: float = _HUNG_S,
) -> Slice:
    """Run seeds in this process. Run seeds with violations again, for their trace.

    ``run`` simulates one seed, in at most ``hung_s`` seconds.
    ``plant`` names a defect that this process has from now on. See `tools.simulation.plants`.
    """
    quiet()
    if plant:
        plants_of(consumers, timers)[plant]()
    begun = time.process_time()
    failed: list[Outcome] = []
    run = partial(run or run_seed, consumers=consumers, timers=timers, other=other)
    for seed in seeds:
        with watched(seed, hung_s):
            if not run(seed).violations:
                continue
            failed.append(run(seed, trace=True))
        if not keep_going:
            break
    return Slice(failed, time.process_time() - begun, PROBES.take())


def in_children(calls: Iterable[Callable[[], T]], workers: int) -> Generator[T, None, None]:
    """Perform each call in a forked process of its own, ``workers`` at a time; yield results in their order.

    A fork has all modules, and its garbage ends with it. Raise RuntimeError if a process dies. If the
    generator is closed early, it kills the processes that run.
    """
    context = get_context("fork")
    waiting = deque(calls)
    running: dict[Connection, BaseProcess] = {}
    due: deque[Connection] = deque()
    results: dict[Connection, T] = {}
    try:
        while waiting or due:
            while waiting and len(running) < workers:
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_child, args=(theirs, waiting.popleft())
                )
                # A child must not finalize what its parent left as garbage: threads that a finalizer waits
                # for, such as those of grpc.aio, do not exist in it.
                gc.freeze()
                try:
                    process.start()
                finally:
                    gc.unfreeze()
                theirs.close()
                running[ours] = process
                due.append(ours)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                try:
                    results[ready] = ready.recv()
                except EOFError:
                    running[ready].join()
                    code = running[ready].exitcode
                    raise RuntimeError(f"a process of the simulation has died: {code}") from None
                running.pop(ready).join()
            while due and due[0] in results:
                yield results.pop(due.popleft())
    finally:
        for process in running.values():
            process.kill()


def _child(connection: Connection, call: Callable[[], object]) -> None:
    connection.send(call())
