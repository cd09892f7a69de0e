"""Queries that shards answer."""
