"""What a root manifest records: the source, the files, who reads them, what was left out."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.checkpoints.headers import brief
from shard_plans.documents.plan import NATIVE
from shard_plans.errors import ManifestError
from shard_plans.placement.grid import Coordinate
from shard_plans.placement.shards import Skipped

ROOT = "manifest.json"
MARKER = "conversion.partial"
"""Says whose unfinished conversion lies in a folder."""


@dataclass(frozen=True, slots=True)
class SourceFileRecord:
    """One safetensors file of the checkpoint."""

    name: str
    size: int
    """Bytes of the whole file."""
    header: str
    """xxh3-128 of its JSON header."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The checkpoint that was converted."""

    fingerprint: str
    tensors: int
    nbytes: int
    files: tuple[SourceFileRecord, ...]


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A whole file of the output with its digest; `name` is relative to the output folder, or to source/ if carried."""

    name: str
    size: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One shard file and its manifest."""

    name: str
    manifest: str
    """Name of the manifest file."""
    size: int
    """Bytes of the shard file."""
    xxh3: str
    """Digest of the manifest file's bytes."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank reads."""

    at: Coordinate
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConstantRegion:
    """A region of a stored tensor whose content is known and that lies in no shard."""

    pattern: str
    """Stored name; `{expert}` stands for a number."""
    region: tuple[tuple[int, int], ...]
    """Half-open range of each dimension of the stored tensor."""
    reason: str
    values: tuple[int, ...] | None = None
    """The elements, in row-major order; None: all zero."""


@dataclass(frozen=True, slots=True)
class Origin:
    """An output whose shards were read instead of the checkpoint."""

    plan: str
    """Digest of its plan."""
    manifest: str
    """Digest of its root manifest."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The root manifest."""

    family: str
    plan: str
    """Digest of the plan."""
    source: SourceRecord
    carried: tuple[CarriedFile, ...]
    ranks: tuple[RankFiles, ...]
    files: tuple[ManifestFile, ...]
    documents: tuple[CarriedFile, ...]
    skipped: tuple[Skipped, ...]
    digest: str = ""
    """Of everything else; filled in when the manifest is read."""
    constants: tuple[ConstantRegion, ...] = ()
    partial: tuple[int, ...] | None = None
    """The ranks that a partial output was made for, `ranks` and `files` are theirs; None where it is whole."""
    layout: str = NATIVE
    """Whose loader reads the shards."""
    via: tuple[Origin, ...] = ()
    """The outputs through which the bytes came, the first made from the checkpoint; none where it was read itself."""

    def file(self, name: str) -> ManifestFile:
        """The entry of the shard file `name`."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise ManifestError(f"{ROOT} lists no shard file {brief(name)}; it lists {len(self.files)}")
