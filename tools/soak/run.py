"""``gazette soak``: the command, and one run of it."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import itertools
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from gazette.config.schema import Schema, duration, exit_with, setting
from gazette.errors import GazetteError, Invalid, Unavailable
from gazette.run.dev.word_count import import_examples
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.tasks import TaskScope
from tools.chaos.cluster import ChaosSettings
from tools.soak.cluster import SoakCluster, SoakSettings
from tools.soak.database import new_database
from tools.soak.driver import Driver
from tools.soak.faults import KINDS
from tools.soak.report import Report

STORES: Final = ("sqlite", "rocksdb", "json", "sql")
WORKERS_PER_SHARD: Final = 2
KEPT: Final = 4096
"""Greatest number of finished streams of a journal that are remembered."""
DRAIN_S: Final = 180.0
LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class SoakFlags:
    """Flags of ``gazette soak``."""

    minutes: float = setting(5.0, "minutes for which things break")
    seed: int = setting(0, "random seed of faults and load; 0 picks one and prints it")
    stores: str = setting(",".join(STORES), "stores of the shards, one shard each")
    database: str = setting(
        "auto",
        "database of the store sql: a PostgreSQL server, or a file",
        choices=("auto", "postgres", "sqlite"),
    )
    brokers: int = setting(3, "number of brokers")
    members: int = setting(3, "number of members")
    lease: float = duration("15s", "time to live of the leases of processes")
    sla: float = duration("120s", "time within which every sum must be there, during any fault")
    scenarios: str = setting("", "names of the faults to use; empty: all")
    dir: Path | None = setting(
        None,
        "directory of state, logs and history (default: a temporary one, kept after a violation)",
    )
    json: bool = setting(False, "print one JSON object instead of progress")


def run(argv: Sequence[str]) -> int:
    """Run the subcommand. Return its exit code.

    0 means no violation; 1 violations, or a run that could not end; 2 a mistake in the flags.
    """
    schema = Schema("gazette soak", {"": SoakFlags})
    try:
        flags = schema.load(argv, {}).group(SoakFlags)
        settings = _settings(flags)
        import_examples()
        # Import it now. Later the import would stop the event loop, which forwards renewals of leases.
        importlib.import_module("stream_sum.load")
        if flags.dir is not None:
            flags.dir.mkdir(parents=True, exist_ok=True)
            return asyncio.run(Soak(flags, settings, flags.dir, SystemClock()).run())
        made = Path(tempfile.mkdtemp(prefix="gazette-soak-"))
        code = asyncio.run(Soak(flags, settings, made, SystemClock()).run())
        if code != 1:  # After a violation, the files are needed.
            shutil.rmtree(made, ignore_errors=True)
        return code
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except KeyboardInterrupt:
        return 130
    except GazetteError as error:
        print(f"gazette soak: {error}\n  {error.hint}", file=sys.stderr)
        return 1


def _settings(flags: SoakFlags) -> SoakSettings:
    stores = tuple(filter(None, flags.stores.split(",")))
    for store in stores:
        if store not in STORES:
            raise Invalid(
                f"unknown store {store!r}", path="--stores", hint=f"Known are {', '.join(STORES)}."
            )
    if not stores:
        raise Invalid("a store is needed", path="--stores")
    if flags.minutes <= 0:
        raise Invalid(f"{flags.minutes:g} minutes (expected more than 0)", path="--minutes")
    if flags.brokers < 2:
        raise Invalid(f"{flags.brokers} brokers (expected 2 or more)", path="--brokers")
    if flags.members < 1:
        raise Invalid(f"{flags.members} members (expected 1 or more)", path="--members")
    for kind in scenarios_of(flags):
        if kind not in KINDS:
            raise Invalid(
                f"unknown scenario {kind!r}",
                path="--scenarios",
                hint=f"Known are {', '.join(KINDS)}.",
            )
    return SoakSettings(stores=stores, members=flags.members)


def scenarios_of(flags: SoakFlags) -> tuple[str, ...]:
    return tuple(filter(None, flags.scenarios.split(",")))


class History:
    """The events of a run, one JSON object a line. ``t`` is in seconds since the beginning."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        self._file: TextIO = path.open("w")

    def note(self, event: str, **facts: Any) -> None:
        line = {"t": round(self._clock.monotonic() - self._began, 3), "event": event, **facts}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Served:
    """Times at which shards did their work, by the streams that were summed."""

    def __init__(self, journals: Sequence[str]) -> None:
        self.latencies: list[float] = []
        self._recent: defaultdict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._journals = journals

    def add(self, finished: Any) -> None:
        self.latencies.append(finished.latency_s)
        self._recent[finished.journal].append(finished)

    def served_since(self, time: float) -> float | None:
        last = 0.0
        for journal in self._journals:
            times = [one.summed_at for one in self._recent[journal] if one.began_at >= time]
            if not times:
                return None
            last = max(last, min(times))
        return last

    def longest_gap(self, begin: float, end: float) -> float:
        longest = 0.0
        for journal in self._journals:
            times = sorted(one.summed_at for one in self._recent[journal])
            inside = [time for time in times if begin < time < end]
            before = max((time for time in times if time <= begin), default=begin)
            for earlier, later in itertools.pairwise([before, *inside, end]):
                longest = max(longest, later - earlier)
        return longest


class Soak:
    """One run, in ``directory``."""

    def __init__(
        self, flags: SoakFlags, settings: SoakSettings, directory: Path, clock: Clock
    ) -> None:
        self.flags = flags
        self.seed = flags.seed or random.SystemRandom().randrange(1, 1 << 31)
        self.clock = clock
        self.database = new_database(flags.database, directory)
        chaos = ChaosSettings(directory, brokers=flags.brokers, lease_ttl_s=flags.lease)
        self.settings = settings
        self.cluster = SoakCluster(settings, chaos, self.database, clock)
        self.history = History(directory / "history.ndjson", clock)
        self.report = Report(seed=self.seed, stores=list(settings.stores), directory=str(directory))
        self.violations: list[str] = []
        self._loads: list[float] = []

    def say(self, text: str) -> None:
        if not self.flags.json:
            print(text, flush=True)

    def note(self, event: str, **facts: Any) -> None:
        self.history.note(event, **facts)
        if event == "settled":
            self.say(
                f"  {facts['kind']} {facts['target']}: lasted {facts['lasted_s']:.1f} s, a shard stood"
                f" still for {facts['service_s']:.1f} s, as before after {facts['settled_s']:.1f} s"
            )
        elif event == "heads-confirmed":
            self.say(f"    all brokers had ended: {len(facts['journals'])} heads were confirmed")
        elif event == "bad-exit":
            self.report.add_bad_exit(facts["process"], facts["code"])
            self.say(f"    {facts['process']} was asked to stop, and ended with {facts['code']}")
        elif event in ("failed", "restarted", "ended", "violation"):
            self.say(f"    {event}: {', '.join(map(str, facts.values()))[:200]}")

    async def run(self) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        # Clients of this process log many errors because of the faults: keep these in a file.
        logs = logging.FileHandler(self.cluster.directory / "soak.log", delay=True)
        logging.getLogger().addHandler(logs)
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        began = self.clock.monotonic()
        try:
            self.say(f"seed {self.seed}; state and history are in {self.cluster.directory}")
            await asyncio.to_thread(self.database.start)
            await self.cluster.start()
            async with TaskScope("soak") as scope:
                scope.daemon(self.cluster.watch(), name="watch")
                await self.cluster.start_members()
                await self._break_and_verify()
                scope.cancel()
        except asyncio.CancelledError:
            self.say("stopping …")
            return 130
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            killed = await self.cluster.stop_all()
            await asyncio.to_thread(self.database.stop)
            self.history.close()
            logging.getLogger().removeHandler(logs)
            logs.close()
        if killed:
            self._violated("end", f"{', '.join(killed)} did not end after SIGTERM")
        self.report.seconds = round(self.clock.monotonic() - began, 1)
        if self._loads:
            mean = sum(self._loads) / len(self._loads)
            loads = {"begin": self._loads[0], "mean": mean, "max": max(self._loads)}
            self.report.load = {name: round(load, 1) for name, load in loads.items()}
        self.report.violations = self.violations
        self.report.ok = not self.violations
        print(
            json.dumps(self.report.as_dict()) if self.flags.json else "\n".join(self.report.lines())
        )
        return 0 if self.report.ok else 1

    def _violated(self, kind: str, text: str) -> None:
        self.violations.append(f"{kind}: {text}")
        if not self.history._file.closed:
            self.note("violation", kind=kind, text=text)

    async def _break_and_verify(self) -> None:
        from stream_sum.load import Load, LoadSettings
        from stream_sum.verifier import Verifier

        verifier, served = Verifier(), Served(self.cluster.chunk_journals)

        def on_finished(finished: Any) -> None:
            served.add(finished)
            self.history.note(
                "summed",
                stream=finished.key.hex(),
                journal=finished.journal,
                latency_s=round(finished.latency_s, 3),
            )

        settings = LoadSettings(
            workers=WORKERS_PER_SHARD * len(self.settings.stores), pause_s=0.1, offset=0
        )
        scenarios = scenarios_of(self.flags)
        driver = Driver(
            self.cluster, served, random.Random(self.seed), self.note, scenarios=scenarios
        )
        if missing := set(scenarios) - {one.kind for one in driver.faults}:
            raise Invalid(
                f"scenarios that this machine cannot have: {', '.join(sorted(missing))}",
                path="--scenarios",
                hint="crash-database needs the store sql on PostgreSQL, store-read-only a file system that"
                " protects directories.",
            )
        async with self.cluster.client() as client:
            load = Load(
                client, verifier, self.clock, random.Random(self.seed + 1), settings, on_finished
            )
            async with TaskScope("load") as scope:
                loading = scope.spawn(_outcome(load.run()), name="load")
                breaking = scope.spawn(_outcome(driver.run()), name="faults")
                await self._watch(verifier, loading, breaking)
                breaking.cancel()
                await asyncio.wait({breaking})
                await self._put_right(driver)
                # The load must run until it is asked to stop: a load that has ended finds nothing wrong.
                ended = loading.done()
                load.stop()
                await asyncio.wait({loading}, timeout=DRAIN_S)
                if problem := load_problem(loading, ended_before=ended):
                    self._violated("load", problem)
                scope.cancel()
        await driver.close()
        verifier.finish()
        await self._check_totals(verifier)
        for violation in verifier.violations:
            self._violated(violation.kind, str(violation))
        self.report.streams, self.report.verified = load.published, verifier.verified
        self.report.transactions = sum(verifier.transactions.values())
        self.report.add_outcomes(driver.outcomes)
        if not self.violations and not (self.report.faults and verifier.verified):
            self._violated(
                "nothing", f"{self.report.faults} faults, {verifier.verified} streams verified"
            )
        self.report.add_latencies(served.latencies)

    async def _watch(
        self, verifier: Any, loading: asyncio.Task[Any], breaking: asyncio.Task[Any]
    ) -> None:
        """Watch until the time is over, or until there is a violation."""
        deadline = self.clock.monotonic() + 60.0 * self.flags.minutes
        late: set[str] = set()
        while self.clock.monotonic() < deadline:
            done, _ = await asyncio.wait({loading, breaking}, timeout=LOOK_S)
            for one in verifier.overdue(self.clock.monotonic(), self.flags.sla):
                if (stream := one.details["stream"]) not in late:
                    late.add(stream)
                    self._violated("late", str(one))
            self._loads.append(os.getloadavg()[0])
            if breaking in done:
                self._violated("stuck", text_of(breaking.result()))
            if done or verifier.violations:
                return

    async def _put_right(self, driver: Driver) -> None:
        await driver.heal()
        try:
            await driver.settle(self.clock.monotonic())
        except (GazetteError, TimeoutError) as error:
            self._violated("stuck", text_of(error))

    async def _check_totals(self, verifier: Any) -> None:
        """Require that the state of each shard is the fold of what it published."""
        from stream_sum.state import Totals

        for shard in self.cluster.shard_ids:
            try:
                verifier.check_totals(shard, Totals(**await self._totals(shard)))
            except GazetteError as error:
                self._violated("query", f"{shard}: {error}")

    async def _totals(self, shard: str) -> dict[str, int]:
        port = self.cluster.members[0].http_port
        return await asyncio.to_thread(ask, port, f"/shards/{shard}/totals")


def load_problem(loading: asyncio.Task[BaseException | None], *, ended_before: bool) -> str:
    """Return what is wrong with the end of a load that was asked to stop; empty if nothing is."""
    if not loading.done():
        return f"it did not end within {DRAIN_S:.0f} s: something is never summed, or cannot be published"
    if loading.cancelled():
        return "it was cancelled"
    if (error := loading.result()) is not None:
        return text_of(error)
    return "it ended unasked" if ended_before else ""


def text_of(error: BaseException | None) -> str:
    """Return the text of an error with its hint, which may be long."""
    hint = getattr(error, "hint", "")
    return f"{error!r}" if not isinstance(error, GazetteError) else f"{error}\n{hint}".strip()


async def _outcome(work: Any) -> BaseException | None:
    """Return the error of some work as a result."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 - it is reported as a violation
        return error
    return None


def ask(port: int, path: str) -> dict[str, int]:
    """Send one HTTP query to a member. Raise ``Unavailable`` with what went wrong."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body: Any = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"no answer: {error!r}", path=path) from error
    finally:
        connection.close()
    if response.status != 200:
        raise Unavailable(f"answered {response.status}: {body}", path=path)
    totals: dict[str, int] = body
    return totals
