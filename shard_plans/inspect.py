"""What a path is: a checkpoint, a config.json, a plan, or an output folder. What isn't known is None."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from shard_plans.checkpoints.checkpoint import INDEX, Checkpoint, load_object, open_checkpoint
from shard_plans.checkpoints.config_file import config_alone, read_config
from shard_plans.documents.conversions import ConvertedTensor, Tally
from shard_plans.documents.manifest import ROOT, Manifest, Origin, read_manifest, read_shard_manifest
from shard_plans.documents.plan import Plan, read_plan
from shard_plans.documents.stored import refuse_unadopted
from shard_plans.errors import CheckpointError, FamilyError, ReshardError
from shard_plans.families.agreement import disagreements
from shard_plans.families.binding import Binding, bind
from shard_plans.families.config_binding import bind_config
from shard_plans.families.family import Family, load_family, read_family
from shard_plans.families.model import Model, bind_model
from shard_plans.placement.grid import Grid
from shard_plans.placement.shards import ShardTensor

PLAN = "plan.yaml"
KNOWN = "a checkpoint, a config.json, a plan or an output"


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors whose roles share the first word: attn, mlp, experts, ..."""

    name: str
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank of an output reads."""

    rank: int
    stage: int
    files: tuple[str, ...]
    bytes: int
    """Of those files, headers included: what its node must copy."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found."""

    kind: str
    """checkpoint, config, plan or output."""
    path: str
    family: str | None = None
    """None for an architecture that no table describes."""
    tensors: int | None = None
    bytes: int | None = None
    """Payload bytes of those tensors."""
    parameters: int | None = None
    """Logical weight values, without scales, each counted once."""
    layers: int | None = None
    """Layers that run: those for multi-token prediction aren't counted (a plan counts all that its stages hold)."""
    experts: int | None = None
    """Routed experts of a layer; 0 in a dense model."""
    groups: tuple[Group, ...] | None = None
    parallel: dict[str, int] | None = None
    """tp, pp, dp, ep, etp and world, of a plan or an output."""
    ranks: tuple[Rank, ...] | None = None
    source: str | None = None
    """Fingerprint of the checkpoint that an output was made from."""
    manifest: str | None = None
    """Digest of an output's root manifest."""
    via: tuple[Origin, ...] | None = None
    """The outputs through which an output's bytes came, the first made from the checkpoint."""
    notes: tuple[str, ...] = field(default=())
    weights: dict[str, str] | None = None
    """Group -> format, of a plan or an output: what isn't kept as stored."""
    converted: tuple[ConvertedTensor, ...] | None = None
    """Weights of an output whose precision was changed, with the errors made."""


def inspect(path: Path, family: Path | None = None) -> Inspection:
    """Say what lies at `path`; `family` is a table of the user's own.

    Raises CheckpointError where it is nothing that reshard knows, and the reader's own error where it is malformed.
    """
    if path.is_dir():
        refuse_unadopted(path)
        if (path / ROOT).is_file():
            return _output(path)
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path} has neither config.json (a checkpoint) nor {ROOT} (a finished output); inspect takes {KNOWN}"
            )
        alone = config_alone(path)
        return _config(alone, family) if alone is not None else _checkpoint(open_checkpoint(path), family)
    if not path.is_file():
        raise CheckpointError(f"{path} doesn't exist; inspect takes {KNOWN}")
    if path.name in (ROOT, INDEX, PLAN) and (path.parent / ROOT).is_file():
        return _output(path.parent)
    if path.name == INDEX:
        return _checkpoint(open_checkpoint(path.parent), family)
    if path.suffix in (".yaml", ".yml"):
        return _plan(path, read_plan(path))
    if path.suffix == ".json":
        return _config(path, family)
    raise CheckpointError(f"{path} is neither a folder, a .json nor a .yaml file; inspect takes {KNOWN}")


def _checkpoint(checkpoint: Checkpoint, family: Path | None) -> Inspection:
    found = Inspection(
        "checkpoint", str(checkpoint.folder), tensors=len(checkpoint), bytes=checkpoint.total_bytes
    )  # fmt: skip
    try:
        table = load_family(checkpoint.config, family)
    except FamilyError as error:
        if family is not None:
            raise
        return replace(found, notes=(str(error),))
    binding = bind(checkpoint, table)
    return _bound(found, binding, disagreements(binding))


def _bound(found: Inspection, binding: Binding, notes: tuple[str, ...] = ()) -> Inspection:
    return replace(
        _with_model(found, binding.model), parameters=_parameters(binding), groups=_source_groups(binding),
        notes=(*binding.notes, *notes),
    )  # fmt: skip


def _with_model(found: Inspection, model: Model) -> Inspection:
    return replace(
        found, family=model.family, layers=len(model.forward_layers), experts=model.sizes.get("experts", 0)
    )  # fmt: skip


def _parameters(binding: Binding) -> int:
    """Weight values, packed ones one by one; an embedding and a head that are stored twice but tied count once."""
    return sum(
        len(part.tensors) * math.prod(part.shape) * (parameter.format.pack if parameter.format is not None else 1)
        for parameter in binding.parameters
        for part in parameter.parts
        if part.kind == "values" and not (parameter.role == "head" and binding.doubled)
    )


def _source_groups(binding: Binding) -> tuple[Group, ...]:
    return _groups(
        (parameter.group, part.stored, part.nbytes, part.dtype)
        for parameter in binding.parameters
        for part in parameter.all_parts
    )


def _groups(rows: Iterable[tuple[str, int, int, str]]) -> tuple[Group, ...]:
    """Sum (group, tensors, bytes, dtype) by group, in order of first appearance."""
    found: dict[str, tuple[int, int, set[str]]] = {}
    for name, tensors, size, dtype in rows:
        before = found.get(name, (0, 0, set()))
        found[name] = (before[0] + tensors, before[1] + size, before[2] | {dtype})
    return tuple(Group(name, count, size, tuple(sorted(dtypes))) for name, (count, size, dtypes) in found.items())


def _config(path: Path, family: Path | None) -> Inspection:
    """The tensors are those that a checkpoint of this config.json holds, by the family table."""
    config, digest = read_config(path)
    found = Inspection("config", str(path))
    try:
        table = load_family(config, family)
    except FamilyError as error:
        if family is not None:
            raise
        return replace(found, notes=(str(error),))
    binding = bind_config(config, digest, path, table)
    return _bound(replace(found, tensors=len(binding.source), bytes=binding.source.total_bytes), binding)


def _plan(path: Path, plan: Plan) -> Inspection:
    ids = {i for slots in (plan.experts.default, *plan.experts.layers.values()) for slot in slots for i in slot}
    return Inspection(
        "plan", str(path), plan.checkpoint.family, plan.checkpoint.tensors, plan.checkpoint.bytes,
        layers=plan.stages[-1][1], experts=len(ids), parallel=_parallel(plan.grid), weights=dict(plan.weights),
    )  # fmt: skip


def _parallel(grid: Grid) -> dict[str, int]:
    return {
        "tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "ep": grid.ep, "etp": grid.etp, "world": grid.world
    }  # fmt: skip


def _output(path: Path) -> Inspection:
    """The tensors are those of the shard files, as written; replicas share files, so each counts once."""
    manifest = read_manifest(path)
    rows, tally = [], Tally()
    for entry in manifest.files:
        shard = read_shard_manifest(path, entry.name, manifest)
        tally.take([shard])
        rows += [(_native_group(tensor.name), 1, tensor.nbytes, tensor.dtype) for tensor in shard.tensors]
    plan, model, notes = _kept(path)
    found = Inspection(
        "output", str(path), manifest.family, len(rows), sum(size for _, _, size, _ in rows), groups=_groups(rows),
        parallel=_parallel(plan.grid) if plan is not None else None, ranks=_ranks(manifest), notes=notes,
        source=manifest.source.fingerprint, manifest=manifest.digest, via=manifest.via,
        weights=dict(plan.weights) if plan is not None else None, converted=tally.tensors(),
    )  # fmt: skip
    return _with_model(found, model) if model is not None else found


def _native_group(name: str) -> str:
    tensor = ShardTensor(name, "U8", (), ())
    role = name if tensor.layer is None else name.split(".", 2)[2]
    return role.partition(".")[0]


def _kept(path: Path) -> tuple[Plan | None, Model | None, tuple[str, ...]]:
    """The plan and the model by the documents that lie in an output; a note where they can't be read."""
    plan: Plan | None = None
    try:
        plan = read_plan(path / PLAN)
        table: Family = read_family(path / "family.yaml")
        return plan, bind_model(table, load_object(path / "source", "config.json")), ()
    except ReshardError as error:
        return plan, None, (str(error),)


def _ranks(manifest: Manifest) -> tuple[Rank, ...]:
    sizes = {entry.name: entry.size for entry in manifest.files}
    return tuple(
        Rank(entry.at.rank, entry.at.stage, entry.files, sum(sizes[name] for name in entry.files))
        for entry in manifest.ranks
    )
