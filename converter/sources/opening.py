"""Which kind of source a checkpoint is."""

from __future__ import annotations

from converter.sources.published import Published
from converter.sources.sharded import Sharded
from converter.sources.source import Source
from shard_plans.checkpoints.checkpoint import Checkpoint


def open_source(checkpoint: Checkpoint) -> Source:
    """Where the bytes of the checkpoint lie: in its own files, or in the shards of an output. Raises ManifestError."""
    return Sharded(checkpoint) if checkpoint.sharded else Published(checkpoint)
