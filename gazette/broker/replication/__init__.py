"""Pipelines from a primary to its peers."""
