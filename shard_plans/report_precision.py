"""Changes of precision for people: a line for each pair of formats, the worst tensors, and what was no number."""

from __future__ import annotations

from collections.abc import Sequence

from shard_plans.console import out, remark
from shard_plans.documents.conversions import ConvertedTensor, by_format, worst_first

SHOWN = 5
"""Tensors that are listed."""
NAMED = 20
"""Tensors with NaN or infinities that are named one by one."""


def show_precision(tensors: Sequence[ConvertedTensor]) -> None:
    """The errors of a conversion, and remarks on what the checkpoint holds that is no number."""
    if not tensors:
        return
    _line("converted weights, with the worst relative errors and cosines:")
    for t in by_format(tensors):
        _line(f"  {t.stored} -> {t.made}, {t.matrices:,} matrices: {_figures(t)}")
    for t in worst_first(t for t in tensors if t.largest > 0)[:SHOWN]:
        experts = f", {t.matrices} experts" if t.matrices > 1 else ""
        _line(f"    {t.tensor}{experts}: {_figures(t)}")
    odd = [t for t in tensors if t.nan or t.infinite]
    for t in odd[:NAMED]:
        remark(f"{t.tensor} holds {t.nan} NaN and {t.infinite} infinities in the checkpoint")
    if len(odd) > NAMED:
        remark(f"{len(odd) - NAMED} more tensors hold NaN or infinities; --json and the manifests name them")


def _line(text: str) -> None:
    out().print(text, soft_wrap=True, highlight=False, markup=False)


def _figures(t: ConvertedTensor) -> str:
    if t.largest == 0:
        return "exact"
    return f"largest {t.largest:.3g}, mean {t.mean:.3g}, cosine 1 - {1 - t.cosine:.2g}"
