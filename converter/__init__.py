"""Moves bytes: checkpoint -> hashed shards, and back; checks both (no torch)."""
