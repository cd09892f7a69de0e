"""``python -m stream_sum chunk``: publish streams to a running cluster, and verify what comes of them.

Exit codes: 0 all right; 1 a violation, or it broke; 2 a mistake in the flags.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gazette.client.flags import BrokerClientFlags
from gazette.config.schema import Loaded, Schema, duration, exit_with, setting
from gazette.errors import GazetteError, Invalid
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.tasks import TaskScope
from stream_sum.load import Load, LoadSettings
from stream_sum.verifier import Verifier

LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ChunkerFlags:
    """Flags of the chunker; the first three are named as in the original."""

    streams: int = setting(100, "number of streams to publish; -1: without end")
    chunks: int = setting(100, "greatest number of chunks of a stream")
    workers: int = setting(8, "number of streams that are published at the same time")
    sla: float = duration("40s", "time within which a stream's sum must follow its last chunk")
    alone: bool = setting(True, "no other process publishes streams: an unknown sum is a violation")


def main(argv: Sequence[str]) -> int:
    schema = Schema(
        "stream_sum chunk",
        {"chunker": ChunkerFlags, "broker": BrokerClientFlags},
        file_stem="gazette",
    )
    try:
        loaded = schema.load(argv, os.environ)
        flags = loaded.group(ChunkerFlags)
        for name, value in (("chunks", flags.chunks), ("workers", flags.workers)):
            if value < 1:
                raise Invalid(f"{value} {name} (expected 1 or more)", path=f"--chunker.{name}")
        return asyncio.run(_run(flags, loaded, SystemClock()))
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        sys.stderr.write(f"stream_sum chunk: {error}\n  {error.hint}\n")
        return 1
    except KeyboardInterrupt:
        return 130


async def _run(flags: ChunkerFlags, loaded: Loaded, clock: Clock) -> int:
    verifier = Verifier(alone=flags.alone)
    settings = LoadSettings(
        workers=flags.workers,
        chunks=flags.chunks,
        streams=flags.streams,
        pause_s=0.0,
        offset=0 if flags.alone else -1,
    )
    async with (
        loaded.group(BrokerClientFlags).client("", clock) as client,
        TaskScope("chunker") as scope,
    ):
        load = Load(client, verifier, clock, random.SystemRandom(), settings)
        running = scope.spawn(load.run(), name="load")
        late = ""
        while not running.done() and not verifier.violations and not late:
            await asyncio.wait({running}, timeout=LOOK_S)
            late = "; ".join(map(str, verifier.overdue(clock.monotonic(), flags.sla)))
        scope.cancel()
    if running.done() and not running.cancelled():
        running.result()
        verifier.finish()
    for violation in verifier.violations:
        sys.stderr.write(f"violation: {violation}\n")
    if late:
        sys.stderr.write(f"violation: {late}\n")
    sys.stdout.write(f"{load.published} streams published, {verifier.verified} verified\n")
    return 1 if late or verifier.violations else 0
