"""Stage 13 of the byte path: finds messages that lack their time, which is the time that their source
declares, or the clock of their UUID."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from gazette.message.envelope import Envelope, TimedEnvelope
from gazette.message.message_time import UnusableTime, no_clock
from gazette.protocol.ids import JournalName

_clock_of: Final = attrgetter("clock")


class UntimedMessages:
    """The search for messages of one shard that lack their time. Used on the shard's thread.

    ``has_declared`` says that some sources declare the time of their messages. For all other sources,
    ``clock_places`` are the places of the UUIDs whose clock is the time; empty without event time.
    """

    def __init__(self, has_declared: bool, clock_places: Mapping[JournalName, str]) -> None:
        self._has_declared = has_declared
        self._clock_places = clock_places

    def checks(self, journal: JournalName) -> bool:
        """Return True if messages of a source may lack the time that they need."""
        return self._has_declared or journal in self._clock_places

    def find(self, batch: Sequence[Envelope[Any]]) -> list[tuple[int, UnusableTime]]:
        """Return the positions of messages without a time in a batch of one source, and their errors."""
        place = self._clock_places.get(batch[0].journal)
        if place is not None:
            return _without_clock(batch, place)
        return _without_declared(batch) if self._has_declared else []


def _without_clock(batch: Sequence[Envelope[Any]], place: str) -> list[tuple[int, UnusableTime]]:
    if all(map(_clock_of, batch)):
        return []
    return [
        (index, no_clock(envelope.journal, envelope.begin, envelope.end, place))
        for index, envelope in enumerate(batch)
        if not envelope.clock
    ]


def _without_declared(batch: Sequence[Envelope[Any]]) -> list[tuple[int, UnusableTime]]:
    return [
        (index, error)
        for index, envelope in enumerate(batch)
        if isinstance(envelope, TimedEnvelope) and (error := envelope.unusable) is not None
    ]
