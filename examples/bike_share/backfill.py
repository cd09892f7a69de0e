"""The bike-share's backfill: the last rides of each bike, from the history of a partition.

::

    gazctl shards backfill bike_share.backfill:BikeShareBackfill -l id:prefix=bike- \\
        --staging /mnt/staging --verify --enable

The cycles that the history closed have been published when it was live, and are not published again: where a
shard has a state, the history ends where that ends (``--offsets``, which a refusal tells). Those
that the rides to come will close are found, since the rides before them are there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Any, Final

from bike_share.app import BikeShare
from bike_share.history import WINDOW, History
from bike_share.rides import Leg, Stop
from gazette.backfill import Backfill, Batches

KEPT: Final = ("bike", "ride", "start_time", "start_station", "end_time", "end_station")


class BikeShareBackfill(Backfill):
    """Keeps the last rides of each bike in memory, and writes them once, in order.

    The rides of a bike are numbered in their order, which is exact because one process publishes them: the
    one that the bike's stations report to. (Those of several, in transactions, would have to be numbered
    in the order of their commits.)
    """

    application = BikeShare
    discard_publications = True

    def build(self, shard: Any, store: History, messages: Batches) -> None:
        last: defaultdict[int, deque[Leg]] = defaultdict(partial(deque, maxlen=WINDOW))
        counts: defaultdict[int, int] = defaultdict(int)
        for batch in messages:
            for envelope in batch:
                ride = envelope.message
                ride.validate()
                bike = int(ride.bike)
                last[bike].append(Leg(ride.start, ride.end))
                counts[bike] += 1
        for bike in sorted(last):
            first = counts[bike] - len(last[bike]) + 1
            for number, leg in enumerate(last[bike], first):
                store.put(bike, number, leg)

    # On Spark the same, in columns: those of the CSV, up to the last one that is needed.

    fields = (
        "duration string, start_time string, end_time string,"
        " start_station string, start_name string, start_latitude string, start_longitude string,"
        " end_station string, end_name string, end_latitude string, end_longitude string, bike long"
    )
    meta = ("journal", "offset")
    order = ("bike", "ride")

    def fold(self, frame: Any) -> Any:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        of_bike = Window.partitionBy("shard", "bike")
        ride = F.row_number().over(of_bike.orderBy("_journal", "_offset"))
        rides = F.count(F.lit(1)).over(of_bike)
        numbered = frame.select("*", ride.alias("ride"), rides.alias("rides"))
        return numbered.where(f"ride > rides - {WINDOW}").select("shard", *KEPT)

    def load(self, shard: Any, store: History, batches: Any) -> None:
        for batch in batches:
            for row in batch.select(KEPT).to_pylist():
                start = Stop(row["start_time"], row["start_station"])
                end = Stop(row["end_time"], row["end_station"])
                store.put(row["bike"], row["ride"], Leg(start, end))
