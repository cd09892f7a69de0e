"""The guard of the lease: a broker acknowledges appends, and sends bytes of its spools to readers, only while
its lease is known to hold.

A broker that was paused for longer than its lease does not know that others lead its journals. With R=1 only
this guard prevents a second history of the same offsets.
"""

from __future__ import annotations

from typing import Protocol

from gazette.errors import Unavailable


class Remaining(Protocol):
    """The part of a lease that this module uses."""

    @property
    def id(self) -> int:
        """Number of the lease, which no other lease has or had."""
        ...

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease surely holds, counted from the *sending* of the last renewal."""
        ...


class LeaseGuard:
    """Refuses acknowledgements, and reads of spools, unless the lease is known to hold. Loop-bound."""

    def __init__(self) -> None:
        self._lease: Remaining | None = None

    def attach(self, lease: Remaining) -> None:
        """Rely on ``lease`` from now on. Until the first call, the guard refuses all."""
        self._lease = lease

    @property
    def id(self) -> int:
        """Number of the broker's lease; 0 before there is one."""
        return 0 if self._lease is None else self._lease.id

    @property
    def holds(self) -> bool:
        """True if the lease is known to hold at this moment."""
        return self._lease is not None and self._lease.remaining_s > 0

    def check(self) -> None:
        """Raise ``Unavailable`` unless the lease is known to hold at this moment."""
        if self.holds:
            return
        late_s = 0.0 if self._lease is None else -self._lease.remaining_s
        raise Unavailable(
            "the broker's lease may have ended: it acknowledges nothing, and sends readers none of its own "
            "bytes, as others may lead its journals",
            hint="The broker was paused, or cut off from etcd. It will exit: start it again.",
            late_s=round(late_s, 3),
        )
