"""What a shard tensor holds of stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from converter.sources.layouts import Layout

Places = Mapping[int, int]
"""Expert id -> its position in a stack."""
PLAIN, STACK = -1, -2
"""In the place of an expert's id: a stored tensor that is no expert's, and one that stacks all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """One shard tensor, and the digests by which its bytes are known."""

    file: str
    name: str
    start: int
    """Absolute byte offset in the file."""
    nbytes: int
    digests: bytes
    """16 bytes for each chunk."""
    first_chunk: int
    """Number of its first chunk among those of all shard tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one shard tensor holds of a stored tensor, or of each expert's."""

    tensor: HeldTensor
    layout: Layout
    base: int
    """Where it begins in the shard tensor, in bytes; of the first expert, where experts are stacked."""
    each: int
    """Bytes of one expert in the stack."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Parts that hold the same experts in the same order, no two alike."""

    places: Places | None
    """None where nothing is stacked."""
    parts: dict[Layout, Part] = field(default_factory=dict)


Tile = tuple[HeldTensor, Layout, int]
"""A shard tensor, what it holds of one stored tensor, and where that begins in it, in bytes."""
