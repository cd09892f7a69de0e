"""The commits in a recovery log: where each one is, and when it was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from gazette.client.client import Client
from gazette.errors import Corrupt
from gazette.protocol.ids import JournalName, Offset
from gazette.recoverylog.log.ops import HEADER_LENGTH, MAGIC, RecordedOp, decode_op, frame_length
from gazette.run.console.journal_reads import bounds_of, read_bytes

TAIL_BYTES: Final = 1 << 20
_PROBE_BYTES: Final = 1 << 16
_AROUND_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class LoggedCommit:
    """One append to a log: ``[begin, end)``, at a time in Unix milliseconds."""

    begin: Offset
    end: Offset
    time_ms: int
    operations: int


def operations_in(data: bytes, base: Offset) -> Iterator[RecordedOp]:
    """Yield the operations of some bytes of a log, from the first operation that begins there. No IO."""
    at = 0
    while (at := data.find(MAGIC, at)) >= 0 and at + HEADER_LENGTH <= len(data):
        length = frame_length(data, at)
        end = at + HEADER_LENGTH + (length or 0)
        if length is None or end > len(data):
            at += 1
            continue
        try:
            payload = data[at + HEADER_LENGTH : end]
            op = decode_op(payload, log="", first_offset=base + at, frame_end=base + end)
        except Corrupt:
            at += 1  # The magic word stood in the content of a file.
            continue
        yield op
        at = op.last_offset - base


def commits_in(data: bytes, base: Offset) -> list[LoggedCommit]:
    """Return the commits whose begins are in some bytes, without an incomplete last commit. No IO."""
    commits: list[LoggedCommit] = []
    for op in operations_in(data, base):
        if op.group_time:
            commits.append(LoggedCommit(op.first_offset, op.last_offset, op.group_time, 1))
        elif commits:
            last = commits[-1]
            commits[-1] = LoggedCommit(
                last.begin, op.last_offset, last.time_ms, last.operations + 1
            )
    return [commit for commit in commits if commit.end <= base + len(data)]


async def last_commits(client: Client, log: JournalName, count: int) -> dict[str, Any]:
    """Return the bounds of a log, its last commits, and the time of its first commit."""
    begin, head = await bounds_of(client, log)
    start = max(begin, head - TAIL_BYTES)
    commits = commits_in(await read_bytes(client, log, start, head), start)
    first_bytes = await read_bytes(client, log, begin, min(head, begin + TAIL_BYTES))
    first = next(iter(commits_in(first_bytes, begin)), None)
    return {
        "log": log,
        "begin": begin,
        "head": head,
        "first_ms": None if first is None else first.time_ms,
        "commits": [asdict(commit) for commit in commits[-count:]],
    }


async def commits_near(client: Client, log: JournalName, time_ms: int) -> list[LoggedCommit]:
    """Return the commits about a time. Times of a log rise with its offsets, but for clocks that differ."""
    first, head = await bounds_of(client, log)
    low, high = first, head
    while high - low > _AROUND_BYTES:
        middle = (low + high) // 2
        probe = await read_bytes(client, log, middle, min(head, middle + _PROBE_BYTES))
        commit = next(iter(commits_in(probe, middle)), None)
        if commit is not None and commit.time_ms < time_ms:
            low = middle
        else:
            high = middle
    begin, end = max(first, low - _AROUND_BYTES), min(head, high + TAIL_BYTES)
    return commits_in(await read_bytes(client, log, begin, end), begin)
