"""The memory ledger: what each rank needs, in bytes.

Weights are exact. The rest are estimates by the formulas below, for serving in bf16 with the layout of this plan.
Engines differ (public start-up logs of one deployment differ by over 1 GiB between two boots), so leave a margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shard_plans.documents.plan import Plan, Workload
from shard_plans.documents.plan_schema import KV_DTYPES
from shard_plans.errors import FamilyError
from shard_plans.families.binding import Binding
from shard_plans.families.model import Layer, Model
from shard_plans.memory.ledger import LedgerRow
from shard_plans.memory.payload import Payload, rank_weights
from shard_plans.placement.grid import Grid

MIB = 1 << 20
RUNTIME = 1536 * MIB
"""Driver context, kernels, captured graphs and what the allocator loses. Start-up logs of vLLM show 0.02 to 4.03 GiB
outside its tensors; 1.79 GiB for an 8B model on one card."""
COMMUNICATOR = 256 * MIB
"""A collective library's channels for one group of more than one rank (with RUNTIME near the 2.53 GiB that vLLM shows
for DeepSeek-R1 at tp 8, pp 2)."""
CUSTOM_ALL_REDUCE = 8 * MIB
"""Default buffer of vLLM's own all-reduce."""
COMPUTE = 2
"""Bytes of an activation: bf16."""
SKEW = 2
"""How many times its fair share of tokens the busiest expert slot gets."""


@dataclass(frozen=True, slots=True)
class Need:
    """What every rank of a stage needs beside its weights, in bytes."""

    kv_cache: int
    activations: int
    communication: int
    runtime: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.kv_cache + self.activations + self.communication + self.runtime


def kv_cache(layer: Layer, model: Model, grid: Grid, workload: Workload) -> int:
    """Bytes that a rank caches for one layer.

    Grouped-query attention keeps max(1, kv_heads / tp) heads of keys and values: heads fewer than tp are repeated.
    Latent attention (MLA) keeps kv_lora + rope numbers a token, whole on every tp rank. A replica serves
    ceil(concurrency / dp) sequences of `context` tokens; a layer with a window keeps at most
    window - 1 + prefill_chunk of each. Kimi delta attention (KDA) keeps no tokens but a state a sequence: the last
    taps - 1 inputs of its three convolutions in bf16, and heads / tp matrices of dim x dim in fp32.
    Sources: vLLM's AttentionSpec, MLAAttentionSpec, SlidingWindowSpec and kda_state_shape.
    """
    sizes, words = model.sizes, layer.words
    sequences = -(-workload.concurrency // grid.dp)
    if words["attn"] == "kda":
        heads, dim = -(-_size(model, "kda_heads") // grid.tp), _size(model, "kda_dim")
        return sequences * heads * dim * (3 * (_size(model, "taps") - 1) * COMPUTE + 4 * dim)
    if words["attn"] == "gqa":
        width = 2 * -(-_size(model, "kv_heads") // grid.tp) * sizes["head_dim"]
    elif words["attn"] == "mla":
        width = _size(model, "kv_lora") + sizes["rope"]
    else:
        raise FamilyError(f"family {model.family}: the memory of attention {words['attn']!r} isn't known")
    tokens = workload.context
    if words.get("window"):
        tokens = min(tokens, int(words["window"]) - 1 + workload.prefill_chunk)
    return width * tokens * sequences * KV_DTYPES[workload.kv_dtype]


def activations(layer: Layer, model: Model, grid: Grid, workload: Workload) -> int:
    """Bytes that a layer's forward pass holds at its peak, for one step of prefill.

    The residual stream and its norm, tokens x 2 hidden (more where the stream carries a bank of earlier sums), and the
    larger of attention: q, k, v and the output; for MLA the latents, q, the expanded k and v, the output; for KDA q, k
    and v before and after their convolutions, decay, gate and output;
    feed-forward: gate, up and their product, tokens x 3 ffn / tp; for experts (rows that arrive) x (2 hidden +
    3 expert_ffn / etp), and the shared expert beside them. Attention scores aren't stored (flash attention).
    """
    tokens, sizes, tp = step_tokens(grid, workload), model.sizes, grid.tp
    heads = -(-_size(model, "heads") // tp)
    row = expert_row(model)
    if layer.words["attn"] == "gqa":
        attention = (2 * heads + 2 * -(-sizes["kv_heads"] // tp)) * sizes["head_dim"]
    elif layer.words["attn"] == "kda":
        attention = 9 * -(-sizes["kda_heads"] // tp) * sizes["kda_dim"]
    else:
        expanded = heads * (2 * (sizes["nope"] + sizes["rope"]) + 2 * sizes["v_dim"])
        attention = sizes["q_lora"] + sizes["kv_lora"] + sizes["rope"] + expanded
    if layer.words["ffn"] == "moe":
        width = 2 * row + -(-3 * sizes["expert_ffn"] // grid.etp)
        forward = arriving_rows(model, grid, workload) * width
        forward += tokens * -(-3 * sizes.get("shared_ffn", 0) // tp)
    else:
        forward = tokens * -(-3 * sizes["ffn"] // tp)
    return COMPUTE * (tokens * (stream(model, layer.index) + 1) * sizes["hidden"] + max(tokens * attention, forward))


def stream(model: Model, layer: int) -> int:
    """Hidden vectors a token before a layer: one, and with AttnRes the bank of ceil(layer / res_block) sums."""
    return 1 + (-(-layer // int(model.words["res_block"])) if "res_block" in model.words else 0)


def expert_row(model: Model) -> int:
    """Numbers that a token sends to an expert: the hidden size, or the latent one that experts work in."""
    return model.sizes.get("latent", model.sizes["hidden"])


def logits(model: Model, grid: Grid, workload: Workload) -> int:
    """Bytes of the last stage's fp32 logits: one row a sequence, the rank's part and the gathered whole."""
    part = -(-model.sizes["vocab"] // grid.tp)
    return 4 * -(-workload.concurrency // grid.dp) * (part + (model.sizes["vocab"] if grid.tp > 1 else 0))


def communication(model: Model, grid: Grid, workload: Workload) -> int:
    """Bytes of collective libraries and of buffers in flight.

    COMMUNICATOR for each kind of group with more than one rank; tp: an all-reduce's tokens x hidden and the fixed
    buffer; pp: the stream that is sent and the one received; experts: rows sent and rows that arrive, both ways.
    """
    tokens, row = step_tokens(grid, workload), COMPUTE * model.sizes["hidden"]
    experts = bool(model.sizes.get("experts"))
    groups = [grid.world, grid.tp, grid.pp] + ([grid.ep, grid.etp] if experts else [])
    need = COMMUNICATOR * sum(1 for size in groups if size > 1)
    if grid.tp > 1:
        need += tokens * row + CUSTOM_ALL_REDUCE
    if grid.pp > 1:
        need += 2 * tokens * row * stream(model, len(model.forward_layers))
    if experts and grid.ep * grid.etp > 1:
        sent = -(-tokens // grid.tp) * model.sizes["topk"]
        need += 2 * COMPUTE * expert_row(model) * (sent + arriving_rows(model, grid, workload))
    return need


def step_tokens(grid: Grid, workload: Workload) -> int:
    """Tokens that a replica runs in one step: the prefill chunk, or all there are."""
    return min(workload.prefill_chunk, workload.context * -(-workload.concurrency // grid.dp))


def arriving_rows(model: Model, grid: Grid, workload: Workload) -> int:
    """Token rows that the busiest expert slot computes in a step: SKEW times the mean, at most all of its replica's."""
    rows = grid.dp * step_tokens(grid, workload) * model.sizes["topk"]
    replica = -(-rows // grid.edp)
    return min(replica, SKEW * -(-replica // grid.ep))


def stage_need(model: Model, grid: Grid, workload: Workload, stage: int, layers: tuple[int, int]) -> Need:
    """What a stage's ranks need beside weights. Multi-token-prediction layers are stored but not run: no cache."""
    run = [layer for layer in model.layers[layers[0] : layers[1]] if not layer.mtp]
    kinds: dict[object, list[Layer]] = {}
    for layer in run:
        kinds.setdefault(tuple(sorted(_words(layer).items())), []).append(layer)
    peak = max((activations(alike[-1], model, grid, workload) for alike in kinds.values()), default=0)
    return Need(
        sum(len(alike) * kv_cache(alike[0], model, grid, workload) for alike in kinds.values()),
        peak + (logits(model, grid, workload) if stage == grid.pp - 1 else 0),
        communication(model, grid, workload),
        RUNTIME,
    )


def _words(layer: Layer) -> Mapping[str, str]:
    return {word: str(layer.words.get(word)) for word in ("attn", "ffn", "window")}


def _size(model: Model, name: str) -> int:
    if name not in model.sizes:
        raise FamilyError(f"family {model.family}: the size {name} is needed to count memory, and the table has none")
    return model.sizes[name]


def ledger(payload: Payload, plan: Plan) -> tuple[LedgerRow, ...]:
    """One row a rank; the capacity is that of the plan's card (0 without a cluster)."""
    model, grid = payload.binding.model, plan.grid
    capacity = plan.cluster.card.memory if plan.cluster is not None else 0
    needs = [stage_need(model, grid, plan.workload, stage, layers) for stage, layers in enumerate(plan.stages)]
    rows = []
    for rank, weights in enumerate(rank_weights(payload, plan)):
        stage = rank // grid.stage_ranks
        need = needs[stage]
        rows.append(
            LedgerRow(
                rank, stage, weights, need.kv_cache, need.activations, need.communication, need.runtime,
                weights + need.total, capacity,
            )
        )  # fmt: skip
    return tuple(rows)


def with_ledger(plan: Plan, binding: Binding) -> Plan:
    """The plan with its ledger computed."""
    return replace(plan, ledger=ledger(Payload(binding, plan.strict_blocks), plan))
