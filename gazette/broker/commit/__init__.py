"""Performs appends on the replicas of a journal, as `broker/append` decides."""
