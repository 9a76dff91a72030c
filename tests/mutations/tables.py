"""Wrong family tables. They fool the ranks and reshard's own reference alike: only another implementation can tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.request import RunOptions
from runtime.run import verify_and_run
from tests.mutations.models import PLANS, Outputs
from tests.tools.sharded import checks, convert_tiny, failed

LAYER, MOE = "layer", "layer ffn=moe"
ALL, SPARSE, SLIDING, KDA = range(6), range(1, 6), (0, 2, 4), (0, 1, 3, 4)
"""Layers of the models, by what they have."""


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
    layers: Collection[int]
    """Those that it spoils."""


@dataclass(frozen=True, slots=True)
class Told:
    """What was said of a wrong table."""

    failed: frozenset[str]
    """Checks that failed."""
    where: str
    """Where the reference parts from transformers."""


def try_table(table: Table, outputs: Outputs, folder: Path) -> Told:
    """Convert by the wrong table below an empty folder, and verify with `--reference transformers` too."""
    source, out, path = outputs.checkpoint(table.family), folder / "out", folder / "wrong.yaml"
    stated = {"family": "wrong", "match": [table.extends], "extends": table.extends, **table.change}
    path.write_text(yaml.safe_dump(stated, sort_keys=False))
    convert_tiny(source, out, PLANS[table.family][1], path)
    ids = str(source / "reference.safetensors")
    result = verify_and_run(RunOptions(out, source, input_ids=ids, transformers=True))
    return Told(frozenset(failed(result)), checks(result)["transformers"].where)


def blocks(section: str, **words: Any) -> dict[str, Any]:
    """Other words of a section."""
    return {"blocks": {section: words}}


def exchanged(section: str, one: str, other: str, roles: tuple[str, str], shape: str) -> dict[str, Any]:
    """Two stored names, each taken for the other."""
    return {"tensors": {section: {one: f"{roles[1]} {shape}", other: f"{roles[0]} {shape}"}}}


TABLES = (
    Table("gate named up", "qwen3_deep", "qwen3",
          exchanged(LAYER, "mlp.gate_proj.weight", "mlp.up_proj.weight", ("mlp.gate", "mlp.up"),
                    "[tp(ffn), hidden] quant"), ALL),
    Table("keys named values", "qwen3_deep", "qwen3",
          exchanged(LAYER, "self_attn.k_proj.weight", "self_attn.v_proj.weight", ("attn.k", "attn.v"),
                    "[tp(kv_heads)*head_dim, hidden] quant"), ALL),
    Table("norms exchanged", "qwen3_deep", "qwen3",
          exchanged(LAYER, "input_layernorm.weight", "post_attention_layernorm.weight", ("attn.norm", "ffn.norm"),
                    "[hidden]"), ALL),
    Table("RoPE in pairs", "qwen3_deep", "qwen3", blocks(LAYER, rope="interleaved"), ALL),
    Table("RoPE on all of a head", "glm4_moe_deep", "glm4_moe", blocks(LAYER, rope_part=1.0), ALL),
    Table("factor of the experts left out", "glm4_moe_deep", "glm4_moe", blocks(MOE, scale=None), SPARSE),
    Table("weights don't sum to one", "glm4_moe_deep", "glm4_moe", blocks(MOE, renormalize=False), SPARSE),
    Table("best of a group", "deepseek_v3_deep", "deepseek_v3", blocks(MOE, group_score="max"), SPARSE),
    Table("softmax without yarn's scale", "deepseek_v3_deep", "deepseek_v3", blocks(LAYER, softmax_scale=None), ALL),
    Table("RoPE in halves", "deepseek_v3_deep", "deepseek_v3", blocks(LAYER, rope="half"), ALL),
    Table("indexer's RoPE in pairs", "deepseek_v32_deep", "deepseek_v32", blocks(LAYER, index_rope="interleaved"), ALL),
    Table("halves for pairs", "gpt_oss_deep", "gpt_oss", blocks(LAYER, expert_pairs=None), ALL),
    Table("alpha 1", "gpt_oss_deep", "gpt_oss", blocks(LAYER, alpha=1.0), ALL),
    Table("window left out", "gpt_oss_deep", "gpt_oss", {"blocks": {"layer window=sliding": None}}, SLIDING),
    Table("norms not centred", "qwen3_next_deep", "qwen3_next", blocks("model", norm="rms"), ALL),
    Table("bounded decay", "kimi_linear_deep", "kimi_linear",
          blocks("layer mixer=kda", decay="sigmoid", decay_bound=-5.0), KDA),
    Table("queries' convolution named the keys'", "kimi_linear_deep", "kimi_linear",
          exchanged("layer mixer=kda", "self_attn.q_conv1d.weight", "self_attn.k_conv1d.weight",
                    ("kda.q_conv", "kda.k_conv"), "[tp(kda_heads)*kda_dim, 1, taps]"), KDA),
)  # fmt: skip
