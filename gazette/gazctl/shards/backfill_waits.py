"""Reports of servers for which a stalled backfill waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gazette.client.client import Client
from gazette.client.rpc.preflight import require_reachable
from gazette.client.shards import ShardClient
from gazette.errors import Unavailable
from gazette.gazctl.io.terminal import Terminal
from gazette.history.backfill.report import Progress
from gazette.runtime.clock import Clock

QUIET_S: Final = 5.0
"""Seconds without progress before servers are checked, and between checks."""
CONNECT_S: Final = 5.0


async def report_stalls(
    servers: Mapping[str, Client | ShardClient],
    progress: Progress,
    terminal: Terminal,
    clock: Clock,
    quiet_s: float = QUIET_S,
) -> None:
    """Report unreachable servers while ``progress`` does not change, until cancelled. Report a reason once
    before the next progress.

    Keys of ``servers`` are descriptions of the servers. Appends and reads wait until brokers are back.
    """
    reported: set[str] = set()
    before = None
    while True:
        await clock.sleep(quiet_s)
        if (now := (progress.step, progress.done)) != before:
            before, reported = now, set()
            continue
        for server, client in servers.items():
            hint = (
                "The backfill continues when the server is back. If interrupted, resume it by "
                "its --run-id."
            )
            try:
                await require_reachable(client, server, connect_s=CONNECT_S, hint=hint)
            except Unavailable as error:
                if error.message not in reported:
                    reported.add(error.message)
                    terminal.note(f"{progress.step}: {error.message}\n{hint}")
