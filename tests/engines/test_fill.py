"""Filling a model from a rank's shards through a weight loading that cuts whole tensors itself, as engines' do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from converter.sources.sharded import Sharded
from converter.verbs import convert
from runtime.engines.fill import fill
from runtime.engines.standins import StandIns
from runtime.engines.watch import Account, Watch
from shard_plans.documents.manifest import read_manifest
from shard_plans.documents.stored import open_stored
from shard_plans.errors import CheckFailed, ManifestError, RuntimeFault
from tests.checkpoints.store import read_tensors
from tests.conftest import MakeCheckpoint
from tests.tools import tamper

Weights = Iterator[tuple[str, Tensor]]
ROWS = r"(q|k|v|gate|up)_proj\.|embed_tokens|lm_head|\.w[13]\."
COLUMNS = r"(o|down)_proj\.|\.w2\."
EXPERTS = 16


class Engine:
    """A model of rank `rank` of `ranks`: experts whole where `ep`, the rest cut."""

    def __init__(self, source: Path, rank: int, ranks: int, ep: bool = False) -> None:
        self.rank, self.ranks, self.ep = rank, ranks, ep
        self.wanted = {
            name: part for name, whole in read_tensors(source).items() if (part := self.cut(name, whole)) is not None
        }
        self.held = {name: torch.empty_like(part) for name, part in self.wanted.items()}

    def cut(self, name: str, whole: Tensor) -> Tensor | None:
        """What this rank has of a tensor."""
        expert = re.search(r"experts\.(\d+)\.", name)
        if expert and self.ep:
            return whole if int(expert[1]) // (EXPERTS // self.ranks) == self.rank else None
        axis = 0 if re.search(ROWS, name) else 1 if re.search(COLUMNS, name) else None
        if axis is None:
            return whole
        size = whole.shape[axis] // self.ranks
        return whole.narrow(axis, self.rank * size, size)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As a module's."""
        yield from self.held.items()

    def load(self, weights: Weights) -> None:
        """As an engine's: from whole tensors."""
        for name, whole in weights:
            part = self.cut(name, whole)
            if part is not None:
                self.held[name].copy_(part)


def filled(out: Path, engine: Engine, rank: int, load: Callable[[Weights], None] | None = None) -> int:
    """Fill the engine from the files of a rank; the bytes read."""
    files = read_manifest(out).ranks[rank].files
    return fill(Sharded(open_stored(out), files), 3, engine.parameters, load or engine.load)


def octets(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", {"tp": 2}), ("qwen3_moe_fp8", {"tp": 2, "ep": 2}), ("qwen3_moe_fp8", {"tp": 2}), ("mixtral", {"tp": 2})],
    ids=str,
)
def test_every_parameter_is_a_slice_of_the_source(
    name: str, sizes: dict[str, int], tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    source, out = tiny(name), tmp_path / "out"
    convert(source, out, **sizes)  # type: ignore[arg-type]
    for rank, entry in enumerate(read_manifest(out).ranks):
        engine = Engine(source, rank, 2, "ep" in sizes)
        read = filled(out, engine, rank)
        assert read < 1.2 * sum((out / file).stat().st_size for file in entry.files)  # a chunk may be read again
        for key, part in engine.wanted.items():
            assert octets(engine.held[key]) == octets(part), key


class Lenient(Watch):  # type: ignore[no-untyped-call]
    """Lets everything be read, and keeps the account of what was lent last."""

    last: Account

    def lend(self, account: Account, tensor: Tensor, owner: object) -> None:
        """Only keep it."""
        self.last = account


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("qwen3_moe_fp8", {"tp": 4}), ("kimi_k25_int4", {"tp": 2}), ("gpt_oss", {"tp": 2, "ep": 2}), ("llama_odd", {})],
    ids=str,
)
def test_stand_ins_are_the_source_wherever_they_are_anything(
    name: str, sizes: dict[str, int], tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    """Scales cut inside a block, shapes that no shard holds, stacked experts, padding; all ranks make the whole."""
    source, out = tiny(name), tmp_path / "out"
    convert(source, out, **sizes)  # type: ignore[arg-type]
    stored = {key: tensor.reshape(tensor.shape or (1,)) for key, tensor in read_tensors(source).items()}
    left = {key: torch.ones(tensor.shape, dtype=torch.bool) for key, tensor in stored.items()}
    for entry in read_manifest(out).ranks:
        watch = Lenient({})
        for key, tensor in StandIns(Sharded(open_stored(out), entry.files), 1 << 20).lend(watch):
            pair = [each.reshape(stored[key].shape) for each in (tensor, stored[key])]
            for region in watch.last.held:
                axes = [torch.tensor([i for first, stop in spans for i in range(first, stop)]) for spans in region]
                place = torch.meshgrid(*axes, indexing="ij")
                mine, theirs = (each.view(torch.uint8).view(*each.shape, -1)[place] for each in pair)
                assert torch.equal(mine, theirs), key
                left[key][place] = False
    assert not [key for key, mask in left.items() if mask.any()]


@pytest.fixture
def converted(tiny: MakeCheckpoint, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint and its shards for two ranks."""
    source, out = tiny("llama"), tmp_path / "out"
    convert(source, out, tp=2)
    return source, out


def without(name: str) -> Callable[[Engine], Callable[[Weights], None]]:
    """A loading that passes over a tensor."""
    return lambda engine: lambda weights: engine.load(pair for pair in weights if pair[0] != name)


def half_filled(engine: Engine) -> Callable[[Weights], None]:
    """A loading that writes only the first row of the final norm."""

    def load(weights: Weights) -> None:
        for name, whole in weights:
            if name == "model.norm.weight":
                engine.held[name][:1].copy_(whole[:1])
            else:
                engine.load(iter([(name, whole)]))

    return load


def hasty(engine: Engine) -> Callable[[Weights], None]:
    """A loading that stops after the first tensor."""
    return lambda weights: engine.load(iter([next(weights)]))


def unwanted(engine: Engine) -> Callable[[Weights], None]:
    """A model without the final norm, whose loading passes over it."""
    del engine.held["model.norm.weight"]
    return without("model.norm.weight")(engine)


@pytest.mark.parametrize(
    ("loading", "words"),
    [
        (
            without("model.norm.weight"),
            r"1 parameters .* aren't filled .* the first model.norm.weight, from element \[0\]",
        ),
        (half_filled, r"the first model.norm.weight, from element \[1\]"),
        (unwanted, r"doesn't use 1 tensors .* the first model.norm.weight"),
        (hasty, "stopped loading before"),
    ],
)
def test_a_loading_that_leaves_something_out_is_refused(
    loading: Callable[[Engine], Callable[[Weights], None]], words: str, converted: tuple[Path, Path]
) -> None:
    source, out = converted
    engine = Engine(source, 0, 2)
    with pytest.raises(RuntimeFault, match=words):
        filled(out, engine, 0, loading(engine))


def test_what_another_rank_holds_is_not_read(converted: tuple[Path, Path]) -> None:
    source, out = converted
    with pytest.raises(RuntimeFault, match=r"element \[\d+, 0\] of \S+, which the plan gives to another rank"):
        filled(out, Engine(source, 1, 2), 0)


def test_a_flipped_bit_is_found_wherever_it_is(converted: tuple[Path, Path]) -> None:
    source, out = converted
    (file,) = read_manifest(out).ranks[0].files
    for place in (0.3, 0.999):
        offset = int(place * (out / file).stat().st_size)
        tamper.flip(out / file, offset)
        with pytest.raises(CheckFailed, match="is damaged"):
            filled(out, Engine(source, 0, 2), 0)
        tamper.flip(out / file, offset)
    filled(out, Engine(source, 0, 2), 0)


@pytest.mark.parametrize("spoil", [Path.unlink, tamper.truncate])
def test_a_missing_or_short_file_is_found(spoil: Callable[[Path], None], converted: tuple[Path, Path]) -> None:
    source, out = converted
    first, second = (out / entry.files[0] for entry in read_manifest(out).ranks)
    spoil(second)
    filled(out, Engine(source, 0, 2), 0)  # the other rank's file isn't needed
    spoil(first)
    with pytest.raises(ManifestError, match=first.name):
        filled(out, Engine(source, 0, 2), 0)
