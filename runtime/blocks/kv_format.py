"""How a cache stores a vector: in a plain type, or in 8 bits with a scale of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One cache type; its name is the plan's (shard_plans/memory/kv_formats.yaml)."""

    dtype: torch.dtype
    largest: float | None = None
    """What the largest number of a vector is scaled to; None: numbers are stored as they are."""

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether numbers of this type are stored as they are."""
        return self.largest is None and torch.promote_types(dtype, self.dtype) == self.dtype

    def store(self, x: Tensor) -> list[Tensor]:
        """Vectors x [.., width]: their numbers, and the float32 scale [..] by which to multiply them."""
        if self.largest is None:
            return [x.to(self.dtype)]
        wide = x.float()
        scale = wide.abs().amax(-1) / self.largest
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        scaled = wide / scale[..., None]
        if not self.dtype.is_floating_point:
            return [scaled.round().clamp(-self.largest, self.largest).to(self.dtype), scale]
        return [scaled.to(self.dtype).view(torch.uint8), scale]  # few operations know 8-bit floats

    def load(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """What `store` was given, rounded, in `dtype`."""
        if self.largest is None:
            return stored[0].to(dtype)
        values, scale = stored
        numbers = values.view(self.dtype) if self.dtype.is_floating_point else values
        return (numbers.float() * scale[..., None]).to(dtype)


KV_FORMATS = {
    "fp32": KvFormat(torch.float32),
    "bf16": KvFormat(torch.bfloat16),
    "fp8": KvFormat(torch.float8_e4m3fn, 448.0),
    "int8": KvFormat(torch.int8, 127.0),
}
"""FP8 is E4M3. In 8 bits each token and head has a scale, a latent as a whole."""
