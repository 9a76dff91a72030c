"""The mixture of experts replayed: the router, the rows on their way, one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence

from shard_plans.errors import FamilyError
from shard_plans.families.model import Layer
from shard_plans.memory.replay.common import column, gated, linear, rms_norm, swiglu
from shard_plans.memory.replay.held import Weights
from shard_plans.memory.replay.place import Place
from shard_plans.memory.replay.tape import Shape, Tape, made

ID = 8
"""Bytes of a number of a token or an expert."""


def moe(place: Place, layer: Layer, weights: Weights, x: Shape, counts: Sequence[int]) -> tuple[Shape, list[Shape]]:
    """As runtime/blocks/moe.py on one rank; `counts`: the rows that each expert gets. Also what the routing keeps."""
    tape, words, topk = place.tape, layer.words, place.size("topk")
    bias = weights["moe.router_bias"].dense(tape, tape.wide) if words.get("router_bias") else None
    router = weights["moe.router"].dense(tape, tape.wide)
    routing = route(layer, topk, x.to(tape.wide), router, bias)
    tokens, experts = x.rows, place.size("experts")
    owner = _spread(tape.new(tokens, bytes=ID), topk)
    slot_and_local = _destinations(tape, experts, tokens * topk)
    order = _order(slot_and_local, tokens * topk)
    sent = column(tape, weights, "moe.latent_down", x) if words.get("latent") else x.view(*x.shape)
    sizes = tape.new(1, bytes=ID)
    rows = _picked(sent, tokens * topk, _shifted(_taken(owner, order)))
    y = _through(place, weights, rows, _taken(slot_and_local, order), counts)
    back = y.like()
    out = _combined(place, weights, back.view(tokens, topk, y.shape[1]), bool(words.get("latent")))
    if words.get("shared") is not None:
        out = made(out, out, _shared(tape, weights, words["shared"], x))
    del sizes, order, rows
    return out, routing


def _shared(tape: Tape, weights: Weights, word: str, x: Shape) -> Shape:
    y = swiglu(tape, weights, "shared", x)
    if word == "added":
        return y
    gate = column(tape, weights, "shared.router", x).to(tape.wide)
    return _gated_by(y, gate.like()).to(tape.compute)


def _gated_by(y: Shape, gate: Shape) -> Shape:
    return y.like(y.tape.wide)


def route(layer: Layer, topk: int, x: Shape, router: Shape, bias: Shape | None) -> list[Shape]:
    """As runtime/blocks/router.py: indices, shares, scores for the choice, margin."""
    tape, words = x.tape, layer.words
    if words["score"] not in ("softmax", "sigmoid") or words.get("router_bias") == "logits":
        raise FamilyError(f"the memory of a router that scores by {words['score']} isn't replayed")
    logits = linear(x, router)
    scores = logits.like()
    choice = scores if bias is None else scores.like()
    margin = tape.new(x.rows, bytes=tape.wide)
    groups = int(words.get("groups") or 1)
    if groups > 1:
        choice, margin = _limited(choice, groups, int(words.get("topk_groups") or groups), words.get("group_score"))
    indices = _best(choice, topk)[1]
    margin = made(margin, _lead(choice, topk))
    chosen = tape.new(x.rows, topk, bytes=tape.wide)
    if words.get("renormalize"):
        chosen = made(chosen, _safe(chosen.sums()))
    return [indices, chosen if words.get("scale") is None else chosen.like(), choice, margin]


def _safe(sums: Shape) -> Shape:
    return sums.like()


def _limited(choice: Shape, groups: int, kept: int, score: str | None) -> tuple[Shape, Shape]:
    tape, tokens = choice.tape, choice.rows
    if score == "top2_sum":
        both = tape.new(tokens, groups, 2, bytes=tape.wide), tape.new(tokens, groups, 2, bytes=ID)
        values = both[0]
        del both
        group_scores = tape.new(tokens, groups, bytes=tape.wide)
        del values
    else:
        group_scores = tape.new(tokens, groups, bytes=tape.wide)
    dropped = tape.new(tokens, groups, bytes=1)
    _best(group_scores, kept)
    limited = made(choice, dropped)
    return limited, _lead(group_scores, kept)


def _best(x: Shape, count: int) -> tuple[Shape, Shape]:
    """Values and indices of the best of each row."""
    return x.tape.new(x.rows, count, bytes=x.bytes), x.tape.new(x.rows, count, bytes=ID)


def _lead(scores: Shape, count: int) -> Shape:
    tape = scores.tape
    if count >= scores.shape[1]:
        return tape.new(scores.rows, bytes=scores.bytes)
    best = _best(scores, count + 1)[0]
    lead = tape.new(best.rows, bytes=best.bytes)
    return made(lead, lead.like(1))


def _spread(arange: Shape, topk: int) -> Shape:
    return arange.tape.new(arange.rows * topk, bytes=ID)


def _destinations(tape: Tape, experts: int, rows: int) -> Shape:
    """Slot and local number of each row; on one rank every expert is there once."""
    table = tape.new(experts, 1, 2, bytes=ID)
    counts = tape.new(experts, bytes=ID)
    place = _looked_up(table, rows, _remainder(counts, rows))
    return place


def _remainder(counts: Shape, rows: int) -> Shape:
    return _taken(counts, counts.tape.outside((rows,), ID)).like()


def _looked_up(table: Shape, rows: int, copy: Shape) -> Shape:
    return table.tape.new(rows, 2, bytes=ID)


def _order(keys: Shape, rows: int) -> Shape:
    """Sorted numbers and their order; the numbers go."""
    both = keys.tape.new(rows, bytes=ID), keys.tape.new(rows, bytes=ID)
    return both[1]


def _taken(x: Shape, order: Shape) -> Shape:
    return x.tape.new(order.rows, bytes=ID)


def _shifted(x: Shape) -> Shape:
    return x.like()


def _picked(x: Shape, rows: int, index: Shape) -> Shape:
    return x.tape.new(rows, x.shape[1], bytes=x.bytes)


def _through(place: Place, weights: Weights, x: Shape, local: Shape, counts: Sequence[int]) -> Shape:
    rows, ids = x.like(), local.like()
    y = _products(place, weights, rows, ids, counts)
    return y


def _products(place: Place, weights: Weights, x: Shape, local: Shape, counts: Sequence[int]) -> Shape:
    tape = place.tape
    order = _order(local, x.rows)
    out = x.like()
    tape.new(len(counts), bytes=ID)
    last: list[Shape] = []  # an expert's output lives until the next one's is there
    names = ("experts.gate_up",) if "experts.gate_up" in weights else ("experts.gate", "experts.up")
    for count in counts:
        if not count:
            continue
        h = tape.new(count, x.shape[1])
        parts = []
        for name in names:
            parts.append(_product(weights[name].dense(tape), h))
        both = tape.new(count, sum(part.shape[1] for part in parts))
        half = both.shape[1] // 2
        gate, up = both.view(count, half), both.view(count, half)
        last[:] = [_through_down(tape, weights, gated(gate, up))]
    del order
    return out


def _product(matrix: Shape, x: Shape) -> Shape:
    return linear(x, matrix)


def _through_down(tape: Tape, weights: Weights, x: Shape) -> Shape:
    return _product(weights["experts.down"].dense(tape), x)


def _combined(place: Place, weights: Weights, y: Shape, latent: bool) -> Shape:
    tape = place.tape
    out = _summed(_weighed(y.to(tape.wide))).to(tape.compute)
    if not latent:
        return out
    if "moe.latent_norm" in weights:
        out = rms_norm(out, weights["moe.latent_norm"].dense(tape))
    return column(tape, weights, "moe.latent_up", out)


def _weighed(y: Shape) -> Shape:
    return y.like()


def _summed(y: Shape) -> Shape:
    return y.tape.new(y.rows, y.shape[2], bytes=y.bytes)
