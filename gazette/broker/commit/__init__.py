"""Performs appends: what `broker/append` decides, on the replicas of a journal."""
