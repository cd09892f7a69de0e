"""``gazette dev``: a cluster to develop against, in one command."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gazette.config.option import require_writable, writing
from gazette.config.schema import Schema, duration, exit_with, setting
from gazette.errors import GazetteError, Invalid
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.console_process import console_beside
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.file_limit import raise_file_limit
from gazette.runtime.tasks import TaskScope


@dataclass(frozen=True, slots=True)
class DevFlags:
    """Flags of ``gazette dev``."""

    dir: Path | None = setting(
        Path(".gazette"), "directory of all state, which a restart finds again"
    )
    brokers: int = setting(1, "number of brokers")
    zones: int = setting(1, "number of zones of the brokers")
    host: str = setting(
        "127.0.0.1", "address that brokers listen on; 0.0.0.0: all, open to other machines"
    )
    port: int = setting(8080, "gRPC port of the first broker, HTTP is the next; 0: any free ports")
    etcd_port: int = setting(2379, "port of etcd; 0: any free port")
    lease: float = duration("20s", "time after which etcd gives up a broker that does not answer")
    ready_file: Path | None = setting(None, "file to write, as JSON, when the cluster is usable")
    log_level: str = setting("warn", "least severity that brokers log")
    ui: bool = setting(True, "serve the console, and print its address")


def run(argv: Sequence[str]) -> int:
    """Run the subcommand. Return 0 after SIGTERM or SIGINT, 1 if a process failed, 2 for a wrong flag."""
    schema = Schema("gazette dev", {"": DevFlags})
    try:
        flags = schema.load(argv, {}).group(DevFlags)
        settings = _settings(flags)
        raise_file_limit()
        return asyncio.run(_serve(settings, flags, SystemClock()))
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        print(f"gazette dev: {error}\n  {error.hint}", file=sys.stderr)
        return 1


def _settings(flags: DevFlags) -> ClusterSettings:
    if flags.dir is None:
        raise Invalid("a directory is needed", path="--dir")
    return ClusterSettings(
        directory=flags.dir,
        brokers=flags.brokers,
        zones=min(flags.zones, flags.brokers),
        lease_ttl_s=flags.lease,
        host=flags.host,
        first_port=flags.port,
        etcd_port=flags.etcd_port,
        log_level=flags.log_level,
    )


async def _serve(settings: ClusterSettings, flags: DevFlags, clock: Clock) -> int:
    """Run the cluster. Return 0 once a signal asks for a stop, or 1 once a broker has ended."""
    ready_file = flags.ready_file
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if ready_file is not None:
        require_writable(ready_file, "--ready-file")
        with writing(ready_file, "--ready-file"):
            ready_file.unlink(missing_ok=True)
    cluster = LocalCluster(settings, clock)
    async with TaskScope("dev") as scope:
        start = scope.spawn(cluster.start(), name="start")
        stop = scope.spawn(stopping.wait(), name="stop")
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            await asyncio.wait({start})
            return 0
        start.result()
        if ready_file is not None:
            cluster.write_ready_file(ready_file)
        brokers = ",".join(broker.grpc_url for broker in cluster.brokers)
        surroundings = (cluster.directory, cluster.environ, clock, partial(print, flush=True))
        console: AbstractAsyncContextManager[None]
        console = console_beside(*surroundings, brokers=brokers) if flags.ui else nullcontext()
        try:
            async with console:
                _say(cluster)
                return await _watch(cluster, scope, stop)
        finally:
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)
            with suppress(OSError):  # The reader of the output may be gone.
                print("stopping …", flush=True)
            await asyncio.shield(cluster.stop())  # noqa: TID251 - a task of its own
            scope.cancel()


async def _watch(cluster: LocalCluster, scope: TaskScope, stop: asyncio.Task[object]) -> int:
    """Return 0 once a signal asks for a stop, or 1 once a broker has ended."""
    processes = {
        scope.spawn(broker.process.wait(), name=broker.process.name): broker.process
        for broker in cluster.brokers
    }
    done, _ = await asyncio.wait({stop, *processes}, return_when=asyncio.FIRST_COMPLETED)
    if stop in done:
        return 0
    for task in done:
        process = processes[task]  # type: ignore[index]
        print(f"gazette dev: {process.died()}", file=sys.stderr, flush=True)
    return 1


def _say(cluster: LocalCluster) -> None:
    first_broker = cluster.brokers[0]
    print(f"etcd     {cluster.etcd.endpoint}")
    for broker in cluster.brokers:
        print(f"broker   {broker.grpc_url} (gRPC)   {broker.http_url} (HTTP)   {broker.zone}")
    print(f"state    {cluster.directory}")
    broker_url, etcd_url = map(shlex.quote, (first_broker.grpc_url, cluster.etcd.endpoint))
    print(f"try      gazctl journals list --broker.address {broker_url}")
    print(
        f"         gazette run app.py --broker.address {broker_url} "
        f"--etcd.address {etcd_url} --store file:///"
    )
    print("Ctrl-C stops it; the state stays.", flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
