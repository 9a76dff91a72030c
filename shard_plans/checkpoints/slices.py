"""Slices: the entries of stored tensors that stack experts, as rows of a checkpoint's columns by themselves.

An entry of the first dimension is one stretch of bytes, so what is done with a stored tensor can be done with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shard_plans.checkpoints.checkpoint import Checkpoint


def sliced(checkpoint: Checkpoint, stacks: Sequence[int]) -> tuple[Checkpoint, dict[int, range]]:
    """The checkpoint with rows for the slices of these tensors behind those of its tensors, and which they are.

    Names, counts and totals stay those of the tensors that are stored; `label` names a slice.
    """
    if not stacks:
        return checkpoint, {}
    dtypes, shapes = list(checkpoint.dtypes), list(checkpoint.shapes)
    starts, sizes, files, origins = [checkpoint.starts], [checkpoint.sizes], [checkpoint.file_numbers], []
    found: dict[int, range] = {}
    for number in stacks:
        count, *rest = checkpoint.shapes[number]
        size = int(checkpoint.sizes[number]) // max(count, 1)
        found[number] = range(len(shapes), len(shapes) + count)
        dtypes += [checkpoint.dtypes[number]] * count
        shapes += [tuple(rest)] * count
        starts.append(int(checkpoint.starts[number]) + size * np.arange(count, dtype=np.int64))
        sizes.append(np.full(count, size, np.int64))
        files.append(np.full(count, checkpoint.file_numbers[number], np.int32))
        origins += [(number, count)]
    return replace(
        checkpoint, dtypes=dtypes, shapes=shapes, starts=np.concatenate(starts), sizes=np.concatenate(sizes),
        file_numbers=np.concatenate(files), stacks=(*checkpoint.stacks, *origins),
    ), found  # fmt: skip
