"""What consumers of shards want them to look like: files, names, fusion."""
