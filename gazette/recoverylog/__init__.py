"""Recovery logs: recorded operations on a shard's files, and the way back to files.

`open_at` returns the state of a shard as of any commit that its log still has.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gazette.recoverylog.log.broker_logs import BrokerLogs as BrokerLogs
    from gazette.recoverylog.log.log_source import LogSource as LogSource
    from gazette.recoverylog.log.log_source import StoredLogs as StoredLogs
    from gazette.recoverylog.shard_state import ShardState as ShardState
    from gazette.recoverylog.time_travel import Moment as Moment
    from gazette.recoverylog.time_travel import open_at as open_at

_MODULES = {
    "BrokerLogs": "log.broker_logs",
    "LogSource": "log.log_source",
    "Moment": "time_travel",
    "ShardState": "shard_state",
    "StoredLogs": "log.log_source",
    "open_at": "time_travel",
}

__all__ = ["BrokerLogs", "LogSource", "Moment", "ShardState", "StoredLogs", "open_at"]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.

    def __getattr__(name: str) -> Any:
        # Load lazily, so that importing one module of the package does not import the others.
        if (module := _MODULES.get(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{module}"), name)
