"""Rides as Citi Bike publishes them, a row of CSV each, and cycles of a bike."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import field

from gazette import CSVRecord
from gazette.errors import Invalid

HEADER: Final = (
    "tripduration",
    "starttime",
    "stoptime",
    "start station id",
    "start station name",
    "start station latitude",
    "start station longitude",
    "end station id",
    "end station name",
    "end station latitude",
    "end station longitude",
    "bikeid",
    "usertype",
    "birth year",
    "gender",
)
"""The columns of the files; in journals, the UUID stands before them."""
START_TIME, STOP_TIME, START_STATION, END_STATION, BIKE = 2, 3, 5, 9, 12


class Ride(CSVRecord):
    """One ride, with its UUID in the first column."""

    __slots__ = ()

    @classmethod
    def from_csv(cls, fields: list[str]) -> Ride:
        return cls(fields)

    def validate(self) -> None:
        """Raise ``Invalid`` for a row that is no ride."""
        if len(self) != 1 + len(HEADER):
            raise Invalid(f"a ride has {1 + len(HEADER)} columns (got {len(self)})")
        if not self[BIKE].isdigit():
            raise Invalid(f"invalid bikeid {self[BIKE]!r} (expected a number)")

    @property
    def bike(self) -> str:
        return self[BIKE]

    @property
    def start(self) -> Stop:
        return Stop(self[START_TIME], self[START_STATION])

    @property
    def end(self) -> Stop:
        return Stop(self[STOP_TIME], self[END_STATION])


class Stop(msgspec.Struct, frozen=True):
    """A place where a bike was, and the time. Names in JSON as here, with a capital."""

    time: str = field(default="", name="Time")
    station: str = field(default="", name="Station")


class Leg(msgspec.Struct, frozen=True):
    """A ride, as queries answer it."""

    start: Stop = field(default=Stop(), name="Start")
    end: Stop = field(default=Stop(), name="End")


class Cycle(msgspec.Struct, kw_only=True):
    """A bike is back where it was, after rides that each began where the one before ended."""

    uuid: str = field(default="", name="UUID")
    bike: int = field(default=0, name="BikeID")
    steps: list[Stop] = field(default_factory=list, name="Steps")
    """The stations of the cycle, from the first one back to it."""
