"""A whole forward pass of one rank replayed: embedding, layers, head; its peak is what the runtime takes at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import FamilyError
from shard_plans.families.model import Layer, Model
from shard_plans.memory.replay.attention import gqa, mla
from shard_plans.memory.replay.common import linear, rms_norm, swiglu
from shard_plans.memory.replay.experts import moe
from shard_plans.memory.replay.held import Held, Weights
from shard_plans.memory.replay.place import Place
from shard_plans.memory.replay.tape import Shape, Tape, made
from shard_plans.placement.grid import Grid
from shard_plans.placement.shards import Placement, ShardTensor

HEAD_ROWS = 16384
"""Rows of the head that the runtime converts at a time."""
ATTENTION: Mapping[str, Callable[[Place, Layer, Weights, Shape], Shape]] = {"gqa": gqa, "mla": mla}
KNOWN = {"qk_norm": (None, "per_head"), "act": ("silu",), "output_gate": (None,), "expert_pairs": (None,)}
"""Words of a layer that change what lives, and their values that are replayed."""
FIRST, LAST = "first", "last"
Sections = Mapping[int | str, Weights]
"""Layer number, FIRST or LAST -> what the rank holds of it."""


def pass_peak(
    model: Model, grid: Grid, sections: Sections, tokens: int, compute: int, routed: Mapping[int, Sequence[int]]
) -> int:
    """Bytes that live at most in a pass over `tokens` tokens of one sequence, without a cache, weights not counted.

    `compute`: bytes of a number that is computed in. `routed`: layer -> rows that each expert gets, of every layer with
    experts. One stage and one rank. Raises FamilyError for a block or format that isn't replayed.
    """
    if grid.world > 1 or (model.words.get("stream"), model.words.get("norm")) != ("plain", "rms"):
        raise FamilyError("only passes of one rank with a plain stream and plain norms are replayed")
    tape = Tape(compute)
    place = Place(model, grid, tape)
    x = _embed(tape, sections[FIRST], tokens)
    for layer in model.forward_layers:
        x = _layer(place, layer, sections[layer.index], x, routed.get(layer.index, ()))
    scores = _logits(tape, sections[LAST], x)
    del scores
    return tape.peak


def _embed(tape: Tape, weights: Weights, tokens: int) -> Shape:
    table = weights["embed"]
    local = tape.new(tokens, bytes=8)
    here = _both(local.like(1), local.like(1))
    picked = _looked_up(tape, table, tokens, local.like()).to(tape.compute)
    return made(picked, here.like())


def _both(one: Shape, other: Shape) -> Shape:
    return one.like()


def _looked_up(tape: Tape, table: Held, tokens: int, index: Shape) -> Shape:
    return tape.new(tokens, table.shape[1], bytes=table.bytes)


def _layer(place: Place, layer: Layer, weights: Weights, x: Shape, counts: Sequence[int]) -> Shape:
    attention = ATTENTION.get(str(layer.words["attn"]))
    odd = [word for word in ("index", "chunk", "sinks", "temperature", "expert_sides") if layer.words.get(word)]
    odd += [f"{word} {layer.words.get(word)}" for word, known in KNOWN.items() if layer.words.get(word) not in known]
    if attention is None or odd:
        raise FamilyError(f"the memory of attention {layer.words['attn']} {', '.join(odd)} isn't replayed")
    out, routing = _run(place, layer, weights, x, attention, counts)
    del routing
    return out


def _run(
    place: Place, layer: Layer, weights: Weights, x: Shape,
    attention: Callable[[Place, Layer, Weights, Shape], Shape], counts: Sequence[int],
) -> tuple[Shape, list[Shape]]:  # fmt: skip
    tape = place.tape
    h = rms_norm(x, weights["attn.norm"].dense(tape))
    x = made(x, x, attention(place, layer, weights, h))
    h = rms_norm(x, weights["ffn.norm"].dense(tape))
    routing: list[Shape] = []
    if layer.words["ffn"] == "moe":
        y, routing = moe(place, layer, weights, h, counts)
    else:
        y = swiglu(tape, weights, "mlp", h)
    return made(x, x, y), routing


def _logits(tape: Tape, weights: Weights, x: Shape) -> Shape:
    x = rms_norm(x, weights["norm"].dense(tape))
    table = weights["head"] if "head" in weights else weights["embed"]
    rows, width = table.shape
    slabs = [
        linear(x, tape.outside((min(HEAD_ROWS, rows - start), width), table.bytes).to(tape.compute))
        for start in range(0, rows, HEAD_ROWS)
    ]
    return tape.new(x.rows, sum(slab.shape[1] for slab in slabs))


def sections_of(placement: Placement, rank: int) -> Sections:
    """What a rank of a laid-out plan holds, by section; a tied head reads the embedding."""
    files = {file.name: file for file in placement.files}
    tensors = [tensor for name in placement.ranks[rank][1] for tensor in files[name].tensors]
    scales = {tensor.name.removesuffix(".scale"): tensor for tensor in tensors if tensor.part == "scale"}
    found: dict[int | str, dict[str, Held]] = {FIRST: {}, LAST: {}}
    for tensor in tensors:
        if tensor.part == "values":
            section, role = _section(tensor.name)
            found.setdefault(section, {})[role] = _held(tensor, role, scales.get(tensor.name))
    found[LAST].setdefault("embed", found[FIRST]["embed"])
    return found


def _section(name: str) -> tuple[int | str, str]:
    if name.startswith("layers."):
        _, number, role = name.split(".", 2)
        return int(number), role
    return (FIRST if name == "embed" else LAST), name


def _held(tensor: ShardTensor, role: str, scale: ShardTensor | None) -> Held:
    stacked = role.startswith("experts.")
    shape = tensor.shape[1:] if stacked else tensor.shape
    scale_bytes = DTYPE_BITS[scale.dtype] // 8 if scale is not None else 4
    return Held(
        shape, DTYPE_BITS[tensor.dtype] // 8, tensor.format if scale is not None else None, tensor.block, scale_bytes
    )
