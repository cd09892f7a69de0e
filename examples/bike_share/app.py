"""Finds bikes that come back to where they were, and answers where a bike has been.

Rides are rows of CSV, published to a partition by their bike. A shard per partition keeps the last rides
of each bike in SQL, and asks, by a recursive query, whether the last one closed a cycle; then it publishes
that, once. Any member answers for any bike.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from bike_share.history import STORES, History, new_history
from bike_share.rides import Cycle, Ride
from gazette import Application, Envelope, Publisher, Shard, ShardRequest, shard_route
from gazette.config.schema import setting
from gazette.consumer.service import ConsumerService
from gazette.errors import Invalid
from gazette.labels import MESSAGE_TYPE
from gazette.message.mapping import Mapping, PartitionsFunc, modulo_mapping
from gazette.protocol.label_set import LabelSelector

RIDES: Final = LabelSelector.parse(f"{MESSAGE_TYPE} = bike_share.Ride")
CYCLES: Final = LabelSelector.parse(f"{MESSAGE_TYPE} = bike_share.Cycle")


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

    def keyed_journals(self) -> LabelSelector:
        return RIDES  # Mapped by their bike.

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

    @shard_route("/api/bikes", key=lambda request: str(bike_of(request)))
    def rides(self, store: History, request: ShardRequest) -> Any:
        """Answer ``GET /api/bikes?id=…``: where a bike has been."""
        bike = bike_of(request)
        return {"bike": bike, "shard": request.shard, "rides": store.rides_of(bike)}


def bike_of(request: ShardRequest) -> int:
    text = request.query.get("id", "")
    if not text.isdigit():
        raise Invalid(f"invalid id {text!r}", hint="Ask for /api/bikes?id=NUMBER.")
    return int(text)
