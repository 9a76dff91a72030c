"""What a conversion wrote, as manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from converter.forward.shard_file import FileLayout
from converter.output.folder import Identity
from converter.precision.errors import Errors
from converter.sources.source import Source
from converter.streams.hashing import Digest, hash_bytes
from shard_plans.documents.converted import Converted, MatrixErrors, rounded
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
from shard_plans.placement.shards import Source as PartSource


def manifest_name(shard: str) -> str:
    """The name of the manifest of a shard file."""
    return shard.removesuffix(".safetensors") + ".json"


def shard_manifest(
    layout: FileLayout, identity: Identity, digests: Sequence[Digest], errors: Mapping[int, Errors]
) -> ShardManifest:
    """The manifest of a shard file, from the digests of its tensors and the errors of the matrices converted."""
    return ShardManifest(
        layout.file.name, layout.file.place, identity.plan, identity.source, layout.size, len(layout.header),
        hash_bytes(layout.header),
        tuple(
            ManifestTensor(
                tensor.name, tensor.dtype, tensor.shape, offset, tensor.nbytes, tensor.format, tensor.part,
                tensor.block, digest.xxh3, digest.chunks,
                tuple(piece_of(source, tensor.part, errors) for source in tensor.sources),
                tensor.fill,
            )
            for tensor, offset, digest in zip(layout.file.tensors, layout.offsets, digests, strict=True)
        ),
    )  # fmt: skip


def piece_of(source: PartSource, part: str, errors: Mapping[int, Errors]) -> Piece:
    """A source as the manifest records it; the errors go with the values, as far as they are known."""
    if source.converted is None or source.converted.source is None:
        return Piece(
            source.pattern, source.experts, source.cuts, source.at, arranged=source.arranged, widened=source.widened
        )
    stored = source.converted.source
    numbers = source.tensors.tolist() if part == "values" else ()
    known = tuple(matrix_figures(errors[number]) for number in numbers if number in errors)
    word = stored.format.name if stored.format is not None else stored.parts[0].dtype
    made = Converted(word, tuple(part.pattern for part in stored.parts), known)
    return Piece(source.pattern, source.experts, source.cuts, source.at, made)


def matrix_figures(errors: Errors) -> MatrixErrors:
    """The errors of a matrix as a manifest states them."""
    return MatrixErrors(
        rounded(errors.largest), rounded(errors.mean), rounded(errors.cosine), errors.nan, errors.infinite
    )


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
