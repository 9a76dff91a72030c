"""Sections: the parts of a rank that are loaded and released together, in execution order."""

from __future__ import annotations

from shard_plans.errors import ManifestError

FIRST, LAST = -1, 1 << 30
"""Outside the layers: the embedding, and the final norm with the head; other sections are layer numbers."""
OUTSIDE = {
    "embed": FIRST, "out.res_norm": LAST, "out.res_proj": LAST, "out.hc_fn": LAST, "out.hc_base": LAST,
    "out.hc_scale": LAST, "norm": LAST, "head": LAST,
}  # fmt: skip
VISION = "vision."
"""What the tower's tensors begin with: they are loaded with the embedding, where images come in."""


def section_of(name: str) -> tuple[int, str]:
    """Section and short name of a native tensor: layers.3.attn.o -> (3, attn.o)."""
    if name.startswith("layers."):
        _, number, short = name.split(".", 2)
        return int(number), short
    if name.startswith(VISION):
        return FIRST, name
    role = name.removesuffix(".scale").removesuffix(".global_scale")
    if role not in OUTSIDE:
        raise ManifestError(f"tensor {name} belongs to no layer, and isn't {', '.join(OUTSIDE)}: nothing can use it")
    return OUTSIDE[role], name


def section_words(section: int) -> str:
    """The section in words."""
    return {FIRST: "the embedding", LAST: "the head"}.get(section, f"layer {section}")
