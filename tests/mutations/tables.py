"""Wrong family tables. They fool the ranks and reshard's own reference alike: only another implementation can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.checking.checks import LIMIT
from runtime.opened import open_output
from runtime.request import RunOptions
from runtime.run import verify_and_run
from tests.mutations.models import PLANS, Outputs
from tests.tools.sharded import convert_tiny, expected, relative, run_output

LAYER = "layer"
MOE = "layer ffn=moe"


@dataclass(frozen=True, slots=True)
class Table:
    """One row of a table that is wrong."""

    name: str
    family: str
    """The checkpoint (tests/checkpoints/deep.py)."""
    extends: str
    """The right table."""
    change: Mapping[str, Any]
    """What is laid over it."""
    layer: int
    """The first layer that it spoils."""


@dataclass(frozen=True, slots=True)
class Told:
    """What was said of a wrong table."""

    alone: bool
    """Whether the verification against reshard's own reference passed."""
    layer: int | None
    """The first layer whose output isn't transformers'."""


def try_table(table: Table, outputs: Outputs, folder: Path) -> Told:
    """Convert by the wrong table below an empty folder; verify, and compare every layer with transformers' output."""
    source, out, path = outputs.checkpoint(table.family), folder / "out", folder / "wrong.yaml"
    stated = {"family": "wrong", "match": [table.extends], "extends": table.extends, **table.change}
    path.write_text(yaml.safe_dump(stated, sort_keys=False))
    convert_tiny(source, out, PLANS[table.family][1], path)
    alone = verify_and_run(RunOptions(out, source)).passed
    reference = expected(source)
    hidden = {n: x for watch in run_output(out, reference["input_ids"][0]).watches for n, x in watch.hidden.items()}
    last = len(open_output(out).model.forward_layers) - 1  # transformers norms what comes out of it
    wrong = [
        n for n in sorted(hidden) if n < last and not relative(hidden[n], reference[f"hidden.{n + 1}"][0]) <= LIMIT
    ]
    return Told(alone, wrong[0] if wrong else None)


def blocks(section: str, **words: Any) -> dict[str, Any]:
    """Other words of a section."""
    return {"blocks": {section: words}}


def exchanged(section: str, one: str, other: str, roles: tuple[str, str], shape: str) -> dict[str, Any]:
    """Two stored names, each taken for the other."""
    return {"tensors": {section: {one: f"{roles[1]} {shape}", other: f"{roles[0]} {shape}"}}}


TABLES = (
    Table("gate named up", "qwen3_deep", "qwen3",
          exchanged(LAYER, "mlp.gate_proj.weight", "mlp.up_proj.weight", ("mlp.gate", "mlp.up"),
                    "[tp(ffn), hidden] quant"), 0),
    Table("keys named values", "qwen3_deep", "qwen3",
          exchanged(LAYER, "self_attn.k_proj.weight", "self_attn.v_proj.weight", ("attn.k", "attn.v"),
                    "[tp(kv_heads)*head_dim, hidden] quant"), 0),
    Table("norms exchanged", "qwen3_deep", "qwen3",
          exchanged(LAYER, "input_layernorm.weight", "post_attention_layernorm.weight", ("attn.norm", "ffn.norm"),
                    "[hidden]"), 0),
    Table("RoPE in pairs", "qwen3_deep", "qwen3", blocks(LAYER, rope="interleaved"), 0),
    Table("RoPE on all of a head", "glm4_moe_deep", "glm4_moe", blocks(LAYER, rope_part=1.0), 0),
    Table("factor of the experts left out", "glm4_moe_deep", "glm4_moe", blocks(MOE, scale=None), 1),
    Table("weights don't sum to one", "glm4_moe_deep", "glm4_moe", blocks(MOE, renormalize=False), 1),
    Table("best of a group", "deepseek_v3_deep", "deepseek_v3", blocks(MOE, group_score="max"), 1),
    Table("softmax without yarn's scale", "deepseek_v3_deep", "deepseek_v3", blocks(LAYER, softmax_scale=None), 0),
    Table("RoPE in halves", "deepseek_v3_deep", "deepseek_v3", blocks(LAYER, rope="half"), 0),
    Table("indexer's RoPE in pairs", "deepseek_v32_deep", "deepseek_v32", blocks(LAYER, index_rope="interleaved"), 0),
    Table("halves for pairs", "gpt_oss_deep", "gpt_oss", blocks(LAYER, expert_pairs=None), 0),
    Table("alpha 1", "gpt_oss_deep", "gpt_oss", blocks(LAYER, alpha=1.0), 0),
    Table("window left out", "gpt_oss_deep", "gpt_oss", {"blocks": {"layer window=sliding": None}}, 0),
    Table("norms not centred", "qwen3_next_deep", "qwen3_next", blocks("model", norm="rms"), 0),
    Table("bounded decay", "kimi_linear_deep", "kimi_linear",
          blocks("layer mixer=kda", decay="sigmoid", decay_bound=-5.0), 0),
    Table("queries' convolution named the keys'", "kimi_linear_deep", "kimi_linear",
          exchanged("layer mixer=kda", "self_attn.q_conv1d.weight", "self_attn.k_conv1d.weight",
                    ("kda.q_conv", "kda.k_conv"), "[tp(kda_heads)*kda_dim, 1, taps]"), 0),
)  # fmt: skip
