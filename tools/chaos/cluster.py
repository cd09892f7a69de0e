"""The cluster: etcd and brokers as processes, with a gateway in every connection between them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.broker.key_space import broker_decoder, is_consistent
from gazette.client.client import Client
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.cluster.allocator.model import DecodedKV
from gazette.cluster.allocator.routes import route_of
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.server import EtcdServer
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Unavailable
from gazette.protocol.journal import JournalSpec
from gazette.protocol.route import Route
from gazette.run.dev.processes import ChildProcess, await_ready, python_module
from gazette.runtime.clock import Clock
from gazette.runtime.ports import free_port
from tools.chaos.network import Gateway, Network
from tools.chaos.seams import BROKER_ENV, CONTROL_ENV, Control

ETCD: Final = "etcd"
ROOT: Final = "/gazette/cluster"
STORE: Final = "store"
"""Directory of the blob store, below the file root."""
OTHER_STORE: Final = "other"
"""Directory of a second blob store."""
LIVES: Final = "lives"
"""Directory of the stores of journals that are created again: each life has its own."""
_LISTEN: Final = "127.0.0.1"
_ADVERTISED: Final = "127.0.0.2"
"""Another address of this machine: gateways listen here, and brokers at `_LISTEN` on the same port."""
_MAX_REPLICATION: Final = 9
_READY_S: Final = 90.0
# A lease of a few seconds is granted only by an etcd that would elect itself quickly.
_QUICK: Final = ("--heartbeat-interval=50", "--election-timeout=500")


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """Times in seconds."""

    directory: Path
    brokers: int = 3
    zones: int = 2
    lease_ttl_s: float = 10.0
    drain_timeout_s: float = 10.0
    min_append_rate: int = 65_536
    log_level: str = "info"


@dataclass(slots=True)
class Broker:
    """A broker process, and how it is reached: directly at its own port, by others at ``url``."""

    name: str
    zone: str
    grpc_port: int
    http_port: int
    process: ChildProcess
    paused: bool = False

    @property
    def url(self) -> str:
        return f"http://{_ADVERTISED}:{self.grpc_port}"


class ChaosCluster:
    """The processes: ``start``, then ``stop``. ``key_space`` mirrors etcd by a connection of its own."""

    def __init__(
        self, settings: ChaosSettings, clock: Clock, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.directory = settings.directory.absolute()
        self.file_root = self.directory / "fragments"
        self.store = self.file_root / STORE
        self.stores = (STORE, OTHER_STORE)
        self.control = Control(self.directory / "control")
        self.brokers: list[Broker] = []
        self.etcd = EtcdServer(
            self.directory / "etcd", durable=False, arguments=_QUICK, clock=clock
        )
        self.network = Network(self.pids)
        self.key_space = KeySpace(ROOT, broker_decoder(ROOT, _MAX_REPLICATION))
        prefixes = ("BROKER_", "ETCD_", "LOG_", "DEBUG_")
        self._environ = {k: v for k, v in environ.items() if not k.startswith(prefixes)}
        self._client: Etcd | None = None

    async def start(self) -> None:
        for store in (*self.stores, LIVES):
            (self.file_root / store).mkdir(parents=True, exist_ok=True)
        self.control.directory.mkdir(exist_ok=True)
        await asyncio.to_thread(self.etcd.start)
        for index in range(self.settings.brokers):
            await self._add_broker(index)
        for broker in self.brokers:
            await broker.process.start()
        for broker in self.brokers:
            await self.await_ready(broker)
        settings = EtcdSettings(endpoints=(self.etcd.endpoint,))
        self._client = await Etcd.connect(settings, self.clock)
        await self.key_space.load(self._client)

    async def watch(self) -> None:
        """Keep ``key_space`` up to date: a daemon."""
        assert self._client is not None
        await self.key_space.watch(self._client)

    async def _add_broker(self, index: int) -> None:
        name = f"broker-{index + 1}"
        zone = f"zone-{chr(ord('a') + index % self.settings.zones)}"
        grpc_port, http_port = free_port(), free_port()
        host, _, port = self.etcd.endpoint.rpartition("//")[2].rpartition(":")
        etcd = await self.network.gateway(ETCD, (host, int(port)), _LISTEN, 0, of=name)
        await self.network.gateway(name, (_LISTEN, grpc_port), _ADVERTISED, grpc_port)
        spools = self.directory / "spools" / name
        spools.mkdir(parents=True, exist_ok=True)
        argv = self._argv(name, zone, grpc_port, http_port, spools, etcd)
        log_path = self.directory / "logs" / f"{name}.log"
        seams = {CONTROL_ENV: str(self.control.directory), BROKER_ENV: name}
        process = ChildProcess(name, argv, log_path, {**self._environ, **seams}, self.clock)
        self.brokers.append(Broker(name, zone, grpc_port, http_port, process))

    def _argv(
        self, name: str, zone: str, grpc_port: int, http_port: int, spools: Path, etcd: Gateway
    ) -> list[str]:
        settings = self.settings
        return python_module(
            "tools.chaos.seams",
            f"--broker.id={name}",
            f"--broker.zone={zone}",
            f"--broker.host={_ADVERTISED}",
            f"--broker.bind-host={_LISTEN}",
            f"--broker.port={grpc_port}",
            f"--broker.http-port={http_port}",
            f"--broker.file-root={self.file_root}",
            f"--broker.spool-dir={spools}",
            f"--broker.drain-timeout={settings.drain_timeout_s}s",
            f"--broker.min-append-rate={settings.min_append_rate}",
            f"--etcd.address=http://{_LISTEN}:{etcd.port}",
            f"--etcd.lease={settings.lease_ttl_s}s",
            f"--log.level={settings.log_level}",
        )

    def pids(self) -> dict[str, int]:
        """Return the process ids of the brokers that run."""
        return {one.name: one.process.pid for one in self.brokers if one.process.running}

    # Clients.

    @property
    def addresses(self) -> str:
        return ",".join(one.url for one in self.brokers)

    def client(
        self, address: str = "", *, routes: bool = True, fragments: bool = False, zone: str = ""
    ) -> Client:
        """Create a client that goes through the gateways.

        Without ``routes`` every call goes to ``address``, and is proxied from there. With ``fragments`` it
        opens stored fragments itself.
        """
        access = FragmentAccess(file_root=self.file_root) if fragments else None
        return Client(
            address or self.addresses,
            zone=zone,
            route_cache_size=1024 if routes else 0,
            fragments=access,
            clock=self.clock,
        )

    # State.

    async def await_ready(self, broker: Broker) -> None:
        await await_ready(broker.process, broker.http_port, self.clock, _READY_S)

    async def revive(self, broker: Broker) -> None:
        """Start a broker that ended, and return when it serves."""
        if not broker.process.running:
            await broker.process.start()
        await self.await_ready(broker)

    def route(self, journal: str) -> tuple[Route, bool]:
        """Return the brokers of a journal as of ``key_space``, and whether they are known to be in step."""
        assignments = self.key_space.prefixed(f"{ROOT}/assign/{journal}#")
        consistent = bool(assignments) and is_consistent(
            assignments[0], assignments[0], assignments
        )
        return route_of(assignments), consistent

    def registered(self) -> dict[str, int]:
        """Return the brokers that are in etcd, with the revisions at which they joined."""
        return {
            kv.key.split("#")[1]: kv.raw.create_revision
            for kv in self.key_space.prefixed(f"{ROOT}/members/")
        }

    def created(self, journal: str) -> int:
        """Return the revision as of which a journal was created; 0 if there is no such journal."""
        kv = self._item(journal)
        return 0 if kv is None else kv.raw.create_revision

    def modified(self, journal: str) -> int:
        """Return the revision as of which a journal was changed last; 0 if there is no such journal."""
        kv = self._item(journal)
        return 0 if kv is None else kv.raw.mod_revision

    def _item(self, journal: str) -> DecodedKV | None:
        key = f"{ROOT}/items/{journal}"
        return next((kv for kv in self.key_space.prefixed(key) if kv.key == key), None)

    def specs(self) -> list[JournalSpec]:
        items: Sequence[DecodedKV] = self.key_space.prefixed(f"{ROOT}/items/")
        return [kv.decoded.value.spec for kv in items]

    def has_replicas(self) -> str:
        """Return what is missing until every journal has all of its replicas in step; else an empty text."""
        specs = self.specs()
        if not specs:
            return "there are no journals"
        for spec in specs:
            route, consistent = self.route(spec.name)
            if len(route.members) != spec.replication or route.primary is None:
                return f"{spec.name} has {len(route.members)} of {spec.replication} replicas"
            if not consistent:
                return f"the replicas of {spec.name} are not in step"
        return ""

    async def stop_brokers(self, timeout_s: float = 60.0) -> list[str]:
        """Send SIGTERM to all brokers at once. Return the names of those that had to be killed."""
        running = [one.process for one in self.brokers if one.process.running]
        ended = await asyncio.gather(*(process.stop(timeout_s) for process in running))
        return [process.name for process, ok in zip(running, ended, strict=True) if not ok]

    async def stop(self) -> None:
        """Stop everything, brokers before etcd."""
        await self.stop_brokers()
        if self._client is not None:
            await self._client.close()
            self._client = None
        await asyncio.to_thread(self.etcd.stop)
        await self.network.stop()

    async def until(self, what: str, missing: Callable[[], str], timeout_s: float) -> None:
        """Return once nothing is ``missing``. Raise ``Unavailable`` with what is missing after a time."""
        deadline = self.clock.monotonic() + timeout_s
        while text := missing():
            if self.clock.monotonic() > deadline:
                raise Unavailable(
                    f"{what} did not happen within {timeout_s:.0f} s: {text}",
                    hint=f"See the logs in {self.directory / 'logs'}.",
                )
            await self.clock.sleep(0.1)
