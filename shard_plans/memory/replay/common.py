"""Norms, products with matrices, the gated unit: what several blocks use."""

from __future__ import annotations

from collections.abc import Sequence

from shard_plans.memory.replay.held import Weights
from shard_plans.memory.replay.tape import Shape, Tape, made


def rms_norm(x: Shape, weight: Shape) -> Shape:
    """As runtime/blocks/norms.py."""
    return made(x, weight, _unit(x).to(x.bytes))


def _unit(x: Shape) -> Shape:
    wide = x.to(x.tape.wide)
    return made(wide, wide, _root(wide))


def _root(wide: Shape) -> Shape:
    mean = _mean(wide.like())
    mean = mean.like()
    return mean.like()


def _mean(squares: Shape) -> Shape:
    return squares.sums()


def linear(x: Shape, matrix: Shape) -> Shape:
    """[rows, in] times [out, in] transposed: [rows, out]."""
    return x.tape.new(x.rows, matrix.shape[0], bytes=x.bytes)


def column(tape: Tape, weights: Weights, role: str, x: Shape) -> Shape:
    """A column-parallel product; a bias is part of it."""
    matrix = weights[role].dense(tape)
    bias = weights.get(f"{role}.bias")
    return _biased(x, matrix, None if bias is None else bias.dense(tape))


def _biased(x: Shape, matrix: Shape, bias: Shape | None) -> Shape:
    return linear(x, matrix)


def row(tape: Tape, weights: Weights, role: str, x: Shape) -> Shape:
    """A row-parallel product; a bias is added behind it."""
    matrix = weights[role].dense(tape)
    y = linear(x, matrix)
    del matrix
    bias = weights.get(f"{role}.bias")
    return y if bias is None else made(y, y, bias.dense(tape))


def fused(tape: Tape, weights: Weights, together: str, roles: Sequence[str], x: Shape) -> list[Shape]:
    """Products of several roles, looks at one piece of memory where they are stored fused."""
    if together in weights:
        y = column(tape, weights, together, x)
        return [y.view(y.rows, y.shape[1])] * len(roles)  # how wide each is, is for the caller to say
    outputs = [column(tape, weights, role, x) for role in roles]
    return outputs


def gated(gate: Shape, up: Shape) -> Shape:
    """silu(gate) * up."""
    return made(gate, gate.like(), up)


def swiglu(tape: Tape, weights: Weights, prefix: str, x: Shape) -> Shape:
    """As runtime/blocks/ffn.py."""
    gate, up = fused(tape, weights, f"{prefix}.gate_up", (f"{prefix}.gate", f"{prefix}.up"), x)
    if f"{prefix}.gate_up" in weights:
        gate, up = (part.view(part.rows, part.shape[1] // 2) for part in (gate, up))
    return row(tape, weights, f"{prefix}.down", gated(gate, up))
