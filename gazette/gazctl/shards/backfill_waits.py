"""What a backfill waits for, said while it does not get on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gazette.backfill.report import Progress
from gazette.client.client import Client
from gazette.client.rpc.preflight import require_reachable
from gazette.client.shards import ShardClient
from gazette.errors import Unavailable
from gazette.gazctl.io.terminal import Terminal
from gazette.runtime.clock import Clock

QUIET_S: Final = 5.0
"""How long nothing gets on before servers are looked at, and again since."""
CONNECT_S: Final = 5.0


async def report_stalls(
    servers: Mapping[str, Client | ShardClient],
    progress: Progress,
    terminal: Terminal,
    clock: Clock,
    quiet_s: float = QUIET_S,
) -> None:
    """Say, without end, which of the servers (by what they are) cannot be reached while ``progress`` stays
    what it is; each reason once. Appends and reads wait for brokers that come back."""
    told: set[str] = set()
    before = None
    while True:
        await clock.sleep(quiet_s)
        if (now := (progress.step, progress.done)) != before:
            before, told = now, set()
            continue
        for what, client in servers.items():
            hint = "It goes on when it is back; interrupted, it is resumed by its --run-id."
            try:
                await require_reachable(client, what, connect_s=CONNECT_S, hint=hint)
            except Unavailable as error:
                if error.message not in told:
                    told.add(error.message)
                    terminal.note(f"{progress.step}: {error.message}\n{hint}")
