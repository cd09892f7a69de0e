"""Messages of examples whose sources have a meaning of their own: chunks of streams, rides of bikes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from bike_share.data import generate
from bike_share.rides import BIKE, Ride
from stream_sum.messages import ID_BYTES, Chunk

STREAMS = 3
PARTS = 2


def chunks(rng: random.Random) -> Iterator[tuple[str, Chunk]]:
    """Yield chunks of a few streams, each in one partition; an empty chunk ends a stream."""
    streams = dict.fromkeys(range(STREAMS), 0)
    following = STREAMS
    while True:
        number = rng.choice(list(streams))
        streams[number] += 1
        data = rng.choice((b"", b"a", b"bc", b"d"))
        stream = (*(0,) * (ID_BYTES - 1), number)
        partition = f"stream-sum/chunks/part-{number % PARTS:03}"
        yield partition, Chunk(id=stream, seq_no=streams[number], data=data)
        if not data:
            del streams[number]
            streams[following] = 0
            following += 1


def rides(rng: random.Random) -> Iterator[tuple[str, Ride]]:
    """Yield rides of two bikes between three stations, so that cycles are frequent."""
    for row in generate(rng, rides=1_000, bikes=2, stations_count=3):
        ride = Ride(["", *row])
        yield f"bike-share/rides/part-{int(ride[BIKE]) % PARTS:03}", ride
