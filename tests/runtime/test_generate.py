"""Greedy generation with a cache gives the tokens that running everything anew for each token gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.checking.reference import Reference
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.checkpoints.checkpoint import open_checkpoint
from shard_plans.families.binding import bind
from shard_plans.families.family import load_family
from tests.conftest import MakeCheckpoint
from tests.tools.plans import plan_id
from tests.tools.sharded import CPU, convert_tiny
from tests.tools.words import write_tokenizer

IDS, COUNT = [5, 77, 130, 9, 201], 10


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """`count` tokens, each from a whole pass of the reference, without a cache."""
    checkpoint = open_checkpoint(folder)
    binding = bind(checkpoint, load_family(checkpoint.config))
    seen = list(ids)
    with Reference(binding, torch.float32, CPU) as reference:
        for _ in range(count):
            reference.begin(torch.tensor(seen))
            for _ in binding.model.forward_layers:
                reference.next_layer()
            seen.append(int(reference.logits()[-1].argmax()))
    return seen[len(ids) :]


def run(out: Path, count: int = COUNT, ignore_end: bool = False) -> tuple[int, ...]:
    words = ",".join(map(str, IDS))
    return verify_and_run(RunOptions(out, input_ids=words, max_new_tokens=count, ignore_end=ignore_end)).generated


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {}),
        ("llama", {"tp": 2, "pp": 3}),
        ("qwen2", {"tp": 4}),
        ("mixtral_window", {"dp": 2, "ep": 2, "pp": 2}),
        ("deepseek_v3_fp8", {"tp": 2, "pp": 2, "dp": 2, "ep": 4}),
        ("deepseek_v3_mtp", {"pp": 3, "tp": 2}),
    ],
    ids=lambda value: plan_id(value) if isinstance(value, dict) else str(value),
)
def test_equals_running_everything_anew(name: str, sizes: dict[str, int], tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny(name), tmp_path / "out", sizes)
    assert list(run(tmp_path / "out", ignore_end=True)) == greedy(tiny(name), IDS, COUNT)


def test_streamed_weights_generate_the_same(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert_tiny(tiny("qwen3_moe"), out, {"tp": 2, "ep": 2, "pp": 2})
    kept = verify_and_run(RunOptions(out, max_new_tokens=5, ignore_end=True))
    rooms: Callable[[torch.device], int]
    for rooms, passes in ((lambda device: 0, 7), (lambda device: 1 << 40, 1)):  # 5, and 2 without the cache
        monkeypatch.setattr("runtime.loaders._room", rooms)
        again = verify_and_run(RunOptions(out, max_new_tokens=5, ignore_end=True))
        assert again.generated == kept.generated
        assert len(again.generated) == 5
        assert again.figures["bytes_read"] == passes * kept.figures["bytes_read"]


def test_stops_behind_an_end_token(tiny: MakeCheckpoint, own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    wanted = greedy(tiny("llama"), IDS, COUNT)
    end = wanted[3]
    folder = own_tiny("llama")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{end}, 255]}}')
    convert_tiny(folder, tmp_path / "out", {"tp": 2})
    stop = wanted.index(end) + 1
    assert list(run(tmp_path / "out")) == wanted[:stop]
    assert list(run(tmp_path / "out", ignore_end=True)) == wanted


def test_nothing_is_generated_unless_asked(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {"tp": 2})
    result = verify_and_run(RunOptions(tmp_path / "out"))
    assert result.generated == ()
    assert result.text is None
    assert len(run(tmp_path / "out", 1, ignore_end=True)) == 1


def test_a_prompt_is_answered_in_words(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = own_tiny("llama")
    write_tokenizer(folder)
    convert_tiny(folder, tmp_path / "out", {"tp": 2})
    result = verify_and_run(RunOptions(tmp_path / "out", prompt="the capital of France is", ignore_end=True))
    ids = [1, 10, 11, 12, 13, 14]
    assert list(result.generated) == greedy(folder, ids, 32)  # 32 are generated where nothing is said
    assert result.text is not None
    assert result.text.split()
    assert any("Generated" in sentence for sentence in result.not_checked)
