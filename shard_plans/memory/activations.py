"""What a forward pass holds at its peak beside weights and cache: one step of prefill, or of decoding."""

from __future__ import annotations

from shard_plans.families.model import Layer, Model, experts_a_token
from shard_plans.memory.caches import size
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid

COMPUTE = 2
"""Bytes of an activation: bf16."""
SKEW = 2
"""How many times its fair share of tokens the busiest expert slot gets."""


def activations(layer: Layer, model: Model, grid: Grid, workload: Workload) -> int:
    """Bytes that a layer's forward pass holds at its peak, for one step of prefill.

    The residual stream and its norm, tokens x 2 hidden (more where the stream carries a bank of earlier sums), and the
    larger of attention and feed-forward. Attention scores aren't stored (flash attention).
    """
    tokens = step_tokens(grid, workload)
    held = tokens * (stream(model, layer.index) + 1) * model.sizes["hidden"]
    return COMPUTE * (
        held + max(tokens * attention_width(layer, model, grid), feed_forward(layer, model, grid, workload))
    )


def attention_width(layer: Layer, model: Model, grid: Grid) -> int:
    """Numbers a token that attention holds: q, k, v and the output; for MLA the latents, q, the expanded k and v, the
    output; for KDA q, k and v before and after their convolutions, decay, gate and output; for GDN the same without
    decay; for compressed attention the low-rank query, q, the one key and value, the output.
    """
    tp, sizes, kind = grid.tp, model.sizes, layer.words["attn"]
    if kind == "kda":
        return 9 * -(-size(model, "kda_heads") // tp) * size(model, "kda_dim")
    if kind == "gdn":
        keys = size(model, "key_heads")
        keys = keys // tp if keys % tp == 0 else keys
        values = keys * size(model, "per_key") * size(model, "dv")
        return 2 * (2 * keys * size(model, "dk") + values) + 2 * values
    if kind == "compressed":
        heads = size(model, "groups") * size(model, "group_heads")
        return sizes.get("q_lora", 0) + sizes["head_dim"] * (2 * -(-heads // tp) + 1)
    heads = -(-size(model, "heads") // tp)
    if kind == "mla":
        expanded = heads * (2 * (size(model, "nope") + size(model, "rope")) + 2 * size(model, "v_dim"))
        return sizes.get("q_lora", 0) + size(model, "kv_lora") + size(model, "rope") + expanded
    gates = 1 if layer.words.get("output_gate") else 0
    return ((2 + gates) * heads + 2 * -(-size(model, "kv_heads") // tp)) * size(model, "head_dim")


def feed_forward(layer: Layer, model: Model, grid: Grid, workload: Workload) -> int:
    """Numbers that the feed-forward part holds: gate, up and their product, tokens x 3 ffn / tp; for experts (rows that
    arrive) x (2 rows + 3 expert_ffn / etp), and the shared expert beside them.
    """
    tokens, sizes = step_tokens(grid, workload), model.sizes
    if layer.words["ffn"] != "moe":
        return tokens * -(-3 * size(model, "ffn") // grid.tp)
    width = 2 * expert_row(model) + -(-3 * size(model, "expert_ffn") // grid.etp)
    return arriving_rows(model, grid, workload) * width + tokens * -(-3 * sizes.get("shared_ffn", 0) // grid.tp)


def stream(model: Model, layer: int) -> int:
    """Hidden vectors a token before a layer: one, with AttnRes the bank of ceil(layer / res_block) sums beside it, with
    hyper-connections as many as there are streams.
    """
    if "streams" in model.words:
        return int(model.words["streams"])
    return 1 + (-(-layer // int(model.words["res_block"])) if "res_block" in model.words else 0)


def expert_row(model: Model) -> int:
    """Numbers that a token sends to an expert: the hidden size, or the latent one that experts work in."""
    return model.sizes.get("latent", model.sizes["hidden"])


def logits(model: Model, grid: Grid, workload: Workload) -> int:
    """Bytes of the last stage's fp32 logits: one row a sequence, the rank's part and the gathered whole."""
    part = -(-model.sizes["vocab"] // grid.tp)
    return 4 * -(-workload.concurrency // grid.dp) * (part + (model.sizes["vocab"] if grid.tp > 1 else 0))


def step_tokens(grid: Grid, workload: Workload) -> int:
    """Tokens that a replica runs in one step: the prefill chunk or all there are; at least one a sequence."""
    sequences = -(-workload.concurrency // grid.dp)
    return max(sequences, min(workload.prefill_chunk, workload.context * sequences))


def arriving_rows(model: Model, grid: Grid, workload: Workload) -> int:
    """Token rows that the busiest expert slot computes in a step: SKEW times the mean, at most all of its replica's."""
    rows = grid.dp * step_tokens(grid, workload) * experts_a_token(model)
    replica = -(-rows // grid.edp)
    return min(replica, SKEW * -(-replica // grid.ep))
