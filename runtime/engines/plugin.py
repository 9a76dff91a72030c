"""The entry point by which vLLM learns of `--load-format reshard`."""

from __future__ import annotations

import logging

LOAD_FORMAT = "reshard"


def register() -> None:
    """Tell vLLM of the loader; it calls this in each of its processes, whatever it is started for.

    So a release that lacks what the loader builds on must still start: only this load format is missing then.
    """
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from runtime.engines.vllm_loader import ReshardLoader
    except ImportError as error:
        logging.getLogger(__name__).warning("--load-format %s isn't there with this vLLM: %s", LOAD_FORMAT, error)
        return
    register_model_loader(LOAD_FORMAT)(ReshardLoader)
