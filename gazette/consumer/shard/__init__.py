"""A shard, from play-back to promotion to the end."""
