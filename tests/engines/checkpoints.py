"""Tiny checkpoints as engines want them: what published configs say beside what transformers writes."""

from __future__ import annotations

import json
from pathlib import Path


def as_published(source: Path) -> Path:
    """Let the config of `source` say how its router chooses and what isn't quantised; returns `source`."""
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] == "deepseek_v3":
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if "quantization_config" in config:
        config["quantization_config"]["modules_to_not_convert"] = ["mlp.gate", "lm_head"]
    (source / "config.json").write_text(json.dumps(config))
    return source
