"""From stored tensors to shard files."""
