"""A shard, from play-back over promotion to its end."""
