"""Embedding and head that are both stored although config.json ties them: their bytes must be the same."""

from __future__ import annotations

import numpy as np

from converter.sources.source import Source
from shard_plans.errors import CheckpointError

STEP = 4 << 20


def check_tied(origin: Source, pair: tuple[int, int]) -> None:
    """Raise CheckpointError unless the two stored tensors hold the same bytes; read in blocks."""
    checkpoint, (first, second) = origin.checkpoint, pair
    names = checkpoint.names[first], checkpoint.names[second]
    kinds = [(checkpoint.dtypes[n], checkpoint.shapes[n]) for n in pair]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"config.json ties {names[0]} and {names[1]}, but they are stored as {kinds[0][0]} {list(kinds[0][1])} "
            f"and {kinds[1][0]} {list(kinds[1][1])}; set tie_word_embeddings to false, or remove one"
        )
    buffers = [np.empty(STEP, np.uint8), np.empty(STEP, np.uint8)]
    size = int(checkpoint.sizes[first])
    with origin.reader(0) as reader:
        for start in range(0, size, STEP):
            length = min(STEP, size - start)
            for number, buffer in zip(pair, buffers, strict=True):
                name = checkpoint.files[int(checkpoint.file_numbers[number])].name
                reader.read(name, int(checkpoint.starts[number]) + start, buffer.data[:length])
            differ = np.flatnonzero(buffers[0][:length] != buffers[1][:length])
            if len(differ):
                raise CheckpointError(
                    f"config.json ties {names[0]} and {names[1]}, but both are stored and differ from byte "
                    f"{start + int(differ[0])} on; set tie_word_embeddings to false if they are meant to"
                )
