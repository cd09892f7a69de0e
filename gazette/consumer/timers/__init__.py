"""Timers of shards: rows of a store, for each of which the runtime calls the application once. ADR 0012."""
