"""Several prompts at once, in chunks, through pages: each is answered as it is alone, without a cache."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.blocks.cache import LayerCache
from runtime.blocks.pages import Allocator, Pool
from runtime.checking.cached import Compared, worst_of
from runtime.checking.checks import AGREEMENT, COSINE, LIKELIHOOD
from runtime.checking.reference import Reference
from runtime.generate import chunks
from runtime.kv_options import KvOptions
from runtime.passes import RankRun
from runtime.request import RunOptions, open_request
from runtime.result import AnswerFound, RunResult
from runtime.run import verify_and_run
from shard_plans.checkpoints.checkpoint import open_checkpoint
from shard_plans.errors import RuntimeFault
from shard_plans.families.binding import bind
from shard_plans.families.family import load_family
from tests.conftest import MakeCheckpoint
from tests.tools.sharded import CPU, checks, convert_tiny, failed
from tests.tools.words import write_tokenizer

COUNT = 5
LENGTHS = (3, 21, 10)
PAGED = KvOptions(block=4, chunk=7)

Ready = Callable[..., tuple[Path, list[list[int]], Path]]


@pytest.fixture
def ready(own_tiny: MakeCheckpoint, tmp_path: Path) -> Ready:
    """Family -> its checkpoint with a tokenizer, ids of prompts, the file of these; converted to `out`."""

    def make(name: str, sizes: dict[str, int] | None = None) -> tuple[Path, list[list[int]], Path]:
        folder, chance = own_tiny(name), random.Random(4)
        write_tokenizer(folder)
        convert_tiny(folder, tmp_path / "out", sizes or {"tp": 2, "pp": 2})
        drawn = [[chance.randrange(20, 250) for _ in range(length)] for length in LENGTHS]
        file = tmp_path / "prompts.txt"
        file.write_text("\n\n".join(" ".join(f"word{number}" for number in ids) for ids in drawn) + "\n")
        return folder, [[1, *ids] for ids in drawn], file

    return make


def answers(out: Path, prompts: Path, cache: KvOptions = PAGED, compute: str = "float32") -> RunResult:
    options = RunOptions(out, prompts=prompts, max_new_tokens=COUNT, cache=cache, compute=compute, ignore_end=True)
    return verify_and_run(options)


def likeliest(folder: Path, answer: AnswerFound) -> list[int]:
    """The likeliest token behind the prompt, and behind each token of the answer, by one pass of the reference."""
    checkpoint = open_checkpoint(folder)
    binding = bind(checkpoint, load_family(checkpoint.config))
    with Reference(binding, torch.float32, CPU) as reference:
        reference.begin(torch.tensor([*answer.input_ids, *answer.generated[:-1]]))
        for _ in binding.model.forward_layers:
            reference.next_layer()
        found: list[int] = reference.logits()[len(answer.input_ids) - 1 :].argmax(-1).tolist()
    return found


FAMILIES = ["llama", "gpt_oss", "deepseek_v3", "kimi_linear", "deepseek_v4"]
MORE = ["qwen3_next", "llama4_text", "glm_moe_dsa", "minimax_m3_vl", "mixtral_window", "deepseek_v3_fp8"]


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_each_of_several_prompts_is_answered_as_alone(name: str, ready: Ready, tmp_path: Path) -> None:
    folder, prompts, file = ready(name)
    found = answers(tmp_path / "out", file)
    assert [list(answer.input_ids) for answer in found.answers] == prompts
    for answer in found.answers:
        assert list(answer.generated) == likeliest(folder, answer)
    check = checks(found)["cache"]
    assert check.passed and check.worst is not None and check.worst < 1e-5
    known = sum(map(len, chunks([len(ids) for ids in prompts], PAGED.chunk))) + len(prompts) * (COUNT - 1)
    assert f"of one of {known} tokens" in check.note
    assert all(answer.text for answer in found.answers) and found.text is None and found.generated == ()


def test_whole_prompts_and_chunks_give_the_same(ready: Ready, tmp_path: Path) -> None:
    *_, file = ready("deepseek_v3")
    runs = [answers(tmp_path / "out", file, cache) for cache in (KvOptions(), PAGED, KvOptions(block=1, chunk=1))]
    assert runs[0].answers == runs[1].answers == runs[2].answers


def test_an_answer_that_ends_gives_its_blocks_back(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, file = ready("llama")
    whole = [list(answer.generated) for answer in answers(tmp_path / "out", file).answers]
    end = whole[1][1]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    convert_tiny(folder, tmp_path / "ends", {"tp": 2})
    held, inner = list[int](), Allocator.give_back

    def note(allocator: Allocator, blocks: Sequence[int]) -> None:
        inner(allocator, blocks)
        held.append(allocator.held)

    monkeypatch.setattr(Allocator, "give_back", note)
    found = verify_and_run(RunOptions(tmp_path / "ends", prompts=file, max_new_tokens=COUNT, cache=PAGED))
    cut = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in whole]
    assert [list(answer.generated) for answer in found.answers] == cut and cut != whole
    assert found.passed and len(cut[1]) == 2 and held[-1] == 0


@pytest.mark.parametrize(
    ("name", "format"), [("qwen3_moe", "fp8"), ("qwen3_moe", "bf16"), ("deepseek_v3", "fp8"), ("deepseek_v3", "int8")]
)
def test_narrow_caches_pass_the_smoke_tests(name: str, format: str, ready: Ready, tmp_path: Path) -> None:
    *_, file = ready(name)
    found = answers(tmp_path / "out", file, KvOptions(format, 4, chunk=7))
    by_name = checks(found)
    assert {"cache", "cache_likelihood", "cache_routing"} <= set(by_name)
    worst = by_name["cache"].worst
    assert worst is not None and COSINE < worst < 1
    assert by_name["cache_likelihood"].limit == LIKELIHOOD and by_name["cache_likelihood"].passed
    assert by_name["cache_routing"].limit == AGREEMENT  # which routers of random weights may well miss


@pytest.mark.parametrize("format", [None, "fp8"])
def test_a_stale_block_is_caught(
    format: str | None, ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, file = ready("llama")
    inner = Pool.write

    def stale(pool: Pool, blocks: Sequence[int], start: int, parts: Sequence[Tensor]) -> None:
        """Write nothing behind the first block of a sequence, as if zeros still lay there."""
        first = max(0, pool.size - start)
        inner(pool, blocks, start, [torch.cat([part[:first], 0 * part[first:]]) for part in parts])

    monkeypatch.setattr(Pool, "write", stale)
    assert failed(answers(tmp_path / "out", file, KvOptions(format, 4))) >= {"cache"}


def test_an_aliased_block_is_caught(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, file = ready("llama")
    inner = Pool.read
    monkeypatch.setattr(Pool, "read", lambda pool, blocks, *rest: inner(pool, [*blocks[:1] * 2, *blocks[2:]], *rest))
    assert failed(answers(tmp_path / "out", file)) == {"cache"}


def test_a_long_context_over_many_blocks(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny("gpt_oss"), tmp_path / "out", {"tp": 2})
    options = RunOptions(tmp_path / "out", context=203, max_new_tokens=3, cache=KvOptions(chunk=50), ignore_end=True)
    found = verify_and_run(options)
    assert found.passed and found.figures["tokens"] == 203 and checks(found)["cache"].passed
    whole = verify_and_run(RunOptions(tmp_path / "out", context=203, max_new_tokens=3, ignore_end=True))
    assert whole.generated == found.generated
    assert whole.figures["kv_cache_bytes"] > found.figures["kv_cache_bytes"]  # windows never held the whole prompt


def test_what_can_not_be_asked_for(ready: Ready, tmp_path: Path) -> None:
    *_, file = ready("llama")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cache": KvOptions(block=4, blocks=12)}, "--kv-blocks 12 of 4 tokens are too few.*at least 13"),
        ({"cache": KvOptions(block=0)}, "--kv-block is 0"),
        ({"cache": KvOptions(chunk=0)}, "--prefill-chunk is 0"),
        ({"cache": KvOptions("fp7")}, "--kv-cache fp7 isn't known"),
        ({"cache": KvOptions("fp8"), "max_new_tokens": 0}, "--kv-cache is for what is generated, and nothing is"),
        ({"cache": KvOptions(blocks=99), "max_new_tokens": 0}, "--kv-blocks is for what is generated"),
        ({"cache": KvOptions(chunk=9), "max_new_tokens": 0}, "--prefill-chunk is for what is generated"),
        ({"prompt": "the"}, "--prompt contradicts --prompts"),
        ({"input_ids": "1"}, "--input-ids contradicts --prompts"),
        ({"prompts": None, "input_ids": "1", "context": 3}, "--input-ids contradicts --context"),
        ({"prompts": Path("nowhere")}, "can't be read"),
    ]
    for given, words in cases:
        with pytest.raises(RuntimeFault, match=words):
            open_request(RunOptions(tmp_path / "out", **{"prompts": file, "max_new_tokens": COUNT, **given}))


def test_chunks_cover_every_token_once() -> None:
    assert list(chunks([3, 2], None)) == [[(0, 0, 3), (1, 0, 2)]]
    assert list(chunks([3, 2, 4], 4)) == [[(0, 0, 3), (1, 0, 1)], [(1, 1, 2), (2, 0, 3)], [(2, 3, 4)]]
    for most in range(1, 12):
        passes = list(chunks([5, 1, 3], most))
        assert all(sum(stop - start for _, start, stop in parts) == most for parts in passes[:-1])
        rows = [(number, row) for parts in passes for number, start, stop in parts for row in range(start, stop)]
        assert rows == [(0, r) for r in range(5)] + [(1, 0)] + [(2, r) for r in range(3)]


def test_a_prompt_cannot_hold_images(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = own_tiny("qwen3_vl_moe")
    write_tokenizer(folder)
    convert_tiny(folder, tmp_path / "out", {})
    (tmp_path / "prompts").write_text("word20 word21\nword20 word250\n")
    with pytest.raises(RuntimeFault, match="1 token ids are the placeholder 250 of an image, and there are 0 images"):
        open_request(RunOptions(tmp_path / "out", prompts=tmp_path / "prompts"))


def test_a_stale_cache_of_one_replica_is_caught(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(LayerCache):
        def append(
            self, positions: Tensor, parts: Sequence[Tensor], window: int | None = None, chunk: int | None = None
        ) -> tuple[Tensor, list[Tensor]]:
            seen, parts = super().append(positions, parts, window, chunk)
            return seen, [torch.cat([0 * part[:1], part[1:]]) for part in parts]

    inner = RankRun.new_caches

    def caches(run: RankRun, pools: Mapping[int, Pool] | None = None) -> dict[int, LayerCache]:
        made = inner(run, pools)
        return {layer: Stale(pools[layer]) for layer in made} if run.ctx.at.dp and pools else made

    *_, file = ready("llama", {"dp": 2})
    assert answers(tmp_path / "out", file).passed
    monkeypatch.setattr(RankRun, "new_caches", caches)
    found = answers(tmp_path / "out", file)
    assert failed(found) == {"cache"} and "replica 1, prompt" in checks(found)["cache"].where


def test_the_worst_of_all_replicas_counts() -> None:
    good, bad = Compared(1e-6, 0.9999, 0.01, "here", 5), Compared(math.nan, 0.9, 0.001, "there", 5)
    for replicas in ([good, bad], [bad, good]):
        found = worst_of(replicas)
        assert math.isnan(found.error) and (found.cosine, found.likelihood, found.where) == (0.9, 0.01, "there")
