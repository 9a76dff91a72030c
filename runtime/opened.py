"""An output folder, opened to be run: its manifest, plan, family and model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from converter.streams.hashing import file_digest
from shard_plans.checkpoints.checkpoint import read_small
from shard_plans.checkpoints.headers import load_json
from shard_plans.documents.manifest import CarriedFile, Manifest, read_manifest, read_shard_manifest
from shard_plans.documents.plan import NATIVE, Plan, plan_digest, read_plan
from shard_plans.errors import CheckpointError, ManifestError, RuntimeFault
from shard_plans.families.family import Family, load_family
from shard_plans.families.model import Model, bind_model
from shard_plans.placement.experts import format_ids

SOURCE = "source"
"""Folder of the files that were carried along."""


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """What a run needs to know of an output folder."""

    out: Path
    root: Manifest
    plan: Plan
    family: Family
    model: Model

    @property
    def carried(self) -> Path:
        """The folder of configuration and tokenizer."""
        return self.out / SOURCE


def open_output(out: Path, whole: bool = True) -> Opened:
    """Read the documents of `out`, each checked against the digest that the root manifest states.

    Raises ManifestError where one is missing, was changed, or belongs elsewhere, RuntimeFault where the layout is
    another loader's or, with `whole`, ranks are missing.
    """
    root = read_manifest(out)
    if root.layout != NATIVE:
        raise RuntimeFault(
            f"{out} has the layout {root.layout}, only {NATIVE} is read here; convert without --layout to verify "
            f"the plan, and compare the bytes of this folder with reshard check --deep"
        )
    for document in root.documents:
        if document.name in ("plan.yaml", "family.yaml"):
            _check(out / document.name, document)
    for carried in root.carried:
        _check(out / SOURCE / carried.name, carried)
    plan = read_plan(out / "plan.yaml")
    if plan_digest(plan) != root.plan:
        raise ManifestError(
            f"{out / 'plan.yaml'} has the digest {plan_digest(plan)}, the manifest was written for {root.plan}; "
            "convert again with the plan that you want"
        )
    if whole and root.partial is not None:
        raise RuntimeFault(
            f"{out} was converted with --ranks and holds ranks {format_ids(root.partial)} of {plan.grid.world} alone; "
            f"a forward pass needs all of them"
        )
    ranks = range(plan.grid.world) if root.partial is None else root.partial
    if [entry.at for entry in root.ranks] != [plan.grid.coordinate(rank) for rank in ranks]:
        raise ManifestError(
            f"{out}: the manifest lists {len(root.ranks)} ranks, which aren't the {plan.grid.world} of the plan's grid"
        )
    try:
        config = load_json(read_small(out / SOURCE, "config.json").decode("utf-8"), str(out / SOURCE / "config.json"))
    except (CheckpointError, UnicodeDecodeError) as error:
        raise ManifestError(f"the carried config.json can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ManifestError(f"{out / SOURCE / 'config.json'} must hold a JSON object")
    family = load_family(config, out / "family.yaml")
    model = bind_model(family, config)
    return Opened(out, root, plan, family, replace(model, tied=_tied(out, root)) if whole else model)


def _check(path: Path, stated: CarriedFile) -> None:
    try:
        size, digest = file_digest(path)
    except OSError as error:
        raise ManifestError(f"{path} can't be read: {error.strerror}; the manifest lists it") from error
    if (size, digest) != (stated.size, stated.xxh3):
        raise ManifestError(
            f"{path} has {size} bytes and the digest {digest}, the manifest states {stated.size} and {stated.xxh3}: "
            "it was changed or damaged"
        )


def _tied(out: Path, root: Manifest) -> bool:
    """Whether the last stage has no head of its own, so that the embedding serves as one."""
    for name in root.ranks[-1].files:
        if any(tensor.name == "head" for tensor in read_shard_manifest(out, name, root).tensors):
            return False
    return True
