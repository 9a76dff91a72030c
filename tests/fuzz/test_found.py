"""What mutated documents brought to light, one test a kind."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from converter.check import check
from shard_plans.documents.plan_check import check_plan
from shard_plans.documents.shard_manifest import parse_shard_manifest
from shard_plans.errors import (
    CheckFailed,
    FamilyError,
    ManifestError,
    PlanError,
    ReshardError,
)
from shard_plans.families.dims import Share, parse_dim, take
from shard_plans.families.family import load_family, parse_family
from tests.fuzz.conftest import SIZES
from tests.tools import tamper
from tests.tools.converted import bound, converted
from tests.tools.little import Stored, little_tensors, write_little
from tests.tools.little_configs import CONFIGS, PLANS, little
from tests.tools.plans import make_plan


def test_messages_are_one_line_whatever_they_quote() -> None:
    for words in ("a\nb", "a\x1b[31mb", "a\u202eb", "\ud800", "x" * 100_000, "\0" * 5000):
        said = str(ReshardError(f"begins {words} ends"))
        assert said.isprintable() and len(said) <= 2000
        assert said.startswith("begins ") and said.endswith(" ends")
    assert str(CheckFailed("plain words, and a \\ too: é")) == "plain words, and a \\ too: é"


def test_a_plan_of_another_number_of_tensors_is_refused(source: Path, tmp_path: Path) -> None:
    """Convert followed it, and its output failed the check: the manifest's numbers were not the plan's."""
    plan = make_plan(bound(source), SIZES)
    for other in (replace(plan.checkpoint, tensors=1), replace(plan.checkpoint, bytes=1)):
        with pytest.raises(PlanError, match="plan it anew"):
            check_plan(replace(plan, checkpoint=other), bound(source))


def test_a_table_without_the_number_of_layers_is_refused() -> None:
    from shard_plans.documents.yaml_text import load_yaml

    table, _ = load_yaml(load_family(CONFIGS["llama"]).document, "it")
    del table["layers"]["count"]
    with pytest.raises(FamilyError, match="layers lacks `count`"):
        parse_family(table)


def test_a_removal_of_what_is_not_there_is_refused() -> None:
    """`~` takes away what an extended table gave; here there is none."""
    from shard_plans.documents.yaml_text import load_yaml

    table, _ = load_yaml(load_family(CONFIGS["llama"]).document, "it")
    table["blocks"]["layer"] = None
    with pytest.raises(FamilyError, match="blocks / layer is removed, but no table"):
        parse_family(table)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_without_their_number_are_refused(name: str) -> None:
    from shard_plans.documents.yaml_text import load_yaml

    table, _ = load_yaml(load_family(CONFIGS[name]).document, "it")
    del table["sizes"]["experts"]
    with pytest.raises(FamilyError, match="has experts, of which `sizes` says no number"):
        parse_family(table)


def test_a_size_is_not_counted_out_before_it_is_looked_at() -> None:
    with pytest.raises(FamilyError, match="falls into more than"):
        take(parse_dim("wide*tp(heads)"), {"wide": 1 << 40, "heads": 4}, {}, {"tp": Share(0, 2)})


def test_lists_of_experts_are_bounded_together(source: Path, tmp_path: Path) -> None:
    """A tensor of no rows takes no bytes, and may stack as many experts as it likes."""
    converted(source, tmp_path / "out", SIZES)
    value = json.loads((tmp_path / "out" / "stage-0-ep-0-etp-0.json").read_text())
    piece = {"tensor": "a.{expert}", "cuts": [{"runs": [], "repeat": 1}], "at": [0]}
    (entry, *_) = value["tensors"]
    empty = entry | {"dtype": "U8", "shape": [65536, 0], "offset": 0, "bytes": 0, "format": None, "block": None}
    many = [empty | {"name": f"t{n}", "sources": [piece | {"experts": f"{n},0-65534"}]} for n in range(100)]
    value |= {"tensors": many, "size": value["header"]["size"]}
    with pytest.raises(ManifestError, match="different lists of experts hold more than"):
        parse_shard_manifest(value, "x.json")
    value["tensors"] = [tensor | {"sources": [piece | {"experts": "0-65535"}]} for tensor in many]
    assert len(parse_shard_manifest(value, "x.json").tensors) == 100


@pytest.mark.parametrize(
    "name", ["layers", "layers.3", "layers..norm", "layers.x.norm", "layers.1_0.norm", "layers.3."]
)
def test_a_tensor_of_no_layer_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    converted(source, out, SIZES)
    path = next(iter(sorted(out.glob("stage-0-tp*.json"))))
    document = json.loads(path.read_text())
    document["tensors"][0]["name"] = "layers.3.another"
    parse_shard_manifest(document, "it")
    document["tensors"][0]["name"] = name
    with pytest.raises(ManifestError, match=r"is of no layer: the names of their tensors are layers\.NUMBER\.ROLE"):
        parse_shard_manifest(document, "it")


def test_tamper_and_little_agree_on_what_a_file_is(source: Path, tmp_path: Path) -> None:
    """The little checkpoints of these tests are whole ones: converted, checked and read back."""
    for name, plans in PLANS.items():
        folder = write_little(tmp_path / name, CONFIGS[name], little(name), 1)
        converted(folder, tmp_path / f"{name}-out", plans[-1])
        assert check(tmp_path / f"{name}-out", folder).passed
    assert tamper.find(tmp_path / "llama-out", "embed")


def test_only_a_vocabulary_is_padded(tmp_path: Path) -> None:
    """A table that pads other rows: convert followed it, and its output failed the check."""
    from shard_plans.documents.yaml_text import load_yaml
    from shard_plans.families.binding import bind
    from shard_plans.placement.place import place

    config = CONFIGS["llama"] | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 6}
    source = write_little(tmp_path / "source", config, _llama(config))
    table, _ = load_yaml(load_family(config).document, "it")
    table["uneven"]["kv_heads"] = "pad 1"
    binding = bind(bound(source).checkpoint, parse_family(table))
    with pytest.raises(PlanError, match=r"is no vocabulary but attn.k, so its dimension .* can't be padded"):
        place(binding, make_plan(binding, {"tp": 3}))
    place(binding, make_plan(binding, {"tp": 2}))


def _llama(config: dict[str, object]) -> dict[str, Stored]:
    return little_tensors(load_family(config), config, random.Random(0))
