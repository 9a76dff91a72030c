"""Ranks of vLLM on a CPU: what a loader of it makes of a folder, compared with its ordinary loading.

Each line of the standard input is one JSON list of `Job`s, one for each rank; the line that answers it has, for each
rank and each pair of folders, how many entries state_dict() has, which differ in a bit, and what the loader said. Run
by engine.py with an interpreter that has vLLM, which finds the plugin by its entry point; nothing else of reshard is
imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_TARGET_DEVICE="cpu")

import torch
from torch import Tensor

PATIENCE = 1800
"""Seconds after which ranks that say nothing have failed."""


@dataclass(frozen=True)
class Job:
    """What one rank does."""

    folders: list[tuple[str, str]]
    """Pairs of a checkpoint, which is loaded as usual, and a folder that is loaded otherwise; a model with experts
    first, if any has them: the engine makes its groups once."""
    load_format: str
    """How the folder is loaded; `save`: it is written, by the engine's own saver, before kernels repack anything."""
    rank: int
    """Of all ranks, replicas slowest, then stages."""
    port: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    text: bool = False
    """Without the vision tower of a class that has one."""
    shards: str | None = None
    """The plugin's option of that name."""
    partition: str | None = None
    """Layers of each stage; None: as the engine chooses."""


def on_cpu() -> None:
    """Let vLLM believe that it runs on a CPU, whichever build it is."""
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = platforms.current_platform = CpuPlatform()


def without_kernels() -> None:
    """Let vLLM make parameters for kernels that it doesn't have here, and that nothing calls."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16,
    )

    torch.cpu._is_amx_tile_supported = lambda: True
    ops._supports_cpu_fp8_w8a16 = True
    compressed_tensors_moe_wna16.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.TRITON, None)


def configuration(job: Job, path: str, load_format: str, **extra: Any) -> Any:
    """The engine's configuration for a folder."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=path, skip_tokenizer_init=True, load_format=load_format, dtype="bfloat16", enforce_eager=True,
        max_model_len=64, tensor_parallel_size=job.tp, pipeline_parallel_size=job.pp, enable_expert_parallel=job.ep,
        data_parallel_size=job.dp, distributed_executor_backend="mp" if job.tp * job.pp > 1 else None,
        model_loader_extra_config=extra, language_model_only=job.text,
    )  # fmt: skip
    found = arguments.create_engine_config()
    parallel = found.parallel_config
    parallel.data_parallel_rank, parallel.rank = divmod(job.rank, job.tp * job.pp)
    parallel._data_parallel_master_port_list, parallel.data_parallel_master_port = [], job.port  # all must agree
    return found


def build(config: Any) -> Any:
    """The engine's model as it is constructed, before any weight is loaded."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16):
        return initialize_model(vllm_config=config, model_config=config.model_config)


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def ordinary(job: Job, source: str) -> tuple[Any, Any]:
    """The engine's configuration for a checkpoint, and its model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    usual = configuration(job, source, "auto")
    with set_current_vllm_config(usual):
        if not torch.distributed.is_initialized():
            rank = usual.parallel_config.rank
            init_distributed_environment(job.tp * job.pp, rank, f"tcp://127.0.0.1:{job.port}", rank, "gloo")
            initialize_model_parallel(job.tp, job.pp)
        return usual, build(usual)


def save(job: Job, source: str, out: str) -> dict[str, Any]:
    """Let the engine's saver write what it loads of a checkpoint, in several parts."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    usual, model = ordinary(job, source)
    with set_current_vllm_config(usual):
        get_model_loader(usual.load_config).load_weights(model, usual.model_config)
        ShardedStateLoader.save_model(model, out, max_size=20_000)
    return {"saved": len(model.state_dict())}


def compare(job: Job, source: str, out: str) -> dict[str, Any]:
    """Load both ways and compare."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    usual, wanted = ordinary(job, source)
    other = configuration(job, out, job.load_format, **({"shards": job.shards} if job.shards else {}))
    with set_current_vllm_config(other):
        model = build(other)
    if job.load_format == "reshard":  # what neither writes must be equal
        for name, tensor in model.named_parameters():
            tensor.data.copy_(wanted.get_parameter(name).data)
    else:
        for tensor in model.state_dict().values():  # memory that isn't written must show
            tensor.detach().reshape(-1).view(torch.uint8).fill_(0x5A)
    with set_current_vllm_config(usual):
        get_model_loader(usual.load_config).load_weights(wanted, usual.model_config)
    with set_current_vllm_config(other):
        try:
            get_model_loader(other.load_config).load_weights(model, other.model_config)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"[:500]}
    first, second = wanted.state_dict(), model.state_dict()
    unequal = [key for key in first if key not in second or not torch.equal(octets(first[key]), octets(second[key]))]
    return {"entries": len(first), "unequal": unequal, "others": sorted(second.keys() - first.keys())}


def work(job: Job) -> list[dict[str, Any]]:
    """One rank's part, in a process of its own."""
    if job.partition is not None:
        os.environ["VLLM_PP_LAYER_PARTITION"] = job.partition
    return [save(job, *pair) if job.load_format == "save" else compare(job, *pair) for pair in job.folders]


def serve() -> None:
    """Answer each line of the standard input; what the engine prints goes elsewhere."""
    from vllm.model_executor.model_loader import get_model_loader  # noqa: F401  long to import: once, before the forks
    from vllm.model_executor.models import deepseek_v2  # noqa: F401
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answer: dict[str, Any]
        jobs = [Job(**fields) for fields in json.loads(line)]
        with multiprocessing.get_context("fork").Pool(len(jobs), maxtasksperchild=1) as ranks:
            try:
                answer = {"ranks": ranks.map_async(work, jobs, chunksize=1).get(PATIENCE)}
            except Exception:
                answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    on_cpu()
    without_kernels()
    serve()
