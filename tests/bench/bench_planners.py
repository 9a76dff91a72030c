"""What other planners say of the same models, and how long they take; predicted times beside measured kernels' sums.

python -m tests.bench.bench_planners --peers VENV/bin [--rounds 3]

VENV holds hf-mem (with h2), kvfit, llm-mem-planner and aiconfigurator. The first two ask the hub alone: a stand-in
serves them the full-size sparse checkpoints that the tests make.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.accuracy.planned import rows
from tests.bench.standin_hub import OWNER, standin_hub
from tests.checkpoints.giant import CONFIGS, make_giant

GIB = 1 << 30
CONTEXT, SEQUENCES = 8192, 16
HF_MEM = """import httpx2
get = httpx2.AsyncClient.get
def redirected(self, url, **options):
    return get(self, str(url).replace("https://huggingface.co", "{hub}"), **options)
httpx2.AsyncClient.get = redirected
from hf_mem.cli import main
main()"""
KVFIT = """import sys, kvfit.hf
kvfit.hf.HF_BASE = "{hub}"
from kvfit.cli import main
sys.exit(main())"""
HUB_NAMES = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "qwen3-235b": "Qwen/Qwen3-235B-A22B",
    "kimi-k3": "moonshotai/Kimi-K3",
}
LOGS = {"deepseek-v3": ("gx002", "gx001"), "qwen3-235b": ("gt056",), "kimi-k3": ("gx003",)}
"""Rows of the ground truth with weights of the same shapes on eight cards (DeepSeek-R1 has DeepSeek-V3's)."""
TIMED = [
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", (8, 1, 0), 1, "vllm", "bf16"),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", (8, 1, 0), 16, "vllm", "bf16"),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", (8, 1, 0), 128, "vllm", "bf16"),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", (4, 1, 0), 16, "vllm", "bf16"),
    ("Qwen/Qwen3-32B", "qwen3-32b", (2, 1, 0), 16, "vllm", "bf16"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3", (8, 1, 8), 1, "sglang", "fp8"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3", (8, 1, 8), 16, "sglang", "fp8"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3", (8, 1, 8), 128, "sglang", "fp8"),
    ("Qwen/Qwen3-235B-A22B", "qwen3-235b", (8, 1, 8), 16, "vllm", "bf16"),
    ("Qwen/Qwen3-235B-A22B", "qwen3-235b", (4, 2, 8), 16, "vllm", "bf16"),
    ("Qwen/Qwen3-235B-A22B", "qwen3-235b", (8, 1, 8), 128, "vllm", "bf16"),
    ("Qwen/Qwen3-235B-A22B", "qwen3-235b", (4, 2, 8), 128, "vllm", "bf16"),
    ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-fp8", (8, 1, 8), 128, "vllm", "bf16"),
    ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-fp8", (4, 2, 8), 128, "vllm", "bf16"),
    ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-fp8", (2, 4, 8), 128, "vllm", "bf16"),
    ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-fp8", (1, 8, 8), 128, "vllm", "bf16"),
]
"""Hub's name, our config, (tp, dp, ep), sequences, AIConfigurator's backend, cache type; 2,048 tokens on H200."""


def ran(command: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds of a command, and what it said."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return time.perf_counter() - start, done


def row(name: str, command: list[str], told: Callable[[str], str], rounds: int) -> str:
    """A line of the table: what a planner says, and its median time."""
    seconds, words = [], ""
    for _ in range(rounds):
        took, done = ran(command)
        seconds.append(took)
        if done.returncode not in (0, 1) or not done.stdout.strip():
            words = "refuses: " + (done.stderr.strip().splitlines() or ["no word"])[0][:110]
            break
        words = told(done.stdout)
    return f"| {name} | {words} | {statistics.median(seconds):.2f} |"


def reshard(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "reshard", "plan-memory", *map(str, arguments)]


def ours(text: str) -> str:
    found = json.loads(text)
    fullest = max(found["ranks"], key=lambda rank: rank["total"])
    return (
        f"{fullest['weights'] / GIB:.2f} GiB of weights and {fullest['kv_cache'] / GIB:.2f} of cache a card, "
        f"{fullest['low'] / GIB:.0f} to {fullest['high'] / GIB:.0f} GiB in all"
    )


def hf_mem(text: str) -> str:
    found = json.loads(text)
    return f"{found['memory'] / GIB:.2f} GiB of weights and {(found.get('kv_cache') or 0) / GIB:.2f} of cache in all"


def kvfit(text: str) -> str:
    found = json.loads(text)
    layout = found["concurrency"]["recommended"]["layout"]
    cache = SEQUENCES * layout["kv_per_sequence_per_rank_gib"]
    return f"{layout['weights_per_rank_gib']:.2f} GiB of weights and {cache:.2f} of cache a card"


def llm_mem(text: str) -> str:
    weights = re.search(r"weights_per_rank: ([\d.]+) GiB", text)
    cache = re.search(r"kv_per_rank=([\d.]+) GiB", text)
    return f"{weights[1]} GiB of weights and {cache[1]} of cache a card" if weights and cache else "no figure"


def aiconfigurator(text: str) -> str:
    found = re.search(r"Memory \(GPU\):\s+([\d.]+) GB", text)
    return f"{found[1]} GB in all a card" if found else "no figure"


def logged(name: str) -> str:
    """What an engine's log says, as a line of the table."""
    found = rows()[name]
    words = f"{float(found['weights_gib_per_gpu']):.2f} GiB of weights a card"
    return f"| a log of {found['engine']}, {name} | {words} ({found['model']}, {found['dtype_or_quant']}) | |"


def memory_table(model: str, folder: Path, bin_: Path, hub: str, rounds: int) -> None:
    """One model on eight H200 at tp 8, ep 8: 16 sequences of 8,192 tokens."""
    layout = (
        "--cluster",
        "1x8:h200",
        "--tp",
        8,
        "--ep",
        8,
        "--etp",
        1,
        "--context",
        CONTEXT,
        "--concurrency",
        SEQUENCES,
    )
    shared = ["--max-model-len", str(CONTEXT), "--batch-size", str(SEQUENCES), "--json-output"]
    aic = [str(bin_ / "aiconfigurator"), "cli", "estimate", "--system", "h200_sxm", "--backend", "sglang", "--no-color"]
    aic += ["--estimate-mode", "static", "--isl", str(CONTEXT), "--osl", "2", "--model-path", HUB_NAMES[model]]
    aic += ["--tp-size", "8", "--moe-ep-size", "8", "--moe-tp-size", "1", "--batch-size", str(SEQUENCES)]
    planner = [str(bin_ / "llm-mem-planner"), "--config", str(CONFIGS / f"{model}.json"), "--tp", "8"]
    planner += ["--seq-len", str(CONTEXT), "--batch", str(SEQUENCES), "--kv-dtype", "bf16"]
    if model == "deepseek-v3":
        planner += ["--weight-dtype", "fp8"]
    python = str(bin_ / "python")
    print(f"\n{model}\n\n| planner | says | seconds |\n|---|---|---|")
    print(row("reshard, config alone", reshard(CONFIGS / f"{model}.json", *layout, "--json"), ours, rounds))
    print(row("reshard, headers", reshard(folder / model, *layout, "--json"), ours, rounds))
    at = ["--model-id", f"{OWNER}/{model}", "--experimental", *shared]
    print(row("hf-mem", [python, "-c", HF_MEM.format(hub=hub), *at], hf_mem, rounds))
    at = [f"{OWNER}/{model}", "--hardware", "h200", "--gpus", "8", "--context", str(CONTEXT), "--json"]
    print(row("kvfit", [python, "-c", KVFIT.format(hub=hub), *at], kvfit, rounds))
    print(row("llm-mem-planner", planner, llm_mem, rounds))
    print(row("AIConfigurator", aic, aiconfigurator, rounds))
    for name in LOGS[model]:
        print(logged(name))


def time_table(bin_: Path) -> None:
    """Predicted steps beside AIConfigurator's, which adds up kernels that were measured."""
    print("\n| model | layout | sequences | decode, ms | AIConfigurator | prefill of all, s | AIConfigurator |")
    print("|---|---|---|---|---|---|---|")
    for name, config, (tp, dp, ep), sequences, backend, cache in TIMED:
        moe = ["--moe-ep-size", str(ep), "--moe-tp-size", "1"] if ep else []
        command = [str(bin_ / "aiconfigurator"), "cli", "estimate", "--system", "h200_sxm", "--backend", backend]
        command += [
            "--no-color",
            "--estimate-mode",
            "static",
            "--isl",
            "2048",
            "--osl",
            "2",
            "--model-path",
            name,
            *moe,
        ]
        command += ["--tp-size", str(tp), "--attention-dp-size", str(dp), "--batch-size", str(sequences // dp)]
        said = ran(command)[1].stdout
        theirs = [re.search(rf"{word}:\s+([\d.]+) ms", said) for word in ("TPOT", "TTFT")]
        experts = ["--ep", ep, "--etp", 1] if ep else []
        load = ["--context", 2048, "--concurrency", sequences, "--kv-dtype", cache, "--utilization", 1]
        layout: list[object] = ["--cluster", f"1x{tp * dp}:h200", "--tp", tp, "--dp", dp, *experts, *load, "--json"]
        found: dict[str, Any] = json.loads(ran(reshard(CONFIGS / f"{config}.json", *layout))[1].stdout)
        predicted = found["prediction"]
        if predicted is None or not all(theirs):
            continue
        step, first = (float(match[1]) for match in theirs if match)
        prefill = sequences * 2048 / predicted["prefill_tokens"]
        words = f"tp {tp} dp {dp}" + (f" ep {ep}" if ep else "")
        print(
            f"| {config} | {words} | {sequences} | {predicted['decode_step'] * 1e3:.1f} | {step:.1f} | "
            f"{prefill:.2f} | {first / 1e3:.2f} |"
        )


def speed_table(folder: Path, rounds: int) -> None:
    """The whole search for ever larger clusters."""
    print("\n| Kimi K3 | median, s | of it in use of a core |\n|---|---|---|")
    for cluster, source, words in (
        ("16x8:s5000", CONFIGS / "kimi-k3.json", "128 cards, config alone"),
        ("128x8:s5000", CONFIGS / "kimi-k3.json", "1,024 cards, config alone"),
        ("16x8:s5000", folder / "kimi-k3", "128 cards, headers of the sparse checkpoint"),
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        took = [ran(reshard(source, "--cluster", cluster, "--concurrency", 256, "--json"))[0] for _ in range(rounds)]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / rounds
        print(f"| {words} | {statistics.median(took):.2f} | {used:.2f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the bin folder of an environment with the other planners")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for model in HUB_NAMES:
            make_giant(model, folder / model)
        speed_table(folder, chosen.rounds)
        if chosen.peers is None:
            return
        with standin_hub(folder) as hub:
            for model in HUB_NAMES:
                memory_table(model, folder, chosen.peers, hub, chosen.rounds)
        time_table(chosen.peers)


if __name__ == "__main__":
    main()
