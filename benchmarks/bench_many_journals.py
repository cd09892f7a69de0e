"""Thousands of journals on three brokers: their creation, idle cost and take-over, beside the original.

::

    python benchmarks/bench_many_journals.py [--journals 2000] [--refresh 1] [--replication 3]

``GAZETTE_GO`` names a directory with the original's binaries, to measure it in the same run. For each side it
prints seconds until the journals are applied, until each has its brokers, and until each has taken an append;
then the share of a processor that a broker takes at rest. With ``--spare`` it then kills one of four brokers,
and prints seconds until each journal has taken an append again. At the end it prints how many brokers failed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.errors import GazetteError
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.runtime.clock import SystemClock
from gazette.runtime.timeouts import timeout
from tools.bench.cluster import journal_spec
from tools.bench.processes import cpu_seconds
from tools.bench.sides import BROKERS, addresses_of, original_directory

_CLOCK: Final = SystemClock()
_BATCH: Final = 100
_WRITERS: Final = 32
_LIMIT_S: Final = 120.0
_REST_S: Final = 20.0
_STOP_S: Final = 1.0
_LEASE_S: Final = 20.0
_ATTEMPT_S: Final = 30.0


async def _apply(client: Client, specs: Sequence[JournalSpec]) -> None:
    for begin in range(0, len(specs), _BATCH):
        batch = specs[begin : begin + _BATCH]
        await client.apply_journals([JournalChange(upsert=spec) for spec in batch])


async def _assigned(client: Client, specs: Sequence[JournalSpec]) -> None:
    while True:
        listed = await client.list_journals(LabelSelector.of())
        routes = [one.route for one in listed.journals]
        if sum(len(route.members) for route in routes if route.primary is not None) >= sum(
            spec.replication for spec in specs
        ):
            return
        await _CLOCK.sleep(0.5)


async def _append_all(client: Client, specs: Sequence[JournalSpec]) -> int:
    """Append to each journal, until it takes it. Return how many took none in time."""
    left = list(specs)

    async def write() -> None:
        while left:
            spec = left.pop()
            try:
                async with timeout(_ATTEMPT_S):
                    await client.append(AppendParams(spec.name), [b"x\n"])
            except (GazetteError, TimeoutError):
                left.insert(0, spec)

    try:
        async with timeout(_LIMIT_S):
            await asyncio.gather(*(write() for _ in range(_WRITERS)))
    except TimeoutError:
        return len(left)
    return 0


async def _measure(cluster: LocalCluster, specs: Sequence[JournalSpec], rest_s: float) -> None:
    pids = [one.process.pid for one in cluster.brokers]
    async with Client(addresses_of(cluster), clock=_CLOCK) as client:
        begun = _CLOCK.monotonic()

        def report(what: str, seconds: float | None = None) -> None:
            took_s = _CLOCK.monotonic() - begun if seconds is None else seconds
            print(f"  {what}: {took_s:.1f} s", flush=True)

        await _apply(client, specs)
        report("applied")
        await _assigned(client, specs)
        report("assigned")
        missing = await _append_all(client, specs)
        report(f"all took an append, but {missing}" if missing else "all took an append")
        used = cpu_seconds(pids)
        report("processor time of three brokers", used)
        await _CLOCK.sleep(rest_s)
        before = cpu_seconds(pids)
        await _CLOCK.sleep(rest_s)
        share = (cpu_seconds(pids) - before) / rest_s / len(pids)
        print(f"  at rest: {share:.1%} of a processor for each broker", flush=True)
        if len(pids) > BROKERS:
            begun = _CLOCK.monotonic()
            cluster.brokers[0].process.signal(signal.SIGKILL)
            alive = ",".join(one.grpc_url for one in cluster.brokers[1:])
            async with Client(alive, clock=_CLOCK) as other:
                missing = await _append_all(other, specs)
            report(
                f"taken over after SIGKILL, but {missing}"
                if missing
                else "taken over after SIGKILL"
            )
    ended = sum(1 for one in cluster.brokers[1:] if not one.process.running)
    print(f"  brokers that failed: {ended}", flush=True)


async def _run(args: argparse.Namespace) -> None:
    original = original_directory()
    names = {"ours": None, **({"original": original} if original else {})}
    for name, programs in names.items():
        if args.only not in ("", name):
            continue
        with tempfile.TemporaryDirectory() as directory:
            settings = ClusterSettings(
                Path(directory),
                brokers=BROKERS + 1 if args.spare else BROKERS,
                zones=BROKERS,
                lease_ttl_s=_LEASE_S,
                original=programs,
                broker_flags=(f"--broker.limit={2 * args.journals}",),
            )
            print(
                f"{name}: {args.journals} journals, R={args.replication}, refresh {args.refresh} s"
            )
            specs = [
                journal_spec(f"many/{n:05}", replication=args.replication, refresh_s=args.refresh)
                for n in range(args.journals)
            ]
            cluster = LocalCluster(settings, _CLOCK)
            await cluster.start()
            try:
                await _measure(cluster, specs, args.rest)
            finally:
                await asyncio.shield(cluster.stop(_STOP_S))  # noqa: TID251 - a task of its own


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--journals", type=int, default=2_000)
    parser.add_argument("--replication", type=int, default=BROKERS)
    parser.add_argument("--refresh", type=int, default=300, metavar="SECONDS")
    parser.add_argument("--rest", type=float, default=_REST_S, metavar="SECONDS")
    parser.add_argument("--only", choices=("", "ours", "original"), default="")
    parser.add_argument("--spare", action="store_true", help="run a fourth broker, and kill one")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
