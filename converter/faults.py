"""Faults that the converter tells apart from others of their kind."""

from __future__ import annotations

from shard_plans.errors import CheckpointError


class SourceChanged(CheckpointError):
    """The checkpoint isn't what it was when the conversion began: what was written of it can't be trusted."""
