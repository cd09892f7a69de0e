"""State of shards in a shared SQL database: `SQLStore`."""

from __future__ import annotations

from gazette.stores.sql.store import SQLStore as SQLStore
from gazette.stores.sql.store import checkpoint_table as checkpoint_table
from gazette.stores.sql.store import create_checkpoint_table as create_checkpoint_table
from gazette.stores.sql.store import create_engine as create_engine
from gazette.stores.sql.store import create_tables as create_tables
from gazette.stores.sql.store import create_timer_table as create_timer_table
from gazette.stores.sql.store import shared_engine as shared_engine
from gazette.stores.sql.store import timer_table as timer_table

__all__ = [
    "SQLStore",
    "checkpoint_table",
    "create_checkpoint_table",
    "create_engine",
    "create_tables",
    "create_timer_table",
    "shared_engine",
    "timer_table",
]
