"""States of shards as tables of Spark."""
