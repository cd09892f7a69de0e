"""The renewal of a lease in its own thread, so that a busy event loop does not lose the lease.

A process whose loop is busy still owns its items, and serves them late. Only a loop that has run nothing for
``STALL_MAX_S`` counts as dead. Then the lease is left to expire, so that other processes can take over.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from contextlib import suppress
from typing import Final, NoReturn

from gazette.cluster.etcd.connection import Connection
from gazette.cluster.etcd.lease import Lease
from gazette.cluster.etcd.values import LeaseLost
from gazette.runtime.tasks import LoopThread
from gazette.runtime.user_code import place_of_thread

log = logging.getLogger(__name__)

STALL_MAX_S: Final = 60.0
"""Seconds for which an event loop may run nothing before its lease is left to expire."""
_LOOK_S: Final = 1.0


async def keep_alive_apart(lease: Lease) -> NoReturn:
    """Renew ``lease`` as `Lease.keep_alive` does, but in a thread, and while the caller's loop is busy.

    Raise ``LeaseLost`` if the lease was lost, also if the loop ran nothing for so long that the lease
    expired. Raise ``Closed`` or ``NotAllowed`` if the client was closed or its user lost its rights.
    Cancellation: the thread ends. The lease stays until its TTL has passed.
    """
    if not lease.connection.on_network:  # A whole simulation runs on one loop.
        await lease.keep_alive()
    thread = LoopThread("lease")
    try:
        await asyncio.wrap_future(thread.begin(_Renewal(lease).run()))
    finally:
        await asyncio.to_thread(thread.close)


class _Renewal:
    """The renewal of a lease, made on the lease's loop. Call ``run`` on the loop of another thread."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = lease.connection.clock
        self._ran_at = self._clock.monotonic()
        self._is_warned = False  # True once the stall was logged.

    async def run(self) -> NoReturn:
        """Renew the lease over a connection of this thread, until that is not possible any more."""
        shared = self._lease
        connection = Connection(shared.connection.settings, self._clock)
        own_lease = Lease(connection, shared.id, shared.ttl_s, shared.expires_at)
        try:
            while True:
                await own_lease.until_due()
                while self._is_stalled(own_lease):
                    await self._clock.sleep(_LOOK_S)
                await own_lease.renew()
                shared.ttl_s, shared.expires_at = own_lease.ttl_s, own_lease.expires_at
        except LeaseLost:
            # The busy loop learns of the loss later. Until then, it must not acknowledge anything.
            shared.expires_at = min(shared.expires_at, self._clock.monotonic())
            raise
        finally:
            await connection.close()

    def _is_stalled(self, kept: Lease) -> bool:
        """Ask the loop for a sign of life. Return True while the last sign is ``STALL_MAX_S`` old.

        Raise ``LeaseLost`` if the lease has expired meanwhile.
        """
        with suppress(RuntimeError):  # The loop is closed: the process ends.
            self._loop.call_soon_threadsafe(self._note_sign)
        silent_s = self._clock.monotonic() - self._ran_at
        if silent_s < STALL_MAX_S:
            self._is_warned = False
            return False
        if kept.remaining_s <= 0:
            raise kept.lost(f"the event loop has run nothing for {silent_s:.0f} s")
        if not self._is_warned and silent_s >= STALL_MAX_S + _LOOK_S:
            self._is_warned = True
            log.error(
                "the event loop has run nothing for %(seconds).0f s%(where)s: the lease of this process is"
                " no longer renewed. It expires in %(left).0f s unless the loop continues",
                {"seconds": silent_s, "where": _where(self._thread), "left": kept.remaining_s},
            )
        return True

    def _note_sign(self) -> None:
        self._ran_at = self._clock.monotonic()


def _where(thread: int) -> str:
    """Return where a thread is, in parentheses: in the user's code, if it runs any."""
    frame = sys._current_frames().get(thread)
    place = place_of_thread(thread)
    if not place and frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f" (at {place})" if place else ""
