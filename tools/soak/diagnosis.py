"""The diagnosis of a soak that is stuck: states of shards and journals, and the last warnings in logs."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gazette.errors import GazetteError
from tools.chaos.cluster import Broker
from tools.soak.cluster import Member, SoakCluster

COMPLAINTS: Final = 4
"""Number of lines of a log that are reported."""
_TAIL_BYTES: Final = 256 << 10
_COMPLAINT: Final = re.compile(r"^\S+ (warning|error|fatal) ", re.MULTILINE)


async def diagnose(cluster: SoakCluster, waits: Mapping[str, int]) -> str:
    """Return a text of some lines. ``waits``: milliseconds of waiting, by what was waited for."""
    lines = [f"waited {ms / 1000:.1f} s: {what}" for what, ms in _worst(waits)]
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    lines.append(f"load of the machine: {load}")
    lines += await _shards(cluster)
    lines += _journals(cluster)
    members: list[Broker | Member] = [*cluster.brokers, *cluster.members]
    for member in members:
        process = member.process
        state = "stopped" if member.paused else "runs" if process.running else "ended"
        code = "" if process.running else f" with {process.exit_code}"
        lines.append(f"{member.name} {state}{code}; its log {process.log_path}:")
        lines += [f"    {line}" for line in await asyncio.to_thread(complaints, process.log_path)]
    return "\n".join(lines)


def _worst(waits: Mapping[str, int]) -> Sequence[tuple[str, int]]:
    return sorted(waits.items(), key=lambda item: -item[1])[:5]


async def _shards(cluster: SoakCluster) -> list[str]:
    try:
        shards = await cluster.listed_shards()
    except (GazetteError, TimeoutError) as error:
        return [f"shards cannot be listed: {error!r}"]
    lines = []
    for shard in shards:
        replicas = [
            f"{member.suffix} {status.code.name} {'; '.join(status.errors)}".rstrip()
            for member, status in zip(shard.route.members, shard.status, strict=True)
        ]
        lines.append(f"{shard.spec.id}: {', '.join(replicas) or 'no member'}")
    return lines


def _journals(cluster: SoakCluster) -> list[str]:
    lines = []
    for spec in cluster.specs():
        route, consistent = cluster.route(spec.name)
        if len(route.members) != spec.replication or not consistent or route.primary is None:
            names = ", ".join(one.suffix for one in route.members)
            lines.append(
                f"{spec.name}: {names or 'no broker'}, {'in' if consistent else 'not in'} step,"
                f" primary {route.primary}"
            )
    return lines


def complaints(log_path: Path, count: int = COMPLAINTS) -> list[str]:
    """Return the last warnings and errors of a log."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return [f"no log: {error}"]
    lines = [line for line in text.splitlines() if _COMPLAINT.match(line)]
    return [line[:400] for line in lines[-count:]]
