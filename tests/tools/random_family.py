"""Random little families, plans for them, and what a dimension means: said a second time, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from shard_plans.documents.plan import Plan
from shard_plans.families.binding import Binding
from shard_plans.placement.experts import ExpertPlacement, contiguous
from tests.tools.plans import make_plan

Owners = list[frozenset[int] | None]
"""Of each element of a dimension, in stored order: the members of the axis that hold it; None: all of them."""
AXES = ("tp", "etp")
SIZES = (1, 2, 3, 4, 6, 8)
BLOCKS = st.tuples(st.integers(1, 5), st.integers(1, 5))


@dataclass(frozen=True)
class Drawn:
    """A table, a config for it, and sizes of a plan that mostly fits."""

    table: dict[str, Any]
    config: dict[str, Any]
    parallel: dict[str, int]
    dims: dict[str, tuple[str, ...]]
    """Stored name, its holes kept -> the dimensions of its row."""


class Line:
    """A dimension as a value: products and sums of it make longer ones. Python reads the table's text itself."""

    def __init__(self, owners: Owners) -> None:
        self.owners = owners

    def __mul__(self, other: Line | int) -> Line:
        inner = _line(other)
        return Line([_both(a, b) for a in self.owners for b in inner.owners])

    def __rmul__(self, other: int) -> Line:
        return _line(other) * self

    def __add__(self, other: Line | int) -> Line:
        return Line(self.owners + _line(other).owners)

    def __radd__(self, other: int) -> Line:
        return _line(other) + self


def _line(value: Line | int) -> Line:
    return value if isinstance(value, Line) else Line([None] * value)


def _both(a: frozenset[int] | None, b: frozenset[int] | None) -> frozenset[int] | None:
    return b if a is None else a if b is None else a & b


def owners(text: str, sizes: Mapping[str, int], rules: Mapping[str, str], axis: str, count: int) -> Owners:
    """Who holds each element of the dimension `text`, where `axis` has `count` members."""

    def dealt(size: Line) -> Line:
        name = next(name for name, line in lines.items() if line is size)
        return Line(_dealt(len(size.owners), rules.get(name, "refuse"), count))

    lines = {name: Line([None] * size) for name, size in sizes.items()}
    marks = {other: dealt if other == axis else (lambda size: size) for other in AXES}
    return _line(eval(text, {"__builtins__": {}}, {**lines, **marks})).owners


def _dealt(size: int, rule: str, count: int) -> Owners:
    """Even shares in order; where heads are fewer than members, each is on neighbouring ones; or whole; or padded."""
    if size % count and rule == "whole":
        return [None] * size
    if size % count and rule == "repeat" and size and not count % size:
        each = count // size
        return [frozenset(range(head * each, (head + 1) * each)) for head in range(size)]
    if rule.startswith("pad") and size % count:
        multiple = int(rule.split()[1]) * count
        size_padded = -(-size // multiple) * multiple
        return [frozenset({place // (size_padded // count)}) for place in range(size)]
    return [frozenset({place * count // size}) for place in range(size)]


@st.composite
def a_dim(draw: st.DrawFn, names: list[str], dealt: list[str], axis: str | None) -> str:
    """A dimension in the table's grammar, dealt to an axis or not."""
    a, b = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    if axis is None:
        return draw(st.sampled_from([a, a, f"{a}+{b}", f"2*{a}", "3", f"{a}*2"]))
    cut = f"{axis}({draw(st.sampled_from(dealt))})"
    other = f"{axis}({draw(st.sampled_from(dealt))})"
    return draw(
        st.sampled_from(
            [cut, cut, f"{cut}*{a}", f"2*{cut}", f"{cut}*2", f"{cut}*({a}+{b})", f"{cut}+{other}", f"{cut}*2+{other}",
             f"{a}+{cut}", f"2*{cut}*{a}", f"({cut}+{other})*2", f"{cut}+{a}+{other}*3", f"{a}*{cut}"]
        )
    )  # fmt: skip


@st.composite
def a_row(
    draw: st.DrawFn, role: str, names: list[str], dealt: list[str], axis: str, rank: int
) -> tuple[str, list[str]]:
    """`[dim, ...] flags` of a row, at most one of its dimensions dealt."""
    where = draw(st.integers(-1, rank - 1))
    dims = [draw(a_dim(names, dealt, axis if place == where else None)) for place in range(rank)]
    flags = " quant" if rank >= 2 and draw(st.booleans()) else ""
    return f"{role} [{', '.join(dims)}]{flags}", dims


@st.composite
def families(draw: st.DrawFn) -> Drawn:
    """A family of one to four layers, dense or with experts, plain or quantised, with MTP layers or without."""
    tp, etp, ep = draw(st.sampled_from([1, 2, 2, 3, 4])), draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 3))
    moe = draw(st.booleans())
    config: dict[str, Any] = {"model_type": "drawn", "tie_word_embeddings": draw(st.booleans()), "rms_norm_eps": 1e-6}
    config |= {name: draw(st.sampled_from(SIZES)) for name in ("a", "b", "c")}
    config |= {f"t{n}": tp * draw(st.sampled_from((1, 1, 2, 3))) for n in range(2)}
    config |= {f"e{n}": etp * draw(st.sampled_from((1, 2, 3))) for n in range(2)}
    config |= {"vocab": draw(st.sampled_from((4, 7, 8, 12))), "kv": draw(st.sampled_from((1, 2, tp)))}
    config |= {"experts": ep * draw(st.integers(1, 2)) + draw(st.integers(0, 1)), "layers": draw(st.integers(1, 3))}
    config |= {"dense": draw(st.integers(0, 1)) if moe else 99, "mtp": draw(st.sampled_from((0, 0, 1)))}
    names = ["a", "b", "c"]
    if draw(st.booleans()):
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(draw(BLOCKS))}
    dims: dict[str, tuple[str, ...]] = {}
    prefix = "m.{layer}."

    def row(name: str, role: str, axis: str, rank: int, dealt: list[str], layer: bool = True) -> dict[str, str]:
        text, found = draw(a_row(role, names, dealt, axis, rank))
        dims[(prefix if layer else "") + name] = tuple(found)
        return {name: text}

    tp_sizes, heads, e_sizes = ["t0", "t1"], ["t0", "kv"], ["e0", "e1"]
    attention = row("in.weight", "attn.norm", "tp", 1, tp_sizes)
    for role, dealt in (("q", tp_sizes), ("k", heads), ("v", heads), ("o", tp_sizes)):
        attention |= row(f"{role}.weight", f"attn.{role}", "tp", draw(st.sampled_from((1, 2, 2, 2, 3))), dealt)
    attention |= row("post.weight", "ffn.norm", "tp", 1, tp_sizes)
    dense: dict[str, str] = {}
    sparse = row("router", "moe.router", "tp", 2, tp_sizes)
    for role in ("gate", "up", "down"):
        dense |= row(f"mlp.{role}.weight", f"mlp.{role}", "tp", 2, tp_sizes)
        rank = draw(st.sampled_from((2, 2, 2, 3)))
        sparse |= row(f"experts.{{expert}}.{role}.weight", f"experts.{role}", "etp", rank, e_sizes)
    last = row("norm.weight", "norm", "tp", 1, tp_sizes, False)
    last |= {"head.weight": "head [tp(vocab), a] tied(embed)"}
    dims |= {"embed.weight": ("tp(vocab)", "a"), "head.weight": ("tp(vocab)", "a")}
    sizes = {name: name for name in ("a", "b", "c", "t0", "t1", "e0", "e1", "vocab", "kv", "experts")}
    kinds = {"dense": "layer < dense", "moe": "else"}
    table: dict[str, Any] = {
        "family": "drawn", "match": ["drawn"], "sizes": sizes,
        "uneven": {"vocab": f"pad {draw(st.integers(1, 4))}", "kv": draw(st.sampled_from(["repeat", "whole"]))},
        "layers": {"count": "layers", "ffn": kinds, "mtp": {"count": "mtp", "ffn": "moe" if moe else "dense"}},
        "prefix": prefix,
        "tensors": {
            "first": {"embed.weight": "embed [tp(vocab), a]"}, "layer": attention, "layer ffn=dense": dense,
            "layer ffn=moe": sparse, "last": last,
        },
        "blocks": {
            "model": {"stream": "plain", "norm": "rms", "eps": "=rms_norm_eps"}, "layer": {"attn": "gqa"},
            "layer ffn=dense": {"ffn": "swiglu", "act": "silu"}, "layer ffn=moe": {"ffn": "moe", "act": "silu"},
        },
    }  # fmt: skip
    edp = draw(st.integers(1, 2))
    stage = ep * etp * edp if moe else tp * draw(st.integers(1, 2))
    parallel = {"tp": tp, "pp": draw(st.integers(1, config["layers"])), "dp": max(1, stage // tp)}
    if moe:
        parallel |= {"ep": ep, "etp": etp}
    return Drawn(table, config, parallel, dims)


def draw_plan(draw: Callable[..., Any], binding: Binding, parallel: Mapping[str, int]) -> Plan:
    """A plan of these sizes; experts anywhere, some of them more than once, otherwise in some layers."""
    plan = make_plan(binding, parallel, draw(st.sampled_from(("keep", "drop"))))
    if not plan.experts.default:
        return plan
    count, grid = len({expert for ids in plan.experts.default for expert in ids}), plan.grid

    def slots() -> tuple[tuple[int, ...], ...]:
        found = []
        for _ in range(draw(st.sampled_from((1, grid.edp)))):
            order = draw(st.permutations(range(count)))
            for places in contiguous(count, grid.ep):
                more = draw(st.lists(st.integers(0, count - 1), max_size=2))
                found.append((*(order[place] for place in places), *more))
        return tuple(found)

    layers = {p.layer for p in binding.parameters if p.per_expert and p.layer is not None}
    own = {layer: slots() for layer in sorted(layers) if draw(st.integers(0, 3)) == 0}
    experts = ExpertPlacement(slots() if draw(st.booleans()) else plan.experts.default, own)
    return Plan(plan.checkpoint, grid, plan.stages, experts, plan.mtp)


def held_by(line: Owners, member: int) -> list[int]:
    """Places that the member holds, in stored order."""
    return [place for place, who in enumerate(line) if who is None or member in who]


def chunks(values: list[int], size: int) -> list[tuple[int, ...]]:
    """Values in groups of `size`, the last one shorter."""
    rest = iter(values)
    return list(iter(lambda: tuple(itertools.islice(rest, size)), ()))
