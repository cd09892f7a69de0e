"""Stage 6 of the byte path: takes the completed spools of one replica, gives `persister` the bytes to upload.
It holds bytes back that only this broker is known to have.

A follower leaves an upload to its primary only while the primary is known to hold the same bytes. The proof
is a proposal: a primary that proposes exactly our fragment has its bytes. A follower uploads all other
spools at once. The cost is an object that another broker may upload as well.

A primary commits to its own spool as it proposes to its peers. If the network cuts the primary off from its
peers just then, it has bytes that the journal may never have. The next primary goes on without those bytes,
and gives their offsets to other bytes. So a primary uploads no byte beyond the *agreed end*: up to this
offset, all replicas have acknowledged the journal. No client got an answer for bytes beyond: an append is
answered when all replicas have acknowledged it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from gazette.fragment.completed_spool import CompletedSpool
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset, Revision
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.runtime.latch import Latch

log = logging.getLogger(__name__)


class Uploads(Protocol):
    """The part of the persister that this module uses."""

    def spool_complete(
        self,
        spool: CompletedSpool,
        *,
        life: Revision,
        tenure: Revision,
        reassigned: Latch | None = None,
        end: Offset | None = None,
    ) -> None: ...


class UploadGate:
    """The agreed end of one replica, and the completed spools that wait for it. Loop-bound.

    All spools are of the journal that was created at revision ``life``. ``completed`` is called with the end
    of each spool that a primary passes on: all replicas have acknowledged everything before that end.

    A follower passes its spools on at once, and says whether its primary has the same bytes. (Both may lose
    their leases at once, with bytes that a third replica does not have. The follower then uploads them.)
    """

    def __init__(
        self, uploads: Uploads, life: Revision, completed: Callable[[Offset], None]
    ) -> None:
        self._uploads = uploads
        self._life = life
        self._completed = completed
        self._tenure: Revision = 0
        self._end: Offset | None = None
        self._registers = EMPTY_LABELS
        self._acknowledged: tuple[Offset, LabelSet] = (0, EMPTY_LABELS)  # See `note_acknowledged`.
        self._held: list[CompletedSpool] = []  # Spools that end beyond the agreed end.
        self._confirmed: Fragment | None = None  # See `confirm`. None: no proposal was confirmed.
        self._reassigned: Latch | None = None  # See `confirm`.

    @property
    def end(self) -> Offset | None:
        """The agreed end; None while this replica follows."""
        return self._end

    @property
    def registers(self) -> LabelSet:
        """The journal's registers at the agreed end."""
        return self._registers

    @property
    def tenure(self) -> Revision:
        """Tenure of the newest primary that this replica knows: its own once it leads; 0: none."""
        return self._tenure

    def become_primary(self, end: Offset, registers: LabelSet, tenure: Revision) -> None:
        """Lead the journal from now on, by the assignment that was created at ``tenure``.

        The spool ends at ``end``, with ``registers``. No effect if the replica leads already. A replica that
        has led never follows: another one replaces it.
        """
        if self._end is None:
            self._end, self._registers, self._tenure = end, registers, tenure

    def agree(self, end: Offset, registers: LabelSet) -> None:
        """Record that all replicas of the journal's route have acknowledged everything before ``end``, and
        have ``registers`` there."""
        if self._end is None or end <= self._end:
            return
        self._end, self._registers = end, registers
        held_spools, self._held = self._held, []
        for spool in held_spools:
            self.spool_complete(spool)

    def note_acknowledged(self, end: Offset, registers: LabelSet) -> None:
        """Record that all replicas have everything before ``end``, but etcd may not name this primary yet.

        The bytes are held back until ``agree_acknowledged`` or ``finish``.
        """
        if end > self._acknowledged[0]:
            self._acknowledged = (end, registers)

    def agree_acknowledged(self) -> None:
        """Count all acknowledged bytes as agreed: etcd names this primary now, or may name it."""
        self.agree(*self._acknowledged)

    def confirm(self, fragment: Fragment, reassigned: Latch, tenure: Revision) -> None:
        """Record that the primary of ``tenure`` proposed exactly ``fragment``, and that this replica has it.

        ``reassigned`` is set once the journal has another primary, or other members, than at the proposal.
        """
        self._confirmed, self._reassigned, self._tenure = fragment, reassigned, tenure

    def spool_complete(self, spool: CompletedSpool) -> None:
        """Pass a spool on, or hold it until all is agreed. Raise ``Closed`` if the persister has finished."""
        if self._end is None:
            is_confirmed = spool.fragment == self._confirmed
            self._uploads.spool_complete(
                spool,
                life=self._life,
                tenure=self._tenure,
                reassigned=self._reassigned if is_confirmed else None,
            )
        elif spool.fragment.end <= self._end:
            self._uploads.spool_complete(spool, life=self._life, tenure=self._tenure)
            self._completed(spool.fragment.end)
        else:
            self._held.append(spool)

    def finish(self) -> None:
        """Pass on the agreed part of all held spools: no more answers will arrive.

        All acknowledged bytes are agreed now: a write to etcd without an answer may have named this primary.
        If the lease is lost, the persister asks etcd before it uploads.

        The part beyond the agreed end is dropped, and logged. Raise ``Closed`` if the persister has finished.
        The persister cuts and repeats these uploads like all others.
        """
        self.agree_acknowledged()
        held_spools, self._held = self._held, []
        for spool in held_spools:
            self._give_agreed(spool)

    def _give_agreed(self, spool: CompletedSpool) -> None:
        """Pass on the part of a spool before the agreed end, if there is such a part. Log the other part."""
        fragment, end = spool.fragment, self._end
        assert end is not None
        log.warning(
            "%(journal)s: not uploading [%(begin)d, %(end)d): not all replicas have acknowledged it, and its "
            "append was not answered",
            {"journal": fragment.journal, "begin": max(end, fragment.begin), "end": fragment.end},
        )
        if end > fragment.begin:
            self._uploads.spool_complete(spool, life=self._life, tenure=self._tenure, end=end)
            self._completed(end)
