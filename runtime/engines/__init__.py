"""Native shards, loaded into the models of serving engines."""
