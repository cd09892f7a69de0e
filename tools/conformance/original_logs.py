"""``python -m tools.conformance.original_logs PROGRAMS``: record logs of the original, for tests.

A log is of a shard of ``original/tally.go``, byte for byte. ``PROGRAMS`` is the directory of that program.
"""

from __future__ import annotations

import asyncio
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from tools.conformance.handover import Lane, apply, opened, read_all
from tools.conformance.programs import Programs, original

TARGET: Final = Path(__file__).parents[2] / "tests" / "recoverylog" / "testdata"
LANES: Final = (
    Lane("sqlite", "sqlite"),
    Lane("journal", "sqlite", attached="archive", journal="TRUNCATE"),
)


async def record(programs: Programs, directory: Path) -> None:
    """Let the original count, and write each log and what it counted."""
    async with opened(programs, directory, *LANES) as run, run.theirs() as shards:
        await apply(shards, LANES)
        await run.work(shards, *LANES, tail=5)
        await run.done(*LANES)
        for lane in LANES:
            log = await read_all(run.broker.client, lane.spec.recovery_log)
            source = await read_all(run.broker.client, lane.source)
            name = f"original-{lane.name}"
            TARGET.joinpath(f"{name}.log.xz").write_bytes(lzma.compress(log, preset=9))
            counted = {"counts": dict(sorted(lane.expected.items())), "read_through": len(source)}
            TARGET.joinpath(f"{name}.json").write_bytes(msgspec.json.encode(counted) + b"\n")
            print(f"{name}: {len(log):,} bytes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(record(original(Path(sys.argv[1])), Path(scratch)))
