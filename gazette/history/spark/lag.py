"""Finds the lag of a stream in the progress of its query: data sources in Python have no metrics."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from gazette.errors import Corrupt
from gazette.history.spark.source.stream_offset import AT, AWAITED, decode_offset
from gazette.message.uuid import clock_unix_ns
from gazette.protocol.ids import JournalName, Offset

LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JournalLag:
    """The lag of a stream behind one journal, at the end of a batch."""

    journal: JournalName
    offset: Offset
    """Offset up to which the stream has read."""
    end: Offset
    """End of the journal when the batch was planned, even if the stream waits for earlier bytes."""
    read_until: datetime.datetime | None
    """Clock of the newest committed message that was read. None before the first message, or with
    ``read_uncommitted``."""
    at: datetime.datetime
    """Time at which the batch began."""
    awaited: tuple[Offset, Offset] | None = None
    """Bytes that the stream waits for: not stored yet, although later bytes are. None: it does not wait."""

    @property
    def behind_bytes(self) -> int:
        """Bytes of the journal that are not read yet."""
        return max(self.end - self.offset, 0)

    @property
    def behind_s(self) -> float | None:
        """Age of the newest message read, in seconds. Zero: all is read. None: ``read_until`` is unknown."""
        if not self.behind_bytes:
            return 0.0
        if self.read_until is None:
            return None
        return max((self.at - self.read_until).total_seconds(), 0.0)


def stream_lag(progress: Mapping[str, Any]) -> list[JournalLag]:
    """Return the lag of a query, journal by journal. Leave out other sources of the query.

    ``progress`` is ``query.lastProgress``, an entry of ``query.recentProgress``, or
    ``event.progress`` of a listener.
    """
    batch_time = datetime.datetime.fromisoformat(progress["timestamp"])
    lags: list[JournalLag] = []
    for source in progress["sources"]:
        lags += _of_source(source, batch_time)
    return sorted(lags, key=lambda lag: lag.journal)


def _of_source(source: Mapping[str, Any], at: datetime.datetime) -> Iterator[JournalLag]:
    """Yield the lag behind each journal of a source; nothing for a source of another kind."""
    try:
        sources = decode_offset(json.loads(source["endOffset"] or "{}"))
        latest = json.loads(source["latestOffset"] or "{}")
        ends = {journal: (int(end[AT]), _awaited(end)) for journal, end in latest.items()}
    except (Corrupt, AttributeError, KeyError, TypeError, ValueError):
        return  # The source is not one of journals: its offsets have another form.
    for journal, (end, awaited) in ends.items():
        checkpoint = sources.get(journal)
        clocks = [] if checkpoint is None else [p.last_ack for p in checkpoint.producers.values()]
        read_until = None
        if clocks:
            micros = clock_unix_ns(max(clocks)) // 1000
            read_until = _EPOCH + datetime.timedelta(microseconds=micros)
        offset = 0 if checkpoint is None else checkpoint.read_through
        yield JournalLag(journal, offset, end, read_until, at, awaited)


def _awaited(one: Mapping[str, Any]) -> tuple[Offset, Offset] | None:
    if AWAITED not in one:
        return None
    begin, end = map(int, one[AWAITED])
    return begin, end


def _greatest(ages: Sequence[float], count: int) -> str:
    """Return the greatest of the known ages as a text: a lower bound, if fewer than ``count`` are known."""
    if not ages:
        return "not known"
    return f"{'at least ' if len(ages) < count else ''}{max(ages):.1f} s"


_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class LagListener(StreamingQueryListener):
    """Listener that logs the lag of each stream of journals after each batch.

    Add it by ``spark.streams.addListener(LagListener())``. The listener logs at level INFO, in this process.
    """

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Log nothing: no byte was read yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Log the lag of all journals of the stream in one line; nothing for other streams."""
        progress = event.progress
        lags = stream_lag(progress)
        if not lags:
            return
        ages = [lag.behind_s for lag in lags if lag.behind_s is not None]
        LOGGER.info(
            "stream %(query)s is %(bytes)d bytes behind %(journals)d journals, and waits for bytes of "
            "%(awaited)d journals that are not stored yet. "
            "Greatest age of a journal's newest message read: %(age)s",
            {
                "query": progress.name or progress.id,
                "bytes": sum(lag.behind_bytes for lag in lags),
                "journals": len(lags),
                "age": _greatest(ages, len(lags)),
                "awaited": sum(lag.awaited is not None for lag in lags),
            },
        )

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Log nothing: Spark reports how the query ended."""
