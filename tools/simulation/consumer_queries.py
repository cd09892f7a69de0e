"""Queries of simulated shards: the members that answer, the clients that ask, and the judge of answers.

The judge compares an answer with the states that its shard has finalized and committed so far. It also
compares the answer with the messages that have committed below the offset that the query waited for.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from gazette.consumer.query.query_codec import HEADER, MAX_STALENESS, READ_THROUGH, STALENESS
from gazette.consumer.query.shard_rpc import shard_rpc
from gazette.consumer.service import ConsumerService
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.pb.consumer_pb2_grpc import ShardStub
from gazette.runtime.tasks import TaskScope
from gazette.testing.simulation.loop import NodeClock, SimNode, VirtualLoop
from gazette.testing.simulation.queries import CHANNEL, NEVER_PASSED_ON

Fingerprint = tuple[int, int]
"""Identifies a set of numbers: how many they are, and the sum of their hashes."""

EMPTY: Final[Fingerprint] = (0, 0)
BEYOND: Final = 1 << 40
"""An offset that no source ever reaches."""
_SERVICE: Final = "simulation.Folds"
_ASKED_MAX: Final = 4
"""Greatest number of queries of one client in progress."""
_ENDS_WITHIN_S: Final = 1.0
"""Seconds after the failure of their member, within which queries end."""
_LATE_S: Final = 2.0
"""How much later than its timeout a query may end."""
_ROUNDING_S: Final = 0.001


class Ask(msgspec.Struct):
    """A question: what has the shard folded?"""

    shard: str


class Folds(msgspec.Struct):
    """An answer. ``life`` is the life of the primary's store; 0 for a standby's view."""

    life: int
    numbers: list[int]


class FoldsStub:
    """Calls of the service through one channel."""

    def __init__(self, channel: Any) -> None:
        self.Fold = channel.unary_unary(
            f"/{_SERVICE}/Fold",
            request_serializer=msgspec.json.encode,
            response_deserializer=lambda data: msgspec.json.decode(data, type=Folds),
        )


class FoldsApi:
    """The service of one member."""

    def __init__(self, service: ConsumerService, dawdle: Callable[[], None]) -> None:
        self.service = service
        self._dawdle = dawdle

    @shard_rpc(FoldsStub)
    def Fold(self, store: Any, request: Ask) -> Folds:
        """Return what the shard has folded."""
        del request
        self._dawdle()
        return Folds(store.life, store.folded().numbers)


@dataclass(slots=True)
class _Running:
    shard: str
    begun: float


class MemberQueries:
    """The queries that one process of a member answers now."""

    def __init__(
        self,
        name: str,
        node: SimNode,
        timeout_s: float,
        violated: Callable[[str], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        self._name = name
        self._node = node
        self._timeout_s = timeout_s
        self._violated = violated
        self._is_leaving = is_leaving
        self._running: dict[int, _Running] = {}
        self._count = 0
        self._failed_at: float | None = None
        self.holds: list[tuple[float, float]] = []
        """When the process was paused: from, until."""

    def handler(self, answer: Callable[[Ask, Any], Awaitable[Folds]]) -> Any:
        """Return the handler to add to the member's server."""

        async def handle(request: Ask, context: Any) -> Folds:
            loop = self._node.loop
            self._count += 1
            number, running = self._count, _Running(request.shard, loop.now)
            self._running[number] = running
            try:
                return await answer(request, context)
            finally:
                self._running.pop(number, None)
                if self._node.alive:
                    self._judge_end(running, context)

        method = grpc.unary_unary_rpc_method_handler(
            handle,
            lambda data: msgspec.json.decode(data, type=Ask),
            msgspec.json.encode,
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {"Fold": method})

    def _judge_end(self, running: _Running, context: Any) -> None:
        """Require that a query ended in time, and with a code that its member may answer."""
        now = self._node.loop.now
        lasted, code = now - running.begun, context.code()
        if lasted > self._timeout_s + _LATE_S + self._held_s(running.begun, now):
            self._violated(f"{self._name} took {lasted:.1f} s for a query of {running.shard}")
        if code in NEVER_PASSED_ON:
            self._violated(
                f"{self._name} answered a query of {running.shard} with {code.name}:"
                f" {context.details()}"
            )
        passed_on = any(name == HEADER for name, _ in context.invocation_metadata())
        early = lasted < self._timeout_s - _LATE_S
        leaves = self._failed_at is not None or self._is_leaving()
        if code is grpc.StatusCode.UNAVAILABLE and early and not passed_on and not leaves:
            self._violated(
                f"{self._name} gave a query of {running.shard} up after {lasted:.1f} s:"
                f" {context.details()}"
            )

    def _held_s(self, begun: float, ended: float) -> float:
        return sum(max(0.0, min(ended, until) - max(begun, since)) for since, until in self.holds)

    def failed(self) -> None:
        """Note that the member has failed: its queries end at once."""
        loop = self._node.loop
        self._failed_at = loop.now
        loop.at(loop.now + _ENDS_WITHIN_S, self._judge_failed, set(self._running))

    def _judge_failed(self, running: set[int]) -> None:
        loop, node = self._node.loop, self._node
        if not node.alive:
            return
        if node.blocked:
            loop.at(loop.now + _ENDS_WITHIN_S, self._judge_failed, running)
            return
        for number in sorted(running & self._running.keys()):
            shard = self._running[number].shard
            self._violated(f"{self._name} still answers a query of {shard} after it has failed")


@dataclass(slots=True)
class _Life:
    """A store of a primary, from its opening to its end."""

    shard: str
    states: set[Fingerprint]
    shared: bool
    """True if the state is in a database that other members change, too."""
    answered: list[tuple[float, int]] = field(default_factory=list)
    """Times at which answers arrived, each with the highest count of numbers until then."""


class Notes:
    """Judges answers by the commits of shards, and by messages that writers know to be committed."""

    def __init__(self, loop: VirtualLoop, violated: Callable[[str], None]) -> None:
        self._loop = loop
        self._violated = violated
        self._lives: list[_Life] = []
        self._states: dict[str, set[Fingerprint]] = {}
        """Of each shard, all states that a life of it has finalized."""
        self._durable: dict[str, list[tuple[float, int]]] = {}
        """By shard: for each commit, when it was known to be durable, and its count of numbers."""
        self._writes: dict[str, list[tuple[int, list[int]]]] = {}
        """By source: for each committed write, its end, and its numbers."""
        self.answers = 0
        self.stale_answers = 0

    # What shards and writers report.

    def opened(self, shard: str, state: Fingerprint, *, shared: bool = False) -> int:
        """Note that a store was opened, and return the number of its life."""
        self._lives.append(_Life(shard, {state}, shared))
        self._states.setdefault(shard, {EMPTY}).add(state)
        return len(self._lives)

    def finalized(self, life: int, state: Fingerprint) -> None:
        """Note a state that is about to be committed."""
        one = self._lives[life - 1]
        one.states.add(state)
        self._states[one.shard].add(state)

    def committed(self, life: int, state: Fingerprint) -> None:
        """Note a state whose commit is durable: in the recovery log, or in the shared database."""
        durable = self._durable.setdefault(self._lives[life - 1].shard, [])
        most = max(state[0], durable[-1][1] if durable else 0)
        durable.append((self._loop.now, most))

    def written(self, journal: str, end: int, numbers: list[int]) -> None:
        """Note numbers that are committed below ``end``."""
        self._writes.setdefault(journal, []).append((end, numbers))

    def pruned(self, journal: str, end: int) -> None:
        """Note that bytes below ``end`` were pruned before a shard read them.

        A transaction that begins there, and ends later, is not judged either: a part of it may be read.
        """
        writes = self._writes.get(journal, [])
        at = next((i for i, (one, _) in enumerate(writes) if one > end), len(writes))
        self._writes[journal] = [
            (one, [] if i <= at else numbers) for i, (one, numbers) in enumerate(writes)
        ]

    def written_ends(self, journal: str) -> list[int]:
        """Return offsets up to which a query of the source may wait."""
        return [end for end, _ in self._writes.get(journal, ())]

    # Judging.

    def judge(
        self,
        shard: str,
        answer: Folds,
        begun: float,
        staleness_s: float,
        max_staleness_s: float | None,
        read_through: dict[str, int],
    ) -> None:
        """Judge an answer that has just arrived, to a query that began at ``begun``."""
        self.answers += 1
        missing = self._missing(answer, read_through)
        if missing:
            self._violated(f"an answer of {shard} lacks {missing}, read through {read_through}")
        state = fingerprint(answer.numbers)
        if not answer.life:
            self.stale_answers += 1
            self._judge_stale(shard, state, begun - staleness_s, staleness_s, max_staleness_s)
            return
        life = self._lives[answer.life - 1]
        known = self._states[shard] if life.shared else life.states
        if life.shard != shard or state not in known:
            self._violated(
                f"an answer of {shard} is no state of a commit: {len(answer.numbers)} numbers"
            )
        at = bisect_right(life.answered, (begun, BEYOND))
        if at and life.answered[at - 1][1] > state[0]:
            self._violated(
                f"an answer of {shard} went back from {life.answered[at - 1][1]} to"
                f" {state[0]} numbers in one life"
            )
        most = max(state[0], life.answered[-1][1] if life.answered else 0)
        life.answered.append((self._loop.now, most))

    def judge_stat(self, shard: str, read_through: dict[str, int], wanted: dict[str, int]) -> None:
        """Judge what a Stat call has said."""
        if any(read_through.get(journal, 0) < at for journal, at in wanted.items()):
            self._violated(f"Stat of {shard} said {read_through} when it was asked for {wanted}")

    def _missing(self, answer: Folds, read_through: dict[str, int]) -> list[int]:
        """Return the numbers that are committed below these offsets, and missing in the answer."""
        has = set(answer.numbers)
        return sorted(
            number
            for journal, offset in read_through.items()
            for end, numbers in self._writes.get(journal, ())
            if end <= offset
            for number in numbers
            if number not in has
        )

    def _judge_stale(
        self,
        shard: str,
        state: Fingerprint,
        as_of: float,
        staleness_s: float,
        max_staleness_s: float | None,
    ) -> None:
        """Require that a standby answered the state of a commit, and one as new as it says."""
        if max_staleness_s is None or staleness_s > max_staleness_s + _ROUNDING_S:
            self._violated(
                f"an answer of {shard} is {staleness_s} s old, and {max_staleness_s} were asked for"
            )
        if state not in self._states.get(shard, {EMPTY}):
            self._violated(
                f"a standby of {shard} answered a state of no commit: {state[0]} numbers"
            )
        durable = self._durable.get(shard, [])
        at = bisect_right(durable, (as_of - _ROUNDING_S, -1))
        if at and durable[at - 1][1] > state[0]:
            self._violated(
                f"a standby of {shard} answered {state[0]} numbers as of {as_of:.3f} s, when"
                f" {durable[at - 1][1]} were committed"
            )


def fingerprint(numbers: Iterable[int]) -> Fingerprint:
    """Return the fingerprint of a set of numbers."""
    state = EMPTY
    for number in numbers:
        state = added(state, number)
    return state


def added(state: Fingerprint, number: int) -> Fingerprint:
    """Return the fingerprint with one number more."""
    return state[0] + 1, (state[1] + hash((number, 1))) & 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Asked:
    """A query of a client: the shard, and bounds of the answer."""

    shard: str
    max_staleness_s: float | None = None
    read_through: dict[str, int] = field(default_factory=dict)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        values: list[tuple[str, str]] = []
        if self.max_staleness_s is not None:
            values.append((MAX_STALENESS, repr(self.max_staleness_s)))
        if self.read_through:
            pairs = (f"{journal}={offset}" for journal, offset in self.read_through.items())
            values.append((READ_THROUGH, ",".join(pairs)))
        return tuple(values)


class QueryClient:
    """Asks members for the folds of shards, even during faults."""

    def __init__(
        self,
        node: SimNode,
        transport: Any,
        members: list[str],
        sources: dict[str, list[str]],
        notes: Notes,
        rng: random.Random,
    ) -> None:
        """Create a client. ``sources`` are the journals that each shard reads."""
        self._notes = notes
        self._members = members
        self._sources = sources
        self._rng = rng
        self._clock = NodeClock(node.loop)
        self._loop = node.loop
        self._channels = {
            host: transport.channel(f"{host}:8080", None, CHANNEL) for host in members
        }
        self._think_s = rng.choice((0.7, 2.0, 6.0))
        self._free = _ASKED_MAX

    async def run(self) -> None:
        """Ask, until cancelled."""
        async with TaskScope("queries") as scope:
            while True:
                await self._clock.sleep(self._rng.expovariate(1 / self._think_s))
                if self._free:
                    self._free -= 1
                    scope.spawn(self._ask_one(), name="query")

    async def _ask_one(self) -> None:
        rng = self._rng
        host, shard = rng.choice(self._members), rng.choice(sorted(self._sources))
        timeout_s = rng.choice((2.0, 20.0, 90.0))
        try:
            if rng.random() < 0.15:
                await self._stat(host, shard, timeout_s)
            else:
                await self.ask(host, self._question(shard), timeout_s)
        finally:
            self._free += 1

    def _question(self, shard: str) -> Asked:
        rng = self._rng
        kind = rng.random()
        if kind < 0.2:
            return Asked(shard)
        if kind < 0.55:
            return Asked(shard, rng.choice((0.0, 0.5, 5.0, 60.0)))
        if kind < 0.6:
            return Asked(shard, read_through={rng.choice(self._sources[shard]): BEYOND})
        max_staleness_s = rng.choice((None, None, 5.0))
        return Asked(shard, max_staleness_s, self._read_through(shard))

    def _read_through(self, shard: str) -> dict[str, int]:
        offsets = {}
        for journal in self._sources[shard]:
            if ends := self._notes.written_ends(journal):
                last = self._rng.random() < 0.7
                offsets[journal] = ends[-1] if last else self._rng.choice(ends)
        return offsets

    async def ask(self, host: str, asked: Asked, timeout_s: float) -> bool:
        """Ask one member, and judge the answer. Return False if the answer is an error."""
        begun = self._loop.now
        method = FoldsStub(self._channels[host]).Fold
        call = method(Ask(asked.shard), timeout=timeout_s, metadata=asked.metadata)
        try:
            answer: Folds = await call
        except grpc.aio.AioRpcError:
            return False
        values = dict(await call.trailing_metadata())
        self._notes.judge(
            asked.shard,
            answer,
            begun,
            float(values.get(STALENESS, "0")),
            asked.max_staleness_s,
            asked.read_through,
        )
        return True

    async def _stat(self, host: str, shard: str, timeout_s: float) -> None:
        wanted = self._read_through(shard)
        request = consumer_pb2.StatRequest(shard=shard, read_through=wanted)
        stub: Any = ShardStub(self._channels[host])
        try:
            response = await stub.Stat(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return
        if response.status == consumer_pb2.OK:
            self._notes.judge_stat(shard, dict(response.read_through), wanted)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
