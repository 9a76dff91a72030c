"""Declared constants: regions of stored tensors that no rank holds must be what they are declared to be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from converter.sources.source import Source, StoredReader
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import CheckpointError, PlanError
from shard_plans.placement.shards import Constant

STEP = 1 << 20
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}


def check_constants(origin: Source, constants: Iterable[Constant]) -> None:
    """Raise CheckpointError for the first element that isn't what its constant declares; read in small steps."""
    checkpoint, buffer = origin.checkpoint, np.empty(STEP, np.uint8)
    with origin.reader(0) as reader:
        for constant in constants:
            for number in constant.tensors.tolist():
                file = checkpoint.files[int(checkpoint.file_numbers[number])].name
                for start, length in stretches(checkpoint, number, constant):
                    for first in range(start, start + length, STEP):
                        part = buffer[: min(STEP, start + length - first)]
                        reader.read(file, int(checkpoint.starts[number]) + first, part.data)
                        wrong = np.flatnonzero(part != content(constant, checkpoint.dtypes[number]))
                        if len(wrong):
                            _refuse(checkpoint, constant, number, reader, first + int(wrong[0]))


def content(constant: Constant, dtype: str) -> Any:
    """The bytes that the region holds: 0, or all of them where they are stated."""
    if constant.values is None:
        return 0
    if dtype not in ("I32", "I64"):
        raise PlanError(f"the constant {constant.values} of {constant.pattern} can't be held by {dtype}")
    return np.array(constant.values, FLOATS[dtype]).view(np.uint8)


def stretches(checkpoint: Checkpoint, number: int, constant: Constant) -> Iterator[tuple[int, int]]:
    """The region as runs of bytes of the stored tensor: start and length."""
    shape, bits = checkpoint.shapes[number], DTYPE_BITS[checkpoint.dtypes[number]]
    inside = all(0 <= a <= b <= size for (a, b), size in zip(constant.region, shape, strict=False))
    if bits % 8 or len(constant.region) != len(shape) or not inside:
        raise PlanError(f"the constant {constant.region} of {constant.pattern} doesn't lie in {list(shape)}")
    lengths = [stop - start for start, stop in constant.region]
    split = len(shape) - 1
    while split > 0 and lengths[split] == shape[split]:
        split -= 1
    run = math.prod(lengths[split:])
    for outer in np.ndindex(*lengths[: max(split, 0)]):
        place = 0
        for axis, size in enumerate(shape):
            place = place * size + constant.region[axis][0] + (outer[axis] if axis < split else 0)
        if run:
            yield place * bits // 8, run * bits // 8


def _refuse(checkpoint: Checkpoint, constant: Constant, number: int, reader: StoredReader, byte: int) -> None:
    """Say which element isn't zero, and what it is."""
    dtype, shape = checkpoint.dtypes[number], checkpoint.shapes[number]
    item = DTYPE_BITS[dtype] // 8
    raw = bytearray(item)
    file = checkpoint.files[int(checkpoint.file_numbers[number])].name
    reader.read(file, int(checkpoint.starts[number]) + byte // item * item, memoryview(raw))
    at = ", ".join(str(int(index)) for index in np.unravel_index(byte // item, shape)) if shape else ""
    raise CheckpointError(
        f"{checkpoint.label(number)} must be {'zero' if constant.values is None else list(constant.values)} at "
        f"{', '.join(f'{a}:{b}' for a, b in constant.region)} "
        f"({constant.reason}), but its element [{at}] is {_value(dtype, bytes(raw))}; this isn't the layout that the "
        f"family table describes"
    )


def _value(dtype: str, raw: bytes) -> Any:
    if dtype == "BF16":
        return np.frombuffer(b"\0\0" + raw, "<f4")[0].item()
    if dtype in FLOATS:
        return np.frombuffer(raw, FLOATS[dtype])[0].item()
    return f"0x{raw[::-1].hex()}"
