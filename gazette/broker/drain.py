"""How long a broker that wants to leave waits for others to take its journals over."""

from __future__ import annotations

from typing import Final

from gazette.allocator.state import State
from gazette.broker.settings import BrokerSettings
from gazette.clock import Clock

_POLL_S: Final = 0.25


def can_take_over(state: State) -> bool:
    """Whether there is another broker that stays and takes journals."""
    return any(
        kv.key != state.local_key
        and not kv.decoded.value.exiting()
        and kv.decoded.value.item_limit() > 0
        for kv in state.members
    )


async def patience_ends(clock: Clock, state: State, settings: BrokerSettings) -> str:
    """Return, with the reason, once waiting for a hand-off is of no more use.

    While no other broker could take over: ``drain_timeout_s`` from now, or from when the last one
    left. While there is one: ``drain_timeout_max_s`` from now, because it may lack capacity, or a
    journal may want as many replicas as there are brokers, until a replacement has started.
    """
    begun = clock.monotonic()
    alone_since: float | None = None
    while True:
        now = clock.monotonic()
        alone_since = None if can_take_over(state) else now if alone_since is None else alone_since
        if alone_since is not None and now - alone_since >= settings.drain_timeout_s:
            return f"no other broker could take over for {settings.drain_timeout_s:g} s"
        if now - begun >= settings.drain_timeout_max_s:
            return f"no other broker has taken over for {settings.drain_timeout_max_s:g} s"
        await clock.sleep(min(_POLL_S, settings.drain_timeout_s or _POLL_S))
