"""A broker in the test's own process, on a real etcd, with real files and real gRPC."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from gazette.auth import MemberAuth, NoAuth
from gazette.blobs.registry import StoreConstructor
from gazette.broker.service import BrokerService
from gazette.broker.settings import BrokerSettings
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.rpc.channel import TlsSettings
from gazette.cluster.allocator.model import MEMBERS
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.lease import Lease
from gazette.cluster.process.membership import MemberEnvironment
from gazette.fragment.local_file import Disk
from gazette.net.server import Server, ServerSettings
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.text import duration
from gazette.runtime.clock import Clock, SystemClock

STORE = "file:///fragments/"
"""URL of the blob store of ``journal_spec``: a directory below the fixture's ``file_root``."""


def journal_spec(
    name: str,
    *,
    replication: int = 1,
    labels: LabelSet = EMPTY_LABELS,
    codec: Codec = Codec.NONE,
    stores: tuple[str, ...] = (STORE,),
    length: int = 1 << 24,
    **fields: Any,
) -> JournalSpec:
    """Return a valid specification. ``fields`` are further fields of ``JournalSpec``."""
    fragment = FragmentSpec(
        length=length, codec=codec, stores=stores, refresh_interval_ns=duration.SECOND
    )
    return JournalSpec(name, replication, labels, fragment, **fields)


async def leases_of(etcd: Etcd, root: str, id: str) -> list[Lease]:
    """Return the leases of those members of a cluster whose id is ``id``."""
    answer = await etcd.range(f"{root}{MEMBERS}", keys_only=True)
    lease_ids = [kv.lease for kv in answer.kvs if kv.key.decode().endswith(f"#{id}")]
    return [Lease(etcd._connection, lease_id, 0.0, 0.0) for lease_id in lease_ids]


class BrokerFixture:
    """A running broker at ``endpoint``. ``client`` is connected to it. ``http`` is its HTTP URL.

    Brokers on the same ``etcd`` and ``root`` are one cluster, and share ``tmp_path / "root"`` as
    the root of ``file://`` stores:

        async with await BrokerFixture.start(etcd, tmp_path) as broker:
            await broker.create(journal_spec("a/journal"))
            await broker.client.append(AppendParams("a/journal"), b"hello")
    """

    def __init__(self, service: BrokerService, client: Client, file_root: Path, etcd: Etcd) -> None:
        self.service = service
        self.client = client
        self.file_root = file_root
        self.etcd = etcd
        self._ended = False

    @classmethod
    async def start(
        cls,
        etcd: Etcd,
        tmp_path: Path,
        *,
        zone: str = "local",
        id: str = "broker-one",
        root: str = "/gazette/cluster",
        clock: Clock | None = None,
        auth: MemberAuth | None = None,
        lease_ttl_s: float = 5.0,
        server: dict[str, Any] | None = None,
        constructors: Mapping[str, StoreConstructor] | None = None,
        peer_tls: TlsSettings | None = None,
        disk: Disk | None = None,
        **settings: Any,
    ) -> Self:
        """Start a broker, and wait until it is ready.

        The broker makes its own connection to the endpoints of ``etcd``. ``settings`` are fields of
        ``BrokerSettings``, ``server`` fields of ``ServerSettings``. ``constructors`` replace the blob stores,
        and ``disk`` replaces the disk of spools. ``client``, and the broker's own calls to brokers, use
        ``peer_tls``.
        """
        clock = SystemClock() if clock is None else clock
        file_root = tmp_path / "root"
        (file_root / "fragments").mkdir(parents=True, exist_ok=True)
        address = ServerSettings("127.0.0.1", bind_host="127.0.0.1")
        listener = Server(clock, replace(address, **(server or {})))
        listener.bind()
        defaults = BrokerSettings(
            zone=zone,
            id=id,
            root=root,
            lease_ttl_s=lease_ttl_s,
            watch_delay_s=0.002,
            file_root=file_root,
            graceful_stop_s=2.0,
            drain_timeout_s=0.0,
            persist_timeout_s=10.0,
        )
        environment = MemberEnvironment(
            clock, random.Random(id), listener, etcd.settings, auth or NoAuth(), peer_tls
        )
        service = BrokerService(
            environment, replace(defaults, **settings), constructors=constructors, disk=disk
        )
        try:
            await service.start()
        except BaseException:
            await service.crash()
            raise
        client = Client(
            listener.endpoint,
            zone=zone,
            tls=peer_tls,
            signer=auth,
            fragments=FragmentAccess(file_root=file_root),
            clock=clock,
        )
        return cls(service, client, file_root, etcd)

    @property
    def endpoint(self) -> str:
        """URL of the broker's gRPC server: the address for clients."""
        return self.service.server.endpoint

    @property
    def http(self) -> str:
        """URL of the broker's HTTP server."""
        return self.service.server.http_endpoint

    async def create(self, *specs: JournalSpec) -> None:
        """Create journals, and wait until each has a consistent set of all its replicas.

        With too few brokers, this waits until the test's timeout.
        """
        await self.client.apply_journals([JournalChange(upsert=spec) for spec in specs])
        for spec in specs:
            await self.settled(spec.name)

    async def settled(self, journal: str) -> None:
        """Wait until the journal has all its replicas, and all of them are consistent."""
        context = self.service.context
        while not self._is_settled(journal):
            await context.key_space.next_change()

    async def settled_without(self, other: BrokerFixture, journal: str) -> None:
        """Wait until ``other``, which has crashed, is no longer a member. Then call ``settled``."""
        context = self.service.context
        gone = other.service.process_id
        while context.state.member(gone.zone, gone.suffix) is not None:
            await context.key_space.next_change()
        await self.settled(journal)

    def _is_settled(self, journal: str) -> bool:
        state = self.service.context.state
        item = state.item(journal)
        assignments = state.assignments_of(journal)
        return (
            item is not None
            and len(assignments) == item.decoded.value.desired_replication()
            and all(state.is_consistent(item, assigned, assignments) for assigned in assignments)
        )

    async def stop(self) -> None:
        """Stop the broker gracefully: its fragments are stored. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        await self.client.close()
        await self.service.stop()

    async def crash(self) -> None:
        """Stop the broker as SIGKILL would: its lease expires, and its spools are lost."""
        if self._ended:
            return
        self._ended = True
        await self.client.close()
        await self.service.crash()

    async def die(self) -> None:
        """Crash the broker, and revoke its lease at once: see `ConsumerFixture.die`."""
        leases = await leases_of(self.etcd, self.service.settings.root, self.service.settings.id)
        await self.crash()
        for lease in leases:
            await lease.revoke()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
