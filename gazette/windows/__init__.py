"""Windows and joins over time for applications: a small library that uses a store and timers."""

from __future__ import annotations

from gazette.windows.aggregate import Aggregate as Aggregate
from gazette.windows.aggregate import count as count
from gazette.windows.aggregate import greatest as greatest
from gazette.windows.aggregate import least as least
from gazette.windows.aggregate import mean as mean
from gazette.windows.aggregate import total as total
from gazette.windows.spans import Hopping as Hopping
from gazette.windows.spans import Sessions as Sessions
from gazette.windows.spans import Tumbling as Tumbling
from gazette.windows.stream_join import JoinKind as JoinKind
from gazette.windows.stream_join import JoinOutcome as JoinOutcome
from gazette.windows.stream_join import JoinResult as JoinResult
from gazette.windows.stream_join import StreamJoin as StreamJoin
from gazette.windows.table_join import TableJoin as TableJoin
from gazette.windows.table_join import TableJoinResult as TableJoinResult
from gazette.windows.windows import WindowResult as WindowResult
from gazette.windows.windows import Windows as Windows

__all__ = [
    "Aggregate",
    "Hopping",
    "JoinKind",
    "JoinOutcome",
    "JoinResult",
    "Sessions",
    "StreamJoin",
    "TableJoin",
    "TableJoinResult",
    "Tumbling",
    "WindowResult",
    "Windows",
    "count",
    "greatest",
    "least",
    "mean",
    "total",
]
