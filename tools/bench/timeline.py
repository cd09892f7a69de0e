"""`gazette bench timeline`: the time of `end-to-end`, stage by stage.

Processes mark the points that they pass (`gazette.runtime.failpoints`) with the machine's monotonic
clock, which all of them share. First, messages come so slowly that each is alone. Then they come at
the rate of `end-to-end`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gazette.client.read.reader import ReadParams
from gazette.message.envelope_reader import CommittedReader
from gazette.runtime.failpoints import ENV, MARKS_ENV
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout
from tools.bench.app import BenchMessage, Mode, out_of
from tools.bench.cluster import Bench, journal_spec
from tools.bench.messages import ECHO_RATE, application, paced, shard, shard_spec
from tools.bench.report import Figure, percentile

SOURCE: Final = "bench/timeline/in"
ALONE_RATE: Final = 10
"""Messages per second, so that each is done before the next comes."""
SECONDS: Final = 4.0
OUT: Final = out_of(SOURCE)
POINTS: Final = (
    "append.begin",
    "append.applied",
    "source.read",
    "transaction.begun",
    "commit.finalized",
    "commit.enqueued",
    "ack.appended",
    "transaction.acknowledged",
)
_TIMEOUT_S: Final = 120.0


@dataclass(slots=True)
class Seen:
    """Times at which this process sent, published and received its messages, in their order.

    All are seconds of the machine's monotonic clock.
    """

    sent: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Marks:
    """Times at which a member passed the points of the code that it marks.

    Keys are a point and its detail; values are seconds of the machine's monotonic clock.
    """

    times: dict[tuple[str, str], list[float]]

    @classmethod
    def read(cls, path: Path) -> Marks:
        times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for line in path.read_text().splitlines():
            at, point, detail = line.split(" ", 2)
            times[point, detail].append(int(at) / 1e9)
        return cls(dict(times))

    def of(self, point: str, detail: str) -> list[float]:
        return self.times.get((point, detail), [])


@dataclass(frozen=True, slots=True)
class Commit:
    """Times of one transaction.

    They are its finalization, the appends of the store's commit and of its acknowledgement, and its end.
    """

    finalized: float
    log: tuple[float, float]
    acknowledgement: tuple[float, float]
    acknowledged: float


def commits_of(marks: Marks, shard_id: str, log: str) -> list[Commit]:
    """Return the completely marked transactions, in order: one ends before the next is finalized."""
    logged, out = _appends(marks, log), _appends(marks, OUT)
    ends = marks.of("transaction.acknowledged", shard_id)
    commits: list[Commit] = []
    for finalized in marks.of("commit.finalized", shard_id):
        committed = _first(logged, finalized)
        acknowledged = committed and _first(out, committed[1])
        end_at = acknowledged and bisect_left(ends, acknowledged[1])
        if committed and acknowledged and end_at is not None and end_at < len(ends):
            commits.append(Commit(finalized, committed, acknowledged, ends[end_at]))
    return commits


def _appends(marks: Marks, journal: str) -> list[tuple[float, float]]:
    """Return the times of a process's appends to a journal, as pairs of begin and end, in order.

    Appends to one journal do not overlap: so the n-th end belongs to the n-th begin.
    """
    times = zip(
        marks.of("append.begin", journal), marks.of("append.applied", journal), strict=False
    )
    return list(times)


def _first(spans: Sequence[tuple[float, float]], begin: float) -> tuple[float, float] | None:
    at = bisect_left(spans, (begin, begin))
    return spans[at] if at < len(spans) else None


def stages_of(seen: Seen, marks: Marks, commits: Sequence[Commit]) -> dict[str, list[float]]:
    """Return, by stage, the milliseconds that each message spent in it.

    Each stage begins where the former ends, except those in brackets.
    """
    stages: defaultdict[str, list[float]] = defaultdict(list)
    reads, ends = marks.of("source.read", SOURCE), [one.finalized for one in commits]
    for sent, published, received in zip(seen.sent, seen.published, seen.received, strict=False):
        read_at = bisect_left(reads, sent)
        if read_at == len(reads):
            break
        read = reads[read_at]
        commit_at = bisect_left(ends, read)
        if commit_at == len(commits):
            break
        one = commits[commit_at]
        acked = one.acknowledgement
        points = (
            ("publish, until the shard's reader has it", read, sent),
            ("(publish, until it is acknowledged)", published, sent),
            ("until its transaction is finalized", one.finalized, read),
            ("until its output is appended", one.log[0], one.finalized),
            ("append of the store's commit", one.log[1], one.log[0]),
            ("until its acknowledgement is sent", acked[0], one.log[1]),
            ("until the reader downstream has it", received, acked[0]),
            ("(append of the acknowledgement)", acked[1], acked[0]),
            ("(until the next transaction may commit)", one.acknowledged, acked[1]),
            ("in all", received, sent),
        )
        for name, end, begin in points:
            stages[name].append(1e3 * (end - begin))
    return dict(stages)


async def timeline(bench: Bench) -> list[Figure]:
    """Measure the stages of end to end, each message alone and at `ECHO_RATE`; medians in milliseconds."""
    source = journal_spec(SOURCE, replication=3)
    out = journal_spec(OUT, replication=3)
    path = bench.cluster.directory / "marks"
    environ = {ENV: ";".join(f"{point}=mark@*" for point in POINTS), MARKS_ENV: str(path)}
    figures: list[Figure] = []
    async with bench.journals(source, out), application(bench, environ) as shards:
        spec = shard_spec("timeline", Mode.ECHO, SOURCE, 1.0)
        async with shard(bench, shards, spec, replication=3):
            await _echo(bench, ECHO_RATE, 20)
            for rate in (ALONE_RATE, ECHO_RATE):
                count = max(20, int(rate * SECONDS * bench.settings.seconds))
                seen = await _echo(bench, rate, count)
                # Wait for the end of what the last messages started.
                await bench.clock.sleep(0.2)
                marks = Marks.read(path)
                commits = commits_of(marks, spec.id, spec.recovery_log)
                stages = stages_of(seen, marks, commits)
                figures += [
                    Figure("timeline", f"{rate} msg/s, {name}", "ms", (percentile(taken, 50),))
                    for name, taken in stages.items()
                ]
                during = [one for one in commits if one.finalized >= seen.sent[0]]
                per_txn = count / max(1, len(during))
                figures.append(
                    Figure("timeline", f"{rate} msg/s, messages in a transaction", "", (per_txn,))
                )
    return figures


async def _echo(bench: Bench, rate: int, count: int) -> Seen:
    """Publish at a fixed rate, and read committed until all messages have come."""
    head = await bench.write_head(OUT)
    reader = CommittedReader(bench.client, ReadParams(OUT, offset=head, block=True), BenchMessage)
    seen = Seen()
    async with bench.publisher() as (_, publisher), TaskScope("timeline") as scope:
        publishing = paced(bench, publisher, SOURCE, count, rate, seen.published.append)
        scope.spawn(publishing, name="publish")
        async with timeout(_TIMEOUT_S), aclosing(reader.batches()) as batches:
            async for batch in batches:
                now = bench.clock.monotonic()
                seen.sent += [one.message.sent / 1e9 for one in batch]
                seen.received += [now] * len(batch)
                if len(seen.sent) >= count:
                    break
    return seen
