"""The models that bugs are put into, deeper than other tiny ones, and the plans by which they are cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.checkpoints import cache
from tests.checkpoints.kimi_k3 import make_kimi_k3
from tests.tools.sharded import convert_tiny

DENSE: tuple[Mapping[str, int], ...] = ({"tp": 2}, {"tp": 2, "pp": 3}, {"tp": 4, "pp": 2}, {"tp": 2, "dp": 2, "pp": 2})
MOE: tuple[Mapping[str, int], ...] = (
    {"tp": 2, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2}, {"tp": 4, "pp": 3, "ep": 2, "etp": 2},
    {"tp": 2, "dp": 2, "pp": 2, "ep": 2, "etp": 2}, {"tp": 2, "dp": 2, "ep": 4},
)  # fmt: skip
NO_ETP = tuple(plan for plan in MOE if "etp" not in plan)
"""Where a cut of experts would lie inside a group of numbers that share a byte or a scale."""
PLANS: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "qwen3_deep": DENSE,
    "glm4_moe_deep": MOE,
    "deepseek_v3_deep": MOE,
    "deepseek_v32_deep": MOE,
    "gpt_oss_deep": MOE,
    "qwen3_next_deep": MOE,
    "kimi_linear_deep": MOE,
    "kimi_k25_deep": NO_ETP,
}
"""Dense attention; experts with biases and shared ones; MLA with FP8 blocks, groups and an indexer; sinks, windows and
MXFP4; two kinds of linear attention; INT4 groups.
"""

PICTURED: tuple[Mapping[str, int], ...] = (
    {"tp": 2, "ep": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 3, "ep": 2}, {"tp": 2, "dp": 2, "pp": 2, "ep": 2},
)  # fmt: skip
TOWERS: Mapping[str, tuple[Mapping[str, int], ...]] = {
    name: PICTURED for name in ("kimi_k25", "kimi_k3", "qwen3_vl_moe", "qwen3_5_moe", "minimax_m3_vl")
}
"""Those that bugs of images are put into: three or four layers behind a tower of two or three blocks."""
EVERY = {**PLANS, **TOWERS}


class Outputs:
    """Checkpoints, kept between runs, and what was converted from them, each once."""

    def __init__(self, checkpoints: Path, folder: Path) -> None:
        """`checkpoints` is a cache (tests/checkpoints/cache.py), `folder` one for the outputs of this run alone."""
        self._checkpoints, self._folder = checkpoints, folder

    def checkpoint(self, family: str) -> Path:
        """The checkpoint of a family; never written into."""
        return cache.made(self._checkpoints, family, lambda folder: make(family, folder))

    def output(self, family: str, sizes: Mapping[str, int]) -> Path:
        """The family's shards by a plan; to be copied before they are spoiled."""
        out = self._folder / "-".join((family, *(f"{axis}{size}" for axis, size in sizes.items())))
        if not out.exists():
            convert_tiny(self.checkpoint(family), out, sizes)
        return out


def make(name: str, folder: Path, seed: int = 0) -> None:
    """Write a tiny checkpoint; other seeds give other values."""
    if name == "kimi_k3":
        return make_kimi_k3(folder, seed)
    from tests.checkpoints import tiny  # transformers takes seconds to import; a kept checkpoint needs none

    tiny.quiet()
    tiny.make_tiny(name, folder, seed)
