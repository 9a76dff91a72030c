"""What the plan and the family table place in every file, worked out again and held against the manifests.

The other checks believe a manifest's account of where bytes came from. Two tensors exchanged in the data and in that
account would pass them; here the account itself is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from converter.backward.gather import Shards
from converter.findings import Failure
from converter.forward.manifests import piece_of
from converter.output.carry import FAMILY, PLAN, SOURCE
from converter.sources.source import Source
from converter.streams.hashing import file_digest
from shard_plans.documents.manifest import ROOT
from shard_plans.documents.plan import NATIVE, read_plan
from shard_plans.documents.shard_records import ManifestTensor, ShardManifest
from shard_plans.errors import ReshardError
from shard_plans.families.binding import bind
from shard_plans.families.family import read_family
from shard_plans.layouts.registry import lay_out_plan
from shard_plans.placement.shards import ShardFile, ShardTensor


def departures(shards: Shards, origin: Source) -> Iterator[Failure]:
    """Where the manifests tell of other tensors, shapes or origins than the plan makes from this checkpoint."""
    try:
        binding = bind(origin.checkpoint, read_family(shards.out / FAMILY))
        placement = lay_out_plan(binding, read_plan(shards.out / PLAN))
    except ReshardError as error:
        yield Failure(PLAN, None, f"can't be laid out again: {error}")
        return
    yield from _carried(shards, origin)
    expected = {file.name: file for file in placement.files}
    places = {_place(file.place): file.name for file in placement.files}
    found: dict[str, list[ShardManifest]] = {}
    for manifest in shards.manifests:
        parts = None if shards.root.layout == NATIVE else places.get(_place(manifest.place))
        name = manifest.file if manifest.file in expected else parts or manifest.file
        found.setdefault(name, []).append(manifest)
    for name, manifests in found.items():
        file = expected.pop(name, None)
        if file is None:
            yield Failure(name, None, f"isn't among the {len(placement.files)} files that the plan makes")
        else:
            yield from _file(manifests, file)
    if shards.root.partial is None:
        for name in expected:
            yield Failure(name, None, f"is a file that the plan makes, and {ROOT} doesn't list it")


def _place(place: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(place.items()))


def _carried(shards: Shards, origin: Source) -> Iterator[Failure]:
    """Configuration, tokenizer and the division into files are the checkpoint's too."""
    checkpoint, stated = origin.checkpoint, {file.name: file for file in shards.root.carried}
    for name in sorted(stated.keys() ^ set(checkpoint.carried)):
        words = "was carried along, but the checkpoint has none" if name in stated else "is in the checkpoint alone"
        yield Failure(f"{SOURCE}/{name}", None, words)
    for name in sorted(stated.keys() & set(checkpoint.carried)):
        size, digest = file_digest(origin.carried(name).path)
        if (size, digest) != (stated[name].size, stated[name].xxh3):
            yield Failure(
                f"{SOURCE}/{name}", None, f"has the digest {stated[name].xxh3}, the checkpoint's file has {digest}"
            )
    ours = {file.name: (file.size, file.header) for file in shards.root.source.files}
    theirs = {file.name: (file.size, file.header_digest) for file in checkpoint.files}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield Failure(ROOT, None, f"tells of the source file {name} as {ours.get(name)}, it is {theirs.get(name)}")


def _file(manifests: Sequence[ShardManifest], file: ShardFile) -> Iterator[Failure]:
    """A rank's file; an engine may have divided it into parts."""
    stated = {tensor.name: tensor for manifest in manifests for tensor in manifest.tensors}
    wanted = {tensor.name: tensor for tensor in file.tensors}
    for name in wanted.keys() - stated.keys():
        yield Failure(file.name, name, "is lost: the plan places it there")
    for name in stated.keys() - wanted.keys():
        yield Failure(file.name, name, "is there, but the plan doesn't place it there")
    for name in wanted.keys() & stated.keys():
        difference = _difference(stated[name], wanted[name])
        if difference is not None:
            yield Failure(file.name, name, difference)


def _difference(stated: ManifestTensor, wanted: ShardTensor) -> str | None:
    for what in ("dtype", "shape", "format", "part", "block", "fill"):
        ours, theirs = getattr(stated, what), getattr(wanted, what)
        if ours != theirs:
            return f"has the {what} {ours}, the plan makes it {theirs}"
    pieces = tuple(piece_of(source, wanted.part, {}) for source in wanted.sources)
    if len(stated.sources) != len(pieces):
        return f"is said to be made of {len(stated.sources)} sources, the plan makes it of {len(pieces)}"
    for ours, theirs in zip(stated.sources, pieces, strict=True):
        if ours != theirs:
            what = "from" if ours.tensor != theirs.tensor else "from other experts or places in"
            return f"is said to come {what} {ours.tensor}, the plan takes {theirs.tensor} in that place"
    return None
