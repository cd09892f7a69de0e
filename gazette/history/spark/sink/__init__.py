"""Rows of Spark as messages."""
