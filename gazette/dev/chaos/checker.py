"""The judge of a run: what its history says must be in the journals, is; and nothing else. Pure.

Everything is derived from the history and the journals' bytes in the end, so that a verdict can be had
again from what a run left. The kinds of violation:

============== ============================================================================
``lost``       an acknowledged append is not at the offsets of its acknowledgement
``duplicate``  a payload is in the journal twice
``torn``       a part of a payload is there
``interleaved`` another append's bytes are within a payload
``changed``    a payload has other bytes than were appended; an acknowledgement another sum
``foreign``    bytes that nobody appended
``refused``    an append that was refused is there nevertheless
``offset``     an append at an explicit offset is elsewhere
``order``      an append that began after another was acknowledged stands before it
``register``   a check of registers that held or failed at a place where it should not
``back``       a reader was given an offset twice, or one was left out
``read``       a reader was given other bytes than the journal has
``jump``       a reader was told that bytes are missing
``source``     a broker, or the fragments, have other bytes than the others
``client``     an operation that is retried failed for its caller
``replication`` a journal had fewer replicas in etcd than its specification asks for
============== ============================================================================

The last two are judged only for runs that promise it (rolling restarts).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gazette.dev.chaos.history import (
    ClientFailed,
    Completed,
    Event,
    Final,
    HeadReset,
    Invoked,
    Jumped,
    Opened,
    Read,
    Replicas,
)
from gazette.dev.chaos.payload import Placed, digest, take_apart
from gazette.dev.chaos.registers import REGISTER_MISMATCH, Attempt, check_registers


@dataclass(frozen=True, slots=True)
class Violation:
    kind: str
    journal: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.journal}: {self.text}"


@dataclass(slots=True)
class Verdict:
    """What was wrong, and how much there was to be wrong. ``unknown`` counts attempts whose client does
    not know, ``unknown_there`` those of them that are in a journal."""

    violations: list[Violation] = field(default_factory=list)
    appends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    unknown_there: int = 0
    reads: int = 0
    read_bytes: int = 0
    content_bytes: int = 0

    @property
    def ok(self) -> bool:
        return not self.violations


def check(
    events: Iterable[Event], contents: Mapping[str, bytes], *, restarts_only: bool = False
) -> Verdict:
    """Judge a run. ``contents`` has the bytes of each journal, from offset 0, as one source had them:
    `Final` events say what others had. ``restarts_only``: nothing was broken, so that no client's
    operation may fail and no journal be without its replicas."""
    book = _Book()
    for event in events:
        book.enter(event)
    verdict = Verdict(reads=book.reads, read_bytes=book.read_bytes)
    for journal in sorted(book.journals | set(contents)):
        content = contents.get(journal, b"")
        verdict.content_bytes += len(content)
        _check_journal(verdict, journal, content, book)
    if restarts_only:
        verdict.violations += book.broken_promises
    for attempt in book.attempts.values():
        verdict.appends[attempt.outcome] += 1
        if attempt.outcome == "fail" and attempt.completed is not None:
            verdict.refusals[attempt.completed.status] += 1
    return verdict


class _Book:
    """The history, by what is asked of it."""

    def __init__(self) -> None:
        self.journals: set[str] = set()
        self.attempts: dict[tuple[int, int], Attempt] = {}
        self.lengths: dict[str, dict[int, int]] = defaultdict(dict)
        self.by_op: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.finals: dict[str, list[Final]] = defaultdict(list)
        self.spans: dict[str, dict[tuple[int, int, str], str]] = defaultdict(dict)
        """Of what was read: the reader who was the first."""
        self.reader_violations: list[Violation] = []
        self.broken_promises: list[Violation] = []
        self.reads = self.read_bytes = 0
        self.resets: dict[str, list[int]] = defaultdict(list)
        self._readers: dict[tuple[str, str], int] = {}

    def enter(self, event: Event) -> None:
        match event:
            case Invoked():
                key = (event.op, event.attempt)
                self.journals.add(event.journal)
                self.attempts[key] = Attempt(event, None)
                self.by_op[event.op].append(key)
                self.lengths[event.journal][event.op] = event.length
            case Completed():
                key = (event.op, event.attempt)
                self.attempts[key] = Attempt(self.attempts[key].invoked, event)
            case Opened():
                self._readers[event.reader, event.journal] = event.offset
            case Read():
                self._enter_read(event)
            case Jumped():
                self._move(event.reader, event.journal, event.begin, event.end)
                self._complain(event.journal, "jump", event, "was told that nothing is there")
            case HeadReset():
                self.resets[event.journal].append(event.offset)
            case Final():
                self.finals[event.journal].append(event)
            case ClientFailed():
                text = f"{event.client} at {event.time:.1f} s: {event.error}"
                self.broken_promises.append(Violation("client", "", text))
            case Replicas() if event.assigned < event.wanted:
                text = f"{event.assigned} of {event.wanted} at revision {event.revision}"
                self.broken_promises.append(Violation("replication", event.journal, text))

    def _enter_read(self, event: Read) -> None:
        self.reads += 1
        self.read_bytes += event.end - event.begin
        at = self._readers.get((event.reader, event.journal))
        if at != event.begin:
            self._complain(event.journal, "back", event, f"was at {at}")
        self._move(event.reader, event.journal, event.begin, event.end)
        span = (event.begin, event.end, event.sum)
        self.spans[event.journal].setdefault(span, event.reader)

    def _move(self, reader: str, journal: str, begin: int, end: int) -> None:
        del begin
        self._readers[reader, journal] = end

    def _complain(self, journal: str, kind: str, event: Read | Jumped, text: str) -> None:
        text = f"{event.reader} got [{event.begin}, {event.end}) at {event.time:.1f} s and {text}"
        self.reader_violations.append(Violation(kind, journal, text))


def _check_journal(verdict: Verdict, journal: str, content: bytes, book: _Book) -> None:
    def say(kind: str, texts: Iterable[str]) -> None:
        verdict.violations += [Violation(kind, journal, text) for text in texts]

    placed, damages = take_apart(content, book.lengths[journal])
    for damage in damages:
        say(damage.kind, [f"op {damage.op} at {damage.offset}"])
    places: dict[int, list[Placed]] = defaultdict(list)
    for one in placed:
        places[one.op].append(one)
    for op, found in places.items():
        if len(found) > 1:
            say("duplicate", [f"op {op} is at {', '.join(str(one.begin) for one in found)}"])
    attempts = [one for one in book.attempts.values() if one.invoked.journal == journal]
    say("lost", _lost(attempts, places, len(content)))
    say("changed", _wrong_sums(attempts, content))
    log = _order(placed, book)
    say("refused", _refused(places, book))
    say("offset", _wrong_offsets(places, book))
    say("order", _wrong_order(log, placed))
    refused = [
        one
        for one in attempts
        if one.completed is not None and one.completed.status == REGISTER_MISMATCH
    ]
    resets = book.resets[journal]
    gone = frozenset(bisect_left([one.begin for one in placed], offset) for offset in resets)
    say("register", check_registers(log, refused, gone))
    say("read", _wrong_reads(book.spans[journal], content))
    verdict.violations += [one for one in book.reader_violations if one.journal == journal]
    say("source", _wrong_sources(book.finals[journal], content))
    verdict.unknown_there += sum(one.outcome == "unknown" for one in log)


def _acknowledged(attempts: Iterable[Attempt]) -> Iterator[tuple[Invoked, Completed]]:
    for attempt in attempts:
        if attempt.outcome == "ok" and attempt.completed is not None:
            yield attempt.invoked, attempt.completed


def _lost(
    attempts: Sequence[Attempt], places: Mapping[int, Sequence[Placed]], length: int
) -> Iterator[str]:
    for invoked, completed in _acknowledged(attempts):
        begins = [one.begin for one in places.get(invoked.op, ())]
        if completed.begin in begins and completed.end - completed.begin == invoked.length:
            continue
        where = f"is at {begins[0]}" if begins else f"is not in the journal of {length} bytes"
        yield f"op {invoked.op} of {invoked.length} bytes was acknowledged as {_span(completed)}, and {where}"


def _wrong_sums(attempts: Sequence[Attempt], content: bytes) -> Iterator[str]:
    for invoked, completed in _acknowledged(attempts):
        held = content[completed.begin : completed.end]
        if len(held) == invoked.length and digest(held) != completed.sum:
            yield f"op {invoked.op}: {_span(completed)} holds other bytes than were acknowledged"


def _order(placed: Sequence[Placed], book: _Book) -> list[Attempt]:
    """For each payload of the journal the attempt that put it there, in the order of the journal."""
    log: list[Attempt] = []
    for one in placed:
        attempts = [book.attempts[key] for key in book.by_op[one.op]]
        log.append(min(attempts, key=lambda attempt: _likelihood(attempt, one)))
    return log


def _likelihood(attempt: Attempt, placed: Placed) -> int:
    """Smaller is likelier: acknowledged here, unknown, anything else."""
    completed = attempt.completed
    if attempt.outcome == "ok" and completed is not None and completed.begin == placed.begin:
        return 0
    return {"unknown": 1, "ok": 2}.get(attempt.outcome, 3)


def _refused(places: Mapping[int, Sequence[Placed]], book: _Book) -> Iterator[str]:
    for op, found in places.items():
        attempts = [book.attempts[key] for key in book.by_op[op]]
        if all(attempt.outcome == "fail" for attempt in attempts):
            status = attempts[0].completed.status if attempts[0].completed else ""
            yield f"op {op} is at {found[0].begin}, but was refused: {status}"


def _wrong_offsets(places: Mapping[int, Sequence[Placed]], book: _Book) -> Iterator[str]:
    for op, found in places.items():
        offsets = {book.attempts[key].invoked.offset for key in book.by_op[op]}
        if 0 not in offsets and found[0].begin not in offsets:
            yield f"op {op} is at {found[0].begin}, but was to be at {sorted(offsets)}"


def _wrong_order(log: Sequence[Attempt], placed: Sequence[Placed]) -> Iterator[str]:
    """Going backwards, nobody may have been acknowledged before an earlier one began."""
    earliest, whose = float("inf"), 0
    for attempt, one in zip(reversed(log), reversed(placed), strict=True):
        if attempt.invoked.time > earliest:
            yield (
                f"op {one.op} at {one.begin} began at {attempt.invoked.time:.3f} s, and op {whose}, which"
                f" stands behind it, was acknowledged at {earliest:.3f} s"
            )
        completed = attempt.completed
        if attempt.outcome == "ok" and completed is not None and completed.time < earliest:
            earliest, whose = completed.time, one.op


def _wrong_reads(spans: Mapping[tuple[int, int, str], str], content: bytes) -> Iterator[str]:
    for (begin, end, held), reader in spans.items():
        if digest(content[begin:end]) != held or end > len(content):
            yield f"{reader} was given other bytes of [{begin}, {end}) than the journal has"


def _wrong_sources(finals: Sequence[Final], content: bytes) -> Iterator[str]:
    held = digest(content)
    for final in finals:
        if (final.length, final.sum) != (len(content), held):
            yield (
                f"{final.source} has {final.length} bytes of sum {final.sum[:12]}, others"
                f" {len(content)} of {held[:12]}"
            )


def _span(completed: Completed) -> str:
    return f"[{completed.begin}, {completed.end})"
