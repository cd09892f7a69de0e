"""Commands on shards, one file for each verb."""
