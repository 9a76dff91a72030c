"""What a bug is: a change of one layer's weights, words or code, of an exchange between ranks, a plan, a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.opened import Opened
from shard_plans.families.model import Layer, Model


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Where one bug goes: an output that may be spoiled, one of its layers and one of its ranks."""

    out: Path
    opened: Opened
    """As it was before."""
    layer: Layer
    rank: int
    """Of the layer's stage."""
    shapes: Mapping[str, tuple[int, ...]]
    """What this rank holds of the layer: native name without its prefix -> shape as stored; scales apart."""
    dice: random.Random
    patch: pytest.MonkeyPatch

    @property
    def model(self) -> Model:
        """The architecture."""
        return self.opened.model

    @property
    def stage(self) -> int:
        """The layer's pipeline stage."""
        return next(n for n, (first, stop) in enumerate(self.opened.plan.stages) if first <= self.layer.index < stop)

    @property
    def block(self) -> int:
        """A block of the vision tower."""
        return int(self.layer.index % self.model.sizes["vt_count"])

    def word(self, name: str) -> Any:
        """A word of the layer's block vocabulary, or None."""
        return self.layer.words.get(name)


EMBEDDING, HEAD, STAGE, STEP, ANSWER, SEEN = "embedding", "head", "stage", "step", "answer", "seen"
"""Places of bugs that lie in no layer's weights: both ends of the model, between two stages; in what a cache keeps from
one token to the next, and in what it keeps where a prompt comes in chunks and an answer needs more blocks; on the way
of an image, up to the first layer.
"""


@dataclass(frozen=True, slots=True)
class Bug:
    """One row of the table."""

    name: str
    place: str
    """`attn` or `ffn` of a layer, or one of the places above."""
    fits: Callable[[Site], bool]
    """Whether this layer of this model can have it."""
    inject: Callable[[Site], None]
    compute: str = "float32"
    """In which arithmetic it is looked for: what is smaller than float32's rounding shows in float64 alone."""
    like: str = ""
    """A published bug of this kind."""
    images: bool = False
    """It is put into models with a vision tower, whose prompts hold images; others into those without."""
    dealt: bool = False
    """It needs images that are dealt to the tp ranks."""
    names: Callable[[Site], str] = lambda site: ""
    """What the check `vision` must say first, or the sentence that ends the run somewhere, if the place is `seen`: a
    pattern."""
