"""Folders that engines' own tools wrote: recognised, given manifests, and read back like outputs of convert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converter.check import check
from converter.restore import restore
from converter.verbs import adopt, convert
from shard_plans.errors import ManifestError, OutputError
from tests.checkpoints.store import read_tensors
from tests.conftest import MakeCheckpoint
from tests.converter.test_deepseek_mp import expected
from tests.engines.checkpoints import as_published
from tests.tools import tamper
from tests.tools.cli import RunCli
from tests.tools.converted import contents


def as_deepseek_saves(source: Path, folder: Path, world: int) -> Path:
    """A folder of DeepSeek's converter, sliced by the contract alone; no config.json lies in it."""
    folder.mkdir()
    stored, config = read_tensors(source), json.loads((source / "config.json").read_text())
    for rank in range(world):
        held = {name: tensor.contiguous() for name, tensor in expected(stored, config, rank, world).items()}
        save_file(held, folder / f"model{rank}-mp{world}.safetensors")
    return folder


def as_vllm_saves(source: Path, folder: Path, **sizes: int) -> Path:
    """A folder as vLLM's saver writes it: plain headers, several parts a rank, the checkpoint's config beside them."""
    made = folder.with_name("made")
    convert(source, made, layout="vllm@0.33", **sizes)  # type: ignore[arg-type]
    folder.mkdir()
    for path in made.glob("model-*.safetensors"):
        names = sorted(load_file(path).items())
        for part, held in enumerate((names[::2], names[1::2])):
            save_file(dict(held), folder / path.name.replace("part-0", f"part-{part}"))
    shutil.copy(source / "config.json", folder)
    (folder / "README.md").write_text("served by vLLM\n")
    shutil.rmtree(made)
    return folder


def shards(out: Path) -> dict[str, bytes]:
    """The shard files of an output."""
    return {name: data for name, data in contents(out).items() if name.endswith(".safetensors")}


def equal(folder: Path, source: Path) -> bool:
    """Whether two checkpoints hold the same tensors, bit by bit."""
    mine, theirs = read_tensors(folder), read_tensors(source)
    same = all(torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in theirs)
    return mine.keys() == theirs.keys() and same


@pytest.mark.parametrize("name", ["deepseek_v3_wide", "deepseek_v3_wide_fp8"])
def test_a_folder_of_deepseek_s_converter(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = tiny(name)
    folder = as_deepseek_saves(source, tmp_path / "mp", 2)
    found = adopt(folder, source)
    assert (found.layout, found.tp, found.ep, found.announced) == ("deepseek-mp", 2, 2, False)
    assert check(folder, source).passed
    convert(folder, tmp_path / "out", tp=2, mtp="drop")
    convert(source, tmp_path / "direct", tp=2, mtp="drop")
    assert shards(tmp_path / "out") == shards(tmp_path / "direct")
    restore(folder, tmp_path / "back")
    if "fp8" not in name:  # there the layers for multi-token prediction are missing
        assert all(data == (source / file).read_bytes() for file, data in contents(tmp_path / "back").items())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", {"tp": 2, "pp": 2}), ("qwen3_moe", {"tp": 2, "ep": 2}), ("qwen3_moe", {"tp": 2}), ("deepseek_v3", {})],
    ids=str,
)
def test_a_folder_of_vllm_s_saver_and_nothing_else(
    name: str, sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    """Its own config.json says what the checkpoint held."""
    source = as_published(own_tiny(name))
    folder = as_vllm_saves(source, tmp_path / "saved", **sizes)
    before = check(folder)
    assert (before.passed, before.hashes, before.files) == (True, False, 2 * sizes.get("tp", 1) * sizes.get("pp", 1))
    found = adopt(folder)
    assert (found.layout, found.tp, found.pp, found.ep) == (
        "vllm@0.33", sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("ep", 1)
    )  # fmt: skip
    after = check(folder)
    assert (after.passed, after.hashes) == (True, True), after.failures
    restore(folder, tmp_path / "back")
    assert equal(tmp_path / "back", source)
    convert(folder, tmp_path / "out")
    convert(tmp_path / "back", tmp_path / "direct")
    assert check(tmp_path / "out", tmp_path / "back").passed


@pytest.fixture
def saved(own_tiny: MakeCheckpoint, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint and a folder that vLLM saved of it."""
    source = own_tiny("qwen3_moe")
    return source, as_vllm_saves(source, tmp_path / "saved", tp=2, ep=2)


def test_what_changes_after_the_adoption_is_found(saved: tuple[Path, Path]) -> None:
    source, folder = saved
    adopt(folder, source)
    assert check(folder, source).passed
    path = folder / "model-rank-1-part-1.safetensors"
    tamper.flip(path, path.stat().st_size - 9)
    (failure,) = check(folder).failures
    assert failure.file == path.name
    with pytest.raises(OutputError, match="it is an output already"):
        adopt(folder, source)


def test_an_interrupted_adoption_leaves_nothing_in_the_way_and_other_files_stay(saved: tuple[Path, Path]) -> None:
    source, folder = saved
    (folder / "source").mkdir()
    left = [folder / "plan.yaml.partial", folder / "source" / "config.json.partial", folder / "manifest.json.partial"]
    for path in left:
        path.write_text("half of")
    download = folder / "more.safetensors.partial"
    download.write_text("the user's")
    adopt(folder, source)
    assert download.read_text() == "the user's" and not any(path.exists() for path in left)
    assert check(folder, source).passed


def test_exchanged_ranks_are_found_by_the_deep_check(saved: tuple[Path, Path]) -> None:
    """Names and shapes are alike, so only the checkpoint can tell."""
    source, folder = saved
    first, second = (folder / f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1))
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)
    adopt(folder, source)
    assert check(folder).passed
    assert not check(folder, source).passed


PART = "model-rank-0-part-{}.safetensors"


def rewritten(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """A spoiling of what a file holds."""

    def spoil(folder: Path) -> None:
        path = folder / PART.format(0)
        held = load_file(path)
        change(held)
        save_file(held, path)

    return spoil


def repack(held: dict[str, Tensor]) -> None:
    """As a kernel wants it."""
    name = next(name for name in held if name.endswith("w2_weight"))
    held[name] = held[name].transpose(1, 2).contiguous()


def as_another_rank(folder: Path) -> None:
    """A folder of DeepSeek's names instead, with a number that can't be."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for rank in (0, 1, 5):
        save_file({"a": torch.zeros(1)}, folder / f"model{rank}-mp2.safetensors")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (rewritten(repack), r"weight is BF16 \[8, .*\], the layout holds BF16 .*saved after kernels had repacked it"),
        (rewritten(lambda held: held.pop(next(iter(held)))), "is missing"),
        (rewritten(lambda held: held.update(W_UK_T=torch.zeros(2))), "W_UK_T .* of which the layout knows nothing"),
        (lambda folder: [path.unlink() for path in folder.glob("model-rank-0-*")], "lacks the files of rank 0 of 2"),
        (lambda folder: shutil.copy(folder / PART.format(0), folder / PART.format(7)), "both hold"),
        (lambda folder: save_file({"a": torch.zeros(1)}, folder / "model0-mp2.safetensors"), "several conversions"),
        (as_another_rank, "has a file of rank 5, by its name of 2 ranks"),
        (lambda folder: (folder / "config.json").unlink(), "name the checkpoint that it was made from"),
    ],
    ids=["repacked", "missing", "unknown", "rank", "twice", "mixed", "number", "config"],
)  # fmt: skip
def test_what_is_not_as_the_engine_holds_it_is_refused(
    spoil: Callable[[Path], object], words: str, saved: tuple[Path, Path]
) -> None:
    _, folder = saved
    spoil(folder)
    with pytest.raises(ManifestError, match=words):
        adopt(folder)
    assert not (folder / "manifest.json").exists()


def test_the_command(saved: tuple[Path, Path], run_cli: RunCli, tmp_path: Path) -> None:
    source, folder = saved
    assert "there are no hashes: reshard adopt" in " ".join(run_cli("check", folder).stdout.split())
    out = tmp_path / "x"
    for verb in (
        ("convert", folder, out),
        ("restore", folder, out),
        ("check", folder, "--deep", source),
        ("inspect", folder),
    ):
        assert "nothing says what is in it: run reshard adopt" in run_cli(*verb, code=2).stderr
    repacked = tmp_path / "repacked"
    shutil.copytree(folder, repacked)
    rewritten(repack)(repacked)
    assert run_cli("check", repacked, "--json", code=1).json["failures"]
    assert "vllm@0.33, tp 2 pp 1 ep 2" in run_cli("adopt", folder, "--checkpoint", source).stdout
    run_cli("check", folder, "--deep", source)
    assert run_cli("inspect", folder, "--json").json["kind"] == "output"
