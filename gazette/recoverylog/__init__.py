"""Recovery logs: recorded operations on a shard's files, and the way back to files.

`open_at` returns the state of a shard as of any commit to which its log and its hints reach back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.lazy import lazy_names

if TYPE_CHECKING:
    from gazette.recoverylog.log.broker_logs import BrokerLogs as BrokerLogs
    from gazette.recoverylog.log.log_source import LogSource as LogSource
    from gazette.recoverylog.log.log_source import StoredLogs as StoredLogs
    from gazette.recoverylog.shard_state import ShardState as ShardState
    from gazette.recoverylog.time_travel import Moment as Moment
    from gazette.recoverylog.time_travel import open_at as open_at

_HOMES = {
    "BrokerLogs": "gazette.recoverylog.log.broker_logs",
    "LogSource": "gazette.recoverylog.log.log_source",
    "Moment": "gazette.recoverylog.time_travel",
    "ShardState": "gazette.recoverylog.shard_state",
    "StoredLogs": "gazette.recoverylog.log.log_source",
    "open_at": "gazette.recoverylog.time_travel",
}

__all__ = ["BrokerLogs", "LogSource", "Moment", "ShardState", "StoredLogs", "open_at"]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.
    __getattr__ = lazy_names(__name__, _HOMES)
