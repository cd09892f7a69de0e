"""Stage 6 of the byte path: takes content and proposals from `broker/commit/driver` (primary) and
`broker/api/replicate` (replica), and decides how the spool changes.

A spool is the fragment that a broker is writing now: committed bytes ``[begin, end)``, then ``delta`` bytes
that were received and are not yet committed. The replicas of a journal agree on a spool by proposals. A
proposal names a whole fragment, its digest and the journal's registers. A proposal takes effect only on a
spool that can become exactly this fragment.

Pure: the bytes, their digest and the clock belong to ``spool_file``, which performs the effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import msgspec

from gazette.errors import Bug, Invalid
from gazette.protocol.fragment import ZERO_SUM, Codec, Fragment
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.status import Status

_SECOND_NS: Final = 1_000_000_000


class Content(msgspec.Struct, frozen=True):
    """Bytes by which to extend the spool. ``delta`` must be the number of bytes that are pending."""

    content: bytes
    delta: int


class Proposal(msgspec.Struct, frozen=True):
    """The fragment and registers that the spool is to have."""

    fragment: Fragment
    registers: LabelSet


class SpoolResult(msgspec.Struct, frozen=True):
    """The answer to content or a proposal: OK, or PROPOSAL_MISMATCH. ``fragment`` and ``registers`` describe
    the spool afterwards."""

    status: Status
    fragment: Fragment
    registers: LabelSet


class Completed(msgspec.Struct, frozen=True):
    """The spool was rolled: ``fragment`` will not change again, and a new spool begins."""

    fragment: Fragment
    registers: LabelSet
    first_append_time: float


class Restarted(msgspec.Struct, frozen=True):
    """The spool was rolled and held no committed bytes."""


class Committed(msgspec.Struct, frozen=True):
    """The pending bytes were made part of ``fragment``."""

    fragment: Fragment
    length: int


class RolledBack(msgspec.Struct, frozen=True):
    """``length`` pending bytes were given up; zero if nothing was pending."""

    length: int


class Mismatched(msgspec.Struct, frozen=True):
    """The proposal does not fit. Nothing changed, except that the spool may have rolled."""


SpoolEffect: TypeAlias = Completed | Restarted | Committed | RolledBack | Mismatched


@dataclass(slots=True)
class SpoolState:
    """The decisions about one spool. Invariants: see ``_check``."""

    fragment: Fragment
    registers: LabelSet = EMPTY_LABELS
    delta: int = 0
    first_append_time: float | None = None
    """Unix seconds of the first commit; None while the fragment is empty."""
    _next: Fragment | None = field(default=None, compare=False, repr=False)
    """The fragment that the pending bytes would make, once it was computed."""

    @classmethod
    def new(cls, journal: JournalName) -> SpoolState:
        """Return the spool of a replica that knows no bytes yet: ``[0, 0)``."""
        return cls(Fragment(journal=journal, begin=0, end=0))

    def check_content(self, content: Content) -> int:
        """Return the place of the content in the spool's file.

        Raise ``Invalid`` unless the content follows the pending bytes. Change nothing: call ``extend`` once
        the bytes are written.
        """
        if content.delta != self.delta:
            raise Invalid(
                f"invalid ContentDelta ({content.delta}; expected {self.delta})",
                path="ContentDelta",
                journal=self.fragment.journal,
            )
        return self.fragment.length + self.delta

    def extend(self, length: int) -> None:
        """Count ``length`` more pending bytes."""
        self.delta += length
        self._next = None

    def roll_back(self) -> RolledBack:
        """Give up the pending bytes."""
        length, self.delta, self._next = self.delta, 0, None
        return RolledBack(length)

    def propose(
        self, proposal: Proposal, pending_sum: Callable[[], bytes], now: float
    ) -> tuple[SpoolEffect, ...]:
        """Apply a proposal; the last effect says how it ended.

        ``pending_sum`` returns the SHA-1 of committed and pending bytes, and is called only if needed.
        ``now`` is Unix seconds. Raise ``Invalid`` for another journal's proposal.
        """
        if proposal.fragment.journal != self.fragment.journal:
            raise Invalid(
                f"proposal is of another journal ({proposal.fragment.journal})",
                path="Proposal.Journal",
                journal=self.fragment.journal,
            )
        rolled = (self._roll(proposal),) if self._must_roll(proposal.fragment) else ()
        return (*rolled, self._take(proposal, pending_sum, now))

    def grow(self, length: int, sum: bytes, registers: LabelSet, now: float) -> Fragment:
        """Commit ``length`` bytes, after which the SHA-1 is ``sum``, while nothing is pending. Return the
        fragment. This has the effect of ``extend``, and then ``propose`` with the ``next`` fragment."""
        assert length
        assert not self.delta
        former = self.fragment
        self.fragment = Fragment(
            former.journal, former.begin, former.end + length, sum, former.codec
        )
        self.registers, self._next = registers, None
        if self.first_append_time is None:
            self.first_append_time = now
        return self.fragment

    def next(self, pending_sum: Callable[[], bytes]) -> Fragment:
        """Return the fragment that the pending bytes would make."""
        fragment = self.fragment
        if not self.delta:
            return fragment
        if self._next is None:
            # All other fields have their defaults: see `_check`.
            self._next = Fragment(
                fragment.journal,
                fragment.begin,
                fragment.end + self.delta,
                pending_sum(),
                fragment.codec,
            )
        return self._next

    def commit_next(self, now: float) -> Committed:
        """Commit the pending bytes, after ``next`` has returned their fragment. This has the effect of
        ``propose`` with this fragment and the present registers."""
        assert self._next is not None
        length, self.delta = self.delta, 0
        self.fragment, self._next = self._next, None
        if self.first_append_time is None:
            self.first_append_time = now
        return Committed(self.fragment, length)

    def _must_roll(self, proposed: Fragment) -> bool:
        """Return True if the spool must roll before it can take the proposal.

        A proposal beyond all bytes here means that this replica missed commits: the spool goes on from the
        proposal's end. An empty proposal at our end is the primary's order to complete the fragment.
        """
        end = self.fragment.end
        return proposed.end > end + self.delta or (proposed.end == end and not proposed.length)

    def _roll(self, proposal: Proposal) -> Completed | Restarted:
        """Begin an empty fragment at the end of the proposal. Complete a present fragment that has bytes."""
        fragment, end = self.fragment, proposal.fragment.end
        effect: Completed | Restarted = Restarted()
        if fragment.length:
            assert self.first_append_time is not None
            effect = Completed(fragment, self.registers, self.first_append_time)
        if end > fragment.end:
            # Take registers of the proposal only if it ends after our end. If both end at one offset, keep
            # ours: different registers are then a mismatch.
            self.registers = proposal.registers
        self.fragment = Fragment(
            journal=fragment.journal, begin=end, end=end, codec=proposal.fragment.codec
        )
        self.delta, self._next = 0, None
        self.first_append_time = None
        return effect

    def _take(
        self, proposal: Proposal, pending_sum: Callable[[], bytes], now: float
    ) -> Committed | RolledBack | Mismatched:
        """Commit or roll back the pending bytes, as the proposal says. Change nothing if it does not fit."""
        if self.fragment == proposal.fragment and self.registers == proposal.registers:
            return self.roll_back()  # To propose the committed fragment means to roll back.
        if (
            self.delta
            and self.fragment.end + self.delta == proposal.fragment.end
            and self.next(pending_sum) == proposal.fragment
        ):
            self.registers = proposal.registers
            return self.commit_next(now)
        return Mismatched()

    def _check(self) -> None:
        """Raise ``AssertionError`` if an invariant is broken."""
        fragment = self.fragment
        assert 0 <= fragment.begin <= fragment.end
        assert self.delta >= 0
        assert (fragment.sum == ZERO_SUM) == (not fragment.length)
        assert (self.first_append_time is None) == (not fragment.length)
        # Peers compare whole fragments: facts of a blob store must never get in here.
        assert not fragment.backing_store
        assert not fragment.mod_time
        assert not fragment.path_postfix


def proposal_of(
    fragment: Fragment,
    first_append_time: float | None,
    *,
    roll_to: Offset,
    fragment_length: int,
    codec: Codec,
    flush_interval_ns: int,
    now: float,
) -> Fragment:
    """Return a primary's proposal before content: ``fragment`` unchanged, or rolled to a new, empty one.

    The fragment is rolled in any of these cases:

    - it is empty: then the new fragment gets the codec of the current specification;
    - it is *longer* than ``fragment_length``;
    - ``roll_to`` (0: not given) is not its begin;
    - its first commit was in another flush interval than ``now``, counted from the Unix epoch.

    The new fragment begins at ``roll_to``, or at the present end. Raise ``Bug`` if it loses committed bytes.
    """
    must_roll = (
        not fragment.length
        or fragment.length > fragment_length
        or (roll_to != 0 and roll_to != fragment.begin)
        or _is_flush_due(first_append_time, flush_interval_ns, now)
    )
    if not must_roll:
        return fragment
    end = roll_to or fragment.end
    if end < fragment.end:
        raise Bug("spool cannot roll backwards", journal=fragment.journal, roll_to=roll_to)
    return replace(fragment, begin=end, end=end, sum=ZERO_SUM, codec=codec)


def _is_flush_due(first_append_time: float | None, flush_interval_ns: int, now: float) -> bool:
    interval = flush_interval_ns // _SECOND_NS
    if interval <= 0 or first_append_time is None:
        return False
    return int(first_append_time) // interval != int(now) // interval
