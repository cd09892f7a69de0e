"""The limits of uploads, from known heads of journals: a later primary may have begun before their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gazette.broker.key_space import local_id_of
from gazette.broker.known_head import Head, read_head
from gazette.errors import GazetteError, NotFound, Unavailable
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.broker.lease_guard import LeaseGuard
    from gazette.cluster.allocator.state import State
    from gazette.cluster.etcd.client import Etcd
    from gazette.protocol.ids import JournalName, Offset, Revision
    from gazette.runtime.clock import Clock

_ASK_S: Final = 2.0
_SILENT_S: Final = 4.0
"""Seconds before etcd is asked again for any upload, after it did not answer."""


class UploadLimits:
    """Offsets at which later primaries have begun. They limit uploads of former primaries. Loop-bound.

    A broker asks etcd before each upload. Its key space may be behind etcd although its lease holds. A
    follower may have bytes that a later primary never had. There is one exception: the bytes of a primary's
    own tenure, while its lease holds and its key space says that it leads. A primary uploads only bytes that
    all replicas have acknowledged.
    """

    def __init__(self, etcd: Etcd, state: State, lease: LeaseGuard, clock: Clock) -> None:
        self._etcd = etcd
        self._state = state
        self._lease = lease
        self._clock = clock
        self._silent_until = 0.0  # Monotonic time until which etcd is not asked again.

    async def of(self, journal: JournalName, life: Revision, tenure: Revision) -> Offset | None:
        """Return the offset at which a later primary of the journal began; None if no later primary did.

        Raise ``NotFound`` if the journal was deleted: its known head is gone, too. Raise ``Unavailable``
        while etcd does not answer, and for `_SILENT_S` after that. Raise ``Conflict`` for a head of another
        form. After ``Unavailable`` or ``Conflict``, a later primary may have begun.
        """
        if self._lease.holds and self._leads(journal, tenure):
            return None
        if self._clock.monotonic() < self._silent_until:
            raise _silent()
        try:
            async with timeout(_ASK_S):
                lives, kv = await read_head(self._etcd, self._state.root, journal, life)
        except (GazetteError, TimeoutError) as error:
            self._silent_until = self._clock.monotonic() + _SILENT_S
            raise _silent() from error
        if not lives:
            raise NotFound("the journal was deleted", journal=journal, life=life)
        head = Head(life) if kv is None else Head.decode(kv.value)
        return head.limit(tenure) if head.life == life else None

    def _leads(self, journal: JournalName, tenure: Revision) -> bool:
        """Return True if this broker leads the journal in that tenure, as its key space says."""
        local = local_id_of(self._state)
        return any(
            kv.raw.create_revision == tenure
            and not kv.decoded.slot
            and kv.decoded.member_id == (local.zone, local.suffix)
            for kv in self._state.assignments_of(journal)
        )


def _silent() -> Unavailable:
    return Unavailable(
        "etcd did not answer: another broker may have led the journal since",
        hint="No action: the bytes are kept, and etcd is asked again. Check etcd if this lasts.",
    )
