"""What changes of precision cost, summed up by stored name: experts of a layer as one, the worst of each figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shard_plans.documents.converted import MatrixErrors
from shard_plans.documents.shard_records import ShardManifest


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One converted weight, or those of all experts of a layer."""

    tensor: str
    """Stored name of the values, with `{expert}` where each expert has one."""
    stored: str
    """The checkpoint's storage format, or type where it is plain."""
    made: str
    """The same of the output."""
    matrices: int
    """Experts, or 1."""
    largest: float
    """Of |converted - stored| / |stored|."""
    mean: float
    """Of the same; of the matrix where it is highest."""
    cosine: float
    """Of the matrix where it is lowest."""
    nan: int
    infinite: int
    """Elements of the checkpoint that are no numbers; they are in no other figure."""


Key = tuple[str, str, str]
"""Stored name, storage format before and after."""


class Tally:
    """Collects the errors of matrices; one that several shards hold parts of counts once."""

    def __init__(self) -> None:
        self._found: dict[Key, dict[int, MatrixErrors]] = {}

    def add(self, tensor: str, stored: str, made: str, expert: int, errors: MatrixErrors) -> None:
        """Take the errors of one matrix."""
        self._found.setdefault((tensor, stored, made), {})[expert] = errors

    def take(self, manifests: Iterable[ShardManifest]) -> None:
        """Take all that manifests state."""
        for manifest in manifests:
            for tensor in manifest.tensors:
                for piece in tensor.sources:
                    if piece.converted is None:
                        continue
                    made = tensor.format or tensor.dtype
                    ids = piece.experts or (0,)
                    for expert, errors in zip(ids, piece.converted.errors, strict=False):
                        self.add(piece.converted.tensors[0], piece.converted.format, made, expert, errors)

    def tensors(self) -> tuple[ConvertedTensor, ...]:
        """Summed up, in the order of arrival."""
        return tuple(
            ConvertedTensor(
                *key, len(found), max(e.largest for e in found.values()), max(e.mean for e in found.values()),
                min(e.cosine for e in found.values()), sum(e.nan for e in found.values()),
                sum(e.infinite for e in found.values()),
            )
            for key, found in self._found.items()
        )  # fmt: skip


def worst_first(tensors: Iterable[ConvertedTensor]) -> list[ConvertedTensor]:
    """Those with NaN or infinities, then by cosine and mean error."""
    return sorted(tensors, key=lambda t: (not (t.nan or t.infinite), t.cosine, -t.mean, t.tensor))


def by_format(tensors: Iterable[ConvertedTensor]) -> list[ConvertedTensor]:
    """One for each pair of formats: the worst of all figures, and no name."""
    found: dict[tuple[str, str], ConvertedTensor] = {}
    for t in tensors:
        key = t.stored, t.made
        b = found.get(key, ConvertedTensor("", *key, 0, 0.0, 0.0, 1.0, 0, 0))
        found[key] = ConvertedTensor(
            "", *key, b.matrices + t.matrices, max(b.largest, t.largest), max(b.mean, t.mean), min(b.cosine, t.cosine),
            b.nan + t.nan, b.infinite + t.infinite,
        )  # fmt: skip
    return list(found.values())
