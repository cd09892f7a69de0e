"""Journals as tables and streams of Spark."""
