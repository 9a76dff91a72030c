"""One rank of vLLM on a CPU: what its sharded_state loader makes of a folder, compared with its ordinary loading.

`python vllm_compare.py CHECKPOINT OUT TP PP EP(0|1) RANK PORT` prints one JSON line: how many entries state_dict() has,
which differ in a bit, and what the loader said. Run by test_vllm.py with an interpreter that has vLLM; nothing of
reshard is imported.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_TARGET_DEVICE="cpu")

import torch
from torch import Tensor


def on_cpu() -> None:
    """Let vLLM believe that it runs on a CPU, whichever build it is."""
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = platforms.current_platform = CpuPlatform()


def configuration(path: str, load_format: str, tp: int, pp: int, ep: bool, rank: int) -> Any:
    """The engine's configuration for a folder."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=path, skip_tokenizer_init=True, load_format=load_format, dtype="bfloat16", enforce_eager=True,
        max_model_len=64, tensor_parallel_size=tp, pipeline_parallel_size=pp, enable_expert_parallel=ep,
        distributed_executor_backend="mp" if tp * pp > 1 else None,
    )  # fmt: skip
    found = arguments.create_engine_config()
    found.parallel_config.rank = rank
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


def main(source: str, out: str, tp: int, pp: int, ep: bool, rank: int, port: int) -> dict[str, Any]:
    """Load both ways and compare."""
    on_cpu()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model_loader

    usual = configuration(source, "auto", tp, pp, ep, rank)
    with set_current_vllm_config(usual):
        init_distributed_environment(tp * pp, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(tp, pp)
        wanted = build(usual)
        get_model_loader(usual.load_config).load_weights(wanted, usual.model_config)
    sharded = configuration(out, "sharded_state", tp, pp, ep, rank)
    with set_current_vllm_config(sharded):
        model = build(sharded)
        for tensor in model.state_dict().values():  # memory that isn't written must show
            tensor.detach().reshape(-1).view(torch.uint8).fill_(0x5A)
        try:
            get_model_loader(sharded.load_config).load_weights(model, sharded.model_config)
        except (KeyError, ValueError, RuntimeError) as error:
            return {"refused": f"{type(error).__name__}: {error}"[:500]}
    first, second = wanted.state_dict(), model.state_dict()
    unequal = [key for key in first if key not in second or not torch.equal(octets(first[key]), octets(second[key]))]
    return {"entries": len(first), "unequal": unequal, "others": sorted(second.keys() - first.keys())}


if __name__ == "__main__":
    source, out, *numbers = sys.argv[1:]
    tp, pp, ep, rank, port = map(int, numbers)
    print(json.dumps(main(source, out, tp, pp, bool(ep), rank, port)))
