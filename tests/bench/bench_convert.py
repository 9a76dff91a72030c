"""Time and peak memory of convert and check on a DeepSeek-shaped checkpoint, against raw direct I/O of the same bytes.

    python -m tests.bench.bench_convert [--gigabytes 4] [--rounds 3] [--tp 8 --ep 8] [--plain] [--folder FOLDER]

All are timed in turn, in one run, from files that were dropped from the page cache, fsync included.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.bench import ways

HIDDEN, EXPERTS, EXPERT_FFN, HEADS, VOCAB, BLOCK = 2048, 64, 1024, 16, 32768, 128
Q_LORA, KV_LORA, NOPE, ROPE, V_DIM, FFN = 768, 512, 128, 64, 128, 6144
PART = 1 << 30
"""Bytes of a file of the checkpoint."""
STEP = 8 << 20
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def config(layers: int) -> dict[str, object]:
    """config.json of a small DeepSeek-V3 in FP8."""
    return {
        "model_type": "deepseek_v3", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": Q_LORA, "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V_DIM, "intermediate_size": FFN,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 8, "moe_intermediate_size": EXPERT_FFN,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    }  # fmt: skip


def tensors(layers: int) -> Shapes:
    """Names, types and shapes, in order."""
    found: Shapes = {"model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN))}

    def matrix(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
        found[f"{name}.weight_scale_inv"] = ("F32", (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)))

    def mlp(prefix: str, width: int) -> None:
        matrix(f"{prefix}gate_proj", width, HIDDEN)
        matrix(f"{prefix}up_proj", width, HIDDEN)
        matrix(f"{prefix}down_proj", HIDDEN, width)

    for layer in range(layers):
        start = f"model.layers.{layer}."
        for norm, size in (
            ("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_a_layernorm", Q_LORA), ("self_attn.kv_a_layernorm", KV_LORA),
        ):  # fmt: skip
            found[f"{start}{norm}.weight"] = ("BF16", (size,))
        attention = f"{start}self_attn."
        matrix(f"{attention}q_a_proj", Q_LORA, HIDDEN)
        matrix(f"{attention}q_b_proj", HEADS * (NOPE + ROPE), Q_LORA)
        matrix(f"{attention}kv_a_proj_with_mqa", KV_LORA + ROPE, HIDDEN)
        matrix(f"{attention}kv_b_proj", HEADS * (NOPE + V_DIM), KV_LORA)
        matrix(f"{attention}o_proj", HIDDEN, HEADS * V_DIM)
        if layer == 0:
            mlp(f"{start}mlp.", FFN)
            continue
        found[f"{start}mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
        found[f"{start}mlp.gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
        for expert in range(EXPERTS):
            mlp(f"{start}mlp.experts.{expert}.", EXPERT_FFN)
        mlp(f"{start}mlp.shared_experts.", EXPERT_FFN)
    found["model.norm.weight"] = ("BF16", (HIDDEN,))
    found["lm_head.weight"] = ("BF16", (VOCAB, HIDDEN))
    return found


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * {"BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]


def parts(found: Shapes) -> Iterator[Shapes]:
    """The tensors of each file."""
    part: Shapes = {}
    size = 0
    for name, (dtype, shape) in found.items():
        if part and size + size_of(dtype, shape) > PART:
            yield part
            part, size = {}, 0
        part[name] = dtype, shape
        size += size_of(dtype, shape)
    yield part


def make(folder: Path, gigabytes: float) -> None:
    """Write a checkpoint of about that size, of seeded random bytes."""
    one, two = (sum(size_of(*kind) for kind in tensors(layers).values()) for layers in (1, 2))
    layers = 1 + max(1, round((gigabytes * 1e9 - one) / (two - one)))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(layers), indent=1))
    weight_map: dict[str, str] = {}
    random = np.random.default_rng(0)
    listed = list(parts(tensors(layers)))
    for number, part in enumerate(listed, 1):
        name = f"model-{number:05}-of-{len(listed):05}.safetensors"
        weight_map |= dict.fromkeys(part, name)
        entries, end = {}, 0
        for tensor, (dtype, shape) in part.items():
            entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size_of(dtype, shape)]}
            end += size_of(dtype, shape)
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for start in range(0, end, STEP):
                file.write(random.bytes(min(STEP, end - start)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def child(source: Path, out: Path, tp: int, ep: int, workers: int) -> None:
    """Convert in this process and print its result and peak memory."""
    from converter.convert import convert
    from shard_plans.checkpoints.checkpoint import open_checkpoint
    from shard_plans.documents.plan import Plan, PlanSource
    from shard_plans.families.binding import bind
    from shard_plans.families.family import load_family
    from shard_plans.placement.experts import ExpertPlacement, contiguous
    from shard_plans.placement.grid import make_grid
    from shard_plans.placement.place import place

    checkpoint = open_checkpoint(source)
    binding = bind(checkpoint, load_family(checkpoint.config))
    whose = PlanSource(binding.family.name, checkpoint.fingerprint, len(checkpoint), checkpoint.total_bytes)
    stages = ((0, len(binding.model.layers)),)
    plan = Plan(whose, make_grid(tp=tp, ep=ep), stages, ExpertPlacement(contiguous(EXPERTS, ep)))
    result = convert(checkpoint, binding, plan, place(binding, plan), out, workers)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": result.seconds, "peak": int(peak.split()[1]) * 1024}))


def measured(source: Path, out: Path, options: argparse.Namespace) -> dict[str, float]:
    """One conversion in a process of its own."""
    sizes = ["--tp", str(options.tp), "--ep", str(options.ep), "--workers", str(options.workers)]
    command = [sys.executable, "-m", "tests.bench.bench_convert", *sizes, "--child", str(source), str(out)]
    done: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return done


def one_round(source: Path, folder: Path, options: argparse.Namespace, last: bool) -> dict[str, float]:
    """Seconds of each way, one after the other, from files that are on the disk alone."""
    from converter.check import check

    found: dict[str, float] = {}
    ways.evict(source)
    found["raw direct copy"] = ways.raw_copy(source, folder / "copy", 2)
    shutil.rmtree(folder / "copy")
    ways.evict(source)
    found["plain file copy"] = ways.plain_copy(source, folder / "copy")
    shutil.rmtree(folder / "copy")
    ways.evict(source)
    found |= {f"convert {key}": value for key, value in measured(source, folder / "out", options).items()}
    ways.evict(folder / "out")
    found["raw direct read"] = ways.raw_read(folder / "out", 2)
    ways.evict(folder / "out")
    started = time.monotonic()
    if not check(folder / "out", workers=options.workers).passed:
        raise SystemExit("the output doesn't pass its check")
    found["check"] = time.monotonic() - started
    if last and options.plain:
        ways.evict(source)
        found["load all, then save_file"] = ways.load_all_then_save(source, folder / "out", folder / "plain")
        shutil.rmtree(folder / "plain")
    shutil.rmtree(folder / "out")
    return found


def main() -> None:
    """Make the checkpoint, measure all ways in turn, print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to make the files; default: a temporary folder")
    parser.add_argument("--plain", action="store_true", help="also load everything and save_file, in the last round")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        source, out = options.child
        child(source, out, options.tp, options.ep, options.workers)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        source = folder / "checkpoint"
        make(source, options.gigabytes)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        rounds = []
        for number in range(options.rounds):
            rounds.append(one_round(source, folder, options, number == options.rounds - 1))
            print(f"round {number}: {rounds[-1]}", file=sys.stderr)
        middle = {way: statistics.median(found[way] for found in rounds if way in found) for way in rounds[-1]}
        print(f"{size / 1e9:.2f} GB, tp {options.tp}, ep {options.ep}, {options.workers} workers")
        seconds = {way.removesuffix(" seconds"): took for way, took in middle.items() if not way.endswith("peak")}
        for way, took in seconds.items():
            print(f"{way:26} {took:6.2f} s  {size / took / 1e9:5.2f} GB/s")
        print(f"convert at {seconds['raw direct copy'] / seconds['convert']:.2f} of a raw direct copy, "
              f"peak {max(found['convert peak'] for found in rounds) / 2**20:.0f} MiB; "
              f"check at {seconds['raw direct read'] / seconds['check']:.2f} of a raw read")  # fmt: skip
        if options.plain:
            print(
                f"{seconds['load all, then save_file'] / seconds['convert']:.1f} times as fast as load all, save_file"
            )


if __name__ == "__main__":
    main()
