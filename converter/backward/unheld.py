"""The deep check of what no stored tensor fills: padding, constant tensors, and what was left out of the shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from converter.backward.agreement import padding
from converter.backward.gather import BLOCK, Shards
from converter.backward.regions import form
from converter.findings import Failure
from converter.streams.reading import Reader
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import element
from shard_plans.documents.manifest import ROOT, ManifestTensor, ShardManifest
from shard_plans.errors import ManifestError


def unfilled(shards: Shards) -> Iterator[Failure]:
    """Declared padding that isn't zero, and constant tensors that don't hold their constant."""
    buffer = np.empty(BLOCK, np.uint8)
    with Reader(shards.out, ManifestError) as reader:
        for manifest in shards.manifests:
            for tensor in manifest.tensors:
                if tensor.fill is not None:
                    yield from _constant(reader, manifest, tensor)
                    continue
                rows = padding(tensor)
                if rows is None or any(piece.experts is not None for piece in tensor.sources):
                    continue
                row = tensor.nbytes // tensor.shape[0]
                start = manifest.header_size + tensor.offset
                for first in range(start + rows[0] * row, start + rows[1] * row, BLOCK):
                    length = min(BLOCK, start + rows[1] * row - first)
                    reader.read(manifest.file, first, buffer.data[:length])
                    set_bytes = np.flatnonzero(buffer[:length])
                    if len(set_bytes):
                        place = (first + int(set_bytes[0]) - start) // row
                        yield Failure(manifest.file, tensor.name, f"its padding isn't zero, from row {place} on")
                        break


def _constant(reader: Reader, manifest: ShardManifest, tensor: ManifestTensor) -> Iterator[Failure]:
    """A tensor that comes from no stored one must hold what it is said to be filled with."""
    held = bytearray(tensor.nbytes)
    reader.read(manifest.file, manifest.header_size + tensor.offset, memoryview(held))
    try:
        one = element(tensor.dtype, tensor.fill or 0.0)
    except ValueError as error:
        yield Failure(manifest.file, tensor.name, str(error))
        return
    if held != one * (len(held) // len(one)):
        yield Failure(manifest.file, tensor.name, f"isn't {tensor.fill} everywhere")


def unlisted(shards: Shards, checkpoint: Checkpoint, absent: Sequence[int]) -> Iterator[Failure]:
    """Stored tensors in no shard must be on the skip list, and nothing else may be on it."""
    patterns = [(item, form(item.pattern)) for item in shards.root.skipped]
    plain = {item.pattern: item for item, _ in patterns if "{" not in item.pattern}
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for number in absent:
        name = checkpoint.names[number]
        found = plain.get(name) or next((item for item, form in patterns if form.fullmatch(name)), None)
        if found is None:
            file = checkpoint.files[int(checkpoint.file_numbers[number])].name
            yield Failure(file, name, "is in no shard, and not on the list of what was left out")
            continue
        counts[found.pattern] += 1
        sizes[found.pattern] += int(checkpoint.sizes[number])
    for item in shards.root.skipped:
        if (counts[item.pattern], sizes[item.pattern]) != (item.count, item.nbytes):
            yield Failure(
                ROOT,
                item.pattern,
                f"is listed as left out with {item.count} tensors of {item.nbytes} bytes; "
                f"{counts[item.pattern]} of {sizes[item.pattern]} bytes were",
            )
