"""``gazctl top``: journals and shards by rate, lag or age."""
