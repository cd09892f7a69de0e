"""Spark: journals as tables and streams, and backfills as jobs. Users import `gazette.spark`."""
