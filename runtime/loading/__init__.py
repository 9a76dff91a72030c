"""Shard files to device memory, on background threads, layer by layer, hashes checked."""
