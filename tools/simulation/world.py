"""A simulated cluster that notes its history for the judge. Some processes may be of another version."""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from gazette.broker.key_space import decode_journal
from gazette.cluster.etcd.pb import rpc_pb2
from gazette.fragment.closing import ClosingName
from gazette.fragment.set_aside import SetAside
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import Fragment, FragmentStoreUrl
from gazette.testing.simulation import cluster
from gazette.testing.simulation.cluster import ETCD, ROOT, Cluster
from gazette.testing.simulation.etcd.watches import WatchStream
from tools.simulation.history import Assigned, History, Life, Stored
from tools.simulation.other_version import OtherVersion

_LEAVING = ("releasing its lease", "cancelling", "stopped")


class BrokerProcess(cluster.SimBroker):
    """One broker process. It notes its end and its losses in the history."""

    origin = __file__
    """Tells versions apart in traces."""
    cluster: World

    def __init__(self, cluster: World, host: str, id: str, number: int) -> None:
        super().__init__(cluster, host, id, number)
        self.began_at = cluster.loop.now
        self.ended_at: float | None = None

    @property
    def lease_id(self) -> int | None:
        """The lease under which the broker may acknowledge; None before it has one."""
        parts = None if self.service is None else self.service._parts
        lease: Any = None if parts is None else parts.context.lease._lease
        return None if lease is None else int(lease.id)

    @property
    def slots(self) -> list[int]:
        """Slots of the journals that are assigned to the broker, as it knows; 0 is a primary's."""
        parts = None if self.service is None else self.service._parts
        items = () if parts is None else parts.context.state.local_items
        return [one.assignment.decoded.slot for one in items]

    @property
    def has_persisted(self) -> bool:
        """True if the broker is ending and has uploaded its spools."""
        return self.service is not None and self.service.phase in _LEAVING

    def lose(self) -> None:
        """Note that the broker has ended, or lost its lease, before it had uploaded all its bytes."""
        self.cluster.history.lost_brokers.setdefault(self.name, self.cluster.loop.now)

    def terminate(self, *, hurried: bool) -> None:
        if hurried:
            self.cluster.history.hurried.setdefault(self.name, self.cluster.loop.now)
        super().terminate(hurried=hurried)


class World(Cluster):
    """Everything that one seed simulates."""

    def __init__(
        self, seed: int, *, trace: bool = False, other: OtherVersion | None = None
    ) -> None:
        self.other = other
        """Another version, of which about half of the processes are."""
        self.history = History()
        self.announced: dict[str, BrokerProcess] = {}
        """Processes whose member key is in etcd, by name."""
        self._leases: dict[str, int] = {}
        """The lease of each member's key, by the member's id."""
        self._settings: dict[str, Any] = {}
        self.on_exited: Callable[[BrokerProcess], None] = lambda process: None
        self.sessions = 0
        """Number of sessions of appends."""
        self.identities = 0
        """How many member ids were made up."""
        self._starts = Counter[str]()
        """Number of processes that were started, by the module that has their class."""
        super().__init__(seed, trace=trace)
        self.history.violations = self.violations

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all brokers. Those that another version does not know are left out."""
        return self._settings

    @settings.setter
    def settings(self, chosen: dict[str, Any]) -> None:
        ours, *others = (
            one.BrokerSettings.__dataclass_fields__
            for one in self.versions("gazette.broker.settings")
        )
        self._settings = {
            name: value
            for name, value in chosen.items()
            if name not in ours or all(name in other for other in others)
        }

    # etcd.

    def _on_etcd(self, revision: int, events: Any) -> None:
        super()._on_etcd(revision, events)
        prefix, members = f"{ROOT}/items/".encode(), f"{ROOT}/members/".encode()
        assignments, assigned = f"{ROOT}/assign/".encode(), dict[str, None]()
        for event in events:
            key: bytes = event.kv.key
            if key.startswith(members):
                id = key.decode().rpartition("#")[2]
                if event.type:
                    self._evicted(id, revision, expired=self.etcd.store.expires)
                else:
                    self._announced(id, revision, event.kv.lease)
            if key.startswith(assignments):
                assigned[key[len(assignments) :].decode().partition("#")[0]] = None
            if not key.startswith(prefix):
                continue
            journal = key[len(prefix) :].decode()
            life = self.history.last_life(journal)
            if event.type:
                assert life is not None
                life.deleted, life.deleted_at = revision, self.loop.now
            elif life is None or life.deleted is not None:
                spec = decode_journal(journal, event.kv.value)
                bucket = FragmentStoreUrl.parse(spec.fragment.stores[0]).host
                self.history.lives.append(Life(journal, revision, bucket))
        names = {one.id: one.name for one in self.announced.values()}
        for journal in assigned:
            found = {names[id]: route for id, route in self._assigned(journal) if id in names}
            synchronized = frozenset(name for name, route in found.items() if route)
            self.history.assigned.append(
                Assigned(journal, revision, self.loop.now, frozenset(found), synchronized)
            )

    def assigned(self, journal: str) -> list[str]:
        """Return the hosts of a journal's brokers, as etcd has them: the primary, then the others."""
        hosts = {one.id: one.host for one in self.brokers.values()}
        return [hosts[id] for id, _ in self._assigned(journal) if id in hosts]

    def _assigned(self, journal: str) -> list[tuple[str, bytes]]:
        """Return the members that a journal is assigned to, in order of slots, with the route of each."""
        prefix = f"{ROOT}/assign/{journal}#"
        end = prefix[:-1] + chr(ord("#") + 1)
        request = rpc_pb2.RangeRequest(key=prefix.encode(), range_end=end.encode())
        slots = []
        for kv in self.etcd.store.range(request).kvs:
            _, id, slot = kv.key.decode().removeprefix(prefix).split("#")
            slots.append((int(slot), id, kv.value))
        return [(id, route) for _, id, route in sorted(slots)]

    def hold_watches(self, host: str) -> list[WatchStream]:
        """Let a host hear of no change in etcd until the streams are released."""
        streams = [one for one in self.etcd.streams if one.peer == f"sim:{host}"]
        for stream in streams:
            stream.hold()
        return streams

    def compact_etcd(self) -> None:
        """Let etcd compact all revisions before the present one."""
        store = self.etcd.store
        if store.compacted < store.revision:
            self.say(ETCD, f"compacts up to {store.revision}")
            store.compact(rpc_pb2.CompactionRequest(revision=store.revision))

    def _announced(self, id: str, revision: int, lease: int) -> None:
        self._leases[id] = lease
        for one in self.processes:
            if one.id == id and not one.ended:
                self.announced[one.name] = one
                self.history.members.setdefault(one.name, (revision, math.inf))

    def _evicted(self, id: str, revision: int, *, expired: bool) -> None:
        """Note the end of a member's lease. By giving it back, a member says that its spools are stored."""
        for name, process in self.announced.items():
            # The key may be of a former process with this id, which was killed: its request can arrive late.
            if process.id == id and process.lease_id == self._leases[id]:
                self.history.evicted.setdefault(name, self.loop.now)
                self.history.members[name] = (self.history.members[name][0], revision)
                if expired and not process.has_persisted:
                    process.lose()
                elif process.slots:  # No other broker has taken over these journals.
                    self.history.hurried.setdefault(name, self.loop.now)
        self.announced = {n: p for n, p in self.announced.items() if p.id != id}

    # Stores.

    def _on_remove(self, bucket: str, path: str) -> None:
        super()._on_remove(bucket, path)
        for one in self.history.stored:
            if one.bucket == bucket and one.path == path and one.removed is None:
                one.removed = self.loop.now

    def _on_put(self, bucket: str, path: str, content: bytes, by: str) -> None:
        super()._on_put(bucket, path, content, by)
        # Only fragments are noted, with their decoded bytes; of closings, only their number.
        journal, _, name = path.rpartition("/")
        if path.startswith(".test/") or SetAside.parse(journal, name) is not None:
            return
        if ClosingName.parse(journal, name) is not None:
            self.history.closings += 1
            return
        marked = any(one.startswith(f"{path}.unconfirmed-") for one in self.buckets[bucket].objects)
        fragment = Fragment.parse(journal, name)
        file = DecodedFile(io.BytesIO(content), FragmentDecoder(fragment, start=fragment.begin))
        decoded = b""
        while block := file.read(1 << 20):
            decoded += block
        self.history.stored.append(
            Stored(self.loop.now, bucket, journal, fragment.begin, fragment.end, decoded, path, by)
        )
        self.history.stored[-1].marked = marked

    # Brokers.

    def _new_broker(self, host: str, id: str, number: int) -> Any:
        return self.version(__name__).BrokerProcess(self, host, id, number)

    def versions(self, module: str) -> list[Any]:
        """Return a module as each version has it; ours is the first."""
        return [sys.modules[module], *([] if self.other is None else [self.other.module(module)])]

    def version(self, module: str) -> Any:
        """Return a module of the version that a new process gets. Versions take turns."""
        found = self.versions(module)
        self._starts[module] += 1
        return found[self._starts[module] % len(found)]

    def crash(self, host: str, *, silent: bool = False) -> None:
        process = self.brokers[host]
        if process.ended:
            return
        super().crash(host, silent=silent)
        process.ended_at = self.loop.now
        process.lose()
        self.history.killed.setdefault(process.name, self.loop.now)

    def on_exit(self, process: BrokerProcess) -> None:
        process.ended_at = self.loop.now
        super().on_exit(process)
        self.on_exited(process)

    def holder(self, id: str, since: float, revision: int) -> tuple[str, ...]:
        """Return the processes that had a member id, in order, from ``since`` until now.

        A process without a member key serves nothing yet. A process that was no member any more at
        ``revision`` has no part in a commit then: an append may have begun long before its last attempt. Such
        processes count only if there is no other.
        """
        names = [
            one.name
            for one in self.processes
            if one.id == id and (one.ended_at is None or one.ended_at >= since)
        ]
        members = self.history.members
        named = [name for name in names if name in members]
        present = tuple(name for name in named if members[name][1] > revision)
        return present or tuple(named or names)

    def primary(self, id: str, since: float, revision: int) -> tuple[str, ...]:
        """Return the processes of ``holder`` that can have led at ``revision``; all of them if none can."""
        names = self.holder(id, since, revision)
        return tuple(name for name in names if self.history.was_member(name, revision)) or names

    def began(self, names: Collection[str]) -> float:
        """Return when the first of these processes began; 0 for none."""
        return min((one.began_at for one in self.processes if one.name in names), default=0.0)
