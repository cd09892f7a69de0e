"""Queries of shards."""
