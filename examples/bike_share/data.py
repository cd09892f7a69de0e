"""``generate`` writes rides as Citi Bike's files have them; ``publish`` has a file published.

Exit codes: 0; 1 it broke; 2 a mistake in the flags.
"""

from __future__ import annotations

import asyncio
import csv
import datetime
import heapq
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TextIO

from bike_share.app import RIDES
from bike_share.rides import BIKE, HEADER, Ride
from gazette import ClientPublisher
from gazette.client.client import Client
from gazette.client.flags import BrokerClientFlags
from gazette.config.schema import Schema, exit_with, setting
from gazette.errors import GazetteError, Invalid
from gazette.runtime.clock import SystemClock

BEGIN: Final = datetime.datetime(2017, 9, 1, tzinfo=datetime.UTC)
STREETS: Final = ("Broadway", "Bowery", "Kent Ave", "Grand St", "Carmine St", "Lafayette St")
TOUR: Final = 12
"""Stations of a tour, which a bike makes now and then: more than any cycle needs."""
BATCH: Final = 1_000


@dataclass(frozen=True, slots=True)
class GenerateFlags:
    rides: int = setting(10_000, "number of rides to write")
    bikes: int = setting(200, "number of bikes")
    stations: int = setting(60, "number of stations")
    seed: int = setting(1, "random seed; the same one gives the same rides")


@dataclass(frozen=True, slots=True)
class PublishFlags:
    file: Path | None = setting(None, "a CSV file of rides (default: standard input)")


@dataclass(frozen=True, slots=True)
class Station:
    id: int
    name: str
    latitude: float
    longitude: float


def stations(rng: random.Random, count: int) -> list[Station]:
    return [
        Station(
            72 + index,
            f"{rng.choice(STREETS)} & {rng.randint(1, 99)} St {index}",
            round(40.68 + rng.random() / 10, 6),
            round(-74.0 + rng.random() / 10, 6),
        )
        for index in range(count)
    ]


def generate(
    rng: random.Random, *, rides: int, bikes: int, stations_count: int
) -> Iterator[list[str]]:
    """Yield rows of rides in the order in which they end, without a UUID.

    A bike starts its next ride where it is. Now and then it makes a tour that returns to its beginning. Now
    and then a truck moves the bike, which is no ride.
    """
    places = stations(rng, stations_count)
    queue: list[tuple[float, int, list[str]]] = []
    at = {14_529 + index: rng.choice(places) for index in range(bikes)}
    plans: dict[int, list[Station]] = {bike: [] for bike in at}
    for bike in at:
        heapq.heappush(queue, _ride(rng, bike, rng.uniform(0, 3_600), at, plans, places))
    for _ in range(rides):
        ended, bike, row = heapq.heappop(queue)
        yield row
        if rng.random() < 0.02:
            at[bike], plans[bike] = rng.choice(places), []
        heapq.heappush(queue, _ride(rng, bike, ended + rng.uniform(30, 900), at, plans, places))


def _ride(
    rng: random.Random,
    bike: int,
    begins: float,
    at: dict[int, Station],
    plans: dict[int, list[Station]],
    places: list[Station],
) -> tuple[float, int, list[str]]:
    start = at[bike]
    if not plans[bike] and rng.random() < 0.05:
        others = [place for place in places if place is not start]
        plans[bike] = [*rng.sample(others, min(TOUR, len(others))), start]
    end = plans[bike].pop(0) if plans[bike] else rng.choice(places)
    at[bike] = end
    seconds = rng.randint(120, 2_400)
    row = [
        str(seconds),
        _time(begins),
        _time(begins + seconds),
        *(str(start.id), start.name, str(start.latitude), str(start.longitude)),
        *(str(end.id), end.name, str(end.latitude), str(end.longitude)),
        str(bike),
        rng.choice(("Subscriber", "Customer")),
        str(rng.randint(1940, 2001)),
        str(rng.randint(0, 2)),
    ]
    return begins + seconds, bike, row


def _time(seconds: float) -> str:
    return f"{BEGIN + datetime.timedelta(seconds=round(seconds)):%Y-%m-%d %H:%M:%S}"


def write_csv(rows: Iterable[Sequence[str]], file: TextIO) -> None:
    """Write the rows with every field in quotes, as in the files of Citi Bike."""
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(rows)


def read_csv(file: Iterable[str]) -> Iterator[Ride]:
    """Yield the rides of a file. Raise ``Invalid``, which names the line."""
    reader = csv.reader(file)
    for row in reader:
        if tuple(one.strip().lower() for one in row) == HEADER or not row:
            continue
        ride = Ride(["", *row])
        try:
            ride.validate()
        except Invalid as error:
            raise error.within(f"line {reader.line_num}") from error
        yield ride


async def publish(client: Client, rides: Iterable[Ride]) -> int:
    """Publish rides, each to the partition of its bike; how many. Returns once they are durable."""
    count, left = 0, iter(rides)
    async with ClientPublisher(client) as publisher:
        while batch := list(islice(left, BATCH)):
            async with publisher.transaction() as transaction:
                for ride in batch:
                    await transaction.publish(RIDES, ride, key=ride[BIKE])
            count += len(batch)
    return count


def main(command: str, argv: Sequence[str]) -> int:
    groups: dict[str, type] = {"": GenerateFlags}
    if command == "publish":
        groups = {"": PublishFlags, "broker": BrokerClientFlags}
    schema = Schema(f"bike_share {command}", groups, file_stem="gazette")
    try:
        loaded = schema.load(argv, os.environ)
        if command == "generate":
            _generate(loaded.group(GenerateFlags))
        else:
            client_flags = loaded.group(BrokerClientFlags)
            count = asyncio.run(_publish_file(loaded.group(PublishFlags).file, client_flags))
            sys.stderr.write(f"{count} rides published\n")
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except (GazetteError, OSError) as error:
        sys.stderr.write(f"bike_share {command}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _generate(flags: GenerateFlags) -> None:
    for name, value in (("bikes", flags.bikes), ("stations", flags.stations)):
        if value < 1:
            raise Invalid(f"{value} {name} (expected 1 or more)", path=f"--{name}")
    rows = generate(
        random.Random(flags.seed),
        rides=flags.rides,
        bikes=flags.bikes,
        stations_count=flags.stations,
    )
    write_csv(rows, sys.stdout)


async def _publish_file(path: Path | None, flags: BrokerClientFlags) -> int:
    async with flags.client("", SystemClock()) as client:
        if path is None:
            return await publish(client, read_csv(sys.stdin))
        with path.open(newline="") as file:
            return await publish(client, read_csv(file))
