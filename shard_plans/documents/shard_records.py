"""What the manifest of one shard file says: its tensors, their digests and the source pieces in them."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.documents.converted import Converted
from shard_plans.placement.arrangement import Arrangement
from shard_plans.placement.shards import Cut


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a shard tensor and where it came from; the fields mean what those of `shards.Source` mean."""

    tensor: str
    """Stored name, with `{expert}` where each of `experts` has a tensor of its own."""
    experts: tuple[int, ...] | None
    cuts: tuple[Cut, ...]
    at: tuple[int, ...]
    converted: Converted | None = None
    """Where its precision was changed; `tensor` and `cuts` are then those of the converted checkpoint."""
    arranged: Arrangement | None = None
    widened: str | None = None

    @property
    def stacked(self) -> bool:
        """Whether the experts are entries of one stored tensor; `cuts` are of what one of them has of it."""
        return self.experts is not None and "{expert}" not in self.tensor


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor of a shard file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file's data."""
    nbytes: int
    format: str | None
    part: str
    block: tuple[int, int] | None
    xxh3: str
    chunks: bytes
    """16 bytes for each chunk; empty where the tensor is not longer than one."""
    sources: tuple[Piece, ...]
    fill: float | None = None
    """What a tensor without sources holds in every element; None: zero."""


@dataclass(frozen=True, slots=True)
class ShardManifest:
    """What one shard file holds."""

    file: str
    place: dict[str, int]
    plan: str
    source: str
    """Fingerprint of the checkpoint."""
    size: int
    """Bytes of the whole file."""
    header_size: int
    """Bytes before the data: the length word, the JSON header and its padding."""
    header_xxh3: str
    """Digest of those bytes."""
    tensors: tuple[ManifestTensor, ...]
