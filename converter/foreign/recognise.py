"""What an engine's folder was made from: a checkpoint that is given, or what a config.json announces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from converter.foreign.announced import Announced, announce
from converter.foreign.folder import Foreign, read_foreign
from shard_plans.checkpoints.checkpoint import INDEX, carried_files, read_small
from shard_plans.errors import ManifestError
from shard_plans.families.binding import Binding, bind
from shard_plans.verbs import open_model

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, eq=False)
class Recognised:
    """An engine's folder, and the checkpoint that it stands for."""

    foreign: Foreign
    binding: Binding
    announced: Announced | None
    """Where there is no checkpoint, but a config.json."""


def recognise(folder: Path, checkpoint: Path | None, family: Path | None) -> Recognised:
    """Read headers and the config. Raises ManifestError where the folder isn't an engine's, or lacks a config."""
    foreign = read_foreign(folder)
    if checkpoint is None and not (folder / CONFIG).is_file():
        raise ManifestError(
            f"{folder} has no {CONFIG}; name the checkpoint that it was made from, or its {CONFIG}, with --checkpoint"
        )
    binding = open_model(checkpoint or folder / CONFIG, family)
    if not binding.alone:
        return Recognised(foreign, binding, None)
    said = binding.source.folder  # of a config.json alone: the file itself
    carried = set(carried_files(folder)) - {INDEX}
    announced = announce(binding, folder, read_small(said.parent, said.name), tuple(carried))
    return Recognised(foreign, bind(announced.checkpoint, binding.family), announced)
