"""Time and peak memory of `convert` and `check` against a plain copy of the same bytes, in one run: `make bench`.

The checkpoint is a Qwen3-MoE in shape, random in content. Every step ends with its bytes on the disk (fsync); the
page cache is warm for all of them. The copy runs before and after, since a disk's speed wanders.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD, EXPERTS, FFN, VOCABULARY = 2048, 16, 4, 128, 64, 512, 32_000
FILE_BYTES = 1_000_000_000
PLAN = ("--tp", "4", "--pp", "2", "--ep", "4", "--etp", "1")
Named = tuple[str, list[int]]


def config(layers: int) -> dict[str, Any]:
    """config.json."""
    return {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": HIDDEN,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "intermediate_size": 4 * HIDDEN, "num_experts": EXPERTS, "num_experts_per_tok": 4, "vocab_size": VOCABULARY,
        "moe_intermediate_size": FFN, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
        "attention_bias": False, "hidden_act": "silu", "max_position_embeddings": 4096,
    }  # fmt: skip


def tensors(layers: int) -> Iterator[Named]:
    """Names and shapes, all bf16."""
    yield "model.embed_tokens.weight", [VOCABULARY, HIDDEN]
    for layer in range(layers):
        yield from layer_tensors(f"model.layers.{layer}")
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [VOCABULARY, HIDDEN]


def layer_tensors(prefix: str) -> Iterator[Named]:
    """One layer."""
    for name, shape in {
        "input_layernorm": [HIDDEN], "self_attn.q_proj": [HEADS * HEAD, HIDDEN],
        "self_attn.k_proj": [KV_HEADS * HEAD, HIDDEN], "self_attn.v_proj": [KV_HEADS * HEAD, HIDDEN],
        "self_attn.o_proj": [HIDDEN, HEADS * HEAD], "self_attn.q_norm": [HEAD], "self_attn.k_norm": [HEAD],
        "post_attention_layernorm": [HIDDEN], "mlp.gate": [EXPERTS, HIDDEN],
    }.items():  # fmt: skip
        yield f"{prefix}.{name}.weight", shape
    for expert in range(EXPERTS):
        for name, shape in {"gate_proj": [FFN, HIDDEN], "up_proj": [FFN, HIDDEN], "down_proj": [HIDDEN, FFN]}.items():
            yield f"{prefix}.mlp.experts.{expert}.{name}.weight", shape


def size(named: Named) -> int:
    """Bytes."""
    return 2 * int(np.prod(named[1]))


def make(folder: Path, wanted: int) -> int:
    """Write a checkpoint of about `wanted` bytes; returns its payload bytes."""
    outside = sum(size(named) for named in tensors(0))
    layers = max(2, round((wanted - outside) / sum(size(named) for named in layer_tensors(""))))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(layers)))
    files: list[list[Named]] = [[]]
    for named in tensors(layers):
        if sum(map(size, files[-1])) + size(named) > FILE_BYTES:
            files.append([])
        files[-1].append(named)
    weight_map: dict[str, str] = {}
    random = np.random.default_rng(0)
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= {named[0]: name for named in file}
        header, offset = {}, 0
        for tensor, shape in file:
            stop = offset + size((tensor, shape))
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, offset, 1 << 24):
                out.write(random.bytes(min(1 << 24, offset - start)))
            out.flush()
            os.fsync(out.fileno())
    total = sum(size(named) for named in tensors(layers))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def copy(source: Path, target: Path) -> None:
    """A plain copy of every file, on the disk when it returns."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())


def reshard(*arguments: str | Path) -> tuple[float, int]:
    """Run the command in a process of its own; seconds from start to end, and its peak resident memory in bytes."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "reshard", *map(str, arguments)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"reshard {arguments[0]} ended with exit code {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def timed(step: Callable[[], None]) -> float:
    """Seconds."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Make, copy, convert, check, copy again, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder unless given")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="reshard-bench-") as name:
        work = Path(name)
        total = make(work / "checkpoint", int(given.gigabytes * 1e9))
        rows: list[tuple[str, float, int | None]] = []
        rows.append(("copy, before", timed(lambda: copy(work / "checkpoint", work / "copy")), None))
        shutil.rmtree(work / "copy")
        rows.append(("convert " + " ".join(PLAN), *reshard("convert", work / "checkpoint", work / "out", *PLAN)))
        rows.append(("check", *reshard("check", work / "out")))
        rows.append(("check --deep", *reshard("check", work / "out", "--deep", work / "checkpoint")))
        rows.append(("copy, after", timed(lambda: copy(work / "checkpoint", work / "copy")), None))
    print(f"{total} bytes, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n")
    print("| step | seconds | GB/s | peak resident MiB |\n|---|---|---|---|")
    for what, seconds, peak in rows:
        memory = f"{peak / 2**20:.0f}" if peak is not None else ""
        print(f"| {what} | {seconds:.2f} | {total / seconds / 1e9:.2f} | {memory} |")


if __name__ == "__main__":
    main()
