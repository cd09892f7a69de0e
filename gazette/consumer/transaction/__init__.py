"""A shard's transactions, which consume messages and commit their effects."""
