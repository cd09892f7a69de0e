"""What fleets of members share: etcd, a broker, and clients of these."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import httpx

from gazette.client.client import Client
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.errors import NotFound
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import leases_of
from tests.faults.fold_forge import Forge

ROOT: Final = Path(__file__).resolve().parents[2]
BROKER_LEASE_S: Final = 20.0


def python_path() -> str:
    """Return the path of processes that import what is here."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


class Backbone:
    """``start``, then ``stop``: also of one that was not started whole.

    ``forge``: processes of members are forked from one that has imported their program.
    """

    def __init__(self, directory: Path, *, forge: bool = False) -> None:
        self.clock = SystemClock()
        settings = ClusterSettings(
            directory, brokers=1, zones=1, lease_ttl_s=BROKER_LEASE_S, durable_etcd=False
        )
        self.cluster = LocalCluster(settings, self.clock)
        self.directory = self.cluster.directory
        self.forge = Forge() if forge else None
        self._etcd: Etcd | None = None

    async def start(self) -> None:
        await self.cluster.start()
        if self.forge is not None:
            environ = {**self.cluster.environ, "PYTHONPATH": python_path()}
            await self.forge.start(environ)
        self.client = Client(self.cluster.brokers[0].grpc_url, clock=self.clock)
        self.http = httpx.AsyncClient(timeout=30.0)
        settings = EtcdSettings(endpoints=(self.cluster.etcd.endpoint,))
        self._etcd = await Etcd.connect(settings, self.clock)

    async def stop(self) -> None:
        if self._etcd is not None:
            await self._etcd.close()
            await self.http.aclose()
            await self.client.close()
        if self.forge is not None:
            await self.forge.stop()
        await self.cluster.stop()

    async def expel(self, root: str, names: Collection[str]) -> None:
        """End the leases of these members, as time would: only of those that are dead."""
        assert self._etcd is not None
        etcd = self._etcd
        leases = [lease for name in names for lease in await leases_of(etcd, root, name)]
        async with TaskScope("leases") as scope:
            for lease in leases:
                scope.spawn(lease.revoke(), name=f"lease {lease.id:x}")

    async def lease_of(self, root: str, name: str) -> tuple[int, int]:
        """Return the lease of a member and the revision at which it joined. Raise ``NotFound``."""
        assert self._etcd is not None
        found = await self._etcd.range(f"{root}/members/")
        for kv in found.kvs:
            if kv.key.decode().rpartition("#")[2] == name:
                return kv.lease, kv.create_revision
        raise NotFound("no such member", name=name)
