"""The entry point by which vLLM learns of `--load-format reshard`."""

from __future__ import annotations

LOAD_FORMAT = "reshard"


def register() -> None:
    """Tell vLLM of the loader; it calls this in each of its processes, some of them more than once."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from runtime.engines.vllm_loader import ReshardLoader

    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(ReshardLoader)
