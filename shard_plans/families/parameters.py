"""How many weights a config describes, by the family table alone: what a checkpoint of it should hold."""

from __future__ import annotations

import math

from shard_plans.families.dims import extent
from shard_plans.families.family import Family
from shard_plans.families.model import Model, wanted
from shard_plans.families.rows import bias_row


def expected_parameters(family: Family, model: Model) -> int:
    """Weight values of the layers that run and of what lies outside them; a tied head counts once.

    Rows that may be absent (`optional`) and layers for multi-token prediction aren't counted.
    """
    total = 0
    rows = [r for row in family.rows for r in ((row, bias_row(row)) if row.bias else (row,))]
    for row in rows:
        if row.optional or not wanted(row, model) or (row.tied is not None and model.tied):
            continue
        places = model.sizes[family.holes[row.hole]] if row.hole is not None else 1
        if row.section.stage == "layer":
            places = sum(row.section.applies(dict(layer.kinds), False) for layer in model.forward_layers)
        experts = model.sizes["experts"] if row.per_expert else 1  # stacked rows count them as a dimension
        total += places * experts * math.prod(extent(dim, model.sizes) for dim in row.dims)
    return total
