"""Applications with their backfills, and how messages of theirs are written."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import Partition, Partitions
from gazette.message.uuid import ACK_TXN, OUTSIDE_TXN, build_uuid, uuid_text
from gazette.run.dev.word_count import import_examples
from gazette.testing.app_driver import AppDriver
from tests.backfill.apps import (
    SingleWindows,
    SingleWindowsBackfill,
    Windows,
    WindowsBackfill,
    Word,
    Words,
    WordsBackfill,
)
from tests.backfill.cluster import line
from tests.backfill.replays import JOURNALS, Subject

import_examples()

from bike_share.app import BikeShare, BikeShareFlags  # noqa: E402
from bike_share.backfill import BikeShareBackfill  # noqa: E402
from bike_share.rides import Cycle, Ride  # noqa: E402
from word_count.app import WordCount  # noqa: E402
from word_count.backfill import WordCountBackfill  # noqa: E402
from word_count.ngram_pb2 import NGramCount  # noqa: E402

CYCLES = "cycles/part-000"
NGRAMS = framing_of(CONTENT_PROTO_FIXED, NGramCount)
RIDES = framing_of(CONTENT_CSV, Ride)


def ngram_line(producer: bytes, clock: int, flags: int = OUTSIDE_TXN, word: str = "") -> bytes:
    message = NGramCount(uuid=build_uuid(producer, clock << 4, flags))
    if flags != ACK_TXN:
        message.n_gram, message.count = word or "last", 1 + clock % 3
    return NGRAMS.encode(message)


def ride_line(
    journal: str, producer: bytes, clock: int, flags: int = OUTSIDE_TXN, word: str = ""
) -> bytes:
    """Return a ride of a bike of its producer, between a few stations: so that they close cycles."""
    uuid = uuid_text(build_uuid(producer, clock << 4, flags))
    if flags == ACK_TXN:
        return RIDES.encode(Ride([uuid, *[""] * 15]))
    rng = random.Random(f"{journal} {clock} {word}")
    bike = 100 * JOURNALS.index(journal) + 2 * producer[-1] + (rng.random() < 0.2)
    start, end = rng.sample(("Bowery", "Grand St", 'Kent "N" Ave'), 2)
    times = [str(clock), str(clock + 1)]
    places = [start, start, "1", "2", end, end, "3", "4"]
    return RIDES.encode(Ride([uuid, "60", *times, *places, str(bike), "Customer", "1980", "0"]))


def bike_share() -> BikeShare:
    application = BikeShare(BikeShareFlags(longer_than=1))
    cycles = Partitions([Partition(CYCLES, CONTENT_JSON_LINES)])
    application.publish_to(lambda: cycles)
    return application


def cycles(driver: AppDriver[Any]) -> list[Any]:
    return [
        (one.bike, [(step.time, step.station) for step in one.steps])
        for one in driver.committed(CYCLES, Cycle)
    ]


SUBJECTS = {
    "words": Subject(Words, WordsBackfill(), Word, CONTENT_JSON_LINES, lambda journal: line),
    "batches that are deferred": Subject(
        Windows, WindowsBackfill(), Word, CONTENT_JSON_LINES, lambda journal: line
    ),
    "messages that are deferred": Subject(
        SingleWindows, SingleWindowsBackfill(), Word, CONTENT_JSON_LINES, lambda journal: line
    ),
    "word_count": Subject(
        WordCount, WordCountBackfill(), NGramCount, CONTENT_PROTO_FIXED, lambda journal: ngram_line
    ),
    "bike_share": Subject(
        bike_share,
        BikeShareBackfill(),
        Ride,
        CONTENT_CSV,
        lambda journal: partial(ride_line, journal),
        cycles,
    ),
}
