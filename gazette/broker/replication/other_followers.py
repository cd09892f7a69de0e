"""The brokers that may upload bytes which this replica never received, and no client was answered for.

A primary sends an append to all of its followers at once. If it ends just then, one follower may have bytes
that another follower never gets. It uploads them when it leaves (`upload_gate`). If the other one leads
next, it would give the same offsets to other bytes.

A follower that stays brings such bytes along: the first synchronization of the new pipeline compares the ends
of all spools. Only followers that are gone matter. For these the new primary ends late uploads and lists the
stores before its first append (``Replica.begin``). It costs a listing if two replicas were lost at once, and
for the first append of a primary that got no content before.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from gazette.protocol.ids import ProcessId, Revision

Incarnation: TypeAlias = tuple[ProcessId, Revision]
"""A broker, and the creation revision of its member key: the next process of that id has another one."""

_LEFT: Final = -1


class OtherFollowers:
    """The other followers of former primaries, as seen by one replica that followed with them.

    A replica that got no content of a primary knows of none: any broker may have been one. To follow is not
    enough: a primary that has appended nothing has not looked at stores either.
    """

    def __init__(self) -> None:
        self._known: frozenset[Incarnation] | None = None

    @property
    def unknown(self) -> bool:
        """True at first, and after ``forget``."""
        return self._known is None

    @property
    def empty(self) -> bool:
        """True if no broker is known that may have other bytes."""
        return self._known == frozenset()

    def follow(self, others: frozenset[Incarnation]) -> None:
        """Record that this replica follows a primary, and ``others`` with it. No effect while none is known.

        A known follower that is not among them has left the journal. If it returns, its replica is new.
        """
        if self._known is None:
            return
        left = {(id, _LEFT) for id, _ in self._known - others}
        self._known = others | left

    def committed(self, others: frozenset[Incarnation]) -> None:
        """Record that this replica has committed content, which its primary sent to ``others``, too.

        That primary was in step with all of its followers. So only they can have other bytes now.
        """
        self._known = others

    def any_gone(self, present: frozenset[Incarnation]) -> bool:
        """Return True unless all known followers are among ``present``."""
        return self._known is None or not self._known <= present

    def forget(self) -> None:
        """Record that any broker may have other bytes: this replica goes on without some of its bytes."""
        self._known = None

    def clear(self) -> None:
        """Record that no broker can have other bytes: this replica leads, and is in step with all."""
        self._known = frozenset()
