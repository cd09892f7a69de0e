"""Stage 6 of the byte path: takes the completed spools of one replica, gives `persister` what may be
uploaded, and holds back what only this broker is known to have.

A replica that follows leaves an upload to its primary only while that is known to hold the same bytes.
The proof is a proposal: a primary that proposes exactly our fragment has its bytes. Anything else is
uploaded at once, at the cost of an object that another broker may upload as well.

A primary commits to its own spool as it proposes to its peers. If it is cut off from them just then, it has
bytes that the journal may never have: whoever leads it next goes on without them, and gives their offsets
to other bytes. So a primary uploads what all replicas have acknowledged, the *agreed end*, and no byte
beyond. Nobody was told that those were appended: an append is answered when all have acknowledged it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from gazette.fragment.completed_spool import CompletedSpool
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset, Revision

log = logging.getLogger(__name__)


class Uploads(Protocol):
    """The persister, as far as it is used here."""

    def spool_complete(
        self,
        spool: CompletedSpool,
        *,
        life: Revision,
        tenure: Revision,
        reassigned: asyncio.Event | None = None,
        end: Offset | None = None,
    ) -> None: ...


class Agreement:
    """The agreed end of one replica, and the completed spools that wait for it. Loop-bound.

    All of them are of the journal that was created at revision ``life``. ``completed`` is called with the
    end of each spool that a primary gives on: all replicas have acknowledged everything before it.

    A replica that follows gives its spools on at once, and says whether its primary has the same bytes.
    (If both lose their leases at once, with bytes that a third does not have, the follower does upload
    them.)
    """

    def __init__(
        self, uploads: Uploads, life: Revision, completed: Callable[[Offset], None]
    ) -> None:
        self._uploads = uploads
        self._life = life
        self._completed = completed
        self._tenure: Revision = 0
        """The assignment of the primary that had content appended last, by when it was created."""
        self._end: Offset | None = None
        self._held: list[CompletedSpool] = []
        self._confirmed: Fragment | None = None
        self._reassigned: asyncio.Event | None = None

    @property
    def end(self) -> Offset | None:
        """The agreed end; None while this replica follows."""
        return self._end

    def lead(self, end: Offset, tenure: Revision) -> None:
        """This replica leads the journal from now on, by the assignment of that creation. Its spool ends at
        ``end``. Of no effect if it did before: a replica that has led never follows, it is replaced."""
        if self._end is None:
            self._end, self._tenure = end, tenure

    def agree(self, end: Offset) -> None:
        """All replicas of the journal's route have acknowledged everything before ``end``."""
        if self._end is None or end <= self._end:
            return
        self._end = end
        held, self._held = self._held, []
        for spool in held:
            self.spool_complete(spool)

    def confirm(self, fragment: Fragment, reassigned: asyncio.Event, tenure: Revision) -> None:
        """The primary of ``tenure`` has proposed exactly ``fragment``, which this replica has accepted.

        ``reassigned`` is set once the journal has another primary or other members than it had then.
        """
        self._confirmed, self._reassigned, self._tenure = fragment, reassigned, tenure

    def spool_complete(self, spool: CompletedSpool) -> None:
        """Give a spool on, or hold it until its end is agreed. Raises as the persister does."""
        if self._end is None:
            confirmed = spool.fragment == self._confirmed
            self._uploads.spool_complete(
                spool,
                life=self._life,
                tenure=self._tenure,
                reassigned=self._reassigned if confirmed else None,
            )
        elif spool.fragment.end <= self._end:
            self._uploads.spool_complete(spool, life=self._life, tenure=self._tenure)
            self._completed(spool.fragment.end)
        else:
            self._held.append(spool)

    def finish(self) -> None:
        """Give on what is held, as far as it is agreed; there will be no more answers.

        What is beyond is dropped, and logged. Raises as the persister does; what it was given is its own
        to cut and to repeat, like everything that it uploads.
        """
        held, self._held = self._held, []
        for spool in held:
            self._give_agreed(spool)

    def _give_agreed(self, spool: CompletedSpool) -> None:
        fragment, end = spool.fragment, self._end
        assert end is not None
        log.warning(
            "%(journal)s: not uploading [%(begin)d, %(end)d), which was not acknowledged by all "
            "replicas: its append was not answered",
            {"journal": fragment.journal, "begin": max(end, fragment.begin), "end": fragment.end},
        )
        if end > fragment.begin:
            self._uploads.spool_complete(spool, life=self._life, tenure=self._tenure, end=end)
            self._completed(end)
