"""The brokers that may upload bytes which this replica never received.

A primary sends an append to all of its followers at once. If the primary ends just then, one follower may
have bytes that another never gets. No client got an answer for such bytes, but the follower uploads them when
it leaves (`upload_gate`). If the other follower leads next, it would give the same offsets to other bytes.

A follower that stays reports such bytes: the first synchronization of the new pipeline compares the ends of
all spools. Only followers that are gone matter: their late uploads must not count. So the new primary writes
its begin to etcd, which ends late uploads, and lists the stores (``Replica.begin``). It does both only if a
follower was lost with the former primary, or if the new primary got no content as follower.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from gazette.protocol.ids import ProcessId, Revision

Incarnation: TypeAlias = tuple[ProcessId, Revision]
"""A broker, and the creation revision of its member key, which differs for a later process of the same id."""

_LEFT: Final = -1
"""Revision of a follower that has left the journal. No member has it, so such a follower counts as gone."""


class OtherFollowers:
    """The other followers of former primaries, as seen by one replica that followed with them.

    A replica that got no content from a primary knows no followers: any broker may have been one. To follow a
    primary is not enough: a primary that appended nothing has not looked at stores either.
    """

    def __init__(self) -> None:
        self.known: frozenset[Incarnation] | None = None
        """The brokers that may have other bytes; None, at first and after ``forget``: any broker."""

    def follow(self, others: frozenset[Incarnation]) -> None:
        """Record that this replica follows a primary, with ``others``. No effect while ``known`` is None.

        A known follower that is not among ``others`` has left the journal. If it returns, its replica is new.
        """
        if self.known is None:
            return
        departed = {(process_id, _LEFT) for process_id, _ in self.known - others}
        self.known = others | departed

    def committed(self, others: frozenset[Incarnation]) -> None:
        """Record that this replica has committed content, which its primary also sent to ``others``.

        That primary was in step with all of its followers. So only ``others`` can have other bytes now.
        """
        self.known = others

    def any_gone(self, present: frozenset[Incarnation]) -> bool:
        """Return True unless ``present`` has all known followers."""
        return self.known is None or not self.known <= present

    def forget(self) -> None:
        """Record that any broker may have other bytes, because this replica goes on without some bytes."""
        self.known = None

    def clear(self) -> None:
        """Record that no broker can have other bytes, because this replica leads and is in step with all."""
        self.known = frozenset()
