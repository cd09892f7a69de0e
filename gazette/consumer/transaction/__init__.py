"""A shard's transactions: messages in, commits out."""
