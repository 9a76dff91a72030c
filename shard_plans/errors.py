"""One exception a fault. Every message is a sentence for the user: what, where, the two values, what to do."""

from __future__ import annotations


class ReshardError(Exception):
    """Base of all faults that a user can cause or meet; the command prints the message and exits with `exit_code`."""

    exit_code = 2


class CheckpointError(ReshardError):
    """The checkpoint's files are missing, malformed, or contradict one another."""


class ConfigError(ReshardError):
    """config.json lacks a key, or holds a value that the family table doesn't cover."""


class FamilyError(ReshardError):
    """A family table is malformed, or no table describes the architecture."""


class GridError(ReshardError):
    """Parallel sizes don't fit together, or don't divide the model."""


class PlanError(ReshardError):
    """A plan document is malformed, or belongs to another checkpoint."""


class ClusterError(ReshardError):
    """A cluster or card isn't described well enough to plan for it."""


class OutputError(ReshardError):
    """An output folder can't be written, or holds something else."""


class ManifestError(ReshardError):
    """A manifest or shard file is malformed, incomplete or belongs elsewhere."""


class RuntimeFault(ReshardError):
    """The forward pass can't be run as asked: a device, backend, block or input is missing."""


class OtherRankStopped(RuntimeFault):
    """This rank had to stop because another one did, which says why itself."""


class CheckFailed(ReshardError):
    """A check ran and found a difference."""

    exit_code = 1
