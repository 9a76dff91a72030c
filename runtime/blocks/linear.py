"""Products with a stored matrix: column-parallel (its rows are dealt to ranks) and row-parallel (its columns are)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.weights import LayerWeights, dense, optional, take
from shard_plans.errors import RuntimeFault


def column_linear(ctx: RankContext, weights: LayerWeights, role: str, x: Tensor) -> Tensor:
    """The product of x [T, in] and this rank's rows of `role`, plus its bias if there is one: [T, local out]."""
    matrix = dense(take(weights, role), ctx.compute)
    check_inner(role, matrix, x)
    bias = optional(weights, f"{role}.bias")
    return ctx.pulse.saw(role, functional.linear(x, matrix, None if bias is None else dense(bias, ctx.compute)))


def row_linear(ctx: RankContext, weights: LayerWeights, role: str, x: Tensor) -> Tensor:
    """The product of x [T, local in] and this rank's columns of `role`, summed over tp, then its bias: [T, out]."""
    matrix = dense(take(weights, role), ctx.compute)
    check_inner(role, matrix, x)
    y = ctx.pulse.saw(role, functional.linear(x, matrix))
    del matrix  # while this rank waits for the others' parts, theirs are in memory
    y = ctx.reduce_tp(y)
    bias = optional(weights, f"{role}.bias")
    return y if bias is None else y + dense(bias, ctx.compute)


def fused_linear(
    ctx: RankContext, weights: LayerWeights, fused: str, roles: Sequence[str], rows: Sequence[int], x: Tensor
) -> list[Tensor]:
    """Column-parallel products of several roles, whether stored fused (rows one after the other) or apart.

    `rows` are the local rows of each role: the outputs are [T, rows[i]].
    """
    if fused in weights:
        y = column_linear(ctx, weights, fused, x)
        if y.shape[-1] != sum(rows):
            raise RuntimeFault(f"{fused} has {y.shape[-1]} rows on this rank, expected {' + '.join(map(str, rows))}")
        return list(torch.split(y, list(rows), dim=-1))
    outputs = [column_linear(ctx, weights, role, x) for role in roles]
    for role, y, count in zip(roles, outputs, rows, strict=True):
        if y.shape[-1] != count:
            raise RuntimeFault(f"{role} has {y.shape[-1]} rows on this rank, expected {count}")
    return outputs


def output_gate(ctx: RankContext, weights: LayerWeights, role: str, x: Tensor, y: Tensor) -> Tensor:
    """Attention's output y [T, local out] times the sigmoid of x [T, in] times `role`, in the compute dtype."""
    gate = column_linear(ctx, weights, role, x).to(ctx.accumulate())
    expect_shape(f"{role} times x", gate, y.shape)
    return (y * gate.sigmoid()).to(ctx.compute)


def expect_shape(role: str, x: Tensor, shape: Sequence[int]) -> None:
    """Raise RuntimeFault unless x has this shape."""
    if tuple(x.shape) != tuple(shape):
        raise RuntimeFault(f"{role} is {list(x.shape)} on this rank, expected {list(shape)}")


def check_inner(role: str, matrix: Tensor, x: Tensor) -> None:
    """Raise RuntimeFault unless the matrix has as many columns as `x`."""
    if matrix.dim() != 2 or matrix.shape[-1] != x.shape[-1]:
        raise RuntimeFault(f"{role} is {list(matrix.shape)} on this rank, its input has width {x.shape[-1]}")
