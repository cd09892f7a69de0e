"""The readiness of a journal for one append: its replica, its store, and the deadline of a wait for them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from gazette.blobs.registry import HealthStatus
from gazette.broker.append import events as ev
from gazette.broker.append.invalidation import changed
from gazette.broker.append.line import Line
from gazette.broker.append.sessions import Admission

if TYPE_CHECKING:
    from gazette.blobs.registry import ActiveStore
    from gazette.broker.context import BrokerContext
    from gazette.broker.replica import Replica
    from gazette.broker.resolver import Resolution


class ReadinessWatch:
    """The readiness of a journal as one append sees it. Pass only resolutions with a specification."""

    __slots__ = ("_arrived", "_context", "_seen")

    def __init__(self, context: BrokerContext, arrived: float | None) -> None:
        """Note the monotonic time at which the append began to wait for its turn (None: not yet)."""
        self._context = context
        self._arrived = arrived
        self._seen: HealthStatus | None = None
        """The health of the store that was seen last."""

    def begin(self) -> None:
        """Count the wait for the store from now on, unless it is counted already."""
        if self._arrived is None:
            self._arrived = self._context.clock.monotonic()

    def look(
        self, resolution: Resolution, replica: Replica, admission: Admission
    ) -> ev.ReadinessSeen:
        """Return the readiness of the journal now, as the append sees it."""
        clock, store = self._context.clock, self._store(resolution)
        head, index = replica.head, replica.index
        error, unlisted = self._ailments(replica, store)
        undecided_to = index.unexplained_to
        return ev.ReadinessSeen(
            store_error=error,
            index=ev.IndexView(index.begin_offset, index.end_offset, index.last_mod_time),
            now=clock.now(),
            monotonic=clock.monotonic(),
            store_until=self._until(replica.line, ails=error is not None or bool(unlisted)),
            head=ev.HeadSeen(head.offset, head.closed_registers, replica.closings.reason)
            if head.loaded
            else None,
            unlisted=unlisted,
            must_begin=replica.must_begin(resolution.header.route),
            admission=admission,
            store_refuses="" if store is None or not store.refusals else _refusal(store, replica),
            undecided_to=undecided_to,
            undecided=_undecided(replica) if undecided_to else "",
        )

    def store_until(self, resolution: Resolution, replica: Replica) -> float:
        """Return the monotonic time until which an append waits for the store before its turn; 0 if the store
        works, or if it refuses the journal: a wait does not end a refusal."""
        store = self._store(resolution)
        if store is not None and _refusal(store, replica):
            return 0.0
        error, unlisted = self._ailments(replica, store)
        return self._until(replica.line, ails=error is not None or bool(unlisted))

    async def change(self, resolution: Resolution, replica: Replica, until: float) -> None:
        """Wait for the first listing, for a change of the store's health since the last look, or for the
        monotonic time ``until``.

        Raise ``Superseded`` if the resolution is invalidated, ``Closed`` if the replica ends. Cancellation:
        no effect.
        """
        clock = self._context.clock
        changes: list[Awaitable[object]] = [clock.sleep(until - clock.monotonic())]
        if not replica.index.first_refresh.is_set:
            changes.append(replica.index.wait_first_refresh())
        if (store := self._store(resolution)) is not None:
            changes.append(store.wait_health_change(self._seen))
        await changed(resolution.invalidated, *changes)

    def _store(self, resolution: Resolution) -> ActiveStore | None:
        """Return the first store of the journal; None if it has no store."""
        assert resolution.spec is not None
        stores = resolution.spec.fragment.stores
        return self._context.blob_stores.get(stores[0]) if stores else None

    def _ailments(self, replica: Replica, store: ActiveStore | None) -> tuple[str | None, str]:
        """Return the error of the first store (None: healthy), and why stores are not listed yet (empty: they
        are)."""
        self._seen = None if store is None else store.health
        error = None if self._seen is None else self._seen.error
        return error, "" if replica.index.first_refresh.is_set else replica.unlisted_reason

    def _until(self, line: Line, *, ails: bool) -> float:
        """Return the monotonic time until which this append waits for a store that ``ails``; 0 if the store
        works. A store that works also ends the wait of the whole line.

        Count from the append's arrival, or from the line's first wait for the store, whichever is later.
        """
        if not ails:
            line.store_ails_since = None
            return 0.0
        assert self._arrived is not None
        ailing_since = line.store_ails_since
        wait_began = max(
            self._arrived, self._context.clock.monotonic() if ailing_since is None else ailing_since
        )
        return wait_began + self._context.settings.store_check_timeout_s


def _refusal(store: ActiveStore, replica: Replica) -> str:
    """Return why the store refuses the journal's fragments; empty if the store takes them."""
    return store.refusals.get((replica.journal, replica.life), "")


def _undecided(replica: Replica) -> str:
    """Return why an append may have to wait for a decision about stored fragments; empty if it need not."""
    index = replica.index
    is_short = index.end_offset < max(index.unexplained_to, replica.head.offset)
    return replica.undecided_reason if is_short else ""
