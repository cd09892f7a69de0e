"""Reports of the reasons why appends wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.errors import GazetteError, NotYet
from gazette.gazctl.io.terminal import Terminal
from gazette.runtime.timeouts import timeout

QUIET_S: Final = 5.0
"""Seconds without an append before a broker is asked for the reason, and between questions."""
ASK_TIMEOUT_S: Final = 20.0
"""Seconds that a broker may take to give a reason: slightly more than it waits for a listing."""


async def report_stalls(
    service: AppendService, client: Client, terminal: Terminal, appended: Callable[[], int]
) -> None:
    """Report why appends wait while ``appended`` does not change. Do not repeat the last reason. Run until
    cancelled."""
    reported: str | None = None
    before = appended()
    while True:
        await client.clock.sleep(QUIET_S)
        now, waiting = appended(), service.waiting()
        if now != before or not waiting:
            before, reported = now, None
            continue
        journal, reason = min(waiting.items())
        reason = reason or await _asked(client, journal)
        more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        # The append may have succeeded meanwhile.
        if reason != reported and journal in service.waiting():
            reported = reason
            terminal.note(f"waiting for {journal}{more}: {reason}")


async def _asked(client: Client, journal: str) -> str:
    """Return why a broker does not answer an append. Ask by a read, which a broker answers sooner."""
    reader = client.reader(ReadParams(journal, offset=-1, block=False, metadata_only=True))
    try:
        async with timeout(ASK_TIMEOUT_S):
            await reader.read()
    except NotYet:
        pass  # The broker serves the journal, which has no bytes after its head.
    except TimeoutError:
        return "its broker answers neither to appends nor to reads"
    except GazetteError as error:
        return str(error)
    finally:
        reader.close()
    return "its broker has not answered the append yet, but answers reads"
