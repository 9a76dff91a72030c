"""What a vision tower needs beside its weights: its activations for the images of one step, and the encoder's cache."""

from __future__ import annotations

from shard_plans.families.model import Model
from shard_plans.memory.activations import COMPUTE
from shard_plans.memory.caches import size
from shard_plans.memory.engine import load_engine
from shard_plans.memory.workload import Workload

DEFAULT_TOKENS = 16384
"""Image tokens of a step where neither the user nor the engine says how many: vLLM's budget in public logs."""


def image_tokens(model: Model, workload: Workload) -> int:
    """Tokens that the tower makes in one step; 0 without a tower."""
    if "tower" not in model.words:
        return 0
    return workload.image_tokens or int(load_engine(workload.engine).value("encoder_tokens", DEFAULT_TOKENS))


def encoder_cache(model: Model, workload: Workload) -> int:
    """Bytes of the embeddings of images that wait for, or are shared by, the sequences: hidden numbers a token."""
    return COMPUTE * image_tokens(model, workload) * model.sizes["hidden"]


def tower_activations(model: Model, workload: Workload) -> int:
    """Bytes that the tower's pass holds at its peak, whole on a rank: for every patch the stream, its norm, and the
    larger of q, k, v with the output and the feed-forward's inner width. A token is made of several patches.
    """
    sizes, width = model.sizes, size(model, "vt")
    inner = max(3 * sizes.get("vt_qkv", width) + width, sizes.get("vt_ffn", 4 * width) * 2)
    return COMPUTE * image_tokens(model, workload) * patches(model) * (2 * width + inner)


def patches(model: Model) -> int:
    """Patches that make one token: `merge`, or as many as the merged width holds; 4 where the table gives neither."""
    sizes = model.sizes
    return sizes.get("merge") or sizes.get("merged", 0) // sizes["hidden"] or 4
