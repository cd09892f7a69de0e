"""Timers of shards: rows of a store. The runtime calls the application once for each row. See ADR 12."""
