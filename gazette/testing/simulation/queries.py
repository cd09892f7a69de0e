"""Queries of one run: members answer about states of shards, and clients ask all the time.

The queries go the way of a user's `shard_rpc`: to any member, which asks the primary or a standby. A client
remembers the offsets that it got, and asks for answers that reflect at least these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from gazette.consumer.query.query import ShardQuery
from gazette.consumer.query.query_codec import metadata_of, result_of
from gazette.consumer.query.shard_rpc import shard_rpc
from gazette.consumer.service import ConsumerService
from gazette.errors import Unavailable
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.pb.consumer_pb2_grpc import ShardStub
from gazette.protocol.shard import ShardSpec
from gazette.runtime.decoders import msgpack_decoder
from gazette.testing.simulation.loop import NodeClock, SimNode
from gazette.testing.simulation.network import SimTransport
from gazette.testing.simulation.states import Rows, seen_state, sources_of_state

_SERVICE: Final = "gazette.testing.States"
CHANNEL: Final = (
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
NEVER_PASSED_ON: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Codes that no query of a shard that exists may end with."""
_ASK_S: Final = 10.0
_THINK_S: Final = (0.7, 2.0)
_QUERIES: Final = 10
"""Number of queries of each client."""
_STALENESS_S: Final = (0.5, 5.0)
_FINAL_S: Final = 120.0
"""Seconds after the last fault within which each member must answer for each shard."""


class AskState(msgspec.Struct):
    """Asks a shard for its state."""

    shard: str


class SeenState(msgspec.Struct):
    """The state of a shard; None for a store whose rows are not known."""

    rows: Rows | None


class StatesOfShard:
    """The calls of a member by one channel."""

    def __init__(self, channel: Any) -> None:
        self.State = channel.unary_unary(
            f"/{_SERVICE}/State",
            request_serializer=msgspec.msgpack.encode,
            response_deserializer=lambda data: msgpack_decoder(SeenState).decode(data),
        )


class StatesRpc:
    """The queries that one member answers."""

    def __init__(self, service: ConsumerService, ignore: Collection[str]) -> None:
        self.service = service
        self._ignore = ignore

    @shard_rpc(StatesOfShard)
    def State(self, store: Any, request: AskState) -> SeenState:
        """Return the state as the store shows it to queries."""
        del request
        return SeenState(seen_state(store, self._ignore))

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handler to add to the member's server."""
        method = grpc.unary_unary_rpc_method_handler(
            self.State,
            lambda data: msgpack_decoder(AskState).decode(data),
            msgspec.msgpack.encode,
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {"State": method})


@dataclass(frozen=True, slots=True)
class SeenRows:
    """The answer to one query of one client."""

    client: int
    shard: str
    wanted: Mapping[str, int]
    """Offsets that the answer was asked to reflect."""
    max_staleness_s: float | None
    staleness_s: float
    asked_at: float
    answered_at: float
    member: str
    rows: Rows | None
    final: bool = False
    """True for a query after the last fault, when every shard rests."""

    def __str__(self) -> str:
        return f"{self.member or 'a member'}, {self.answered_at:.1f} s"


class QueryClients:
    """The clients of one run, and all answers that they got, in order."""

    def __init__(
        self,
        cluster: Any,
        members: Sequence[str],
        specs: Sequence[ShardSpec],
        on_wrong: Callable[[str], None],
        seed: int,
    ) -> None:
        """Create the clients. ``on_wrong`` gets a text for each wrong answer of Stat."""
        self.answers: list[SeenRows] = []
        self.acknowledged: dict[str, int] = {}
        """By journal, the end of the last message that publishers know to be in place."""
        self._loop = cluster.loop
        self._network = cluster.network
        self._members = members
        self._specs = specs
        self._on_wrong = on_wrong
        self._rng = random.Random(f"queries {seed}")

    async def run(self, client: int) -> None:
        """Ask, one query after the other."""
        rng, tokens = self._rng, {spec.id: dict[str, int]() for spec in self._specs}
        channels, clock = self._channels(f"asker-{client}")
        think_s = rng.choice(_THINK_S)
        for _ in range(_QUERIES):
            await clock.sleep(rng.expovariate(1 / think_s))
            spec, channel = rng.choice(self._specs), channels[rng.choice(self._members)]
            token = tokens[spec.id]
            if rng.random() < (0.5 if spec.hot_standbys else 0.1):
                query = ShardQuery(spec.id, max_staleness_s=rng.choice(_STALENESS_S))
                await self._ask(client, channel, query)
                continue
            wanted = dict(token)
            if rng.random() < 0.7:
                for source in spec.sources:
                    end = self.acknowledged.get(source.journal, 0)
                    wanted[source.journal] = max(end, wanted.get(source.journal, 0))
            if rng.random() < 0.3:
                token.update(await self._stat(channel, spec.id, wanted))
                continue
            answer = await self._ask(client, channel, ShardQuery(spec.id, wanted))
            if answer is not None:
                _raise(token, wanted)
                _raise(token, sources_of_state(answer.rows))

    async def finish(self, heads: Mapping[str, int]) -> None:
        """Ask each member for each shard, once all shards rest. An answer must reflect all messages of the
        shard's sources.

        Raise ``Unavailable`` if a member does not answer.
        """
        channels, clock = self._channels("asker-last")
        for spec in self._specs:
            wanted = {source.journal: heads[source.journal] for source in spec.sources}
            query = ShardQuery(spec.id, {name: end for name, end in wanted.items() if end})
            for host, channel in channels.items():
                deadline = self._loop.now + _FINAL_S
                while await self._ask(-1, channel, query, final=True) is None:
                    if self._loop.now > deadline:
                        raise Unavailable(f"{host} answers no query of {spec.id}")
                    await clock.sleep(1.0)

    def _channels(self, name: str) -> tuple[dict[str, Any], NodeClock]:
        node = SimNode(self._loop, name)
        transport = SimTransport(self._network, node)
        hosts = {host: f"{host}:8080" for host in self._members}
        channels = {host: transport.channel(at, None, CHANNEL) for host, at in hosts.items()}
        return channels, NodeClock(self._loop)

    async def _ask(
        self, client: int, channel: Any, query: ShardQuery, *, final: bool = False
    ) -> SeenRows | None:
        """Ask, and keep the answer. Return None for an error. A code of `NEVER_PASSED_ON` is a finding."""
        asked_at = self._loop.now
        call = StatesOfShard(channel).State(
            AskState(query.shard), timeout=_ASK_S, metadata=metadata_of(query)
        )
        try:
            response: SeenState = await call
            values = {name.lower(): value for name, value in await call.trailing_metadata()}
        except grpc.aio.AioRpcError as error:
            self._judge_error(f"a query of {query.shard}", error)
            return None
        result = result_of(response.rows, values)
        answer = SeenRows(
            client,
            query.shard,
            dict(query.read_through),
            query.max_staleness_s,
            result.staleness_s,
            asked_at,
            self._loop.now,
            "" if result.member is None else result.member.suffix,
            result.value,
            final,
        )
        self.answers.append(answer)
        return answer

    async def _stat(self, channel: Any, shard: str, wanted: Mapping[str, int]) -> dict[str, int]:
        """Return the offsets that a shard has read through, by Stat; nothing for an error."""
        request = consumer_pb2.StatRequest(shard=shard, read_through=wanted)
        try:
            response = await ShardStub(channel).Stat(request, timeout=_ASK_S)
        except grpc.aio.AioRpcError as error:
            self._judge_error(f"Stat of {shard}", error)
            return {}
        if response.status != consumer_pb2.OK:
            return {}
        answered = dict(response.read_through)
        behind = {name: end for name, end in wanted.items() if answered.get(name, 0) < end}
        if behind:
            self._on_wrong(f"Stat of {shard} answers {answered}, and is asked for {behind}")
        _raise(answered, wanted)
        return answered

    def _judge_error(self, call: str, error: grpc.aio.AioRpcError) -> None:
        if error.code() in NEVER_PASSED_ON:
            self._on_wrong(f"{call} fails: {error.code().name}: {error.details()}")


def _raise(token: dict[str, int], offsets: Mapping[str, int]) -> None:
    for name, offset in offsets.items():
        token[name] = max(offset, token.get(name, 0))
