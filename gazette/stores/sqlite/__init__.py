"""State of shards in SQLite: `SQLiteStore`."""

from __future__ import annotations

from gazette.stores.sqlite.store import SQLiteStore as SQLiteStore

__all__ = ["SQLiteStore"]
