"""Where a conversion reads: the files of a published checkpoint, or the shards of another output."""
