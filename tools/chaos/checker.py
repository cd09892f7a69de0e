"""The judge of a run: journals must have the bytes that its history says, and no others. Pure.

The verdict follows from the history and the final bytes of the journals. So it can be found again from the
files that a run left. The kinds of violation:

============== ============================================================================
``lost``       an acknowledged append is not at the offsets of its acknowledgement
``overwritten`` two appends were acknowledged at the same offsets
``deposed``    a broker that etcd had removed acknowledged an append
``reborn``     bytes of a journal that was deleted are in the one that was created after it
``duplicate``  a payload is in the journal twice, and was not repeated by its session
``late``       a copy of an append stands after a later append of its session
``torn``       a part of a payload is there
``interleaved`` another append's bytes are within a payload
``changed``    a payload has other bytes than were appended; an acknowledgement another sum
``foreign``    bytes that no client appended
``refused``    an append that was refused is there nevertheless
``offset``     an append at an explicit offset is elsewhere
``order``      an append that began after another was acknowledged stands before it
``register``   a check of registers that held or failed at a place where it should not
``back``       a reader was given an offset twice, or one was left out
``read``       a reader was given other bytes than the journal has
``jump``       a reader was answered that bytes are missing
``damage``     a reader was answered that data is damaged (``DATA_LOSS``)
``source``     a broker, or the fragments, have other bytes than the others, or there is a hole
``stuck``      a reader that follows the head did not get there in a quiet time
``refuses``    a journal acknowledged nothing in a quiet time
``bug``        a broker logged a defect
``ended``      a broker ended unasked, or with an error
``unfinished`` the run has no final comparison of every journal
``replication`` an append was acknowledged with fewer replicas than its journal asks for
``client``     an operation that is retried failed for its caller
============== ============================================================================

``client``, and whether journals have all replicas in etcd, are judged for rolling restarts only.
A declared loss of all replicas (`Lost`) excuses the bytes that only these replicas had, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tools.chaos.history import (
    ClientFailed,
    Completed,
    Created,
    Deposed,
    Ended,
    Event,
    FaultEvent,
    Final,
    HeadReset,
    Invoked,
    Jumped,
    Logged,
    Lost,
    Opened,
    OtherLife,
    Read,
    Replicas,
    Stopped,
    StoredOps,
)
from tools.chaos.payload import Placed, digest, payload, take_apart
from tools.chaos.quiet import QuietTimes, Violation
from tools.chaos.registers import REGISTER_MISMATCH, Attempt, check_registers

STORED = "fragments"
"""The source of a `Final` that was read from the store."""
_DELIVERY_S = 2.0
"""Seconds for which an answer may be on its way after its broker was killed."""
_HELD = " held"
"""Last word in the target of a cut that holds bytes back."""
_CREATION_S = 15.0
"""Seconds by which the record of a creation may be late."""
_STALE_S = 5.0
"""Seconds after a reset of the head in which a reader may still get bytes from before."""
_PENDING_MAX = 12
"""Greatest number of appends that may be in progress at a time."""
_DEPTH_MAX = 3
"""Greatest number of lost appends that one read may add to the lost bytes that readers were shown before."""
_DISK_FULL = "disk is full"
_LEASE_KINDS = ("pause", "etcd")
"""Faults with these words in their names may cost a broker its lease."""


@dataclass(slots=True)
class Figures:
    """Counts of one journal. ``excused``: appends lost with all replicas, as declared."""

    acknowledged: int = 0
    refused: int = 0
    unknown: int = 0
    excused: int = 0
    content_bytes: int = 0
    lives: int = 1


@dataclass(slots=True)
class Verdict:
    """The violations, and the number of operations that were checked.

    ``unknown`` counts attempts whose client does not know the outcome. ``unknown_there`` counts those of them
    that are in a journal.
    """

    violations: list[Violation] = field(default_factory=list)
    appends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    journals: dict[str, Figures] = field(default_factory=lambda: defaultdict(Figures))
    unknown_there: int = 0
    reads: int = 0
    read_bytes: int = 0
    content_bytes: int = 0

    @property
    def ok(self) -> bool:
        return not self.violations


def check(
    events: Iterable[Event],
    contents: Mapping[str, bytes],
    *,
    restarts_only: bool = False,
    lease_s: float = 10.0,
) -> Verdict:
    """Judge a run. ``events`` are iterated twice.

    ``contents`` has the bytes of each journal, from offset 0, as one source had them: `Final` events say
    what others had. ``restarts_only``: nothing was broken, so that no client's operation may fail and no
    journal be without its replicas.
    """
    book = _Book(lease_s)
    for event in events:
        book.enter(event)
    verdict = Verdict(reads=book.reads, read_bytes=book.read_bytes)
    verdict.violations += book.violations + book.quiet.violations() + _unfinished(book, contents)
    verdict.violations += _lives_that_were_not(book)
    reads = _Reads(book, contents)
    for event in events:
        reads.enter(event)
    for journal in sorted(book.journals):
        figures = verdict.journals[journal]
        figures.lives = book.lives[journal].life if journal in book.lives else 1
        _count(verdict, figures, book.attempts_of[journal])
        if (content := contents.get(journal)) is not None:
            figures.content_bytes = len(content)
            verdict.content_bytes += len(content)
            _check_journal(verdict, journal, content, book)
        verdict.violations += reads.violations[journal]
    if restarts_only:
        verdict.violations += book.broken_promises
    return verdict


def _count(verdict: Verdict, figures: Figures, attempts: Iterable[Attempt]) -> None:
    for attempt in attempts:
        verdict.appends[attempt.outcome] += 1
        match attempt.outcome:
            case "ok":
                figures.acknowledged += 1
            case "fail":
                figures.refused += 1
                assert attempt.completed is not None
                verdict.refusals[attempt.completed.status] += 1
            case _:
                figures.unknown += 1


class _Book:
    """The history, indexed for the questions of the judge."""

    def __init__(self, lease_s: float) -> None:
        self.journals: set[str] = set()
        self.attempts: dict[tuple[int, int], Attempt] = {}
        self.lengths: dict[str, dict[int, int]] = defaultdict(dict)
        self.by_op: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.finals: dict[str, list[Final]] = defaultdict(list)
        self.lives: dict[str, Created] = {}
        """The last life of each journal."""
        self.created: dict[str, list[Created]] = defaultdict(list)
        """All lives of each journal."""
        self.stored_ops: dict[str, list[StoredOps]] = defaultdict(list)
        self.losses: dict[str, list[Lost]] = defaultdict(list)
        self.resets: dict[str, list[HeadReset]] = defaultdict(list)
        self.deposed: list[Deposed] = []
        self.violations: list[Violation] = []
        self.broken_promises: list[Violation] = []
        self.other_lives: list[OtherLife] = []
        self.quiet = QuietTimes()
        self.reads = self.read_bytes = 0
        self._lease_s = lease_s
        self._blind: dict[str, list[tuple[float, float]]] = {}
        self._holding: dict[tuple[str, str], float] = {}
        """Time since which a cut holds bytes back, by kind and target."""
        self._held: list[tuple[float, float]] = []
        """The times of cuts that held bytes back."""
        self._shaken: dict[str, float] = {}
        """By target of a fault that may cost leases: until when it may. Infinity while the fault lasts."""
        self._mute: set[str] = set()
        """Brokers that cannot write to files now, nor to their log."""

    @cached_property
    def attempts_of(self) -> dict[str, list[Attempt]]:
        """The attempts by journal. Use this only once all of the history is entered."""
        attempts: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in self.attempts.values():
            attempts[attempt.invoked.journal].append(attempt)
        return attempts

    def session_of(self, op: int) -> str:
        """Return the session of an append; empty for none."""
        return self.attempts[self.by_op[op][0]].invoked.session

    def began(self, attempt: Attempt) -> float:
        """Return when an append began; in a session, its first attempt: an answer may be about that one."""
        if not attempt.invoked.session:
            return attempt.invoked.time
        return self.attempts[self.by_op[attempt.invoked.op][0]].invoked.time

    def enter(self, event: Event) -> None:
        self.quiet.enter(event)
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
            case Read():
                self.reads += 1
                self.read_bytes += event.end - event.begin
            case Created():
                self.journals.add(event.journal)
                self.lives[event.journal] = event
                self.created[event.journal].append(event)
                self.losses.pop(event.journal, None)
                self.resets.pop(event.journal, None)
            case Lost():
                self.losses[event.journal].append(event)
            case HeadReset():
                self.resets[event.journal].append(event)
            case Deposed():
                self.deposed.append(event)
            case StoredOps():
                self.stored_ops[event.journal].append(event)
            case Final():
                self.finals[event.journal].append(event)
            case FaultEvent():
                self._enter_fault(event)
            case Ended():
                self._enter_ended(event)
            case Logged():
                self._complain("bug", "", f"{event.broker}, {event.count} times: {event.text}")
            case Stopped():
                self._complain("unfinished", "", f"after {event.time:.1f} s: {event.error}")
            case ClientFailed():
                text = f"{event.client} at {event.time:.1f} s: {event.error}"
                if event.damage:
                    self._complain("damage", event.journal, text)
                self.broken_promises.append(Violation("client", event.journal, text))
            case OtherLife():
                self.other_lives.append(event)
            case Replicas() if event.assigned < event.wanted:
                text = f"{event.assigned} of {event.wanted} at revision {event.revision}"
                self.broken_promises.append(Violation("replication", event.journal, text))

    def is_old(self, attempt: Attempt) -> bool:
        """Return True if an append was certainly made to an earlier life of its journal."""
        created = self.lives.get(attempt.invoked.journal)
        completed = attempt.completed
        if created is None or created.life == 1 or completed is None:
            return False
        if completed.outcome == "ok":
            return completed.revision < created.revision
        return completed.time < created.time - _CREATION_S

    def excuses(self, journal: str, begin: int, end: int, time: float = float("inf")) -> bool:
        """Return True if these bytes were not stored when all replicas were lost, before ``time``."""
        return any(
            loss.time <= time and not _covers_any(loss.stored, begin, end)
            for loss in self.losses.get(journal, ())
        )

    def excuses_append(self, journal: str, completed: Completed) -> bool:
        """Return True if a declared loss took the replicas that held an append, and it was not stored."""
        return any(
            completed.time <= self._delivered(loss)
            and set(completed.members) <= set(loss.brokers)
            and not _covers_any(loss.stored, completed.begin, completed.end)
            for loss in self.losses.get(journal, ())
        )

    def _delivered(self, loss: Lost) -> float:
        """Return when the last answer of brokers that ended in a loss may arrive.

        A cut that holds bytes back delivers them at its end.
        """
        held = (end for begin, end in self._held if begin <= loss.time <= end)
        return max(held, default=loss.time) + _DELIVERY_S

    def saw_what_was_lost(self, journal: str, time: float) -> bool:
        """Return True if registers at that time may be from appends that were lost later, as declared."""
        if journal not in self._blind:
            self._blind[journal] = list(self._blind_times(journal))
        return any(begin <= time <= end for begin, end in self._blind[journal])

    def _blind_times(self, journal: str) -> Iterator[tuple[float, float]]:
        """Yield, for each loss, the time from the beginning of the first lost append until that loss."""
        for loss in self.losses.get(journal, ()):
            until = self._delivered(loss)
            taken = [
                invoked.time
                for invoked, completed in _acknowledged(self.attempts_of[journal])
                if completed.time <= until
                and not _covers_any(loss.stored, completed.begin, completed.end)
            ]
            if taken:
                yield min(taken), until

    def _enter_fault(self, event: FaultEvent) -> None:
        """Note which bytes, leases and logs a fault may hold back or cost."""
        if event.target.endswith(_HELD):
            if event.phase == "begun":
                self._holding[event.kind, event.target] = event.time
            elif event.phase == "ended":
                begun = self._holding.pop((event.kind, event.target), event.time)
                self._held.append((begun, event.time))
        if any(word in event.kind for word in _LEASE_KINDS):
            self._shaken[event.target] = float("inf") if event.phase == "begun" else event.time
        if event.kind == _DISK_FULL:
            (self._mute.add if event.phase == "begun" else self._mute.discard)(event.target)

    def _enter_ended(self, event: Ended) -> None:
        since = event.time - self._lease_s - _CREATION_S
        shaken = any(
            until >= since and (event.broker in target or target == "etcd")
            for target, until in self._shaken.items()
        )
        if event.asked and event.exit_code == 0:
            return
        chosen = event.exit_code > 0  # No signal has ended it.
        if shaken and chosen and ("lease" in event.error.lower() or event.broker in self._mute):
            return  # A broker without its lease has to end. With a full disk, it cannot log why.
        how = "asked to end, " if event.asked else "unasked, "
        text = f"{event.broker} ended {how}with exit code {event.exit_code} at {event.time:.1f} s: "
        self._complain("ended", "", text + event.error)

    def _complain(self, kind: str, journal: str, text: str) -> None:
        self.violations.append(Violation(kind, journal, text))


def _covers_any(spans: Iterable[tuple[int, int]], begin: int, end: int) -> bool:
    return any(first < end and begin < last for first, last in spans)


def _unfinished(book: _Book, contents: Mapping[str, bytes]) -> list[Violation]:
    violations = []
    if not book.lives:
        violations.append(Violation("unfinished", "", "no journal was created"))
    for journal in book.lives:
        sources = {final.source for final in book.finals[journal]}
        if STORED not in sources:
            violations.append(Violation("unfinished", journal, "its store was not read in the end"))
        if not sources - {STORED} or journal not in contents:
            violations.append(
                Violation("unfinished", journal, "no broker was asked for it in the end")
            )
    return violations


def _lives_that_were_not(book: _Book) -> Iterator[Violation]:
    for refused in book.other_lives:
        created = [life.revision for life in book.created[refused.journal]]
        if not (
            refused.before in created
            and refused.now in created[1:]
            and refused.before < refused.now
        ):
            text = f"{refused.reader} at {refused.time:.1f} s: created at revision {refused.now}, and not"
            yield Violation(
                "damage", refused.journal, f"{text} {refused.before}: it was at {created}"
            )


class _Reads:
    """Compares what readers were given with the journals' bytes: the second pass over a history."""

    def __init__(self, book: _Book, contents: Mapping[str, bytes]) -> None:
        self.violations: dict[str, list[Violation]] = defaultdict(list)
        self._book = book
        self._contents = contents
        self._life: dict[str, int] = defaultdict(lambda: 1)
        self._readers: dict[tuple[str, str], tuple[int, int]] = {}
        """The offset and life of each reader of each journal."""
        self._shown: dict[str, tuple[float, int, bytes]] = {}
        """By journal, when and where readers were first shown appends that were lost, and those appends."""

    def enter(self, event: Event) -> None:
        match event:
            case Created():
                self._life[event.journal] = event.life
            case Opened():
                key = (event.reader, event.journal)
                self._readers[key] = (event.offset, self._life[event.journal])
            case Read():
                self._enter_read(event)
            case Jumped():
                self._move(event)
                if not self._book.excuses(event.journal, event.begin, event.end, event.time):
                    self._complain("jump", event, "and was answered that nothing is there")

    def _enter_read(self, event: Read) -> None:
        at, life = self._readers.get((event.reader, event.journal), (None, 1))
        if at != event.begin:
            self._complain("back", event, f"and was at {at}")
        self._move(event)
        last = self._book.lives.get(event.journal)
        content = self._contents.get(event.journal)
        if content is None or (last is not None and life != last.life):
            return
        if event.end <= len(content) and digest(content[event.begin : event.end]) == event.sum:
            return
        if not self._is_excused(event) and not self._is_unanswered(event, content):
            self._complain("read", event, "which are other bytes than the journal has")

    def _is_unanswered(self, event: Read, content: bytes) -> bool:
        """Return True if these bytes are of appends whose outcomes their clients do not know.

        A broker shows an append before all replicas have it. If the broker dies just then, it may be gone.
        """
        resets = [one.time for one in self._book.resets[event.journal]]
        since = max((time for time in resets if time < event.time - _STALE_S), default=0.0)
        pending = [
            attempt
            for attempt in self._book.attempts_of[event.journal]
            if attempt.outcome == "unknown" and since < attempt.invoked.time < event.time
        ]
        pending = sorted(pending, key=lambda attempt: -attempt.invoked.time)[:_PENDING_MAX]
        shown = self._shown.get(event.journal, (-1.0, 0, b""))
        for learned, begin, lost in [
            *([shown] if since < shown[0] else []),
            (event.time, event.begin, b""),
            *((event.time, event.end - attempt.invoked.length, b"") for attempt in pending),
        ]:
            grown = _explained(event, content, begin, lost, pending)
            if grown is not None:
                self._shown[event.journal] = (learned, begin, grown)
                return True
        return False

    def _is_excused(self, event: Read) -> bool:
        """Return True if these bytes were lost, as declared, after they were read."""
        for loss in self._book.losses.get(event.journal, ()):
            ends = [
                reset.time for reset in self._book.resets[event.journal] if reset.time >= loss.time
            ]
            until = min(ends, default=float("inf")) + _STALE_S
            if event.time <= until and any(
                not _covers_any(loss.stored, at, at + 1) for at in (event.begin, event.end - 1)
            ):
                return True
        return False

    def _move(self, event: Read | Jumped) -> None:
        key = (event.reader, event.journal)
        _, life = self._readers.get(key, (0, 1))
        self._readers[key] = (event.end, life)

    def _complain(self, kind: str, event: Read | Jumped, text: str) -> None:
        text = f"{event.reader} got [{event.begin}, {event.end}) at {event.time:.1f} s, {text}"
        self.violations[event.journal].append(Violation(kind, event.journal, text))


def _explained(
    event: Read, content: bytes, begin: int, lost: bytes, pending: Sequence[Attempt], depth: int = 0
) -> bytes | None:
    """Return lost bytes that explain a read: ``lost``, followed by pending appends. None if none explain it.

    The read is then ``content`` up to the offset ``begin``, and the lost bytes from there on.
    """
    length = event.end - event.begin
    if not event.begin - len(lost) <= begin <= event.end or begin > len(content):
        return None
    shown = content[event.begin : begin] + lost[max(0, event.begin - begin) :]
    if len(shown) >= length:
        return lost if lost and digest(shown[:length]) == event.sum else None
    if depth == _DEPTH_MAX:
        return None
    for attempt in pending:
        rest = [other for other in pending if other is not attempt]
        longer = lost + payload(attempt.invoked.op, attempt.invoked.length)
        explained = _explained(event, content, begin, longer, rest, depth + 1)
        if explained is not None:
            return explained
    return None


def _check_journal(verdict: Verdict, journal: str, content: bytes, book: _Book) -> None:
    """Judge the bytes of a journal by the appends that were made to it."""

    def say(kind: str, texts: Iterable[str]) -> None:
        verdict.violations += [Violation(kind, journal, text) for text in texts]

    holes = [hole for final in book.finals[journal] for hole in final.holes]
    say(
        "source",
        [
            f"there is nothing from {begin} to {end}"
            for begin, end in dict.fromkeys(holes)
            if not book.excuses(journal, begin, end)
        ],
    )
    placed, damages = take_apart(content, book.lengths[journal])
    for damage in damages:
        if not any(begin <= damage.offset < end for begin, end in holes):
            say(damage.kind, [f"op {damage.op} at {damage.offset}"])
    places: dict[int, list[Placed]] = defaultdict(list)
    for whole in placed:
        places[whole.op].append(whole)
    for op, copies in places.items():
        if len(copies) > 1 and not book.session_of(op):
            say("duplicate", [f"op {op} is at {', '.join(str(copy.begin) for copy in copies)}"])
    attempts: list[Attempt] = []
    old: list[Attempt] = []
    for attempt in book.attempts_of[journal]:
        (old if book.is_old(attempt) else attempts).append(attempt)
    say("reborn", _reborn(old, places))
    say("reborn", _in_other_lives(journal, book))
    figures = verdict.journals[journal]
    say("lost", _lost(attempts, places, len(content), book, figures))
    say("overwritten", _overwritten(attempts, book))
    say("changed", _wrong_sums(attempts, content, places))
    say("deposed", _deposed(attempts, book))
    say("replication", _too_few(attempts, book))
    say("late", _late(placed, book))
    log = _order(placed, book)
    say("refused", _refused(places, book))
    say("offset", _wrong_offsets(places, book))
    say("order", _wrong_order(log, placed, book))
    refused = [
        attempt
        for attempt in attempts
        if attempt.completed is not None
        and attempt.completed.status == REGISTER_MISMATCH
        and not book.saw_what_was_lost(journal, attempt.completed.time)
    ]
    begins = [whole.begin for whole in placed]
    # Places from which on registers may be gone, since all replicas had ended.
    gone = {
        place
        for reset in book.resets[journal]
        for place in range(bisect_left(begins, reset.begin), bisect_right(begins, reset.offset) + 1)
    }
    # Attempts that are not in the journal, but may have set registers for a while.
    undone = [
        attempt
        for attempt in attempts
        if attempt.outcome == "unknown"
        and attempt.invoked.op not in places
        and (attempt.invoked.union or attempt.invoked.subtract)
    ]
    undone.sort(key=lambda attempt: attempt.invoked.time)
    say("register", check_registers(log, refused, gone, undone))
    say("source", _wrong_sources(book.finals[journal], content))
    verdict.unknown_there += sum(attempt.outcome == "unknown" for attempt in log)


def _acknowledged(attempts: Iterable[Attempt]) -> Iterator[tuple[Invoked, Completed]]:
    for attempt in attempts:
        if attempt.outcome == "ok" and attempt.completed is not None:
            yield attempt.invoked, attempt.completed


def _reborn(old: Sequence[Attempt], places: Mapping[int, Sequence[Placed]]) -> Iterator[str]:
    for attempt in old:
        for place in places.get(attempt.invoked.op, ()):
            yield f"op {attempt.invoked.op} of an earlier life is at {place.begin}"


def _in_other_lives(journal: str, book: _Book) -> Iterator[str]:
    """Yield acknowledged appends of which even a part is in the store of another life."""
    lives: dict[int, int] = {}
    for invoked, completed in _acknowledged(book.attempts_of[journal]):
        for created in book.created[journal]:
            if created.revision <= completed.revision:
                lives[invoked.op] = created.life
    for stored in book.stored_ops[journal]:
        for op in stored.ops:
            if lives.get(op, stored.life) != stored.life:
                yield f"op {op} of life {lives[op]} is in the store of life {stored.life}"


def _lost(
    attempts: Sequence[Attempt],
    places: Mapping[int, Sequence[Placed]],
    length: int,
    book: _Book,
    figures: Figures,
) -> Iterator[str]:
    for invoked, completed in _acknowledged(attempts):
        begins = [one.begin for one in places.get(invoked.op, ())]
        if completed.begin in begins and completed.end - completed.begin == invoked.length:
            continue
        if not begins and book.excuses_append(invoked.journal, completed):
            figures.excused += 1
            continue
        where = f"is at {begins[0]}" if begins else f"is not in the journal of {length} bytes"
        yield (
            f"op {invoked.op} of {invoked.length} bytes was acknowledged at {completed.time:.1f} s as"
            f" {_span(completed)} by {'+'.join(completed.members) or 'brokers'}, and {where}"
        )


def _overwritten(attempts: Sequence[Attempt], book: _Book) -> Iterator[str]:
    spans = sorted(_acknowledged(attempts), key=lambda span: span[1].begin)
    widest: tuple[Invoked, Completed] | None = None
    for span in spans:
        if widest is not None and span[1].begin < widest[1].end:
            first, second = sorted((widest, span), key=lambda each: each[1].time)
            if not book.excuses_append(first[0].journal, first[1]):
                yield (
                    f"op {first[0].op} was acknowledged as {_span(first[1])} at {first[1].time:.1f} s, and op"
                    f" {second[0].op} as {_span(second[1])} at {second[1].time:.1f} s"
                )
        if widest is None or span[1].end > widest[1].end:
            widest = span


def _deposed(attempts: Sequence[Attempt], book: _Book) -> Iterator[str]:
    for invoked, completed in _acknowledged(attempts):
        for event in book.deposed:
            if (
                completed.primary == event.broker
                and completed.revision < event.revision
                and completed.time > event.time
            ):
                yield (
                    f"op {invoked.op} was acknowledged at {completed.time:.1f} s by {event.broker}, which was"
                    f" not in etcd as of revision {event.revision}, seen at {event.time:.1f} s"
                )
                break


def _too_few(attempts: Sequence[Attempt], book: _Book) -> Iterator[str]:
    for invoked, completed in _acknowledged(attempts):
        created = book.lives.get(invoked.journal)
        if created and completed.members and len(completed.members) < created.replication:
            yield f"op {invoked.op} was acknowledged by {'+'.join(completed.members)} only"


def _wrong_sums(
    attempts: Sequence[Attempt], content: bytes, places: Mapping[int, Sequence[Placed]]
) -> Iterator[str]:
    """Yield the stored appends whose sums are wrong. An absent append is reported as lost elsewhere."""
    for invoked, completed in _acknowledged(attempts):
        stored = content[completed.begin : completed.end]
        whole = invoked.op in places and len(stored) == invoked.length
        if whole and digest(stored) != completed.sum:
            yield f"op {invoked.op}: {_span(completed)} holds other bytes than were acknowledged"


def _order(placed: Sequence[Placed], book: _Book) -> list[Attempt]:
    """Return the attempt that wrote each payload of the journal, in the order of the journal."""
    log: list[Attempt] = []
    for place in placed:
        attempts = [book.attempts[key] for key in book.by_op[place.op]]
        log.append(min(attempts, key=lambda attempt: _likelihood(attempt, place)))
    return log


def _likelihood(attempt: Attempt, placed: Placed) -> int:
    """Return 0 if an attempt was acknowledged at this place, and more the less likely it wrote the bytes."""
    completed = attempt.completed
    if attempt.outcome == "ok" and completed is not None and completed.begin == placed.begin:
        return 0
    return {"unknown": 1, "ok": 2}.get(attempt.outcome, 3)


def _refused(places: Mapping[int, Sequence[Placed]], book: _Book) -> Iterator[str]:
    for op, copies in places.items():
        attempts = [book.attempts[key] for key in book.by_op[op]]
        if all(attempt.outcome == "fail" for attempt in attempts):
            status = attempts[0].completed.status if attempts[0].completed else ""
            yield f"op {op} is at {copies[0].begin}, but was refused: {status}"


def _wrong_offsets(places: Mapping[int, Sequence[Placed]], book: _Book) -> Iterator[str]:
    for op, copies in places.items():
        offsets = {book.attempts[key].invoked.offset for key in book.by_op[op]}
        if 0 not in offsets and copies[0].begin not in offsets:
            yield f"op {op} is at {copies[0].begin}, but was to be at {sorted(offsets)}"


def _late(placed: Sequence[Placed], book: _Book) -> Iterator[str]:
    """Yield copies behind a later append of their session: it began only after the copied one had ended."""
    last: dict[str, Placed] = {}
    for copy in placed:
        session = book.session_of(copy.op)
        if not session:
            continue
        before = last.get(session)
        if before is not None and copy.op < before.op:
            yield f"op {copy.op} is at {copy.begin}, behind op {before.op} of its session at {before.begin}"
        else:
            last[session] = copy


def _wrong_order(log: Sequence[Attempt], placed: Sequence[Placed], book: _Book) -> Iterator[str]:
    """Yield appends that were acknowledged before an earlier append of the journal began."""
    earliest, whose = float("inf"), 0
    for attempt, place in zip(reversed(log), reversed(placed), strict=True):
        began = book.began(attempt)
        if began > earliest:
            yield (
                f"op {place.op} at {place.begin} began at {began:.3f} s, and op {whose}, which"
                f" stands behind it, was acknowledged at {earliest:.3f} s"
            )
        completed = attempt.completed
        if attempt.outcome == "ok" and completed is not None and completed.time < earliest:
            earliest, whose = completed.time, place.op


def _wrong_sources(finals: Sequence[Final], content: bytes) -> Iterator[str]:
    expected = digest(content)
    for final in finals:
        if (final.length, final.sum) != (len(content), expected):
            yield (
                f"{final.source} has {final.length} bytes of sum {final.sum[:12]}, others"
                f" {len(content)} of {expected[:12]}"
            )


def _span(completed: Completed) -> str:
    return f"[{completed.begin}, {completed.end})"
