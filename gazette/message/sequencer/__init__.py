"""Exactly-once order of messages."""
