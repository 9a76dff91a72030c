"""What the cache of a run is like, and how many blocks its sequences need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.blocks.kv_format import KV_FORMATS
from runtime.blocks.pages import BLOCK, Pool
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer

MOST = 1 << 20
"""The largest block, and the most blocks and tokens of a pass."""
RECURRENT = ("kda", "gdn")
"""Attention that keeps a state and no keys."""


@dataclass(frozen=True, slots=True)
class KvOptions:
    """How keys, values and latents are kept, and how prompts are filled in."""

    format: str | None = None
    """A name of KV_FORMATS; None: as computed."""
    block: int = BLOCK
    """Tokens of a block."""
    blocks: int | None = None
    """Blocks of each layer; None: as many as the sequences need."""
    chunk: int | None = None
    """Tokens of prompts that one pass takes at most; None: all."""

    def check(self) -> None:
        """Raise RuntimeFault for what no cache can be."""
        if self.format is not None and self.format not in KV_FORMATS:
            raise RuntimeFault(f"--kv-cache {self.format} isn't known; known are {', '.join(KV_FORMATS)}")
        for name, value in (("kv-block", self.block), ("kv-blocks", self.blocks), ("prefill-chunk", self.chunk)):
            if value is not None and not 1 <= value <= MOST:
                raise RuntimeFault(f"--{name} is {value}; a number from 1 to {MOST} is wanted")

    def check_used(self, new_tokens: int) -> None:
        """Raise RuntimeFault for what nothing would come of: only what is generated goes through a cache."""
        for name, value in (("kv-cache", self.format), ("kv-blocks", self.blocks), ("prefill-chunk", self.chunk)):
            if value is not None and not new_tokens:
                raise RuntimeFault(
                    f"--{name} is for what is generated, and nothing is; give --max-new-tokens N, or leave it out"
                )

    def lossless(self, compute: torch.dtype) -> bool:
        """Whether the cache keeps what is computed, to the last bit."""
        return self.format is None or KV_FORMATS[self.format].holds(compute)

    def blocks_for(self, layer: Layer, prompt: int, tokens: int) -> int:
        """Blocks of a layer that a sequence of `tokens` tokens, `prompt` of them its prompt, holds at most.

        Behind a window lie the tokens that one pass brings; a window may begin and end inside a block.
        """
        words = layer.words
        if words.get("attn") in RECURRENT:
            return 0
        seen = words.get("window") or words.get("chunk")
        at_once = min(prompt, self.chunk or prompt)
        kept = tokens if seen is None or words.get("index") else min(tokens, int(seen) - 1 + at_once)
        whole = -(-tokens // self.block)
        return whole if kept == tokens else min(whole, -(-kept // self.block) + (self.block > 1))

    def need(self, layer: Layer, prompts: Sequence[int], new_tokens: int) -> int:
        """Blocks of a layer for prompts of these lengths and `new_tokens` behind each; the last of them isn't run."""
        return sum(self.blocks_for(layer, prompt, prompt + max(0, new_tokens - 1)) for prompt in prompts)

    def check_room(self, layers: Sequence[Layer], prompts: Sequence[int], new_tokens: int) -> None:
        """Raise RuntimeFault where `blocks` are too few."""
        need = max(self.need(layer, prompts, new_tokens) for layer in layers)
        if self.blocks is not None and need > self.blocks:
            raise RuntimeFault(
                f"--kv-blocks {self.blocks} of {self.block} tokens are too few: {len(prompts)} prompts of "
                f"{sum(prompts)} tokens and {new_tokens} new ones each need {need} in a layer; give at least {need}, "
                "or fewer or shorter prompts"
            )

    def pools(self, layers: Sequence[Layer], prompts: Sequence[int], new_tokens: int) -> dict[int, Pool]:
        """A pool for each layer, which the sequences share."""
        format = None if self.format is None else KV_FORMATS[self.format]
        return {
            layer.index: Pool(self.block, self.blocks or self.need(layer, prompts, new_tokens), format)
            for layer in layers
        }
