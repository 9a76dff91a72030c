"""Loads shards, runs the sharded forward pass and compares it with the reference."""
