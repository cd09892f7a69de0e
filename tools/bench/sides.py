"""Clusters that `gazette bench` measures in turn: one of ours, and one of the original."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.errors import Invalid, Unavailable
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.runtime.clock import Clock
from gazette.runtime.timeouts import timeout
from tools.bench.bare import HTTP2, BareService
from tools.bench.cluster import BROKERS, Bench

ORIGINAL_ENV: Final = "GAZETTE_GO"
"""Names a directory with the original's binaries."""
ORIGINAL: Final = "original"
_STOP_S: Final = 1.0
_READY_TIMEOUT_S: Final = 180.0
_BATCH: Final = 100


@dataclass(slots=True)
class Side:
    """A running cluster, and a client of it. ``bare`` is the bare service beside one of ours."""

    name: str
    cluster: LocalCluster
    client: Client
    bare: BareService | None
    clock: Clock

    @property
    def pids(self) -> list[int]:
        """The processes of all brokers."""
        return [one.process.pid for one in self.cluster.brokers]

    async def apply(self, specs: Sequence[JournalSpec]) -> None:
        """Create journals, and return once each has its primary."""
        changes = [JournalChange(upsert=spec) for spec in specs]
        for begin in range(0, len(changes), _BATCH):
            await self.client.apply_journals(changes[begin : begin + _BATCH])
        try:
            async with timeout(_READY_TIMEOUT_S):
                for spec in specs:
                    while await self.primary(spec.name, spec.replication) is None:
                        await self.clock.sleep(_POLL_S)
        except TimeoutError:
            raise Unavailable("journals did not get their brokers", cluster=self.name) from None

    async def primary(self, journal: str, replication: int = 1) -> tuple[str, int] | None:
        """Return host and port of the journal's primary; None before it has all its replicas."""
        listed = await self.client.list_journals(LabelSelector.of(name=journal))
        route = listed.journals[0].route if listed.journals else None
        if route is None or route.primary is None or len(route.members) < replication:
            return None
        host, _, port = route.endpoints[route.primary].rpartition(":")
        return host.rpartition("/")[2], int(port)


_POLL_S: Final = 0.05


@asynccontextmanager
async def sides(bench: Bench) -> AsyncIterator[list[Side]]:
    """Run a cluster of ours, and one of the original if `ORIGINAL_ENV` names it.

    Raise ``Invalid`` if that directory has no broker, and what a start raises. The end of the block ends all.
    """
    directory = bench.settings.directory / "sides"
    original = original_directory()
    async with AsyncExitStack() as stack:
        running: list[Side] = []
        for name in (HTTP2, *((ORIGINAL,) if original is not None else ())):
            of_original = name == ORIGINAL
            settings = ClusterSettings(
                directory / name,
                brokers=BROKERS,
                zones=BROKERS,
                original=original if of_original else None,
            )
            cluster = LocalCluster(settings, bench.clock)
            stack.push_async_callback(_stop, cluster)
            await cluster.start()
            bare = None
            if not of_original:
                bare = await stack.enter_async_context(
                    BareService(cluster.directory, cluster.environ, bench.clock, name)
                )
            client = await stack.enter_async_context(
                Client(addresses_of(cluster), clock=bench.clock)
            )
            running.append(Side(name, cluster, client, bare, bench.clock))
        yield running


def addresses_of(cluster: LocalCluster) -> str:
    """Return the endpoints of all brokers of a cluster, for a client."""
    return ",".join(one.grpc_url for one in cluster.brokers)


def original_directory() -> Path | None:
    """Return the directory that `ORIGINAL_ENV` names, which has the original's broker, or None."""
    program = original_program(
        "gazette", "Name the directory of the original's binaries, or unset it."
    )
    return None if program is None else program.parent


def original_program(name: str, hint: str) -> Path | None:
    """Return a program in the directory that `ORIGINAL_ENV` names, or None if it names none.

    Raise ``Invalid`` with ``hint`` if the program is not there.
    """
    named = os.environ.get(ORIGINAL_ENV, "")
    if not named:
        return None
    program = Path(named) / name
    if not os.access(program, os.X_OK):
        raise Invalid(f"{named} has no program {name}", path=ORIGINAL_ENV, hint=hint)
    return program


async def _stop(cluster: LocalCluster) -> None:
    # What the brokers hold is not needed any more.
    await asyncio.shield(cluster.stop(_STOP_S))  # noqa: TID251 - a task of its own
