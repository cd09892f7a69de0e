"""The same word count here and on four frameworks, in alternating rounds.

::

    PYTHONPATH=. python benchmarks/frameworks/compare.py --kill --into docs/appendix/performance-messages.md

Each framework gets a virtual environment of its own, from the package index. Kafka is a broker of one
process, whose jars Maven gets. Needs ``mvn`` and ``javac``; ``--java`` runs Kafka and Kafka Streams.

A rate is that of the second half of the messages, so that no start and no warming-up is in it. It ends
with the last count; for ours, it ends with the last commit, which is later. All counts are compared with
those of the messages: from what a restart would restore. ``--kill`` ends each program by SIGKILL in the
middle, starts it again, and compares the counts in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
from kafka_broker import KAFKA, broker, jars_in

from gazette.client.shards import ShardChange
from gazette.errors import GazetteError, NotYet
from gazette.labels import CONTENT_RECOVERY_LOG
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.version import __version__
from tools.bench.app import Mode, message_of
from tools.bench.cluster import Bench, BenchSettings, journal_spec, running
from tools.bench.main import place_of, write_json
from tools.bench.messages import await_primary, member, shard_spec

HERE: Final = Path(__file__).parent
TIMEOUT_S: Final = 600
PROGRAM_S: Final = 240.0
STOP_S: Final = 20.0
POLL_S: Final = 0.05
LOOK_S: Final = 2.0
MARKS: Final = 16
"""Number of times at which a program says how far it is."""
SHARE_OF_FAUST: Final = 32
"""Faust counts this fraction of the messages: it takes a millisecond for each."""
TXN_S: Final = 0.25
PAGE: Final = "benchmarks/frameworks/compare.py"
BYTEWAX: Final = ("bytewax==0.21.1", "msgspec")
QUIX: Final = ("quixstreams==3.28.1",)
FAUST: Final = ("faust-streaming[fast]==0.15.3", "uvloop")


@dataclass(frozen=True, slots=True)
class Way:
    """A framework with its settings, and what its documentation guarantees."""

    name: str
    engine: str
    mode: str
    commits: str
    state: str
    after_kill: str


SECOND: Final = "each second"
ROCKS: Final = "RocksDB, changelog topic"
AGAIN: Final = "counts since the last commit again"
ONCE: Final = "each counts once, in the state and in what is published with it"
OURS_COMMIT: Final = "when the log has the one before, at most 0.25 s"
OURS: Final = tuple(
    Way(
        f"Gazette, {callback}, R={replication}",
        f"gazette-{replication}",
        mode,
        OURS_COMMIT,
        f"SQLite, recovery log on {brokers}",
        ONCE,
    )
    for replication, brokers in ((1, "one broker"), (3, "three brokers"))
    for callback, mode in (
        ("`consume_message`", Mode.FOLD.value),
        ("`consume_messages`", Mode.FOLD_BATCH.value),
        ("`consume_table`", Mode.FOLD_TABLE.value),
    )
)
STREAMS_NAME: Final = f"Kafka Streams {KAFKA}"
WAYS: Final = (
    Way(f"{STREAMS_NAME}, at least once", "streams", "at_least_once", SECOND, ROCKS, AGAIN),
    Way(f"{STREAMS_NAME}, exactly once", "streams", "exactly_once_v2", SECOND, ROCKS, ONCE),
    Way("quixstreams 3.28.1, at least once", "quix", "at-least-once", SECOND, ROCKS, AGAIN),
    Way("quixstreams 3.28.1, exactly once", "quix", "exactly-once", SECOND, ROCKS, ONCE),
    Way(
        "Faust 0.15.3, at least once",
        "faust",
        "at_least_once",
        SECOND,
        "memory, changelog topic",
        AGAIN,
    ),
    Way(
        "Faust 0.15.3, exactly once",
        "faust",
        "exactly_once",
        SECOND,
        "memory, changelog topic",
        ONCE,
    ),
    Way("bytewax 0.21.1, no recovery", "bytewax", "none", "never", "memory", "begins again"),
    Way(
        "bytewax 0.21.1, recovery",
        "bytewax",
        "recovery",
        SECOND,
        "snapshots in SQLite on a disk that must survive",
        "state once; output since the last snapshot again",
    ),
    *OURS,
)
ENGINES: Final = ("streams", "quix", "faust", "bytewax", "gazette-1", "gazette-3")
CHANGELOGS: Final = {
    "streams": "{}-counts-changelog",
    "faust": "{}-counts-changelog",
    "quix": "changelog__{}--words--default",
}


class Failed(Exception):
    """A program that could not be measured, and why."""


@dataclass(slots=True)
class Result:
    """Rates and counts of one framework and mode, by round."""

    rates: list[float] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    killed: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """The messages as a file of lines, and their counts."""

    path: Path
    number: int
    counts: Mapping[str, int]


def words_in(path: Path, number: int) -> Words:
    """Write the first messages to a file."""
    counts: Counter[str] = Counter()
    with path.open("wb") as file:
        for index in range(number):
            message = message_of(index)
            counts[message.word] += message.count
            file.write(msgspec.json.encode(message) + b"\n")
    return Words(path, number, counts)


def verdict(seen: Mapping[str, int], expected: Mapping[str, int]) -> str:
    """Return how counts differ from those of the messages."""
    total = sum(expected.values())
    words = seen.keys() | expected.keys()
    differences = [seen.get(word, 0) - expected.get(word, 0) for word in words]
    many = sum(one for one in differences if one > 0)
    few = -sum(one for one in differences if one < 0)
    parts = [
        f"{share:.2%} too {name}" for share, name in ((many / total, "many"), (few / total, "few"))
    ]
    return ", ".join(part for part in parts if not part.startswith("0.00%")) or (
        f"{many} too many, {few} too few" if many or few else "equal"
    )


class Programs:
    """The environments, classes and jars of the frameworks, and the runs of their programs."""

    def __init__(self, root: Path, java: str) -> None:
        self.root = root
        self.java = java
        self.jars = jars_in(root)
        self.python = {
            engine: environment(root, packages)
            for engine, packages in (("bytewax", BYTEWAX), ("quix", QUIX), ("faust", FAUST))
        }
        source, path = str(HERE / "StreamsCount.java"), f"{self.jars}/*"
        checked(["javac", "--release", "17", "-cp", path, "-d", str(root / "classes"), source])

    def command(self, engine: str) -> list[str]:
        if engine == "streams":
            return [self.java, "-cp", f"{self.root / 'classes'}:{self.jars}/*", "StreamsCount"]
        return [str(self.python[engine]), str(HERE / f"{engine}_count.py")]

    def kafka(self, *arguments: str) -> str:
        """Ask Kafka, and return what it answered."""
        return checked([str(self.python["quix"]), str(HERE / "kafka_client.py"), *arguments])

    def run(
        self, way: Way, directory: Path, words: Words, address: str, *, kill: bool
    ) -> tuple[float, str]:
        """Run a program until all is counted and committed. Return its rate and how its counts are."""
        directory.mkdir()
        group = directory.name
        source = str(words.path) if way.engine == "bytewax" else address
        step, topic = str(words.number // MARKS), words.path.stem
        argv = [source, str(directory), way.mode, group, step, topic]
        if way.engine == "streams" and not kill:
            # Java compiles what runs often: it gets that time before it is measured.
            argv.append(str(words.number))
        program = Program([*self.command(way.engine), *argv], directory / "output")
        try:
            if kill:
                program.await_count(words.number // 2)
                program.kill()
                program.start()
            if way.engine == "bytewax":
                program.await_end()
                seen = json.loads((directory / "counts.json").read_text())
            else:
                ask = [str(self.python["quix"]), str(HERE / "kafka_client.py"), "wait"]
                program.await_end_of([*ask, address, group, topic])
                program.stop()
                changelog = (
                    CHANGELOGS[way.engine].format(group).replace("--words--", f"--{topic}--")
                )
                seen = json.loads(self.kafka("counts", address, changelog))
        finally:
            program.kill()
        rate = 0.0 if kill else steady(program.marks(), words.number)
        return rate, verdict(seen, words.counts)


class Program:
    """One process that prints how many messages it has counted, and when."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self.command = command
        self.output = output
        self.errors = output.with_suffix(".errors")
        self.start()

    def start(self) -> None:
        with self.output.open("ab") as output, self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=errors,
                env=clean(),
                cwd=self.output.parent,
                start_new_session=True,  # As ours: Linux shares processors among sessions.
            )

    def marks(self) -> list[tuple[int, float]]:
        """Return (messages, seconds) so far. Faust prints other lines, too."""
        rows = [line.split() for line in self.output.read_text(errors="replace").splitlines()]
        return [(int(row[0]), float(row[1])) for row in rows if len(row) == 2 and row[0].isdigit()]

    def await_count(self, number: int) -> None:
        self.until(lambda: bool(self.marks()) and self.marks()[-1][0] >= number)

    def await_end(self) -> None:
        self.until(lambda: self.process.poll() == 0)

    def await_end_of(self, command: Sequence[str]) -> None:
        """Wait for another process while this one runs."""
        with subprocess.Popen(command, stderr=subprocess.PIPE) as other:
            try:
                self.until(lambda: other.poll() is not None)
            finally:
                other.kill()
            if other.returncode:
                raise Failed(last_line(other.stderr.read() if other.stderr else b""))

    def until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.perf_counter() + PROGRAM_S
        while not is_done():
            if self.process.poll():
                raise Failed(f"ended: {last_line(self.errors.read_bytes())}")
            if time.perf_counter() > deadline:
                raise Failed(f"not done after {PROGRAM_S:.0f} s: {self.marks()[-1:]}")
            time.sleep(POLL_S)  # noqa: TID251 - waits for other processes

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def steady(marks: Sequence[tuple[int, float]], number: int) -> float:
    """Return the messages per second of the second half."""
    begin = next((mark for mark in marks if mark[0] >= number // 2), None)
    if begin is None or begin == marks[-1]:
        raise Failed("it did not say how far it was")
    end = marks[-1]
    return (end[0] - begin[0]) / (end[1] - begin[1])


async def ours(
    directory: Path, ways: Sequence[Way], words: Words, results: Mapping[str, Result], *, kill: bool
) -> None:
    """Measure our ways on one cluster, with as many brokers as replicas."""
    replication = int(ways[0].engine.removeprefix("gazette-"))
    settings = BenchSettings(directory, brokers=replication)
    async with running(settings, SystemClock()) as bench:
        source = journal_spec("bench/compare", replication=replication)
        async with bench.journals(source):
            head = await bench.fill(source.name, words.number)
            for index, way in enumerate(ways):
                try:
                    seen = await count(bench, f"count-{index}", way, head, words, kill=kill)
                except (GazetteError, TimeoutError) as error:
                    print(f"  {way.name}: not measured: {error!r}", flush=True)
                else:
                    take(results[way.name], way, *seen, kill=kill)


async def count(
    bench: Bench, name: str, way: Way, head: int, words: Words, *, kill: bool
) -> tuple[float, str]:
    """Return our rate between commits, and how the counts of the shard's store are."""
    journal, port = "bench/compare", free_port()
    spec = shard_spec(name, Mode(way.mode), journal, TXN_S)
    log = journal_spec(
        spec.recovery_log,
        replication=bench.settings.brokers,
        content_type=CONTENT_RECOVERY_LOG,
    )
    clock, upsert = bench.clock, [ShardChange(upsert=spec)]
    async with bench.journals(log):
        if kill:
            async with member(bench) as (process, shards):
                await shards.apply_shards(upsert)
                await await_primary(bench, shards, spec.id)
                stat = await shards.stat(spec.id, {journal: head // 4})
                await process.kill()
                if stat.read_through[journal] >= head:
                    raise NotYet("all was committed before the kill", hint="Count more messages.")
        async with member(bench, http_port=port) as (_, shards):
            if not kill:
                await shards.apply_shards(upsert)
            await await_primary(bench, shards, spec.id)
            begin = (await shards.stat(spec.id, {journal: head // 2})).read_through[journal]
            began = clock.monotonic()
            await shards.stat(spec.id, {journal: head})
            seconds = clock.monotonic() - began
            seen = await asyncio.to_thread(
                counts_at, f"http://127.0.0.1:{port}/shards/{name}/counts"
            )
            with suppress(GazetteError):
                await shards.apply_shards([ShardChange(delete=spec.id, expect_mod_revision=-1)])
            # End the shard's last appends before its log is deleted.
            await clock.sleep(0.2)
    rate = 0.0 if kill else (head - begin) / head * words.number / seconds
    return rate, verdict(seen, words.counts)


def counts_at(url: str) -> dict[str, int]:
    with urllib.request.urlopen(url, timeout=STOP_S) as answer:
        counts: dict[str, int] = json.load(answer)
    return counts


def take(result: Result, way: Way, rate: float, counts: str, *, kill: bool) -> None:
    """Note what a run has shown, and print it."""
    if kill:
        result.killed = counts
    else:
        result.rates.append(rate)
        result.counts.append(counts)
    print(f"  {way.name:42} {f'{rate:12,.0f} msg/s' if rate else 'killed'}  {counts}", flush=True)


def one_round(
    programs: Programs,
    directory: Path,
    ways: Sequence[Way],
    words: Mapping[str, Words],
    results: Mapping[str, Result],
    *,
    kill: bool,
) -> None:
    """Run all ways once, in this order. Only their own brokers run beside them."""
    directory.mkdir()
    kafka = [way for way in ways if way.engine in CHANGELOGS]
    for engine in dict.fromkeys(way.engine for way in ways if way.engine.startswith("gazette")):
        of_engine = [way for way in ways if way.engine == engine]
        (directory / engine).mkdir()
        asyncio.run(ours(directory / engine, of_engine, words["words"], results, kill=kill))
    home = directory / "kafka"
    home.mkdir()
    with broker(programs.jars, home, programs.java) if kafka else nullcontext("") as address:
        if kafka:
            programs.kafka("fill", address, *(str(one.path) for one in words.values()))
        for way in (*kafka, *(way for way in ways if way.engine == "bytewax")):
            mine = words["some" if way.engine == "faust" else "words"]
            state = directory / f"{way.engine}-{way.mode}".replace("_", "-")
            try:
                seen = programs.run(way, state, mine, address, kill=kill)
            except (Failed, subprocess.SubprocessError) as error:
                print(f"  {way.name}: not measured: {error}", flush=True)
                if kill:
                    results[way.name].killed = str(error)
            else:
                take(results[way.name], way, *seen, kill=kill)


def main(argv: Sequence[str]) -> int:
    """Return 0 if all were compared; 1 if some could not be, which is printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(ENGINES), help="engines, separated by commas")
    parser.add_argument(
        "--kill", action="store_true", help="kill each program once, after the rounds"
    )
    parser.add_argument("--java", default="java", help="Java that runs Kafka and Kafka Streams")
    parser.add_argument("--directory", type=Path, help="where environments are kept (temporary)")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument(
        "--into", type=Path, help="page whose table between two comments is replaced"
    )
    flags = parser.parse_args(argv)
    ways = [way for way in WAYS if way.engine in flags.only.split(",")]
    results = {way.name: Result() for way in ways}
    if flags.into is not None:
        place_of(flags.into, PAGE)
    with tempfile.TemporaryDirectory(prefix="gazette-compare-") as temporary:
        root = (flags.directory or Path(temporary)).absolute()
        root.mkdir(exist_ok=True)
        programs = Programs(root, flags.java)
        some = flags.messages // SHARE_OF_FAUST
        words = {
            "words": words_in(Path(temporary) / "words.jsonl", flags.messages),
            "some": words_in(Path(temporary) / "some.jsonl", some),
        }
        others: list[float] = []
        began = time.strftime("%Y-%m-%d at %H:%M UTC", time.gmtime())
        for number in range(flags.rounds + flags.kill):
            kill = number == flags.rounds
            others.append(busy_share())
            print(f"round {number + 1}, others use {others[-1]:.0%} of the processors", flush=True)
            shift = number % len(ways)
            in_turn = [*ways[shift:], *ways[:shift]]
            home = Path(temporary) / f"round-{number}"
            one_round(programs, home, in_turn, words, results, kill=kill)
            if flags.json is not None:
                write_json(
                    flags.json, {name: msgspec.to_builtins(one) for name, one in results.items()}
                )
        command = f"{PAGE} --messages {flags.messages} --rounds {flags.rounds}"
        facts = machine(programs, f"{command}{' --kill' * flags.kill}", began, others)
        text = table(ways, results, facts, some)
    print(text)
    if flags.into is not None:
        before, after = place_of(flags.into, PAGE)
        flags.into.write_text(f"{before}\n{text}\n{after}")
    return 0 if all(len(one.rates) == flags.rounds for one in results.values()) else 1


def table(ways: Sequence[Way], results: Mapping[str, Result], facts: str, some: int) -> str:
    """Return a table in Markdown, below what it was measured on."""
    lines = [
        facts,
        "",
        "| | msg/s, median (min–max) | counts | killed half-way | guarantee | state | commits |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in ways:
        result = results[way.name]
        rates = result.rates
        rate = (
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"
            if rates
            else "–"
        )
        counts = "; ".join(dict.fromkeys(result.counts)) or "–"
        name = f"{way.name} ({some:,} messages)" if way.engine == "faust" else way.name
        cells = (name, rate, counts, result.killed or "–", way.after_kill, way.state, way.commits)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(programs: Programs, command: str, began: str, others: Sequence[float]) -> str:
    """Return on what was measured, and how."""
    vm = subprocess.run([programs.java, "-version"], check=True, capture_output=True, text=True)
    runtime = vm.stderr.splitlines()[1].strip()
    busy = " to ".join(f"{share:.0%}" for share in sorted({min(others), max(others)}))
    return (
        f"`{command}`, {began}, on {os.cpu_count()} cores of {cpu()}.\n"
        f"Before the rounds, other programs used {busy} of the processors.\n"
        f"Python is {platform.python_version()} ({platform.python_compiler()}; {build()}) for all. Java is\n"
        f"{runtime}, for Kafka {KAFKA} and Kafka Streams. pygazette is {__version__}."
    )


def build() -> str:
    """Return how the interpreter was configured, as far as it says."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    names = ("--enable-optimizations", "--with-lto")
    said = [f"`{name}`" for name in names if name in options]
    return (
        f"configured with {' and '.join(said)}"
        if said
        else (f"its configuration names neither `{names[0]}` nor `{names[1]}`")
    )


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def busy_share() -> float:
    """Return the share of the processors that is in use while nothing of ours runs."""
    looks: list[tuple[int, int]] = []
    for _ in range(2):
        if looks:
            time.sleep(LOOK_S)  # noqa: TID251 - looks at what others do meanwhile
        ticks = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        looks.append((sum(ticks), ticks[3] + ticks[4]))
    ((all_before, idle_before), (all_after, idle_after)) = next(pairwise(looks))
    return 1 - (idle_after - idle_before) / (all_after - all_before)


def environment(root: Path, packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment that has these packages; make it if it is not there."""
    directory = root / packages[0].partition("[")[0].replace("=", "-")
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        checked([str(python), "-m", "pip", "install", "--quiet", *packages])
    return python


def checked(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, env=clean(), text=True)
    if done.returncode:
        raise Failed(f"{command[:4]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def clean() -> dict[str, str]:
    """Return our environment, without what would lead others to our packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing was said"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
