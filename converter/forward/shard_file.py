"""The bytes of a shard file around its tensors: the padded safetensors header, and where each tensor lies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.documents.shard_manifest import PLAIN_NAME
from shard_plans.errors import PlanError
from shard_plans.placement.shards import ShardFile

PAGE = 4096
"""Data begin at a multiple of this."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One shard file, byte by byte."""

    file: ShardFile
    header: bytes
    """Length word, JSON and padding: everything before the data."""
    offsets: tuple[int, ...]
    """Where each tensor starts, in bytes from the start of the data."""
    size: int
    """Bytes of the whole file."""


def lay_out(file: ShardFile, plan: str, source: str) -> FileLayout:
    """The layout of `file`, whose metadata name its place, the plan's digest and the checkpoint's fingerprint."""
    for name in (file.name, *(tensor.name for tensor in file.tensors)):
        if not PLAIN_NAME.fullmatch(name):
            raise PlanError(f"{name!r} can't be the name of a shard file or tensor; letters, digits and . _ - + can")
    metadata = {
        "format": "pt",
        "reshard_place": json.dumps(file.place, separators=(",", ":")),
        "reshard_plan": plan,
        "reshard_source": source,
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    ends = list(accumulate((tensor.nbytes for tensor in file.tensors), initial=0))
    for tensor, start, stop in zip(file.tensors, ends, ends[1:], strict=False):
        bits = DTYPE_BITS[tensor.dtype]
        for size in tensor.shape:
            bits *= size
        if bits % 8 or tensor.name in entries:
            what = "doesn't fill whole bytes" if bits % 8 else f"occurs twice in {file.name}"
            raise PlanError(f"shard tensor {tensor.name} {list(tensor.shape)} of {tensor.dtype} {what}")
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % PAGE)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(file, header, tuple(ends[:-1]), len(header) + ends[-1])
