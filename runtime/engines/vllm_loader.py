"""vLLM's `--load-format reshard`: each rank's model is filled from its own native shard files.

vLLM's weight loaders get the checkpoint's tensors by their names, each of the stored shape with what the rank's shards
hold of it in its place; so its own code decides what goes where, whatever the model class, the format or the kernels.
What it reads and writes is watched: a read of what the rank doesn't hold, a parameter that isn't filled and a tensor
that isn't used are errors.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.distributed import get_dp_group, get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from converter.sources.sharded import Sharded
from converter.streams.hashing import file_digest
from runtime.engines.fill import fill
from runtime.engines.vllm_rank import Seat, find_rank
from runtime.opened import SOURCE, Opened, open_output
from shard_plans.documents.manifest import ROOT
from shard_plans.documents.stored import open_stored
from shard_plans.errors import ManifestError, RuntimeFault

logger = init_logger(__name__)
SHARDS = "shards"
"""Key of --model-loader-extra-config: the output's folder, where --model isn't the folder source/ in it."""
CONSTANTS = ("input_scale_ub", "g_idx", "g_idx_sort_indices")
"""Ends of the names of parameters that follow from the configuration, or that a checkpoint like this never has."""


class ReshardLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM isn't there where types are checked
    """Fills a model from the native shards of the plan that the engine is started with."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        self.shards = extra.pop(SHARDS, None)
        if extra:
            raise RuntimeFault(
                f"--model-loader-extra-config has {', '.join(map(str, extra))}; the load format reshard knows {SHARDS}"
            )

    def download_model(self, model_config: Any) -> None:
        """Nothing is downloaded: shards lie where they were converted or copied to."""
        self._folder(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill every parameter of the rank's model. Raises ReshardError; then the model must not be used."""
        started = time.monotonic()
        opened = self._open(model_config)
        layers = len(opened.model.forward_layers)
        at = find_rank(opened.plan, layers, _seat(model_config, layers))
        files = next((entry.files for entry in opened.root.ranks if entry.at == at), None)
        if files is None:
            raise RuntimeFault(f"{opened.out} holds no files of rank {at.rank} of its plan; copy or convert them")
        _no_online_quantisation(model)
        source = Sharded(open_stored(opened.out), files)
        nbytes = fill(source, layers, model.named_parameters, model.load_weights, _may_be_empty(model))
        logger.info(
            "rank %d of the plan: %.2f GB of %d shard files read and hashed in %.1f s", at.rank, nbytes / 1e9,
            len(files), time.monotonic() - started,
        )  # fmt: skip

    def _folder(self, model_config: Any) -> Path:
        """The output's folder."""
        model = Path(model_config.model)
        out = Path(self.shards) if self.shards is not None else model.parent
        if not (out / ROOT).is_file() or not (self.shards or model.name == SOURCE):
            raise RuntimeFault(
                f"{model} isn't the folder {SOURCE} of an output of reshard convert; serve OUT/{SOURCE}, or name the "
                f'output: --model-loader-extra-config \'{{"{SHARDS}": "OUT"}}\''
            )
        return out

    def _open(self, model_config: Any) -> Opened:
        """The output; the engine's config.json must be the one of its checkpoint."""
        out = self._folder(model_config)
        opened = open_output(out, whole=False)
        stated = next((file.xxh3 for file in opened.root.carried if file.name == "config.json"), None)
        path = Path(model_config.model) / "config.json"
        try:
            _, found = file_digest(path)
        except OSError as error:
            raise ManifestError(f"{path} can't be read: {error.strerror}; serve a local folder") from error
        if found != stated:
            raise RuntimeFault(
                f"{path} has the digest {found}, the checkpoint of {out} had one of {stated}: the shards are of "
                f"another model; serve {out / SOURCE}"
            )
        return opened


def _seat(model_config: Any, layers: int) -> Seat:
    config = get_current_vllm_config()
    parallel, speculative = config.parallel_config, config.speculative_config
    if speculative is not None and model_config is speculative.draft_model_config:
        raise RuntimeFault("the load format reshard fills no draft models; give the draft a load format of its own")
    tp, pp = get_tp_group(), get_pp_group()
    dp = parallel.data_parallel_size
    flags = {
        "--enable-eplb": parallel.enable_eplb,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        f"--expert-placement-strategy {parallel.expert_placement_strategy}": (
            parallel.enable_expert_parallel and parallel.expert_placement_strategy != "linear"
        ),
    }
    return Seat(
        tp.world_size, pp.world_size, dp, parallel.enable_expert_parallel, tp.rank_in_group, pp.rank_in_group,
        get_dp_group().rank_in_group if dp > 1 else 0,
        get_pp_indices(layers, pp.rank_in_group, pp.world_size),
        tuple(flag for flag, given in flags.items() if given),
    )  # fmt: skip


def _no_online_quantisation(model: Any) -> None:
    for name, module in model.named_modules():
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
            raise RuntimeFault(
                f"{name} is to be quantised while it is loaded (--quantization), which can't be accounted for; serve "
                f"the checkpoint as it is stored"
            )


def _may_be_empty(model: Any) -> set[str]:
    """Names of parameters that a checkpoint needn't have: scales of the KV cache, and what the configuration says."""
    return {
        f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        for leaf, _ in module.named_parameters(recurse=False)
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod) or leaf.endswith(CONSTANTS)
    }
