"""Appends: batches of an append service, and the call."""
