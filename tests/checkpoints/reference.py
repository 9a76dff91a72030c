"""What transformers computes from a checkpoint in fp32, eager: the reference that reshard did not write."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints.variants import TOKENS


@torch.no_grad()
def reference(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Logits, hidden states and routings for random ids.

    input_ids [1, S] int64; logits [1, S, V]; hidden.<i> (0: embeddings, i: after layer i, the last one normed);
    router.<module>.{logits,weights,indices}.
    """
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, arguments: Any, result: Any) -> None:
            if isinstance(result, tuple) and len(result) == 2:  # Llama 4: scores of all experts, 0 where not chosen
                scores, logits = result
                chosen = scores.topk(module.top_k, dim=-1)
                result = (logits, chosen.values, chosen.indices)
            if isinstance(result, tuple) and len(result) == 3:
                for key, tensor in zip(("logits", "weights", "indices"), result, strict=True):
                    found[f"router.{name}.{key}"] = tensor.detach()

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith(("router", "hashrouter"))
    ]
    ids = torch.randint(3, min(240, model.config.get_text_config().vocab_size), (1, TOKENS), generator=generator)
    result = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    for handle in handles:
        handle.remove()
    found |= {"input_ids": ids, "logits": result.logits.float()}
    found |= {f"hidden.{i}": hidden.float() for i, hidden in enumerate(result.hidden_states or ())}
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


MERGED = 4
"""Tokens of the reference image: 4 x 4 patches, merged two by two."""


@torch.no_grad()
def image_reference(model: Any, module: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Logits for an image in the middle of random ids: vision.{input_ids,pixel_values,image_grid_thw,logits,...}."""
    config, vision = model.config, model.config.vision_config
    ids = torch.randint(3, 240, (1, TOKENS), generator=generator)
    image = getattr(config, "image_token_id", None) or config.image_token_index
    ids[0, 5] = getattr(config, "vision_start_token_id", 252)
    ids[0, 6 : 6 + MERGED] = image
    ids[0, 6 + MERGED] = getattr(config, "vision_end_token_id", 253)
    inputs = {"input_ids": ids, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    if module == "kimi_k25":
        inputs["pixel_values"] = torch.randn(16, 3, vision.patch_size, vision.patch_size, generator=generator)
    else:
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(16, width, generator=generator)
    if module in ("qwen3_vl_moe", "qwen3_5_moe"):
        inputs["mm_token_type_ids"] = (ids == image).int()
    logits = model(**inputs, use_cache=False).logits.float()
    return {f"vision.{name}": tensor.contiguous().clone() for name, tensor in {**inputs, "logits": logits}.items()}


@torch.no_grad()
def dead_tensors(model: Any, expected: dict[str, Tensor], threshold: float = 1e-3) -> dict[str, float]:
    """Kinds of tensors whose values in wrong places wouldn't move the logits: a bug there would not show."""
    kinds: dict[str, list[Tensor]] = {}
    stored = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in stored and tensor.is_floating_point():
            kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(tensor)
    dead = {}
    logits = expected["logits"]
    for kind, tensors in kinds.items():
        saved = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.copy_(tensor.flatten().flip(0).view_as(tensor))
        got = model(input_ids=expected["input_ids"], use_cache=False).logits.float()
        for tensor, old in zip(tensors, saved, strict=True):
            tensor.copy_(old)
        change = float((got - logits).norm() / logits.norm())
        if not change > threshold:
            dead[kind] = change
    return dead
