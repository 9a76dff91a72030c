"""Cache types: how many bytes a vector of numbers takes, its scales counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import load_yaml

_FILE = Path(__file__).parent / "kv_formats.yaml"


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One cache type."""

    name: str
    bits: int
    """Of each number."""
    block: int = 0
    """Numbers that share a scale; 0: none is kept for blocks."""
    scale_bits: int = 0
    vector_bits: int = 0
    """A scale for each token and head."""
    rope_bits: int = 0
    """Bits of the numbers of a latent record that carry RoPE; 0: as the others, and scaled with them."""

    def vector(self, numbers: int) -> int:
        """Bytes of one token's vector of so many numbers, rounded up to whole bytes."""
        scales = -(-numbers // self.block) * self.scale_bits if self.block else 0
        return -(-(numbers * self.bits + scales + self.vector_bits) // 8)

    def latent(self, latent: int, rope: int) -> int:
        """Bytes of one token's record of latent attention: `latent` numbers, and the `rope` ones behind them."""
        if not self.rope_bits:
            return self.vector(latent + rope)
        return self.vector(latent) + -(-rope * self.rope_bits // 8)


@cache
def kv_formats() -> dict[str, KvFormat]:
    """All cache types by name."""
    data, _ = load_yaml(_FILE, "KV cache types")
    rows: dict[str, dict[str, Any]] = data
    return {name: KvFormat(name, **row) for name, row in rows.items()}


def kv_format(name: str) -> KvFormat:
    """The cache type `name`, one of workload.KV_DTYPES."""
    return kv_formats()[name]
