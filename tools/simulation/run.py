"""Runs seeds, in this process or in several, and says what each found."""

from __future__ import annotations

import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from tools.simulation.checker import check
from tools.simulation.consumer_scenario import ConsumerScenario
from tools.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed came to."""

    seed: int
    consumers: bool
    violations: tuple[str, ...]
    digest: int
    virtual_s: float
    steps: int
    appends: int
    """Of writers; with consumers, the messages that writers published."""
    acknowledged: int
    """Of those appends; with consumers, the messages that were committed."""
    trace: tuple[tuple[float, str, str], ...] = ()


def run_seed(seed: int, *, trace: bool = False, consumers: bool = False) -> Outcome:
    """Simulate one seed: brokers and their clients, or with ``consumers`` members of an application, too.

    The same seed gives the same outcome, in any process of this code.
    """
    if gc.isenabled():
        # What is imported stays: it need not be looked through after each seed.
        gc.disable()
        gc.collect()
        gc.freeze()
    try:
        return _run_consumers(seed, trace=trace) if consumers else _run(seed, trace=trace)
    finally:
        _collect()


def _run(seed: int, *, trace: bool) -> Outcome:
    scenario = Scenario(seed, trace=trace)
    world = scenario.world
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


def _run_consumers(seed: int, *, trace: bool) -> Outcome:
    scenario = ConsumerScenario(seed, trace=trace)
    world = scenario.world
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


def _collect() -> None:
    """Close what was suspended at the end of a run. It runs its ends; nothing hears of that."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()
    sys.unraisablehook = hook


def quiet() -> None:
    """Silence logs: what matters is in the history."""
    logging.disable(logging.CRITICAL)


def report(outcome: Outcome) -> str:
    """The trace of a seed, and what it violated."""
    lines = [f"{when:10.4f}  {who:8}  {what}" for when, who, what in outcome.trace]
    lines += [f"seed {outcome.seed}: {one}" for one in outcome.violations]
    return "\n".join(lines)


def measured(run: Callable[[], None]) -> float:
    """Run it, and return the seconds of processor time that it took."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


def simulate(seeds: range, *, consumers: bool = False) -> tuple[list[Outcome], float]:
    """Run seeds in this process; those that violated something are run again for their trace."""
    quiet()
    failed: list[Outcome] = []

    def run() -> None:
        for seed in seeds:
            outcome = run_seed(seed, consumers=consumers)
            if outcome.violations:
                failed.append(run_seed(seed, trace=True, consumers=consumers))

    return failed, measured(run)
