"""The calls of the Shard service."""
