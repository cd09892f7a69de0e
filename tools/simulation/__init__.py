"""Deterministic simulation of whole clusters in one process."""
