"""Timers of shards: rows of a store that call the application at a time. See docs/adr/0012."""
