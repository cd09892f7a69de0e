"""``gazette chaos``: one seeded run, from an empty directory to a verdict."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gazette.client.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.reader import OffsetJump, ReadParams
from gazette.clock import Clock, SystemClock
from gazette.config import Schema, duration, exit_with, setting
from gazette.dev.chaos.checker import Verdict, Violation, check
from gazette.dev.chaos.cluster import STORE, ChaosCluster, ChaosSettings
from gazette.dev.chaos.driver import SETTLE_S, Driver, rolling_restarts
from gazette.dev.chaos.history import FaultEvent, Replicas, decode
from gazette.dev.chaos.history import Final as FinalEvent
from gazette.dev.chaos.payload import digest
from gazette.dev.chaos.recorder import Recorder
from gazette.dev.chaos.report import outages, table
from gazette.dev.chaos.store import read_store
from gazette.dev.chaos.workload import ATTEMPT_TIMEOUT_S, Workload, WorkloadSettings
from gazette.dev.heads import write_head
from gazette.errors import GazetteError, Invalid, Unavailable
from gazette.protocol import duration as durations
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.tasks import TaskScope

STYLES: Final = ("plain", "registers", "offsets")
_CODECS: Final = {"plain": Codec.SNAPPY, "registers": Codec.GZIP, "offsets": Codec.ZSTANDARD}
_FRAGMENT_BYTES: Final = 1 << 20
HISTORY: Final = "history.ndjson"


@dataclass(frozen=True, slots=True)
class ChaosFlags:
    """Flags of ``gazette chaos``."""

    minutes: float = setting(20.0, "how long to break things")
    seed: int = setting(1, "of everything that is left to chance")
    replication: str = setting("2,3", "replication of the journals, one or several: 3, or 2,3")
    brokers: int = setting(3, "how many brokers to run, over two zones")
    lease: float = duration("10s", "how long etcd waits for a broker that does not answer")
    rate: float = setting(4.0, "appends per second of each appender")
    restarts: int = setting(0, "break nothing, but restart each broker in turn, so many times over")
    dir: Path | None = setting(None, "an empty directory for all state; it is kept")


def run(argv: Sequence[str]) -> int:
    """The subcommand. Exit codes: 0 no violation; 1 violations, or something else broke; 2 a mistake in
    the flags."""
    schema = Schema(
        "gazette chaos",
        {"": ChaosFlags},
        description="Break a cluster under load, and check every byte and register of what came of it.",
    )
    try:
        flags = schema.load(argv, {}).group(ChaosFlags)
        replications = _replications(flags)
    except Invalid as error:
        return exit_with(error, sys.stderr)
    try:
        with _directory(flags) as directory:
            trial = Trial(flags, replications, directory, SystemClock(), _print)
            return 0 if asyncio.run(_run(trial)).ok else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except GazetteError as error:
        print(f"gazette chaos: {error}\n  {error.hint}", file=sys.stderr)
        return 1


def _replications(flags: ChaosFlags) -> list[int]:
    if flags.brokers < 1:
        raise Invalid(f"invalid brokers ({flags.brokers}; expected 1 or more)", path="--brokers")
    if flags.minutes <= 0:
        raise Invalid(f"invalid minutes ({flags.minutes:g}; expected > 0)", path="--minutes")
    if flags.rate <= 0:
        raise Invalid(f"invalid rate ({flags.rate:g}; expected > 0)", path="--rate")
    if flags.lease < 2:
        raise Invalid(f"invalid lease ({flags.lease:g} s; expected 2 s or more)", path="--lease")
    if flags.restarts < 0:
        raise Invalid(f"invalid restarts ({flags.restarts}; expected >= 0)", path="--restarts")
    if flags.dir is not None and flags.dir.is_dir() and any(flags.dir.iterdir()):
        raise Invalid(f"{flags.dir} is not empty", path="--dir")
    spare = 1 if flags.restarts else 0
    replications = []
    for text in flags.replication.split(","):
        if not text.strip().isdigit() or not 1 <= int(text) <= flags.brokers - spare:
            raise Invalid(
                f'invalid replication "{text}" (expected 1 to {flags.brokers - spare})',
                path="--replication",
                hint="While one broker restarts, the others must have room for all replicas."
                if spare
                else None,
            )
        replications.append(int(text))
    return replications


@contextmanager
def _directory(flags: ChaosFlags) -> Iterator[Path]:
    if flags.dir is not None:
        flags.dir.mkdir(parents=True, exist_ok=True)
        yield flags.dir
        return
    with tempfile.TemporaryDirectory(prefix="gazette-chaos-") as directory:
        yield Path(directory)


def _print(text: str) -> None:
    print(text, flush=True)


async def _run(trial: Trial) -> Verdict:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    return await trial.run()


class Trial:
    """One run. ``say`` is told of its progress."""

    def __init__(
        self,
        flags: ChaosFlags,
        replications: Sequence[int],
        directory: Path,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._flags = flags
        self._clock = clock
        self._directory = directory
        self._specs = [
            _spec(f"chaos/r{replication}/{style}", replication, style)
            for replication in replications
            for style in STYLES
        ]
        settings = ChaosSettings(
            directory, brokers=flags.brokers, zones=min(2, flags.brokers), lease_ttl_s=flags.lease
        )
        if flags.restarts:
            # Clients have the same few cores as everybody: that one gets none for a second is its bad
            # luck, and no failure of a restart.
            settings = replace(settings, min_append_rate=0)
        self.cluster = ChaosCluster(settings, clock)
        self.recorder = Recorder(directory / HISTORY, clock)
        self._told = say
        self._assigned: dict[str, int] = {}
        self._wrong: list[Violation] = []

    def _say(self, text: str) -> None:
        counts = self.recorder.counts
        self._told(
            f"[{self.recorder.time:7.1f} s] {counts['ok']} appends acknowledged,"
            f" {counts['fail']} refused, {counts['unknown']} unknown, {counts['Read']} reads"
            f" | {text}"
        )

    @property
    def journals(self) -> list[str]:
        return [spec.name for spec in self._specs]

    async def run(self) -> Verdict:
        """Raises ``Unavailable`` if the cluster did not recover."""
        flags = self._flags
        what = (
            f"{flags.restarts} rounds of restarts" if flags.restarts else f"{flags.minutes:g} min"
        )
        self._told(f"gazette chaos: seed {flags.seed}, {what}, in {self._directory}")
        driver: Driver | None = None
        try:
            await self.cluster.start()
            driver = Driver(self.cluster, self.recorder, flags.seed, say=self._say)
            await self._create()
            async with TaskScope("chaos") as scope:
                scope.daemon(self.cluster.watch(), name="watch")
                await self.cluster.until("assignment", self.cluster.has_replicas, SETTLE_S)
                self.cluster.key_space.observers.append(self._observe)
                await self._load(driver)
                self.cluster.key_space.observers.remove(self._observe)
                self._say("everything is mended; reading all of it")
                contents = await self._finals()
                scope.cancel()
            await driver.close()
            await self.cluster.stop()
        except BaseException:
            if driver is not None:
                await asyncio.shield(driver.heal())
            await asyncio.shield(self.cluster.stop())
            raise
        finally:
            self.recorder.close()
        return self._judge(contents)

    async def _create(self) -> None:
        async with self.cluster.client() as client:
            await client.apply_journals([JournalChange(upsert=spec) for spec in self._specs])

    async def _load(self, driver: Driver) -> None:
        """Append and read while things break, and until all of them are whole again."""
        flags = self._flags
        patient = flags.restarts > 0
        settings = WorkloadSettings(rate=flags.rate, patient=patient)
        workload = Workload(self.cluster, self.recorder, settings, flags.seed)
        async with TaskScope("workload") as load:
            workload.start(load, self.journals)
            if flags.restarts:
                await rolling_restarts(self.cluster, self.recorder, flags.restarts, say=self._say)
            else:
                await self._break(driver, flags.minutes * 60)
            workload.stopping.set()
            deadline = self._clock.monotonic() + ATTEMPT_TIMEOUT_S
            while workload.appending and self._clock.monotonic() < deadline:
                await self._clock.sleep(0.1)
            # Readers wait for more, which will not come.
            load.cancel()
        await workload.close()
        await self._recovered()

    async def _break(self, driver: Driver, seconds: float) -> None:
        async with TaskScope("faults") as scope:
            lanes = [
                scope.spawn(driver.processes(), name="processes"),
                scope.spawn(driver.surroundings(), name="surroundings"),
            ]
            await asyncio.wait(lanes, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            scope.cancel()
        await driver.heal()
        await driver.settle()

    async def _recovered(self) -> None:
        """Every journal takes appends, and all that was acknowledged is known."""
        async with self.cluster.client() as client, asyncio.timeout(SETTLE_S):
            for journal in self.journals:
                await client.append(AppendParams(journal))

    def _observe(self) -> None:
        """Write down when a journal's number of replicas changes."""
        now = self.recorder.time
        for spec in self._specs:
            route, consistent = self.cluster.route(spec.name)
            assigned = len(route.members)
            if self._assigned.get(spec.name) != assigned:
                self._assigned[spec.name] = assigned
                revision = self.cluster.key_space.header.revision
                self.recorder.record(
                    Replicas(now, spec.name, revision, assigned, spec.replication, consistent)
                )

    # The end.

    async def _finals(self) -> dict[str, bytes]:
        """What every broker has of every journal, and then, all brokers having left, the store."""
        contents: dict[str, bytes] = {}
        for broker in self.cluster.brokers:
            async with self.cluster.client(broker.url, routes=False) as client:
                for journal in self.journals:
                    held = await _read_all(client, journal)
                    self._record_final(broker.name, journal, held)
                    contents.setdefault(journal, held)
        killed = await self.cluster.stop_brokers()
        if killed:
            raise Unavailable(f"{', '.join(killed)} did not end by themselves")
        for journal in self.journals:
            held, wrong = await asyncio.to_thread(
                read_store, self.cluster.file_root / STORE, journal
            )
            self._record_final("fragments", journal, held)
            self._wrong += [Violation("source", journal, text) for text in wrong]
        return contents

    def _record_final(self, source: str, journal: str, held: bytes) -> None:
        self.recorder.record(FinalEvent(source, journal, len(held), digest(held)))

    def _judge(self, contents: Mapping[str, bytes]) -> Verdict:
        with (self._directory / HISTORY).open("rb") as lines:
            events = list(decode(lines))
        verdict = check(events, contents, restarts_only=self._flags.restarts > 0)
        verdict.violations += self._wrong
        faults = [event for event in events if isinstance(event, FaultEvent)]
        found = outages(faults, self.recorder.acknowledged)
        self._told(table(verdict, found, self.recorder.time))
        return verdict


def _spec(name: str, replication: int, style: str) -> JournalSpec:
    fragment = FragmentSpec(
        length=_FRAGMENT_BYTES,
        codec=_CODECS[style],
        stores=(f"file:///{STORE}/",),
        refresh_interval_ns=4 * durations.SECOND,
        flush_interval_ns=2 * durations.MINUTE,
    )
    return JournalSpec(name, replication, fragment=fragment)


async def _read_all(client: Client, journal: str) -> bytes:
    """A journal from offset 0 to its present head; zeros where there is nothing."""
    async with asyncio.timeout(SETTLE_S):
        end = await write_head(client, journal)
        content = bytearray()
        async with client.retry_reader(ReadParams(journal, end_offset=end, block=True)) as reader:
            while len(content) < end:
                try:
                    content += await reader.read()
                except OffsetJump as jump:
                    content += bytes(jump.offset - len(content))
        return bytes(content)
