"""Reading shard tensors whose numbers are in another order than they are stored in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from converter.sources.held import Tile
from converter.sources.layouts import Span, clip
from converter.sources.proof import ProvingReader
from shard_plans.placement.arrangement import Arrangement, narrow

Array = np.ndarray[Any, np.dtype[Any]]


def rearrange(shards: ProvingReader, part: Array, tile: Tile, arranged: Arrangement, spans: Sequence[Span]) -> None:
    """Put what a tile holds of a rectangle in its place; read in the order in which it lies in the shard."""
    tensor, layout, base = tile
    for found in product(*(clip(m, *span) for m, span in zip(layout.matches, spans, strict=True))):
        counts = [match.stop - match.start for match in found]
        lengths, units = arranged.ordered(counts), arranged.ordered(layout.units)
        split = len(lengths) - 1  # from there on bytes follow one another
        while split and lengths[split] * units[split] == units[split - 1]:
            split -= 1
        run = lengths[split] * units[split]
        held = np.empty(math.prod(lengths) * layout.held, np.uint8)
        begin = base + sum(match.place * unit for match, unit in zip(found, layout.units, strict=True))
        for number, at in enumerate(np.ndindex(*lengths[:split])):
            start = begin + sum(index * unit for index, unit in zip(at, units[:split], strict=True))
            for first in range(0, run, shards.piece):
                length = min(shards.piece, run - first)
                to = number * run + first
                held[to : to + length] = np.frombuffer(shards.take(tensor, start + first, length), np.uint8)
        box = arranged.seen(held.view(f"<u{layout.held}").reshape(lengths))
        there = tuple(slice(m.start - low, m.stop - low) for m, (low, _) in zip(found, spans, strict=True))
        np.copyto(part[there], narrow(box, layout.item))
