"""Token ids from every side, text through the carried tokenizer, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.inputs import DEFAULT_TOKENS, check_context, check_ids, choose_ids, default_ids, read_ids
from runtime.request import RunOptions
from runtime.run import verify_and_run
from runtime.text import Tokenizer, end_tokens
from shard_plans.checkpoints.headers import load_json
from shard_plans.errors import RuntimeFault
from shard_plans.families.family import load_family
from shard_plans.families.model import Model, bind_model
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.sharded import convert_tiny
from tests.tools.words import write_tokenizer


@pytest.fixture
def model(tiny: MakeCheckpoint) -> Model:
    config = load_json((tiny("llama") / "config.json").read_text(), "config.json")
    assert isinstance(config, dict)
    return bind_model(load_family(config), config)


def test_the_fixed_list_is_fixed_and_inside_the_vocabulary(model: Model) -> None:
    ids = choose_ids(None, None, None, model)
    assert ids == default_ids(256) == default_ids(256)
    assert len(ids) == DEFAULT_TOKENS
    assert all(0 <= number < 256 for number in ids)
    assert len(set(ids)) > DEFAULT_TOKENS // 2
    longer = choose_ids(None, None, None, model, 100)
    assert len(longer) == 100 and longer[:DEFAULT_TOKENS] == ids


def test_ids_as_a_list(model: Model) -> None:
    assert choose_ids(None, "1, 2,3", None, model) == [1, 2, 3]
    for bad in ("", "1,,2", "1,-2", "one", "1.5", "²"):
        with pytest.raises(RuntimeFault, match="isn't a token id"):
            choose_ids(None, bad, None, model)


def test_ids_from_a_file(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.tensor([[7, 8, 9]])}, path)
    assert choose_ids(None, str(path), None, model) == [7, 8, 9]
    save_file({"input_ids": torch.tensor([[7, 8], [9, 1]])}, path)
    with pytest.raises(RuntimeFault, match=r"int64 \[1, tokens\]"):
        read_ids(path)
    save_file({"input_ids": torch.tensor([[7]], dtype=torch.int32)}, path)
    with pytest.raises(RuntimeFault, match="int32"):
        read_ids(path)
    save_file({"ids": torch.tensor([[7]])}, path)
    with pytest.raises(RuntimeFault, match="holds ids"):
        read_ids(path)
    path.write_bytes(b"no")
    with pytest.raises(RuntimeFault, match="can't be read"):
        read_ids(path)
    with pytest.raises(RuntimeFault, match="can't be read"):
        read_ids(tmp_path / "absent.safetensors")


def test_ids_that_the_model_cannot_take(model: Model) -> None:
    check_ids([0, 255], 254, model)
    with pytest.raises(RuntimeFault, match="no token ids"):
        check_ids([], 0, model)
    with pytest.raises(RuntimeFault, match="token id 256 at position 1 is outside the vocabulary of 0 to 255"):
        check_ids([0, 256], 0, model)
    with pytest.raises(RuntimeFault, match="256 positions"):
        check_ids([0, 255], 255, model)


def test_prompt_and_ids_contradict(model: Model) -> None:
    with pytest.raises(RuntimeFault, match="contradicts"):
        choose_ids("hello", "1,2", None, model)


def test_the_tokenizers_own_special_tokens_are_added(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("the capital of France") == [1, 10, 11, 12, 13]
    assert tokenizer.decode([10, 11, 2]) == "the capital"
    with pytest.raises(RuntimeFault, match="no tokens"):
        Tokenizer(write_tokenizer(tmp_path / "plain", begin=False)).encode("")


def test_a_tokenizer_that_is_missing_or_spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeFault, match=r"carries no tokenizer\.json.*--input-ids"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RuntimeFault, match="can't be read as a tokenizer"):
        Tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RuntimeFault, match=r"pip install tokenizers"):
        Tokenizer(tmp_path)


def test_end_tokens(tmp_path: Path) -> None:
    assert end_tokens(tmp_path, {}) == frozenset()
    assert end_tokens(tmp_path, {"eos_token_id": 2}) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert end_tokens(tmp_path, {"eos_token_id": 2}) == {3, 4}
    (tmp_path / "generation_config.json").write_text('{"temperature": 1}')
    assert end_tokens(tmp_path, {"eos_token_id": 2}) == {2}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(RuntimeFault, match="generation_config"):
        end_tokens(tmp_path, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute": "float8"}, "float32, float64, bfloat16"),
        ({"device": "abacus"}, "no device abacus"),
        ({"max_new_tokens": -1}, "can't be negative"),
        ({"prompt": "hello"}, r"tokenizer\.json"),
        ({"input_ids": "1,999"}, "outside the vocabulary"),
    ],
)
def test_options_that_cannot_be_met(
    changes: dict[str, str | int], words: str, tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {})
    with pytest.raises(RuntimeFault, match=words):
        verify_and_run(RunOptions(tmp_path / "out", **changes))  # type: ignore[arg-type]


def test_a_list_that_is_too_long_is_refused_before_it_is_drawn(model: Model) -> None:
    limit = model.text["max_position_embeddings"]
    check_context(limit, model)
    for count in (limit + 1, 10**23):  # to draw the second would take for ever
        with pytest.raises(RuntimeFault, match=f"more than the {limit} positions"):
            check_context(count, model)
    unlimited = replace(model, text={k: v for k, v in model.text.items() if k != "max_position_embeddings"})
    check_context(limit + 1, unlimited)
    with pytest.raises(RuntimeFault, match="at most 16777216 tokens"):
        check_context(10**23, unlimited)


def test_the_command_refuses_such_a_list(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {})
    ran = run_cli("verify-and-run", tmp_path / "out", "--context", 10**12, "--json", code=2)
    assert "positions that config.json allows" in ran.json["error"]["message"]
