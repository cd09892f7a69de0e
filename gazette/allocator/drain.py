"""How long a member that wants to leave waits for others to take over what it has."""

from __future__ import annotations

from typing import Final

from gazette.allocator.state import State
from gazette.clock import Clock

_POLL_S: Final = 0.25


def can_take_over(state: State) -> bool:
    """Whether the members that stay could take everything that we have.

    There must be as many of them as any of our items needs replicas, and all of the cluster's
    replicas must be within their limits: otherwise the allocator leaves us what does not fit. While
    members leave, an item may need fewer than it asks for (`state.Demand.replication`).
    """
    staying = [
        kv.decoded.value.item_limit()
        for kv in state.members
        if kv.key != state.local_key and not kv.decoded.value.exiting()
    ]
    useful = sum(limit > 0 for limit in staying)
    replication = state.demand.replication
    # An item that was created since the last observation is not ours yet.
    wanted = max((replication.get(one.item.decoded.id, 0) for one in state.local_items), default=0)
    enough: bool = sum(staying) >= state.demand.item_slots
    return enough and useful > 0 and useful >= wanted


def _is_announced(state: State) -> bool:
    """Whether our own wish to leave is in the state, or our key gone."""
    ours = next((kv for kv in state.members if kv.key == state.local_key), None)
    return ours is None or ours.decoded.value.exiting()


async def patience_ends(
    clock: Clock, state: State, *, alone_timeout_s: float, timeout_s: float
) -> str:
    """Return, with the reason, once waiting for a hand-off is of no more use.

    While the others could not take over: ``alone_timeout_s`` from now, or from when that became so.
    It is time for a replacement to start. While they could: ``timeout_s`` from now.
    """
    begun = clock.monotonic()
    alone_since: float | None = None
    while True:
        now = clock.monotonic()
        # Before others know that we leave, none of them offers more than it has.
        alone = _is_announced(state) and not can_take_over(state)
        alone_since = None if not alone else now if alone_since is None else alone_since
        if alone_since is not None and now - alone_since >= alone_timeout_s:
            return f"no other members could take over for {alone_timeout_s:g} s"
        if now - begun >= timeout_s:
            return f"other members have not taken over in {timeout_s:g} s"
        await clock.sleep(min(_POLL_S, alone_timeout_s or _POLL_S))
