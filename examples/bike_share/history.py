"""The last rides of each bike, in SQL: of SQLite in the shard, or of a database that all shards share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

from bike_share.rides import Leg, Ride, Stop
from gazette import Shard
from gazette.consumer.application import Store
from gazette.errors import Invalid
from gazette.stores.sqlite.store import SQLiteStore

STORES: Final = ("sqlite", "sql")
WINDOW: Final = 20
"""Rides of a bike that are kept."""

# One dialect: what is here means the same to SQLite and to PostgreSQL.
SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS rides (
        bike BIGINT NOT NULL, ride BIGINT NOT NULL,
        start_time TEXT NOT NULL, start_station TEXT NOT NULL,
        end_time TEXT NOT NULL, end_station TEXT NOT NULL,
        PRIMARY KEY (bike, ride)
    )"""
NEXT: Final = "SELECT COALESCE(MAX(ride), 0) + 1 FROM rides WHERE bike = :bike"
INSERT: Final = (
    "INSERT INTO rides VALUES (:bike, :ride, :start_time, :start_station, :end_time, :end_station)"
)
PRUNE: Final = "DELETE FROM rides WHERE bike = :bike AND ride <= :ride"
RIDES: Final = (
    "SELECT start_time, start_station, end_time, end_station FROM rides"
    " WHERE bike = :bike AND ride >= :ride ORDER BY ride"
)
# Backwards from the last ride, as long as each began where the one before ended, to the first that
# began where the last one ended.
CYCLE: Final = """
    WITH RECURSIVE path (ride, station, length) AS (
        SELECT ride, start_station, 1 FROM rides WHERE bike = :bike AND ride = :ride
        UNION ALL
        SELECT rides.ride, rides.start_station, path.length + 1
        FROM path JOIN rides
            ON rides.bike = :bike AND rides.ride = path.ride - 1 AND rides.end_station = path.station
        WHERE path.station <> :station
    )
    SELECT ride FROM path WHERE station = :station AND length > :longer_than"""


class History(Store):
    """The methods that the application calls on either store."""

    @abstractmethod
    def change(self, sql: str, **parameters: Any) -> None:
        """Run SQL in the transaction."""

    @abstractmethod
    def look(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Return rows, as of the transaction."""

    @abstractmethod
    def read(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Return rows, as of the last commit. Any thread."""

    def add(self, ride: Ride, longer_than: int) -> list[Stop]:
        """Add a ride. If it closes a cycle of more rides than that, its stops; else none."""
        bike, end = int(ride.bike), ride.end
        number = int(self.look(NEXT, bike=bike)[0][0])
        self.put(bike, number, Leg(ride.start, end))
        self.change(PRUNE, bike=bike, ride=number - WINDOW)
        found = self.look(
            CYCLE, bike=bike, ride=number, station=end.station, longer_than=longer_than
        )
        if not found:
            return []
        legs = _legs(self.look(RIDES, bike=bike, ride=found[0][0]))
        return [leg.start for leg in legs] + [legs[-1].end]

    def put(self, bike: int, number: int, leg: Leg) -> None:
        """Write the ride of a bike that has a number, and do nothing else."""
        self.change(
            INSERT,
            bike=bike,
            ride=number,
            start_time=leg.start.time,
            start_station=leg.start.station,
            end_time=leg.end.time,
            end_station=leg.end.station,
        )

    def rides_of(self, bike: int) -> list[Leg]:
        """Return the last rides of a bike, oldest first. Any thread."""
        return _legs(self.read(RIDES, bike=bike, ride=0))


def _legs(rows: list[tuple[Any, ...]]) -> list[Leg]:
    return [Leg(Stop(row[0], row[1]), Stop(row[2], row[3])) for row in rows]


class SQLiteHistory(History, SQLiteStore):
    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder, SCHEMA)

    def change(self, sql: str, **parameters: Any) -> None:
        self.execute(sql, parameters).fetchall()

    def look(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return list(self.execute(sql, parameters))

    def read(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return self.query(sql, parameters)


def new_history(kind: str, shard: Shard, recorder: Any, database: str) -> History:
    """Create a store by the name of its kind. Raise ``Invalid`` for an unknown one."""
    if kind == "sqlite":
        return SQLiteHistory(recorder)
    if kind != "sql":
        raise Invalid(
            f"unknown store {kind!r}", path="--bikeshare.store", hint="Known are sqlite and sql."
        )
    if not database:
        raise Invalid(
            "the store sql needs a database",
            path="--bikeshare.database",
            hint="Give its SQLAlchemy URL, such as postgresql+psycopg://user@host/name.",
        )
    from bike_share.sql_history import SQLHistory

    return SQLHistory(database)
