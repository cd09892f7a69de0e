"""Finds bikes that come back to where they were, and answers where a bike has been.

Rides are rows of CSV, published to a partition by their bike. A shard per partition keeps the last rides
of each bike in SQL, and asks, by a recursive query, whether the last one closed a cycle; then it publishes
that, once. Any member answers for any bike.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import grpc
import grpc.aio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bike_share.history import STORES, History, new_history
from bike_share.rides import Cycle, Leg, Ride
from gazette import Application, Envelope, GazetteError, Publisher, Shard
from gazette.config.schema import setting
from gazette.consumer.query.query import rpc_errors
from gazette.consumer.service import ConsumerService
from gazette.errors import Invalid, NotFound
from gazette.labels import MESSAGE_TYPE
from gazette.message.mapping import Mapping, PartitionsFunc, modulo_mapping
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header

RIDES: Final = LabelSelector.parse(f"{MESSAGE_TYPE} = bike_share.Ride")
CYCLES: Final = LabelSelector.parse(f"{MESSAGE_TYPE} = bike_share.Cycle")
METHOD: Final = "/bike_share.Bikes/Rides"
QUERY_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class BikeShareFlags:
    store: str = setting("sqlite", "where shards keep rides", choices=STORES)
    database: str = setting("", "SQLAlchemy URL of the database, for the store sql")
    longer_than: int = setting(10, "number of rides that a cycle must exceed")


class BikeShare(Application[History]):
    message_type = Ride
    config_groups: ClassVar[collections.abc.Mapping[str, type]] = {"bikeshare": BikeShareFlags}

    def __init__(self, flags: BikeShareFlags | None = None) -> None:
        self.flags = BikeShareFlags() if flags is None else flags

    async def initialize(self, service: ConsumerService) -> None:
        self.flags = service.config(BikeShareFlags)
        cycles = service.partitions(CYCLES)
        # Before there are shards: a transaction must not find that there is nowhere to publish to.
        await cycles.ready()
        self.publish_to(cycles)
        api = Api(service)
        service.grpc_server.add_generic_rpc_handlers((api.handler(),))
        service.add_route("/api/bikes", api.http_rides)

    def publish_to(self, cycles: PartitionsFunc) -> None:
        self.cycle_mapping: Mapping[Cycle] = modulo_mapping(cycles, lambda one: str(one.bike))

    def new_store(self, shard: Shard, recorder: Any) -> History:
        return new_history(self.flags.store, shard, recorder, self.flags.database)

    def consume_message(
        self, shard: Shard, store: History, envelope: Envelope[Ride], publisher: Publisher
    ) -> None:
        ride = envelope.message
        ride.validate()
        if stops := store.add(ride, self.flags.longer_than):
            cycle = Cycle(bike=int(ride.bike), steps=stops)
            publisher.publish_uncommitted(self.cycle_mapping, cycle)


class Question(msgspec.Struct):
    """A question of one member to another."""

    bike: int
    shard: str
    header: bytes
    """The serialized header of the member that passes it on."""


class Api:
    """``GET /api/bikes?id=…``, and the call by which members ask each other."""

    def __init__(self, service: ConsumerService) -> None:
        self.service = service
        self.rides = service.partitions(RIDES)
        self.mapping: Mapping[str] = modulo_mapping(self.rides, lambda bike: bike)

    async def shard_of(self, bike: int) -> str:
        """Return the shard that reads the rides of a bike. Raise ``NotFound``."""
        await self.rides.ready()
        journal = self.mapping(str(bike)).journal
        shards = self.service.shards_with_source(journal)
        if not shards:
            raise NotFound(f"no shard reads {journal}", hint="Apply specifications of shards.")
        return shards[0].id

    async def rides_of(self, bike: int, shard: str, header: Header | None) -> list[Leg]:
        async def ask(channel: grpc.aio.Channel, peer: Header) -> list[Leg]:
            question = Question(bike, shard, peer.to_pb().SerializeToString())
            call: Any = channel.unary_unary(METHOD, bytes, bytes)
            answer = await call(msgspec.json.encode(question), timeout=QUERY_TIMEOUT_S)
            return msgspec.json.decode(answer, type=list[Leg])

        return await self.service.call_shard(
            shard, lambda store: store.rides_of(bike), ask, header=header
        )

    def handler(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        service, method = METHOD.strip("/").split("/")
        handlers = {method: grpc.unary_unary_rpc_method_handler(self.grpc_rides)}
        return grpc.method_handlers_generic_handler(service, handlers)

    async def grpc_rides(self, request: bytes, context: Any) -> bytes:
        async with rpc_errors(context):
            try:
                question = msgspec.json.decode(request, type=Question)
            except msgspec.MsgspecError as error:
                raise Invalid(f"not a question: {error}") from error
            header = Header.from_pb(broker_pb2.Header.FromString(question.header))
            return msgspec.json.encode(await self.rides_of(question.bike, question.shard, header))
        raise AssertionError("rpc_errors has ended the call")

    async def http_rides(self, request: Request) -> Response:
        text = request.query_params.get("id", "")
        try:
            if not text.isdigit():
                raise Invalid(f"invalid id {text!r}", hint="Ask for /api/bikes?id=NUMBER.")
            shard = await self.shard_of(int(text))
            legs = await self.rides_of(int(text), shard, None)
        except GazetteError as error:
            code = {NotFound: 404, Invalid: 400}.get(type(error), 503)
            return JSONResponse({"error": str(error), "hint": error.hint}, code)
        body = {"bike": int(text), "rides": msgspec.to_builtins(legs)}
        return JSONResponse(body, headers={"X-Shard-ID": shard})
