"""The costs of one member of a large cluster: of its mirror of etcd, and of lists of all items."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from gazette.auth import Capability, Claims, NoAuth
from gazette.broker.api.list_apply import ListApplyApi
from gazette.broker.resolver import Resolver as BrokerResolver
from gazette.broker.settings import BrokerSettings
from gazette.client.journals import list_journals
from gazette.client.rpc.errors import END_OF_STREAM
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.values import KeyValue, ResponseHeader, WatchEvent, WatchResponse
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.consumer.api.shard_api import ShardApi
from gazette.consumer.resolver import Resolver as ConsumerResolver
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import broker_pb2, consumer_pb2
from gazette.runtime.tasks import TaskScope
from tools.scale.clusters import BROKERS, ROOT, Kind, PaperCluster
from tools.scale.paper_etcd import PaperEtcd
from tools.scale.paper_loop import PaperClock, PaperLoop, sleep

CHANGES: Final = (1, 100, 1_000)
"""Numbers of changes that one step of the key space applies."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value. ``turn_s`` is the longest turn of the event loop during the measurement."""

    name: str
    value: float
    unit: str
    turn_s: float = 0.0


class _Replica:
    """A replica, or a shard, without any work."""

    failure = None

    def start(self, *, primary: bool = False) -> None:
        pass

    def route_changed(self) -> None:
        pass

    async def shut_down(self) -> None:
        pass


class _Call:
    """One call of a server: counts the bytes of its answers, and keeps them."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.sizes: list[int] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, answer: Any) -> None:
        self.sizes.append(len(answer.SerializeToString()))
        self.answers.append(answer)
        await sleep(0)


def view(kind: Kind, items: int) -> list[Figure]:
    """Measure the mirror and the lists of one member."""
    loop = PaperLoop()
    try:
        return loop.run_until_complete(_View(loop, kind, items).run())
    finally:
        loop.close()


class _View:
    def __init__(self, loop: PaperLoop, kind: Kind, items: int) -> None:
        self._loop = loop
        self._kind = kind
        self._items = items
        self._clock = PaperClock(loop)
        self._paper = PaperEtcd(loop, 0.005)
        self._cluster = PaperCluster(kind, items, self._paper)
        self._figures: list[Figure] = []

    async def run(self) -> list[Figure]:
        kind, paper = self._kind, self._paper
        self._cluster.assign()
        self._note("keys in etcd", len(paper.kvs), "")
        self._note("bytes of keys and values", paper.value_bytes, "B")
        settings = EtcdSettings(("http://paper:2379",))
        etcd = await Etcd.connect(settings, self._clock, transport=cast("Any", paper))
        ks = KeySpace(ROOT, kind.decoder)
        state = State(ks, self._cluster.key_of(1), kind.is_consistent, kind.progress)
        async with TaskScope("scale") as scope:
            resolver = self._resolver(ks, state, scope)
            ks.observers += [state.observe, resolver.update]
            before = _resident_bytes()
            await self._timed("load of all keys", ks.load(etcd))
            self._note("memory for each item", (_resident_bytes() - before) / self._items, "B")
            self._note("items of this member", len(state.local_items), "")
            for changes in CHANGES:
                await self._timed(f"a step with {changes} changes", self._step(ks, changes))
            if kind is BROKERS:
                await self._list_journals(ks, state, resolver)
            else:
                await self._list_shards(etcd, ks, state, resolver)
            scope.cancel()
        return self._figures

    def _resolver(self, ks: KeySpace, state: State, scope: TaskScope) -> Any:
        replica = cast("Any", _Replica())
        if self._kind is BROKERS:
            return BrokerResolver(ks, state, scope, lambda *_: replica, lambda url: None)
        return ConsumerResolver(ks, state, scope, lambda *_: replica)

    async def _step(self, ks: KeySpace, count: int) -> None:
        """Apply one batch: each change is a write of an assignment, with the value that it has."""
        await sleep(0)
        assignments = ks.prefixed(f"{ROOT}/assign/")
        revision = ks.header.revision
        responses = []
        for number in range(count):
            raw = assignments[number * len(assignments) // count].raw
            revision += 1
            kv = KeyValue(
                raw.key, raw.value, raw.create_revision, revision, raw.version + 1, raw.lease
            )
            responses.append(WatchResponse(ResponseHeader(1, 2, revision, 3), (WatchEvent(kv),)))
        ks.apply(responses)

    async def _list_journals(self, ks: KeySpace, state: State, resolver: Any) -> None:
        settings = BrokerSettings(root=ROOT)
        context = SimpleNamespace(
            clock=self._clock,
            key_space=ks,
            state=state,
            resolver=resolver,
            settings=settings,
            verifier=NoAuth(),
        )
        api = ListApplyApi(cast("Any", context))
        ks.observers.append(api.updated)
        everything = _Call()
        for name, selector, call in self._selectors("name", everything):
            request = broker_pb2.ListRequest(selector=selector.to_pb())
            await self._timed(f"list {name}", api.list(request, call))
            self._note(f"answer to list {name}", sum(call.sizes), "B")
            api.updated()
        self._note("largest piece of an answer", max(everything.sizes), "B")
        access = cast("Any", _Access(everything.answers, self._clock))
        await self._timed("list all, at the client", list_journals(access))

    async def _list_shards(self, etcd: Etcd, ks: KeySpace, state: State, resolver: Any) -> None:
        unused = cast("Any", None)
        api = ShardApi(ROOT, etcd, ks, state, resolver, unused, NoAuth(), unused)
        claims = Claims(Capability.LIST)
        for name, selector, call in self._selectors("id", _Call()):
            if "prefix" in name:
                continue  # The shards of a prefix are matched like those of a label.

            async def answer(selector: LabelSelector = selector, call: _Call = call) -> None:
                request = consumer_pb2.ListRequest(selector=selector.to_pb())
                await call.write(await api.list(request, claims))

            await self._timed(f"list {name}", answer())
            self._note(f"answer to list {name}", sum(call.sizes), "B")

    def _selectors(self, key: str, everything: _Call) -> list[tuple[str, LabelSelector, _Call]]:
        middle = self._kind.item_id(self._items // 2)
        return [
            ("all", LabelSelector.of(), everything),
            ("by a label", LabelSelector.of(team="team-07"), _Call()),
            ("by a prefix", LabelSelector.parse("prefix = scale/team-07/"), _Call()),
            ("by a name", LabelSelector.of(**{key: middle}), _Call()),
        ]

    async def _timed(self, name: str, work: Any) -> None:
        loop = self._loop
        await sleep(0)
        loop.longest_s, began = 0.0, loop.cpu_s
        await sleep(0)
        await work
        took_s = loop.cpu_s - began
        await sleep(0)
        self._figures.append(Figure(name, took_s, "s", loop.longest_s))

    def _note(self, name: str, value: float, unit: str) -> None:
        self._figures.append(Figure(name, value, unit))


class _Access:
    """Replaces the access to a broker, and gives the same pages again."""

    def __init__(self, pages: list[Any], clock: PaperClock) -> None:
        self.clock = clock
        self.address = "paper"
        self.channels = self.credentials = self.addresses = cast("Any", self)
        self.attempts, self.wait_for_ready = 1, True
        self._pages = iter(pages)

    def metadata(self, *claims: object) -> tuple[()]:
        return ()

    async def connected(self) -> tuple[Any, str]:
        return self, "paper"

    def observe_route(self, journal: str, route: object) -> None:
        pass

    def List(self, request: object, **options: object) -> _Access:
        return self

    async def read(self) -> Any:
        await sleep(0)
        return next(self._pages, END_OF_STREAM)

    def cancel(self) -> None:
        pass


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
