"""Softmax attention replayed: grouped-query and latent, the rotary embedding, the scores in pieces."""

from __future__ import annotations

from collections.abc import Callable

from shard_plans.families.model import Layer
from shard_plans.memory.replay.common import column, fused, rms_norm, row
from shard_plans.memory.replay.held import Weights
from shard_plans.memory.replay.place import Place
from shard_plans.memory.replay.tape import Shape, Tape, made

SCORES_AT_ONCE = 1 << 26
"""Scores (heads x queries x keys) that the runtime holds at a time."""
REPLAYED = 3
"""Pieces that are replayed one by one; of more of them all but the last two are outputs that lie there."""


def gqa(place: Place, layer: Layer, weights: Weights, x: Shape) -> Shape:
    """As runtime/blocks/gqa.py."""
    tape, width = place.tape, place.size("head_dim")
    heads, kv_heads = place.share("heads"), max(1, place.size("kv_heads") // place.grid.tp)
    q, k, v = fused(tape, weights, "attn.qkv", ("attn.q", "attn.k", "attn.v"), x)
    gate = q.view(x.rows, heads, 0)  # an empty part of the same memory
    q, k, v = q.view(x.rows, heads, width), k.view(x.rows, kv_heads, width), v.view(x.rows, kv_heads, width)
    if layer.words.get("qk_norm") == "per_head":
        q, k = rms_norm(q, weights["attn.q_norm"].dense(tape)), rms_norm(k, weights["attn.k_norm"].dense(tape))
    turn = turner(tape, layer, int(width * float(layer.words.get("rope_part", 1))), x.rows)
    q, k = turn(q), turn(k)
    y = attend(q, k, v, bool(layer.words.get("window")))
    y = row(tape, weights, "attn.o", y)
    del gate
    return y


def mla(place: Place, layer: Layer, weights: Weights, x: Shape) -> Shape:
    """As runtime/blocks/mla.py."""
    tape, heads = place.tape, place.share("heads")
    nope, rope, latent_width, v_dim = (place.size(name) for name in ("nope", "rope", "kv_lora", "v_dim"))
    if "attn.q_a" in weights:
        low = column(tape, weights, "attn.q_a", x)
        low = rms_norm(low, weights["attn.q_a_norm"].dense(tape))
        q = column(tape, weights, "attn.q_b", low)
    else:
        q = column(tape, weights, "attn.q", x)
    q_pass, q_turn = q.view(x.rows, heads, nope), q.view(x.rows, heads, rope)
    both = column(tape, weights, "attn.kv_a", x)
    latent, k_turn = both.view(x.rows, latent_width), both.view(x.rows, 1, rope)
    del both
    latent = rms_norm(latent, weights["attn.kv_a_norm"].dense(tape))
    turn = turner(tape, layer, rope, x.rows)
    q = _joined(nope + rope, q_pass, turn(q_turn))
    latent = _joined(latent_width + rope, latent, turn(k_turn).view(x.rows, rope))
    kv = column(tape, weights, "attn.kv_b", latent.view(x.rows, latent_width))
    v = kv.view(x.rows, heads, v_dim)
    k = _joined(nope + rope, kv.view(x.rows, heads, nope))
    y = attend(q, k, v, bool(layer.words.get("window")))
    if layer.words.get("output_gate") == "elementwise":
        y = output_gate(tape, weights, x, y)
    return row(tape, weights, "attn.o", y)


def output_gate(tape: Tape, weights: Weights, x: Shape, y: Shape) -> Shape:
    """As runtime/blocks/linear.py."""
    gate = column(tape, weights, "attn.gate", x).to(tape.wide)
    return made(gate, y, gate.like()).to(tape.compute)


def attend(q: Shape, k: Shape, v: Shape, window: bool) -> Shape:
    """Scores, softmax and values, in pieces of the queries."""
    tape, (tokens, heads, _), keys = q.tape, q.shape, k.rows
    step = max(1, SCORES_AT_ONCE // max(1, heads * keys))
    repeated = heads // k.shape[1] > 1
    outputs: list[Shape] = []
    pieces = -(-tokens // step)
    first = 0
    if pieces > REPLAYED:
        first = (pieces - 2) * step
        outputs.append(tape.new(heads, first, v.shape[2]))
    for start in range(first, tokens, step):
        part = min(step, tokens - start)
        scores = _product(tape, heads, part, keys, _repeated(k, heads) if repeated else None).like().to(tape.wide)
        scores = made(scores, _hidden(tape, part, keys, window))
        shares = scores.like()
        outputs.append(_weighted(shares.to(tape.compute), heads, part, v.shape[2], v if repeated else None))
    joined = tape.new(heads, tokens, v.shape[2])
    return _turned(joined, tokens, heads * v.shape[2])


def _product(tape: Tape, heads: int, part: int, keys: int, copy: Shape | None) -> Shape:
    return tape.new(heads, part, keys)


def _weighted(shares: Shape, heads: int, part: int, width: int, repeated: Shape | None) -> Shape:
    copy = None if repeated is None else _repeated(repeated, heads)
    y = shares.tape.new(heads, part, width)
    del copy
    return y


def _hidden(tape: Tape, part: int, keys: int, window: bool) -> Shape:
    """As runtime/blocks/mask.py, causal or with a window."""
    ago = tape.new(part, keys, bytes=8)
    hidden = ago.like(1)
    if window:
        hidden = _either(hidden, ago.like(1))
    return hidden


def _repeated(x: Shape, heads: int) -> Shape:
    """Keys or values of shared heads, copied for each query head."""
    return x.tape.new(x.rows, heads, x.shape[2])


def _either(one: Shape, other: Shape) -> Shape:
    return one.like()


def _turned(x: Shape, rows: int, columns: int) -> Shape:
    return x.tape.new(rows, columns)


def _joined(width: int, first: Shape, *others: Shape) -> Shape:
    return first.tape.new(*first.shape[:-1], width)


def turner(tape: Tape, layer: Layer, width: int, tokens: int) -> Callable[[Shape], Shape]:
    """What turns [tokens, heads, >= width]; it keeps cosines and sines."""
    if layer.words["rope"] == "none":
        return lambda x: x
    angles = _angles(tape.new(tokens, 1, bytes=tape.wide), width // 2)
    cos = angles.like().like().to(tape.compute)
    sin = angles.like().like().to(tape.compute)
    del angles
    return lambda x: _rotated(x, cos, sin, width // 2)


def _angles(positions: Shape, half: int) -> Shape:
    return positions.tape.new(positions.rows, half, bytes=positions.bytes)


def _rotated(x: Shape, cos: Shape, sin: Shape, half: int) -> Shape:
    tape, (rows, heads, _) = x.tape, x.shape

    def pair() -> Shape:
        return _either(tape.new(rows, heads, half), tape.new(rows, heads, half))

    return _joined(x.shape[2], x, pair(), pair())
