"""Rules by which an append judges the answers of peers, the index and the specification."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gazette.broker.append.events import AppendTerms, IndexView, PeerAnswer, Resolved
from gazette.errors import Broken, GazetteError, TooLarge
from gazette.protocol import label_set
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset, Revision
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.status import Status

_SECOND_NS: Final = 1_000_000_000
_DIRTY_FOR_DEFAULT_S: Final = 24 * 3600
"""Seconds after new content for which a journal without a flush interval is not suspended."""
REGISTERS_BYTES_MAX: Final = 1 << 16
"""Limit of a journal's registers, in encoded bytes. Each proposal to a replica carries all of them."""


@dataclass(frozen=True, slots=True)
class SyncVerdict:
    """The consequence of the answers to a synchronizing proposal; empty if all peers agree.

    ``read_through`` (0: none) is a revision at which another route is in force. ``roll_to`` is the offset to
    which the spool must roll (None: no need). ``registers`` are the registers of a peer whose spool ends at
    ``roll_to``, after the end of the local spool; None if there is no such peer.
    """

    read_through: Revision = 0
    roll_to: Offset | None = None
    registers: LabelSet | None = None


def judge_sync(
    answers: Iterable[PeerAnswer], resolution: Resolved, ours: Fragment, error: GazetteError | None
) -> SyncVerdict:
    """Judge the answers to the proposal of ``ours``. ``error``: why a peer did not answer (None: all did).

    A later route, which this broker does not know yet, outweighs all else: the peers of that route will be
    asked. Without a later route, raise ``error``, or ``Broken`` for an answer that no correct replica gives.
    """
    read_through: Revision = 0
    roll_to: Offset | None = None
    registers: LabelSet | None = None
    for answer in answers:
        if answer.status is Status.OK:
            continue
        if answer.status is Status.PROPOSAL_MISMATCH and answer.fragment is not None:
            peer_fragment = answer.fragment
            if peer_fragment.end > ours.end:
                if roll_to is None or peer_fragment.end > roll_to:
                    roll_to, registers = peer_fragment.end, answer.registers
                continue
            if peer_fragment.end == ours.end and not peer_fragment.length:
                # The peer lacks the beginning of our fragment: complete it, and go on from its end.
                roll_to = peer_fragment.end if roll_to is None else roll_to
                continue
        elif answer.revision > resolution.revision and not _same_route(answer, resolution):
            read_through = max(read_through, answer.revision)
            continue
        error = error or unexpected_answer(answer)
    if read_through:
        return SyncVerdict(read_through=read_through)
    if error is not None:
        raise error
    return SyncVerdict(roll_to=roll_to, registers=registers)


def _same_route(answer: PeerAnswer, resolution: Resolved) -> bool:
    return answer.route is None or answer.route.equivalent(resolution.route)


def unexpected_answer(answer: PeerAnswer) -> GazetteError:
    """Return the error of an answer that makes the pipeline useless."""
    facts = {} if answer.fragment is None else {"fragment": answer.fragment.content_name()}
    return Broken(f"recv from {answer.peer}: unexpected {answer.status.name}", **facts)


def is_dirty(index: IndexView, spec: JournalSpec, now: float) -> bool:
    """Return True if only brokers hold the newest content, or if it was stored within the flush interval (24
    hours if the specification has none)."""
    settled_s = spec.fragment.flush_interval_ns // _SECOND_NS or _DIRTY_FOR_DEFAULT_S
    return index.newest_mod_time == 0 or index.newest_mod_time > now - settled_s


def resume_offset(spec: JournalSpec) -> Offset:
    """Return the offset at which a suspended journal goes on; 0 if it never was suspended."""
    return 0 if spec.suspend is None else spec.suspend.offset


def check_terms(terms: AppendTerms) -> None:
    """Raise ``TooLarge`` if one field of a request names more registers than a journal may have."""
    check = terms.check_registers
    if check is None and not terms.changes_registers:
        return
    sets_by_field = {
        "CheckRegisters": () if check is None else (check.include, check.exclude),  # Their sum.
        "UnionRegisters": (terms.union_registers,),
        "SubtractRegisters": (terms.subtract_registers,),
    }
    for field, sets in sets_by_field.items():
        size = sum(labels.encoded_bytes for labels in sets if labels)
        if size > REGISTERS_BYTES_MAX:
            raise _too_large("the request names too many registers", field, size)


def registers_after(registers: LabelSet, terms: AppendTerms) -> LabelSet:
    """Return ``registers`` as ``terms`` change them: subtract first, then unite.

    Raise ``TooLarge`` if the result exceeds the limit, unless it is no larger than ``registers``. Brokers of
    older versions had no limit, and registers that grew there must be able to shrink.
    """
    if not terms.changes_registers:
        return registers
    remaining = label_set.subtract(registers, terms.subtract_registers)
    result = label_set.union(terms.union_registers, remaining)
    size = result.encoded_bytes
    if size > REGISTERS_BYTES_MAX and size > registers.encoded_bytes:
        raise _too_large("the journal's registers would be too large", "UnionRegisters", size)
    return result


def _too_large(message: str, field: str, size: int) -> TooLarge:
    return TooLarge(
        message,
        path=field,
        hint="Subtract registers that are not needed, or keep the values in a journal.",
        bytes=size,
        limit_bytes=REGISTERS_BYTES_MAX,
    )
