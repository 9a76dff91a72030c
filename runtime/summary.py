"""The verdict of a run in a sentence, for every kind of report."""

from __future__ import annotations

import math

import torch

from runtime.checking.checks import exact, limits
from runtime.checking.figures import LayerFigures
from runtime.request import COMPUTE
from runtime.result import RunResult


def verdict(result: RunResult) -> str:
    """Passed or failed, by which checks, and the worst layer."""
    failed = [check.name for check in result.checks if not check.passed]
    count = len(result.checks)
    all_checks = f"{count} check{'' if count == 1 else 's'}"
    words = f"FAILED: {len(failed)} of {all_checks}: {', '.join(failed)}" if failed else f"passed: {all_checks}"
    if (quick := result.figures.get("quick")) is not None:
        words += f" (quick: {len(quick['layers'])} of {quick['of']} layers)"
    layer = worst_layer(result)
    return words if layer is None else f"{words}; worst layer {worst_words(result, layer)}"


def worst_layer(result: RunResult) -> LayerFigures | None:
    """The layer that alone, fed with the reference's input, is the worst; None without a reference.

    One with an operator beyond the limit is worse than one without: a router's wrong scores may choose alike.
    """
    measured = [layer for layer in result.layers if layer.alone is not None]
    high = strict(result)

    def badness(layer: LayerFigures) -> tuple[bool, float]:
        value = math.nan if layer.alone is None else layer.alone
        return first_operator(result, layer) is not None, math.inf if math.isnan(value) else value if high else -value

    return max(measured, key=badness, default=None)


def worst_words(result: RunResult, layer: LayerFigures) -> str:
    """Its number, rank and error, and the operator to look at first."""
    unit, digits = ("relative error", ".3g") if strict(result) else ("cosine", ".6f")
    value = "not a number" if layer.alone is None or math.isnan(layer.alone) else f"{layer.alone:{digits}}"
    words = f"{layer.layer} (rank {layer.rank}, {unit} {value}"
    first = first_operator(result, layer)
    return f"{words}, first wrong in {first})" if first is not None else f"{words})"


def first_operator(result: RunResult, layer: LayerFigures) -> str | None:
    """The first operator of a layer that is beyond the limit; None where none is, or the limits are smoke tests."""
    if not strict(result):
        return None
    most, _ = limits(compute(result))
    return next((name for name, value in layer.operators.items() if not value <= most), None)


def strict(result: RunResult) -> bool:
    """Whether the figures of layers are relative errors, not cosines."""
    return exact(compute(result))


def compute(result: RunResult) -> torch.dtype:
    """What the ranks calculated in."""
    return COMPUTE[result.figures.get("compute", "float32")]
