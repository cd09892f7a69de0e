"""How long a member that wants to leave waits for others to take over what it has."""

from __future__ import annotations

from typing import Final

from gazette.allocator.state import State
from gazette.clock import Clock

_POLL_S: Final = 0.25


def can_take_over(state: State) -> bool:
    """Whether there is another member that stays and takes items."""
    return any(
        kv.key != state.local_key
        and not kv.decoded.value.exiting()
        and kv.decoded.value.item_limit() > 0
        for kv in state.members
    )


async def patience_ends(
    clock: Clock, state: State, *, alone_timeout_s: float, timeout_s: float
) -> str:
    """Return, with the reason, once waiting for a hand-off is of no more use.

    While no other member could take over: ``alone_timeout_s`` from now, or from when the last one
    left. While there is one: ``timeout_s`` from now, because it may lack capacity, or an item may
    want as many replicas as there are members, until a replacement has started.
    """
    begun = clock.monotonic()
    alone_since: float | None = None
    while True:
        now = clock.monotonic()
        alone_since = None if can_take_over(state) else now if alone_since is None else alone_since
        if alone_since is not None and now - alone_since >= alone_timeout_s:
            return f"no other member could take over for {alone_timeout_s:g} s"
        if now - begun >= timeout_s:
            return f"no other member has taken over for {timeout_s:g} s"
        await clock.sleep(min(_POLL_S, alone_timeout_s or _POLL_S))
