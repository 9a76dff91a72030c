"""A layer's figures are the worst of its ranks."""

from __future__ import annotations

import json
import math

from runtime.checking.figures import LayerFigures, merge
from runtime.checking.ladder import poorest

NAN = math.nan


def test_the_worst_rank_counts_and_the_first_of_equals_is_named() -> None:
    ranks = [
        LayerFigures(1, 4, 2e-6, hidden=3e-6, operators={"attn": 1e-6, "ffn": 5e-6}, margin=0.2, ties=[3], load=[1, 2]),
        LayerFigures(1, 5, 7e-6, hidden=1e-6, operators={"attn": 2e-6}, margin=0.1, ties=[1], replayed=[2]),
        LayerFigures(1, 6, 7e-6, decode=4e-6),
        LayerFigures(0, 0, 1e-6),
    ]
    first, second = merge(ranks, exact=True)
    assert (first.layer, first.rank, first.alone, first.decode) == (0, 0, 1e-6, None)
    assert (second.rank, second.alone, second.hidden, second.decode) == (5, 7e-6, 3e-6, 4e-6)
    assert second.operators == {"attn": 2e-6, "ffn": 5e-6} and second.margin == 0.1
    assert (second.ties, second.replayed, second.load) == ([1, 3], [2], [1, 2])


def test_of_cosines_the_lowest_is_the_worst() -> None:
    (layer,) = merge([LayerFigures(0, 0, 0.99), LayerFigures(0, 1, 0.97), LayerFigures(0, 2, 0.98)], exact=False)
    assert (layer.rank, layer.alone) == (1, 0.97)


def test_what_is_no_number_is_worse_than_all() -> None:
    ranks = [LayerFigures(0, 0, 0.5), LayerFigures(0, 1, NAN, operators={"attn": NAN}), LayerFigures(0, 2, NAN)]
    (layer,) = merge(ranks, exact=True)
    assert layer.rank == 1 and layer.alone is not None and math.isnan(layer.alone)
    found = json.loads(json.dumps(layer.as_dict(), allow_nan=False))
    assert found["alone"] is None and found["operators"] == {"attn": None}


def test_a_rank_that_measured_nothing_changes_nothing() -> None:
    (layer,) = merge([LayerFigures(0, 0), LayerFigures(0, 1, 0.5), LayerFigures(0, 2)], exact=True)
    assert (layer.rank, layer.alone) == (1, 0.5)


def test_an_operator_that_is_no_number_is_the_poorest() -> None:
    """Of zeros there is no cosine."""
    for values in ({"attn": 0.9999, "shared": NAN}, {"shared": NAN, "attn": 0.9999}):
        assert poorest(values, high=False) == poorest(values, high=True) == "shared"
    assert poorest({"attn": 0.9, "ffn": 0.8}, high=False) == "ffn"
    assert poorest({"attn": 0.9, "ffn": 0.8}, high=True) == "attn"
