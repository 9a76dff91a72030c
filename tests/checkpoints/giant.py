"""Full-size checkpoints as sparse files, real in names, shapes, dtypes and lengths.

`python -m tests.checkpoints.giant OUT`. Holes read as zeros. DeepSeek-V3 is 689 GB long and takes some 20 MB of disk,
Kimi K3 is 1.56 TB long and takes 130 MB; never copy one with a tool that fills holes.
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Stored = tuple[str, str, list[int]]
"""Name, dtype, shape."""
WIDTH = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
CONFIGS = Path(__file__).parent / "configs"


def linear(name: str, rows: int, columns: int, block: int | None) -> list[Stored]:
    """A weight, with DeepSeek's block scales beside it where it is quantised."""
    if block is None:
        return [(f"{name}.weight", "BF16", [rows, columns])]
    scales = [math.ceil(rows / block), math.ceil(columns / block)]
    return [(f"{name}.weight", "F8_E4M3", [rows, columns]), (f"{name}.weight_scale_inv", "F32", scales)]


def swiglu(name: str, hidden: int, inner: int, block: int | None) -> list[Stored]:
    """The three weights of a feed-forward."""
    gate_up = linear(f"{name}.gate_proj", inner, hidden, block) + linear(f"{name}.up_proj", inner, hidden, block)
    return gate_up + linear(f"{name}.down_proj", hidden, inner, block)


def vectors(prefix: str, **sizes: int) -> list[Stored]:
    """Unquantised vectors: norms."""
    return [(f"{prefix}.{name}.weight", "BF16", [size]) for name, size in sizes.items()]


def deepseek_layer(c: dict[str, Any], layer: int) -> list[Stored]:
    """One layer of DeepSeek-V3, FP8 in blocks."""
    p, h, heads = f"model.layers.{layer}", c["hidden_size"], c["num_attention_heads"]
    nope, rope, kv, q = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"], c["q_lora_rank"]
    block = c["quantization_config"]["weight_block_size"][0]
    stored = vectors(p, input_layernorm=h, post_attention_layernorm=h)
    stored += vectors(f"{p}.self_attn", q_a_layernorm=q, kv_a_layernorm=kv)
    for name, rows, columns in (
        ("q_a_proj", q, h),
        ("q_b_proj", heads * (nope + rope), q),
        ("kv_a_proj_with_mqa", kv + rope, h),
        ("kv_b_proj", heads * (nope + c["v_head_dim"]), kv),
        ("o_proj", h, heads * c["v_head_dim"]),
    ):
        stored += linear(f"{p}.self_attn.{name}", rows, columns, block)
    if layer < c["first_k_dense_replace"]:
        return stored + swiglu(f"{p}.mlp", h, c["intermediate_size"], block)
    experts, inner = c["n_routed_experts"], c["moe_intermediate_size"]
    stored += [(f"{p}.mlp.gate.weight", "BF16", [experts, h])]
    stored += [(f"{p}.mlp.gate.e_score_correction_bias", "F32", [experts])]
    for expert in range(experts):
        stored += swiglu(f"{p}.mlp.experts.{expert}", h, inner, block)
    return stored + swiglu(f"{p}.mlp.shared_experts", h, inner * c["n_shared_experts"], block)


def deepseek_v3(c: dict[str, Any]) -> Iterator[Stored]:
    """All of DeepSeek-V3, with the multi-token-prediction layer behind the last."""
    h, outside, layers = c["hidden_size"], [c["vocab_size"], c["hidden_size"]], c["num_hidden_layers"]
    yield "model.embed_tokens.weight", "BF16", outside
    for layer in range(layers + c["num_nextn_predict_layers"]):
        yield from deepseek_layer(c, layer)
    yield from [("model.norm.weight", "BF16", [h]), ("lm_head.weight", "BF16", outside)]
    for layer in range(layers, layers + c["num_nextn_predict_layers"]):
        p = f"model.layers.{layer}"
        yield from vectors(p, enorm=h, hnorm=h)
        yield from linear(f"{p}.eh_proj", h, 2 * h, None)
        yield f"{p}.embed_tokens.weight", "BF16", outside
        yield from vectors(f"{p}.shared_head", norm=h)
        yield f"{p}.shared_head.head.weight", "BF16", outside


def qwen3_moe(c: dict[str, Any]) -> Iterator[Stored]:
    """All of Qwen3-235B-A22B, bf16."""
    h, head, outside = c["hidden_size"], c["head_dim"], [c["vocab_size"], c["hidden_size"]]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", "BF16", outside
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        yield from vectors(p, input_layernorm=h, post_attention_layernorm=h)
        yield from vectors(f"{p}.self_attn", q_norm=head, k_norm=head)
        for name, rows, columns in (("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)):
            yield from linear(f"{p}.self_attn.{name}", rows, columns, None)
        yield from linear(f"{p}.mlp.gate", c["num_experts"], h, None)
        for expert in range(c["num_experts"]):
            yield from swiglu(f"{p}.mlp.experts.{expert}", h, c["moe_intermediate_size"], None)
    yield from [("model.norm.weight", "BF16", [h]), ("lm_head.weight", "BF16", outside)]


def kimi_k3(c: dict[str, Any]) -> Iterator[Stored]:
    """All of Kimi K3 by the patterns of its published index (kimi-k3-tensors.tsv); a layer's tensors together."""
    text = c["text_config"]
    with (CONFIGS / "kimi-k3-tensors.tsv").open() as file:
        rows = [(row["pattern"], row["dtype"], [*map(int, row["shape"].split(","))], row["layers"]) for row in
                csv.DictReader(file, delimiter="\t")]  # fmt: skip
    mla = set(text["linear_attn_config"]["full_attn_layers"])
    for layer in range(text["num_hidden_layers"]):
        kinds = {"all", "mla" if layer + 1 in mla else "kda", "moe" if layer else "first"}
        for pattern, dtype, shape, where in rows:
            if where in kinds:
                for expert in range(text["num_experts"] if "{e}" in pattern else 1):
                    yield pattern.replace("{i}", str(layer)).replace("{e}", str(expert)), dtype, shape
    for pattern, dtype, shape, where in rows:
        if where in ("-", "blocks"):
            for block in range(c["vision_config"]["vt_num_hidden_layers"] if where == "blocks" else 1):
                yield pattern.replace("{b}", str(block)), dtype, shape


GIANTS = {
    "deepseek-v3": (deepseek_v3, 4_300_000_000),
    "qwen3-235b": (qwen3_moe, 4_000_000_000),
    "kimi-k3": (kimi_k3, 17_500_000_000),
}
"""Name -> (tensors, bytes a file)."""


def make_giant(name: str, folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Write the giant `name` into `folder`: config.json (changed on the way), sparse files, index."""
    tensors, limit = GIANTS[name]
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    if change is not None:
        change(config)
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[Stored]] = [[]]
    total = size = 0
    for stored in tensors(config):
        length = math.prod(stored[2]) * WIDTH[stored[1]]
        if files[-1] and size + length > limit:
            files.append([])
            size = 0
        files[-1].append(stored)
        size += length
        total += length
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):06}.safetensors"
        write_sparse(path, file)
        weight_map |= {stored[0]: path.name for stored in file}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_sparse(path: Path, tensors: list[Stored]) -> None:
    """A safetensors file whose header is real and whose data are a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        stop = offset + math.prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + offset)


if __name__ == "__main__":
    for giant in GIANTS:
        make_giant(giant, Path(sys.argv[1]) / giant)
