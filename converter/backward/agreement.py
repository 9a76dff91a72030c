"""Whether the manifests of an output agree with its plan and among themselves; no weights are read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from converter.backward.gather import Shards
from converter.findings import Failure
from converter.output.carry import HEADERS, PLAN
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.documents.manifest import ROOT, ManifestTensor, Piece, ShardManifest
from shard_plans.documents.plan import NATIVE, Plan, plan_digest, read_plan
from shard_plans.errors import ReshardError
from shard_plans.families.formats import column_steps
from shard_plans.layouts.layout import Layout
from shard_plans.layouts.registry import find_layout
from shard_plans.placement.arrangement import rows_filled
from shard_plans.placement.shards import Cut


def disagreements(shards: Shards) -> Iterator[Failure]:
    """Every statement that another one contradicts."""
    try:
        layout = find_layout(shards.root.layout)
    except ReshardError as error:
        yield Failure(ROOT, None, str(error))
        return
    for manifest in shards.manifests:
        for tensor in manifest.tensors:
            for reason in _regions(tensor, layout):
                yield Failure(manifest.file, tensor.name, reason)
    if layout.name == NATIVE:
        yield from _native(shards)
    try:
        plan = read_plan(shards.out / PLAN)
    except ReshardError as error:
        yield Failure(PLAN, None, str(error))
        return
    if plan_digest(plan) != shards.root.plan:
        yield Failure(PLAN, None, f"has the digest {plan_digest(plan)}, {ROOT} states {shards.root.plan}")
        return
    if plan.layout != shards.root.layout:
        yield Failure(PLAN, None, f"has the layout {plan.layout}, {ROOT} states {shards.root.layout}")
    yield from _source(shards, plan)
    yield from _ranks(shards, plan)
    if shards.root.layout == NATIVE:
        for manifest in shards.manifests:
            yield from _placed(manifest, plan)


def _native(shards: Shards) -> Iterator[Failure]:
    """What holds in reshard's own layout: scales beside their values, and files of a stage alike."""
    for manifest in shards.manifests:
        by_name = {tensor.name: tensor for tensor in manifest.tensors}
        for tensor in manifest.tensors:
            for reason in _scales(tensor, by_name):
                yield Failure(manifest.file, tensor.name, reason)
    yield from _siblings(shards)


def padding(tensor: ManifestTensor) -> tuple[int, int] | None:
    """The rows behind all sources (of each expert, where stacked): half-open; None where there are none."""
    stacked = any(piece.experts is not None for piece in tensor.sources)
    shape = tensor.shape[1:] if stacked else tensor.shape
    if not shape or 0 in tensor.shape:
        return None
    end = max((piece.at[0] + (rows_filled(piece, shape) or 0) for piece in tensor.sources), default=0)
    return (end, shape[0]) if end < shape[0] else None


def _regions(tensor: ManifestTensor, layout: Layout) -> Iterator[str]:
    """Sources must cover the tensor in whole rows, once; only a vocabulary is padded, at its end."""
    stacked = any(piece.experts is not None for piece in tensor.sources)
    shape = tensor.shape[1:] if stacked else tensor.shape
    end = 0
    for piece in sorted(tensor.sources, key=lambda piece: piece.at):
        if (piece.experts is not None) != stacked:
            yield f"{piece.tensor} is mixed with sources that are stacked by expert"
            return
        if piece.experts != tensor.sources[0].experts:
            yield f"{piece.tensor} stacks other experts than {tensor.sources[0].tensor}"
        if tensor.part != "scale" and any(cut.repeat != 1 for cut in piece.cuts):
            yield f"{piece.tensor} is repeated, which only scales may be"
        filled = rows_filled(piece, shape)
        if filled is None:
            yield f"{piece.tensor} doesn't cover whole rows"
        elif piece.at and piece.at[0] != end:
            yield f"{piece.tensor} starts at row {piece.at[0]}, the source before it ends at {end}"
        end = piece.at[0] + (filled or 0) if piece.at else 0
    rows = padding(tensor)
    if rows and tensor.fill is None and (stacked or not layout.pads(tensor.name)):
        yield f"rows {rows[0]} to {rows[1]} have no source, and only a vocabulary may be padded"


def _scales(tensor: ManifestTensor, by_name: dict[str, ManifestTensor]) -> Iterator[str]:
    """Values and their scales must be cut by one rule."""
    if tensor.part != "values":
        if tensor.name.removesuffix(f".{tensor.part}") not in by_name:
            yield "its values are missing in the file"
        return
    if tensor.format is None:
        return
    scale = by_name.get(f"{tensor.name}.scale")
    if scale is None or tensor.block is None:
        yield f"is stored as {tensor.format}, but " + ("its scale is missing" if scale is None else "without a block")
        return
    if (scale.block, scale.format, len(scale.sources)) != (tensor.block, tensor.format, len(tensor.sources)):
        yield f"and its scale disagree on block, format or number of sources: {tensor.block} and {scale.block}"
        return
    columns = column_steps(tensor.format)
    size = (tensor.block[0], max(1, tensor.block[1] // columns[0]))  # in stored elements, as cuts are
    for mine, other in zip(tensor.sources, scale.sources, strict=True):
        if mine.experts != other.experts or mine.tensor.rpartition(".")[0] != other.tensor.rpartition(".")[0]:
            yield f"{mine.tensor} has scales of {other.tensor}"
        cuts = mine.cuts[: len(mine.cuts) + 1 - len(columns)]
        if len(cuts) != len(other.cuts) or len(cuts) < 2:
            yield f"{mine.tensor} is cut in {len(mine.cuts)} dimensions, its scales in {len(other.cuts)}"
            continue
        for axis, (cut, fine) in enumerate(zip(cuts, other.cuts, strict=True)):
            step = ((1,) * (len(cuts) - 2) + size)[axis]
            wanted = tuple((start // step, -(-stop // step)) for start, stop in cut.runs)
            if wanted != fine.runs:
                yield f"{mine.tensor} has values {cut.runs}, whose scales of {step} are {wanted}, not {fine.runs}"


def _siblings(shards: Shards) -> Iterator[Failure]:
    """Files of one stage that differ in one axis must hold the same tensors, cut in the order of that axis."""
    for axis in ("tp", "etp"):
        families: dict[tuple[tuple[str, int], ...], list[ShardManifest]] = defaultdict(list)
        for manifest in shards.manifests:
            if axis in manifest.place:
                families[tuple((k, v) for k, v in manifest.place.items() if k != axis)].append(manifest)
        for members in families.values():
            members.sort(key=lambda manifest: manifest.place[axis])
            everything = {tensor.name for manifest in members for tensor in manifest.tensors}
            before: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {}
            for manifest in members:
                for name in sorted(everything - {tensor.name for tensor in manifest.tensors}):
                    yield Failure(manifest.file, name, f"is missing, though other {axis} ranks of the stage hold it")
                for tensor in manifest.tensors:
                    # positions compared one by one: of two runs that begin alike the shorter one goes on further behind
                    cuts = (cut for piece in tensor.sources for cut in piece.cuts)
                    runs = tuple(tuple((start, -stop) for start, stop in cut.runs) for cut in cuts)
                    if () in runs:
                        continue  # nothing but padding
                    if before.setdefault(tensor.name, runs) > runs:
                        yield Failure(manifest.file, tensor.name, f"is cut before what the {axis} rank before it holds")
                    before[tensor.name] = runs


def _source(shards: Shards, plan: Plan) -> Iterator[Failure]:
    """The root manifest must name the plan's checkpoint, and keep the header of each of its files."""
    root, of = shards.root, plan.checkpoint
    stated = (root.family, root.source.fingerprint, root.source.tensors, root.source.nbytes)
    if stated != (of.family, of.fingerprint, of.tensors, of.bytes):
        planned = f"{of.family} {of.fingerprint} of {of.tensors} tensors, {of.bytes} bytes"
        yield Failure(ROOT, None, f"is of the checkpoint {stated}, its plan of {planned}")
    kept = {document.name: document.xxh3 for document in root.documents if document.name.startswith(HEADERS)}
    headers = {f"{HEADERS}/{file.name}.json": file.header for file in root.source.files}
    for name in sorted({*kept, *headers}):
        if kept.get(name) != headers.get(name):
            yield Failure(
                name, None, f"is kept as {kept.get(name)}, the header of the source's file is {headers.get(name)}"
            )


def _ranks(shards: Shards, plan: Plan) -> Iterator[Failure]:
    """Ranks must stand where the plan's grid puts them, and read the files of their own place."""
    stated = {rank.at for rank in shards.root.ranks}
    expected = set(plan.grid.coordinates())
    if shards.root.partial is not None:
        expected = {at for at in expected if at.rank in shards.root.partial}
    if stated != expected or len(shards.root.ranks) != len(expected):
        yield Failure(
            ROOT, None, f"lists {len(stated)} ranks, which aren't the {len(expected)} that the plan and it ask for"
        )
    places = {manifest.file: manifest.place for manifest in shards.manifests}
    for rank in shards.root.ranks:
        mine = {name for name, place in places.items() if all(getattr(rank.at, k) == v for k, v in place.items())}
        if mine != set(rank.files):
            wrong = sorted(mine ^ set(rank.files))[0]
            said = f"rank {rank.at.rank} lists {', '.join(rank.files)}; of its place are {', '.join(sorted(mine))}"
            yield Failure(wrong, None, said)


def _placed(manifest: ShardManifest, plan: Plan) -> Iterator[Failure]:
    """Layers must lie on the plan's stage, experts on its slot."""
    place = manifest.place
    first, last = plan.stages[place["stage"]] if 0 <= place.get("stage", -1) < len(plan.stages) else (0, 0)
    for tensor in manifest.tensors:
        if not tensor.name.startswith("layers."):
            continue
        word = tensor.name.split(".")[1]
        layer = int(word) if word.isdecimal() and len(word) < 10 else -1
        if not first <= layer < last:
            yield Failure(manifest.file, tensor.name, f"is on stage {place.get('stage')}: layers {first} to {last - 1}")
        for piece in tensor.sources:
            if piece.experts is None:
                continue
            slots = plan.experts.slots(layer, plan.grid)
            slot = place.get("edp", 0) * plan.grid.ep + place.get("ep", 0)
            planned = slots[slot] if slot < len(slots) else ()
            if piece.experts != planned:
                yield Failure(manifest.file, tensor.name, f"holds experts {piece.experts}, the plan says {planned}")


def misfits(piece: Piece, dtype: str, shape: tuple[int, ...], tensor: ManifestTensor) -> Iterator[str]:
    """Why a piece can't have come from a stored tensor of that type and shape."""
    if dtype != (piece.widened or tensor.dtype):
        yield f"{piece.tensor} is stored as {dtype}, the shard holds {piece.widened or tensor.dtype}"
    if piece.stacked:
        if shape and max(piece.experts or (0,)) >= shape[0]:
            yield f"{piece.tensor} is stored as {list(shape)}, which lacks the expert {max(piece.experts or (0,))}"
            return
        shape = shape[1:]
    if piece.arranged is not None:
        if math.prod(piece.arranged.view) != math.prod(shape) or DTYPE_BITS[dtype] < 8:
            yield f"{piece.tensor} is stored as {dtype} {list(shape)}, but read as {list(piece.arranged.view)}"
        return  # the manifest's own check compares the cuts with what it is read as
    if len(shape) != len(piece.cuts):
        yield f"{piece.tensor} is stored as {list(shape)}, but cut in {len(piece.cuts)} dimensions"
        return
    for size, cut in zip(shape, piece.cuts, strict=True):
        if _end(cut) > size * cut.repeat:
            yield f"{piece.tensor} is cut up to {_end(cut)}, but has {size * cut.repeat}"


def _end(cut: Cut) -> int:
    return cut.runs[-1][1] if cut.runs else 0
