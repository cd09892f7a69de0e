"""Judges a simulation: ``check`` is a pure function from its history to the violations.

- An acknowledged append has its bytes at its offsets. Every reader of its journal's life gets them, and every
  fragment of that life has them. If the journal still exists after the last fault, it has them, too.
- No two acknowledged appends share an offset.
- A refused append, or an append of a former life, is nowhere in the journal.
- An append whose outcome is not known is in the journal as a whole, or not at all.
- Registers change as if appends were made one after another.
- Bytes that a reader was given stay, acknowledged or not, unless brokers that had them were lost.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Final, TypeAlias

from tools.simulation.history import Append, Assigned, Confirmed, History, Life, Piece, Stored

LifeKey: TypeAlias = "tuple[str, int]"

_NONE: Final[Mapping[str, float]] = MappingProxyType({})
_NAME_BYTES: Final = 25
"""An append is recognized by so many of its first bytes: they differ for all appends."""
_HEAD: Final = re.compile(rb"<(\d+):(?:[^<]*<\1:)*")
"""The number of an append, which its bytes repeat."""
_SHOWN_BEFORE_S: Final = 60.0
"""A lost broker may have shown bytes that a reader gets at most so many seconds after the loss."""
UPLOAD_S: Final = 60.0
"""Without a fault for so many seconds, the other replicas must have uploaded the bytes of a lost one."""


def check(history: History) -> list[str]:
    """Return what is wrong, one sentence each; nothing if all invariants hold."""
    found = list(history.violations)
    appends: dict[LifeKey, list[Append]] = defaultdict(list)
    pieces: dict[LifeKey, list[Piece]] = defaultdict(list)
    for append in history.appends:
        if append.acknowledged:
            life = history.life_of(append.journal, append.revision)
            if life is None:
                found.append(f"{_name(append)} was acknowledged at a revision without the journal")
            else:
                appends[life.journal, life.created].append(append)
    for piece in history.pieces:
        life = history.life_of(piece.journal, piece.revision)
        if life is not None:
            pieces[life.journal, life.created].append(piece)
    for life in history.lives:
        key = (life.journal, life.created)
        stored = [one for one in history.stored if one.bucket == life.bucket]
        found += _check_life(history, life, appends[key], pieces[key], stored)
        for other, theirs in appends.items():
            if other[0] == life.journal and other != key:
                found += _revenants(theirs, stored)
    return found


def _check_life(
    history: History,
    life: Life,
    appends: list[Append],
    pieces: list[Piece],
    stored: list[Stored],
) -> Iterator[str]:
    appends.sort(key=lambda one: (one.begin or 0, one.end))
    lost = {one.number for one in appends if is_lost(history, one, stored)}
    kept = [one for one in appends if one.number not in lost]
    gone = [one for one in appends if one.number in lost]
    yield from _overlaps(kept)
    yield from _unasked(history, life, appends, gone)
    yield from _evicted(history, appends)
    yield from _skipped(history, life, kept)
    places = _Places(kept)
    for piece in pieces:
        there = places.within(piece.offset, piece.end)
        known = [one for one in there if _known_at(one) <= piece.time]
        yield from _mismatches(
            f"reader {piece.reader}",
            piece.offset,
            piece.content,
            piece.time,
            known,
            () if piece.final else gone,
        )
        later = [one for one in there if _known_at(one) > piece.time]
        yield from _vanished(history, life, piece, later)
    for fragment in stored:
        # A broker that comes back must not leave bytes of lost appends at offsets that were given out again.
        # A killed broker may, and so may a fragment that was removed.
        stays = fragment.removed is None and fragment.by not in history.killed
        if fragment.removed is not None and _is_undone(history, life, kept, fragment):
            continue
        # A removed fragment need not have appends that were acknowledged later. A marked fragment need not
        # have any: brokers ask etcd before they use it.
        until = math.inf if fragment.removed is None else fragment.removed
        if fragment.marked:
            until = -math.inf
        yield from _mismatches(
            f"fragment {fragment.path}",
            fragment.begin,
            fragment.content,
            None,
            [one for one in places.within(fragment.begin, fragment.end) if _known_at(one) <= until],
            () if stays else gone,
        )
    yield from _registers(history, life, kept)
    yield from _wrongly_refused(history, life, kept)
    finals = [piece for piece in pieces if piece.final]
    if life.deleted is None and finals:
        yield from _missing(kept, finals)
        yield from _strangers(history, life, kept, finals)
        yield from _late_copies(history, life, kept, finals)
    if life.deleted is None and history.stopped:
        yield from _not_stored(kept, stored)


class _Places:
    """Finds appends by their offsets, fast: there are thousands of pieces, with few appends in each."""

    def __init__(self, appends: list[Append]) -> None:
        self._appends = appends
        """In the order of their offsets."""
        self._begins = [one.begin or 0 for one in appends]
        self._ends = list(accumulate((one.end for one in appends), max))
        """For each append: the greatest end of this append and of those before it."""

    def within(self, begin: int, end: int) -> list[Append]:
        """Return the appends that have bytes in ``[begin, end)``, and some that may not."""
        return self._appends[bisect_right(self._ends, begin) : bisect_left(self._begins, end)]


def _known_at(append: Append) -> float:
    """Return the time from which readers must find the append and no other bytes at its offsets.

    Until then readers may get bytes there of an append that was not acknowledged: see `_vanished`. These may
    be of an earlier attempt of the same append. So an append with repetitions is known from its end on.
    """
    if append.repeated and append.ended is not None:
        return append.ended
    return append.begun


def _vanished(history: History, life: Life, piece: Piece, later: list[Append]) -> Iterator[str]:
    """Yield an append at the offsets of other bytes, which a reader was given before the append began.

    A primary gives readers only bytes that all replicas have. So the loss of one broker cannot cause this,
    unless the journal has no other. A follower gives readers all bytes that it has adopted. If it is lost
    together with its primary, other replicas may lack these bytes: that is permitted
    (`docs/consistency.md`). Bytes that an operator has given up are permitted, too. A primary that leaves in
    good order drops bytes that not all replicas have acknowledged, as if they were lost.
    """
    end = piece.offset + len(piece.content)
    for append in later:
        assert append.begin is not None
        assert append.ended is not None
        begin, until = max(piece.offset, append.begin), min(end, append.end)
        content = piece.content[begin - piece.offset : until - piece.offset]
        if begin >= until or _same(append, begin, content):
            continue
        since = piece.time - _SHOWN_BEFORE_S
        lost = {n for n, when in history.lost_brokers.items() if since <= when <= append.ended}
        left = {n for n, when in history.evicted.items() if piece.time <= when <= append.ended}
        gone = len(lost | left) if lost else 0
        if gone >= min(2, len(append.holders)) or any(
            one.life is life and piece.time <= one.time <= append.ended for one in history.confirmed
        ):
            continue
        yield (
            f"reader {piece.reader} was given other bytes at {piece.time:.3f} s in [{begin}, {until}) than "
            f"{_name(append)}, which began later"
        )
        return


def _overlaps(appends: list[Append]) -> Iterator[str]:
    before: Append | None = None
    for append in appends:
        if not append.payload:
            continue
        assert append.begin is not None
        if before is not None and append.begin < before.end:
            yield f"two acknowledged appends overlap: {_name(before)} and {_name(append)}"
        if before is None or append.end > before.end:
            before = append


def _unasked(
    history: History, life: Life, appends: list[Append], gone: list[Append]
) -> Iterator[str]:
    """Yield an append at offsets of a lost one, although no operator had confirmed a head in between.

    A journal that has lost acknowledged bytes waits for an operator. An append that names its offset confirms
    the head, too.
    """
    for lost in gone:
        assert lost.begin is not None
        assert lost.ended is not None
        for later in appends:
            assert later.begin is not None
            assert later.ended is not None
            overlap = max(lost.begin, later.begin) < min(lost.end, later.end)
            if not overlap or later.begun <= lost.ended:
                continue
            if not _was_confirmed(history, life, lost.ended, later.ended):
                yield (
                    f"{_name(later)} has offsets of {_name(lost)}, which was lost, and no operator was asked"
                )
                return


def _was_confirmed(history: History, life: Life, since: float, until: float) -> bool:
    """Return True if an operator, or an append that names an offset, may have confirmed a head."""
    heads = (*history.resets, *history.confirmed)
    if any(one.life is life and since <= one.time <= until for one in heads):
        return True
    return any(
        one.journal == life.journal
        and one.offset
        and one.begun <= until
        and (one.ended is None or one.ended >= since)
        for one in history.appends
    )


def _evicted(history: History, appends: list[Append]) -> Iterator[str]:
    """Yield appends that began and were acknowledged when their primary was no member any more."""
    for append in appends:
        gone = [history.evicted.get(name) for name in append.primary]
        if gone and all(time is not None and time < append.begun for time in gone):
            yield f"{_name(append)} was acknowledged by {append.primary}, which had lost its lease"


def _skipped(history: History, life: Life, appends: list[Append]) -> Iterator[str]:
    """Yield appends that a reader skipped as absent, although their store could be listed."""
    unlisted = [one for one in history.unlisted if one.what == life.bucket]
    for jump in history.jumps:
        if jump.journal != life.journal or not life.has(jump.revision):
            continue
        if any(one.begin <= jump.time and jump.since <= one.end for one in unlisted):
            continue
        for append in appends:
            assert append.begin is not None
            if append.payload and append.begin < jump.end and append.end > jump.begin:
                yield f"reader {jump.reader} jumped at {jump.time:.3f} s over {_name(append)}"
                break


def _revenants(appends: list[Append], stored: list[Stored]) -> Iterator[str]:
    """Yield appends that are in these fragments, but were acknowledged in another life of the journal."""
    for fragment in stored:
        for append in appends:
            assert append.begin is not None
            at = append.begin - fragment.begin
            known = append.payload[:_NAME_BYTES]
            if known and at >= 0 and fragment.content[at : at + _NAME_BYTES] == known:
                yield f"fragment {fragment.path} has {_name(append)} of another life"
                return


def _mismatches(
    where: str,
    offset: int,
    content: bytes,
    time: float | None,
    appends: list[Append],
    gone: Iterable[Append],
) -> Iterator[str]:
    """Yield acknowledged appends in whose place ``content`` has other bytes, but for bytes of ``gone``."""
    end = offset + len(content)
    for append in appends:
        assert append.begin is not None
        begin, until = max(offset, append.begin), min(end, append.end)
        if begin >= until or _same(append, begin, content[begin - offset : until - offset]):
            continue
        if not any(_same(one, begin, content[begin - offset : until - offset]) for one in gone):
            seen = "" if time is None else f" at {time:.3f} s"
            yield f"{where} has other bytes{seen} in [{begin}, {until}) than {_name(append)}"
            return


def _same(append: Append, begin: int, content: bytes) -> bool:
    """Return True if an append has these bytes at ``begin``. Bytes behind its end are not compared."""
    assert append.begin is not None
    at = begin - append.begin
    if not 0 <= at < len(append.payload):
        return False
    mine = append.payload[at : at + len(content)]
    return content[: len(mine)] == mine


def _is_undone(history: History, life: Life, kept: list[Append], fragment: Stored) -> bool:
    """Return True if a removed fragment has only bytes of appends that were not kept.

    These were not acknowledged, and a later primary gave their offsets out again.
    """
    numbers = {one.number for one in kept}
    undone = [
        one.payload
        for one in history.appends
        if one.journal == life.journal and one.payload and one.number not in numbers
    ]
    for append in kept:
        assert append.begin is not None
        begin, until = max(fragment.begin, append.begin), min(fragment.end, append.end)
        if begin < until:
            content = fragment.content[begin - fragment.begin : until - fragment.begin]
            if not _same(append, begin, content) and not _consists_of(content, undone):
                return False
    return True


def _consists_of(content: bytes, payloads: list[bytes]) -> bool:
    """Return True if the content consists of some of the payloads, or of parts of them, in any order."""
    if not content:
        return True
    for payload in payloads:
        at = payload.find(content[:_NAME_BYTES])
        if at < 0:  # Perhaps the content begins with the end of a payload.
            ends = (at for at in range(max(0, len(payload) - _NAME_BYTES), len(payload)))
            at = next((at for at in ends if content.startswith(payload[at:])), len(payload))
        length = min(len(content), len(payload) - at)
        found = length and content[:length] == payload[at : at + length]
        if found and _consists_of(content[length:], payloads):
            return True
    return False


def _missing(appends: list[Append], finals: list[Piece]) -> Iterator[str]:
    """Yield acknowledged appends that a reader of the whole journal did not get."""
    readers: dict[str, list[Piece]] = defaultdict(list)
    for piece in finals:
        readers[piece.reader].append(piece)
    for reader, pieces in readers.items():
        spans = _joined((piece.offset, piece.end) for piece in pieces)
        for append in appends:
            assert append.begin is not None
            if append.payload and not any(
                begin <= append.begin and append.end <= end for begin, end in spans
            ):
                yield f"{reader} does not have {_name(append)}"
                break


def _not_stored(appends: list[Append], stored: list[Stored]) -> Iterator[str]:
    """Yield acknowledged appends that no fragment has, after every broker has left in good order."""
    spans = _joined((one.begin, one.end) for one in stored if one.removed is None)
    for append in appends:
        assert append.begin is not None
        if append.payload and not any(
            begin <= append.begin and append.end <= end for begin, end in spans
        ):
            yield f"the store does not have {_name(append)}"
            return


def _strangers(
    history: History, life: Life, appends: list[Append], finals: list[Piece]
) -> Iterator[str]:
    """Yield bytes of the journal that are of no append, of a refused one, or of a part of one."""
    by_begin = {one.begin: one for one in appends if one.payload}
    mine = {one.number for one in appends}
    others = [
        one
        for one in history.appends
        if one.journal == life.journal and one.payload and (one.number not in mine or one.repeated)
    ]
    whole = _assembled(finals)
    for begin, content in whole:
        at = 0
        while at < len(content):
            known = by_begin.get(begin + at)
            if known is not None:
                at += len(known.payload)
                continue
            match = next((one for one in others if content.startswith(one.payload, at)), None)
            if match is None:
                yield (
                    f"{life.journal} has bytes at {begin + at} that are no whole append: "
                    f"{content[at : at + 40]!r}"
                )
                return
            if match.refused:
                yield f"{life.journal} has {_name(match)} at {begin + at}, which was refused"
            at += len(match.payload)


def _late_copies(
    history: History, life: Life, kept: list[Append], finals: list[Piece]
) -> Iterator[str]:
    """Yield appends of which a copy stands behind a later append of their session.

    A copy before the later append is permitted: a session repeats an append until it has succeeded, and
    readers drop the copy.
    """
    ends: dict[int, list[Append]] = defaultdict(list)
    for append in kept:
        if append.session and append.payload:
            ends[append.session].append(append)
    runs = _assembled(finals)
    heads = [{head[1]: head.end() for head in _HEAD.finditer(content)} for _, content in runs]
    for append in history.appends:
        if append.journal != life.journal or append.batch is None or not append.payload:
            continue
        end = append.batch[1]
        later = min(
            (
                one.end
                for one in ends[append.session]
                if one.number > append.number and one.begin is not None and one.begin >= end
            ),
            default=None,
        )
        if later is None:
            continue
        head = _HEAD.match(append.payload)
        for (begin, content), last in zip(runs, heads, strict=True):
            start = max(0, later - begin)
            if head is not None and last.get(head[1], 0) <= start:
                continue
            at = content.find(append.payload, start)
            if at >= 0 and begin + at >= later:
                yield (
                    f"{life.journal} has a late copy of {_name(append)} at {begin + at}, behind a later "
                    f"append of its session, which ends at {later}"
                )


def _assembled(pieces: Iterable[Piece]) -> list[tuple[int, bytes]]:
    """Return the bytes of the reader that got most, as contiguous runs, each with its offset."""
    readers: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        readers[piece.reader].append(piece)
    best = max(readers.values(), key=lambda ones: sum(len(one.content) for one in ones))
    runs: list[tuple[int, bytearray]] = []
    for piece in sorted(best, key=lambda one: one.offset):
        if runs and runs[-1][0] + len(runs[-1][1]) == piece.offset:
            runs[-1][1].extend(piece.content)
        else:
            runs.append((piece.offset, bytearray(piece.content)))
    return [(begin, bytes(content)) for begin, content in runs]


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _registers(history: History, life: Life, appends: list[Append]) -> Iterator[str]:
    """Yield appends that required another value of the register than the one last set before them.

    Registers are lost with the last replica. So no register is known after an operator has confirmed the
    head.
    """
    confirmed = sorted(one.time for one in history.confirmed if one.life is life)
    tag: int | None = None
    known_since = 0.0
    mine = {one.number for one in appends}
    unknown = {one.tag for one in history.appends if one.number not in mine}
    for append in appends:
        expected = append.expected_tag
        while confirmed and append.ended is not None and confirmed[0] <= append.ended:
            del confirmed[0]
            tag = None
        if expected is not None and tag is not None and expected != tag and expected not in unknown:
            yield f"{_name(append)} required {append.expected_tag}, and the register was {tag}"
        if append.tag is not None and append.payload:
            tag, known_since = append.tag, append.begun
        elif append.answered_tags is not None and tag is not None:
            answered = {int(value) for value in append.answered_tags}
            assert append.ended is not None
            is_known = not _was_confirmed(history, life, known_since, append.ended)
            if is_known and tag not in answered and not answered & unknown:
                yield f"{_name(append)} was answered with the register {answered}, and it was {tag}"


def _wrongly_refused(history: History, life: Life, appends: list[Append]) -> Iterator[str]:
    """Yield appends that were refused because of a register, although it had the required value all the time.

    A broker that wakes up after its lease may have older registers. It must not refuse an append by these.
    """
    places = {append.number: place for place, append in enumerate(appends)}
    setting = [one for one in history.appends if one.journal == life.journal and one.tag]
    for append in setting:
        required = places.get(append.expected_tag or 0)
        if required is None or append.ended is None or "REGISTER_MISMATCH" not in append.error:
            continue
        setter = appends[required]
        if setter.ended is None or setter.ended > append.begun:
            continue
        # Another append may have set the register since: a later append, or one whose outcome is not known.
        may_follow = any(
            other.begun <= append.ended
            and not other.refused
            and other is not append
            and (
                places[other.number] > required
                if other.number in places
                else other.ended is None or other.ended >= setter.begun
            )
            for other in setting
        )
        if not may_follow and not _was_confirmed(history, life, setter.begun, append.ended):
            yield (
                f"{_name(append)} was refused for its register, and {setter.tag} was set all the time"
            )


def is_lost(history: History, append: Append, stored: list[Stored]) -> bool:
    """Return True if the bytes of an append may be gone.

    So it is if an operator gave up the offsets. It is so, too, if all replicas ended, or lost their leases,
    before a fragment had the bytes. But `UPLOAD_S` seconds without a fault in between suffice to upload them.
    """
    assert append.begin is not None
    if any(_gives_up(one, append) for one in history.confirmed):
        return True
    ends = replicas_ended(history, append)
    if ends is None:
        return False
    spans = _joined(
        (one.begin, one.end) for one in stored if one.time <= max(ends) and one.removed is None
    )
    if any(begin <= append.begin and append.end <= end for begin, end in spans):
        return False
    return _quiet(history, min(ends), max(ends)) < UPLOAD_S


def _gives_up(confirmed: Confirmed, append: Append) -> bool:
    life = confirmed.life
    if life.journal != append.journal or not life.has(append.revision):
        return False
    assert append.begin is not None
    assert append.ended is not None
    return confirmed.head <= append.begin and append.ended <= confirmed.time


def replicas_ended(
    history: History, append: Append, others: Mapping[str, float] = _NONE
) -> list[float] | None:
    """Return when each replica of an acknowledged append ended or lost its lease; None unless all did.

    ``others`` are further processes that count as ended, and when.
    """
    ends: list[float] = []
    for candidates in append.holders:
        ended = [history.lost_brokers.get(name, others.get(name)) for name in candidates]
        if not ended or any(end is None for end in ended):
            return None
        ends.append(max(end for end in ended if end is not None))
    return ends or None


def assigned_ended(history: History, life: Life, others: Mapping[str, float] = _NONE) -> bool:
    """Return True if all brokers of a journal ended before the journal was assigned to others.

    A broker that was never in step with its primary has nothing of the journal, so it need not have ended.
    ``others`` are further processes that count as ended, and when.
    """
    changes: list[Assigned] = []
    for one in history.assigned:
        if one.journal != life.journal:
            continue
        if life.has(one.revision):
            changes.append(one)
        elif one.revision < life.created:
            changes = [one]  # The assignments of a former life stay if it is created again soon.
    for number, change in enumerate(changes, 1):
        until = changes[number].time if number < len(changes) else math.inf
        ends = [
            history.lost_brokers.get(name, others.get(name, math.inf))
            for name in change.synchronized or change.processes
        ]
        if ends and max(ends) < math.inf and max(ends) <= until:
            return True
    return False


def _quiet(history: History, begin: float, end: float) -> float:
    """Return the longest time between two moments in which nothing was wrong."""
    longest, at = 0.0, begin
    for fault in sorted(history.faults, key=lambda one: one.begin):
        if fault.begin >= end:
            break
        longest = max(longest, fault.begin - at)
        at = max(at, fault.end)
    return max(longest, end - at)


def _name(append: Append) -> str:
    place = f" at [{append.begin}, {append.end})" if append.acknowledged else ""
    return f"append {append.number} of {append.client} to {append.journal}{place}"
