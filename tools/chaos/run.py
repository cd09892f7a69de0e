"""``gazette chaos``: one seeded run, from an empty directory to a verdict."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.config.schema import Schema, duration, exit_with, setting
from gazette.errors import GazetteError, Invalid, Unavailable
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.text import duration as durations
from gazette.run.dev.heads import write_head
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.tasks import TaskScope
from tools.chaos.checker import STORED, Verdict, check
from tools.chaos.cluster import LIVES, OTHER_STORE, STORE, ChaosCluster, ChaosSettings
from tools.chaos.driver import SETTLE_S, Driver, rolling_restarts
from tools.chaos.history import (
    Ended,
    FaultEvent,
    History,
    Replicas,
    Stopped,
    StoredOps,
)
from tools.chaos.history import Final as FinalEvent
from tools.chaos.lives import Lives
from tools.chaos.logs import defects
from tools.chaos.payload import digest
from tools.chaos.quiet import Violation
from tools.chaos.recorder import Recorder
from tools.chaos.report import outages, table, timeline
from tools.chaos.schedule import KINDS, Bounds, kinds_of, plan
from tools.chaos.store import read_store, stored_ops
from tools.chaos.workload import ATTEMPT_TIMEOUT_S, Workload, WorkloadSettings

SLOW: Final = "slow"
STYLES: Final = ("plain", "registers", "offsets")
_CODECS: Final = {
    "plain": Codec.SNAPPY,
    "registers": Codec.GZIP,
    "offsets": Codec.ZSTANDARD,
    LIVES: Codec.NONE,
    SLOW: Codec.NONE,
}
_FRAGMENT_BYTES: Final = 1 << 20
HISTORY: Final = "history.ndjson"
STORM_S: Final = 80.0
"""Seconds for which things break before a quiet time."""
STORE_S: Final = 20.0
"""Seconds after the lease of a lost broker within which others must have stored what they hold."""
SERVE_S: Final = 60.0
_READ_S: Final = 20.0
_GAP_S: Final = 1.0
EXIT_S: Final = 90.0
"""Seconds within which a broker must end when everything is whole."""


@dataclass(frozen=True, slots=True)
class ChaosFlags:
    """Flags of ``gazette chaos``."""

    minutes: float = setting(20.0, "minutes for which things break")
    seed: int = setting(1, "random seed of faults and load; printed with the verdict")
    replication: str = setting("2,3", "replication of the journals, one or several: 1, or 2,3")
    brokers: int = setting(3, "number of brokers, over two zones")
    lease: float = duration("10s", "time to live of brokers' leases")
    rate: float = setting(4.0, "appends per second of each appender")
    faults: str = setting("", "names of the faults to use, separated by commas; empty: all")
    restarts: int = setting(0, "break nothing, and restart each broker in turn this many times")
    dir: Path | None = setting(None, "empty directory for all state; it is kept")


def run(argv: Sequence[str]) -> int:
    """Run the subcommand. Exit codes: 0 no violation; 1 violations; 2 a mistake in the flags."""
    schema = Schema(
        "gazette chaos",
        {"": ChaosFlags},
        description="Break a cluster under load, several faults at a time, and check every byte, register,"
        " reader and log afterwards. Faults: " + ", ".join(KINDS) + ".",
    )
    try:
        flags = schema.load(argv, {}).group(ChaosFlags)
        replications = _replications(flags)
        kinds_of([name.strip() for name in flags.faults.split(",") if name.strip()])
    except Invalid as error:
        return exit_with(error, sys.stderr)
    directory = flags.dir or Path(tempfile.mkdtemp(prefix="gazette-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    kept = flags.dir is not None
    try:
        verdict = asyncio.run(_run(Trial(flags, replications, directory, SystemClock(), _print)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    else:
        # The files of a run with violations are needed to understand them.
        kept = kept or not verdict.ok
        return 0 if verdict.ok else 1
    finally:
        if not kept:
            shutil.rmtree(directory)


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


def _print(text: str) -> None:
    print(text, flush=True)


async def _run(trial: Trial) -> Verdict:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    return await trial.run()


class Trial:
    """One run. ``say`` gets lines about its progress."""

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
            for replication in dict.fromkeys(replications)
            for style in (*STYLES, *(() if flags.restarts else _more_styles(replication)))
        ]
        settings = ChaosSettings(
            directory, brokers=flags.brokers, zones=min(2, flags.brokers), lease_ttl_s=flags.lease
        )
        if flags.restarts:
            # Clients share the cores of all others: a pause of a second is no failure of a restart.
            settings = replace(settings, min_append_rate=0)
        self.cluster = ChaosCluster(settings, clock)
        self.recorder = Recorder(directory / HISTORY, clock)
        self._lives = Lives(self.cluster, self.recorder, self._specs)
        self._plan = plan(
            flags.seed,
            flags.minutes * 60,
            flags.brokers,
            flags.lease,
            kinds_of([name.strip() for name in flags.faults.split(",") if name.strip()]),
        )
        self._print = say
        self._assigned: dict[str, int] = {}
        self._contents: dict[str, bytes] = {}
        self._unread: set[str] = set()
        self._wrong: list[Violation] = []

    def _say(self, text: str) -> None:
        counts = self.recorder.counts
        self._print(
            f"[{self.recorder.time:7.1f} s] {counts['ok']} appends acknowledged,"
            f" {counts['fail']} refused, {counts['unknown']} unknown, {counts['Read']} reads"
            f" | {text}"
        )

    @property
    def journals(self) -> list[str]:
        return [spec.name for spec in self._specs]

    async def run(self) -> Verdict:
        """Return the verdict, also if the run could not be brought to its end: that is a violation."""
        flags = self._flags
        what = (
            f"{flags.restarts} rounds of restarts" if flags.restarts else f"{flags.minutes:g} min"
        )
        self._print(f"gazette chaos: seed {flags.seed}, {what}, in {self._directory}")
        driver: Driver | None = None
        try:
            await self.cluster.start()
            driver = self._driver()
            await self._break_and_read(driver)
        except (GazetteError, TimeoutError) as error:
            self._say(f"the run ends here: {error!r}")
            self.recorder.record(Stopped(self.recorder.time, str(error) or repr(error)))
        finally:
            await asyncio.shield(self._stop(driver))  # noqa: TID251 - a task of its own
        for broker in self.cluster.brokers:
            for logged in defects(broker.name, broker.process.log_path):
                self.recorder.record(logged)
        self.recorder.close()
        return self._judge(driver)

    def _driver(self) -> Driver:
        replication = {spec.name: spec.replication for spec in self._specs}
        floor = min((count for count in replication.values() if count > 1), default=1)
        store_s = self._flags.lease + STORE_S
        bounds = Bounds(floor, self._flags.brokers, store_s)
        return Driver(self.cluster, self.recorder, bounds, replication, self._lives, say=self._say)

    async def _break_and_read(self, driver: Driver) -> None:
        async with TaskScope("chaos") as scope:
            scope.daemon(self.cluster.watch(), name="watch")
            await self._lives.create_all()
            await self.cluster.until("assignment", self.cluster.has_replicas, SETTLE_S)
            self.cluster.key_space.observers.append(self._observe)
            await self._load(driver)
            self.cluster.key_space.observers.remove(self._observe)
            self._say("everything is mended; reading all of it")
            await self._read_from_brokers()
            scope.cancel()
        await self._end_brokers()
        await self._read_from_stores()

    async def _stop(self, driver: Driver | None) -> None:
        if driver is not None:
            await driver.close()
        await self.cluster.stop()

    async def _load(self, driver: Driver) -> None:
        """Append and read during the faults, and until every journal serves again."""
        flags = self._flags
        patient = flags.restarts > 0
        settings = WorkloadSettings(rate=flags.rate, patient=patient)
        workload = Workload(self.cluster, self.recorder, settings, flags.seed)
        async with TaskScope("workload") as load:
            workload.start(load, self.journals)
            if flags.restarts:
                await rolling_restarts(self.cluster, self.recorder, flags.restarts, say=self._say)
                await driver.quiet(self._serve_s)
            else:
                await self._break(driver, flags.minutes * 60)
            workload.stopping.set()
            deadline = self._clock.monotonic() + ATTEMPT_TIMEOUT_S
            while workload.appending and self._clock.monotonic() < deadline:
                await self._clock.sleep(0.1)
            # Readers wait for more, which will not come.
            load.cancel()
        await workload.close()

    @property
    def _serve_s(self) -> float:
        """Seconds without faults within which every journal must serve."""
        return 4 * self._flags.lease + SERVE_S

    async def _break(self, driver: Driver, seconds: float) -> None:
        async with TaskScope("faults") as scope:
            scope.daemon(driver.operate(), name="operator")
            begun, planned = self._clock.monotonic(), 0.0
            while (left := begun + seconds - self._clock.monotonic()) > 0:
                storm_s = min(STORM_S, left)
                await driver.storm(self._plan, planned, storm_s)
                planned += storm_s
                await driver.quiet(self._serve_s)
            scope.cancel()

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

    async def _read_from_brokers(self) -> None:
        for broker in self.cluster.brokers:
            async with self.cluster.client(broker.url, routes=False) as client:
                for journal in self.journals:
                    await self._read_from(broker.name, client, journal)

    async def _read_from(self, name: str, client: Client, journal: str) -> None:
        if journal in self._unread:
            return  # One broker that does not give it is enough to know.
        gaps = self.recorder.quiet.perhaps_empty(journal)
        try:
            content, holes = await _read_all(client, journal, gaps)
        except (GazetteError, TimeoutError) as error:
            text = f"{name} did not give all of {journal}: {error}"
            self.recorder.record(Stopped(self.recorder.time, text))
            self._unread.add(journal)
        else:
            self._record_final(name, journal, content, holes)
            self._contents.setdefault(journal, content)

    async def _end_brokers(self) -> None:
        """Send SIGTERM to all brokers at once, and require that each ends in good order."""
        processes = [broker.process for broker in self.cluster.brokers]
        await asyncio.gather(*(process.stop(EXIT_S) for process in processes))
        for process in processes:
            code = process.exit_code or 0
            error = process.log_tail()[-1000:] if code else ""
            self.recorder.record(Ended(self.recorder.time, process.name, code, True, error))

    async def _read_from_stores(self) -> None:
        for journal in self.journals:
            directory = self.cluster.file_root / self._lives.store_of(journal)
            stored = await asyncio.to_thread(read_store, directory, journal)
            self._record_final(STORED, journal, stored.content, stored.holes)
            # Without a broker that gave it, the store is all there is to judge by.
            self._contents.setdefault(journal, stored.content)
            self._wrong += [Violation("source", journal, text) for text in stored.wrong]

        for journal in self._lives.mortal:
            for life, name in self._lives.stores_of(journal).items():
                directory = self.cluster.file_root / name
                ops = await asyncio.to_thread(stored_ops, directory, journal)
                self.recorder.record(StoredOps(journal, life, ops))

    def _record_final(
        self, source: str, journal: str, held: bytes, holes: tuple[tuple[int, int], ...]
    ) -> None:
        self.recorder.record(FinalEvent(source, journal, len(held), digest(held), holes))

    def _judge(self, driver: Driver | None) -> Verdict:
        history = History(self._directory / HISTORY)
        verdict = check(
            history,
            self._contents,
            restarts_only=self._flags.restarts > 0,
            lease_s=self._flags.lease,
        )
        verdict.violations += self._wrong
        faults = [event for event in history if isinstance(event, FaultEvent)]
        found = outages(faults, self.recorder.acknowledged)
        self._print(table(verdict, found, self.recorder.time))
        if driver is not None and driver.held_back:
            held = ", ".join(f"{n} {kind}" for kind, n in driver.held_back.most_common())
            self._print(f"not begun, since its target was broken already: {held}")
        if not verdict.ok:
            self._print(timeline(faults))
            self._print(f"seed {self._flags.seed}; history and logs: {self._directory}")
        return verdict


def _more_styles(replication: int) -> list[str]:
    """Return styles of journals that are created again, and for a single replica also of slow appends.

    The only fence of a single replica is its lease, so try more of these. Appends are slow so that pauses of
    brokers fall into the middle of one.
    """
    if replication > 1:
        return [LIVES]
    return [LIVES, f"{LIVES}-2", f"{LIVES}-3", SLOW, f"{SLOW}-2", f"{SLOW}-3"]


def _spec(name: str, replication: int, style: str) -> JournalSpec:
    style = style.partition("-")[0]
    store = OTHER_STORE if style == "registers" else STORE
    fragment = FragmentSpec(
        length=_FRAGMENT_BYTES,
        codec=_CODECS[style],
        stores=(f"file:///{LIVES if style == LIVES else store}/",),
        refresh_interval_ns=4 * durations.SECOND,
        flush_interval_ns=2 * durations.MINUTE,
    )
    return JournalSpec(name, replication, fragment=fragment)


def end_of_gap(offset: int, end: int, begins: Iterable[int]) -> int:
    """Return the next offset behind ``offset`` at which a fragment begins, and at most ``end``.

    A gap ends at a confirmed head. Some bytes before that head may be there after all.
    """
    return min([end, *(begin for begin in begins if begin > offset)])


async def _read_all(
    client: Client, journal: str, gaps: Sequence[tuple[int, int]]
) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """Read a journal from offset 0 to its present head. Return its bytes, with zeros in holes, and the holes.
    Pass over ``gaps`` that are empty: a broker that was not lost may have filled others.
    Raise ``Unavailable`` if nothing comes for a time."""
    holes: list[tuple[int, int]] = []
    content = bytearray()

    def skip(to: int) -> None:
        holes.append((len(content), to))
        content.extend(bytes(to - len(content)))

    async with asyncio.timeout(_READ_S):
        end = await write_head(client, journal)
    if not end:
        return b"", ()
    async with client.retry_reader(ReadParams(journal, end_offset=end, block=True)) as reader:
        while len(content) < end:
            at = len(content)
            gap = next((one for one in gaps if one[0] <= at < one[1]), None)
            try:
                async with asyncio.timeout(_READ_S if gap is None else _GAP_S):
                    content += await reader.read()
            except OffsetJump as jump:
                skip(jump.offset)
            except TimeoutError:
                if gap is None:
                    raise Unavailable(
                        f"nothing came from offset {at} for {_READ_S:.0f} s, and the head is {end}"
                    ) from None
                listed = await client.list_fragments(FragmentsParams(journal))
                skip(end_of_gap(at, gap[1], [one.fragment.begin for one in listed]))
                reader.seek(len(content))
    return bytes(content), tuple(holes)
