"""From shard files back to stored tensors; shares no cutting code with the way forward."""
