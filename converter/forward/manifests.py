"""What a conversion wrote, as manifests."""

from __future__ import annotations

from collections.abc import Sequence

from converter.forward.shard_file import FileLayout
from converter.output.folder import Identity
from converter.sources.source import Source
from converter.streams.hashing import Digest, hash_bytes
from shard_plans.documents.manifest import (
    CarriedFile,
    ConstantRegion,
    Manifest,
    ManifestFile,
    ManifestTensor,
    Piece,
    RankFiles,
    ShardManifest,
    SourceFileRecord,
    SourceRecord,
)
from shard_plans.documents.plan import Plan
from shard_plans.placement.shards import Placement


def manifest_name(shard: str) -> str:
    """The name of the manifest of a shard file."""
    return shard.removesuffix(".safetensors") + ".json"


def shard_manifest(layout: FileLayout, identity: Identity, digests: Sequence[Digest]) -> ShardManifest:
    """The manifest of a shard file, from the digests of its tensors."""
    return ShardManifest(
        layout.file.name, layout.file.place, identity.plan, identity.source, layout.size, len(layout.header),
        hash_bytes(layout.header),
        tuple(
            ManifestTensor(
                tensor.name, tensor.dtype, tensor.shape, offset, tensor.nbytes, tensor.format, tensor.part,
                tensor.block, digest.xxh3, digest.chunks,
                tuple(Piece(source.pattern, source.experts, source.cuts, source.at) for source in tensor.sources),
                tensor.fill,
            )
            for tensor, offset, digest in zip(layout.file.tensors, layout.offsets, digests, strict=True)
        ),
    )  # fmt: skip


def root_manifest(
    source: Source, identity: Identity, plan: Plan, placement: Placement, files: Sequence[ManifestFile],
    carried: tuple[CarriedFile, ...], documents: tuple[CarriedFile, ...],
) -> Manifest:  # fmt: skip
    """The root manifest."""
    checkpoint = source.checkpoint
    record = SourceRecord(
        identity.source,
        len(checkpoint),
        checkpoint.total_bytes,
        tuple(SourceFileRecord(file.name, file.size, file.header_digest) for file in checkpoint.files),
    )
    ranks = tuple(RankFiles(at, names) for at, names in placement.ranks)
    return Manifest(
        plan.checkpoint.family, identity.plan, record, carried, ranks, tuple(files), documents, placement.skipped,
        partial=identity.ranks, layout=plan.layout,
        constants=tuple(
            ConstantRegion(item.pattern, item.region, item.reason, item.values) for item in placement.constants
        ),
        via=source.via,
    )  # fmt: skip
