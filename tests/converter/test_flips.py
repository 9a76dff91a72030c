"""Single bits flipped anywhere in an output: each is found by check, and pinned to the tensor or region it lies in.

RESHARD_FLIPS_SEED chooses other places.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from converter.check import check
from tests.conftest import MakeCheckpoint
from tests.tools.converted import contents, converted
from tests.tools.little import write_little
from tests.tools.little_configs import CONFIGS, PLANS, little

SEED = os.environ.get("RESHARD_FLIPS_SEED", "0")


@dataclass(frozen=True)
class Region:
    """Bytes of a shard file, and what a flip there is to be called."""

    file: str
    tensor: str | None
    start: int
    stop: int


def regions(out: Path) -> Iterator[Region]:
    """What every byte of every shard file belongs to, by the manifests as format.md describes them."""
    for path in sorted(out.glob("stage-*.json")):
        manifest = json.loads(path.read_text())
        end = manifest["header"]["size"]
        yield Region(manifest["file"], None, 0, end)
        for tensor in manifest["tensors"]:
            start = end + tensor["offset"]
            yield Region(manifest["file"], tensor["name"], start, start + tensor["bytes"])


@contextmanager
def flipped(path: Path, offset: int, bit: int) -> Iterator[None]:
    """The file with one bit flipped, while the context lasts."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        for value in (byte ^ 1 << bit, byte):
            file.seek(offset)
            file.write(bytes([value]))
            file.flush()
            if value != byte:
                yield


def flip_and_look(out: Path, dice: random.Random, count: int) -> set[tuple[str, str | None]]:
    """Flip bits of shard files one after the other; returns what they lay in."""
    areas = [region for region in regions(out) if region.start < region.stop]
    tensors = [region for region in areas if region.tensor is not None]
    headers = [region for region in areas if region.tensor is None]
    sizes = [region.stop - region.start for region in tensors]
    hit = set()
    for number in range(count):
        # a third in headers and padding, a third in tensors as if all were of one size, a third by bytes
        kind = number % 3
        region = dice.choice((headers, tensors)[kind]) if kind < 2 else dice.choices(tensors, sizes)[0]
        offset, bit = dice.randrange(region.start, region.stop), dice.randrange(8)
        with flipped(out / region.file, offset, bit):
            result = check(out, workers=1)
        found = [(failure.file, failure.tensor) for failure in result.failures]
        assert not result.passed and found == [(region.file, region.tensor)], (region, offset, bit, result.failures)
        words = result.failures[0].reason.split()
        if region.tensor is None:
            assert words[0] == "header,"
        else:  # "chunk 0, bytes A to B of the file"
            first, last = (int(words[words.index("bytes") + step]) for step in (1, 3))
            assert first <= offset < last <= region.stop
        hit.add((region.file, region.tensor))
    assert check(out, workers=1).passed
    return hit


def outputs(folder: Path, names: Iterable[str] = PLANS) -> Iterator[Path]:
    """Outputs of little checkpoints: plain, FP8 blocks refined and not, MXFP4, experts, MTP, a tower."""
    for name in names:
        source = write_little(folder / name, CONFIGS[name], little(name))
        for number, sizes in enumerate(PLANS[name][1:]):
            converted(source, folder / f"{name}-{number}", sizes)
            yield folder / f"{name}-{number}"


def test_flips_in_shard_files(tmp_path: Path) -> None:
    dice = random.Random(f"{SEED}/few")
    for out in outputs(tmp_path, ("llama", "qwen3_moe")):
        flip_and_look(out, dice, 9)


@pytest.mark.slow
def test_ten_thousand_flips_in_shard_files(tmp_path: Path, tiny: MakeCheckpoint) -> None:
    dice = random.Random(SEED)
    hit, there = 0, 0
    for out in outputs(tmp_path):
        there += len(list(regions(out)))
        hit += len(flip_and_look(out, dice, 1150))
    assert hit > 0.9 * there
    converted(tiny("deepseek_v3_mtp"), tmp_path / "out", {"tp": 4, "ep": 2, "etp": 2})
    flip_and_look(tmp_path / "out", dice, 1000)


def test_flips_in_everything_else(tmp_path: Path) -> None:
    """Manifests, documents, headers and carried files: the file is named."""
    dice = random.Random(f"{SEED}/others")
    source = write_little(tmp_path / "source", CONFIGS["llama"], little("llama"))
    (source / "tokenizer_config.json").write_text("{}\n")
    converted(source, tmp_path / "out", {"tp": 2})
    look_elsewhere(tmp_path / "out", dice, 3)


@pytest.mark.slow
def test_many_flips_in_everything_else(tmp_path: Path) -> None:
    dice = random.Random(f"{SEED}/many others")
    for out in outputs(tmp_path):
        look_elsewhere(out, dice, 40)


def look_elsewhere(out: Path, dice: random.Random, count: int) -> None:
    """Flip bits of every file that isn't a shard file, that many in each."""
    for name, data in contents(out).items():
        for _ in range(0 if name.endswith(".safetensors") else count):
            offset, bit = dice.randrange(len(data)), dice.randrange(8)
            with flipped(out / name, offset, bit):
                result = check(out, workers=1)
            named = {failure.file for failure in result.failures}
            assert not result.passed and name in named, (name, offset, bit, result.failures)
    assert check(out, workers=1).passed


def test_a_flip_that_is_not_looked_for_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the digests of tensors the harness fails."""
    source = write_little(tmp_path / "source", CONFIGS["llama"], little("llama"))
    converted(source, tmp_path / "out")
    monkeypatch.setattr("converter.hashes._chunks", lambda *_: iter(()))
    with pytest.raises(AssertionError):
        flip_and_look(tmp_path / "out", random.Random(0), 9)
