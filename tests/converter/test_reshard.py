"""Shards of one plan into shards of another: the same files as from the checkpoint, and the chain is told."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.check import check
from converter.restore import restore
from converter.verbs import convert
from shard_plans.documents.manifest import ROOT, Origin, read_manifest
from shard_plans.documents.plan import Plan, plan_digest
from shard_plans.errors import GridError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.placement.experts import ExpertPlacement
from shard_plans.placement.place import place
from tests.checkpoints.architectures import ARCHITECTURES
from tests.checkpoints.variants import EDGES, MAIN
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.converted import bound, contents, converted
from tests.tools.kimi import TINY
from tests.tools.plans import make_plan, plan_id

Sizes = dict[str, int]
ONE: Sizes = {}
PAIRS: list[tuple[str, Sizes, Sizes]] = [
    ("llama", {"tp": 4}, {"tp": 2, "pp": 3}),  # KV heads repeated, then not
    ("llama_odd", {"tp": 3, "pp": 2}, ONE),  # a padded vocabulary
    ("llama_single", ONE, {"tp": 4}),
    ("qwen2", {"dp": 2, "pp": 3}, {"tp": 2}),  # a tied embedding on two stages
    ("mixtral_odd", {"tp": 2, "ep": 2}, {"pp": 3, "tp": 2, "ep": 1}),  # five experts
    ("qwen3_moe_fp8", {"tp": 4, "ep": 2, "etp": 2}, {"tp": 2, "ep": 2}),  # scales refined, then as stored
    ("qwen3_moe_fp8", {"tp": 2, "ep": 2}, {"tp": 4, "ep": 1, "etp": 4}),
    ("deepseek_v3_mtp", {"pp": 2, "dp": 2, "tp": 2, "ep": 4}, {"tp": 4, "ep": 2, "etp": 2}),
    ("deepseek_v3_full_q", {"tp": 4, "ep": 2, "etp": 1}, {"dp": 4, "ep": 2, "etp": 1}),
    ("gpt_oss_mxfp4", {"tp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4}),  # one stored tensor stacks the experts
    ("kimi_k25_int4", {"tp": 2, "ep": 2}, {"pp": 2, "tp": 2}),  # shapes that are stored are in no shard
]
CYCLE: tuple[Sizes, ...] = (
    {"tp": 2, "ep": 2}, {"pp": 2, "tp": 2}, {"tp": 4, "ep": 2, "etp": 2}, {"dp": 2, "tp": 2, "ep": 4}, ONE,
    {"pp": 3, "tp": 2}, {"tp": 4}, {"dp": 4, "ep": 4, "etp": 1}, {"pp": 3}, {"tp": 3},
)  # fmt: skip


def name_cell(value: object) -> str:
    return plan_id(value) if isinstance(value, dict) else str(value)


def differing(found: Path, wanted: Path) -> list[str]:
    """Files that aren't the same in both folders."""
    one, other = contents(found), contents(wanted)
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def without_chain(out: Path) -> dict[str, object]:
    """The root manifest but for what tells where it came from."""
    root: dict[str, object] = json.loads((out / ROOT).read_bytes())
    return {key: value for key, value in root.items() if key not in ("via", "digest")}


@pytest.mark.parametrize(("name", "first", "second"), PAIRS, ids=name_cell)
def test_shards_make_what_the_checkpoint_makes(
    tiny: MakeCheckpoint, tmp_path: Path, name: str, first: Sizes, second: Sizes
) -> None:
    made_again(tiny(name), tmp_path, first, second)


def test_zeros_that_no_shard_holds_are_zeros_again(tmp_path: Path) -> None:
    made_again(TINY, tmp_path, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 1})
    assert read_manifest(tmp_path / "two").constants


def made_again(source: Path, folder: Path, first: Sizes, second: Sizes) -> None:
    """Convert by the first plan, its output by the second; all but the chain is as if made by the second at once."""
    one, two, direct = folder / "one", folder / "two", folder / "direct"
    converted(source, one, first)
    converted(source, direct, second)
    converted(one, two, second)
    assert differing(two, direct) == [ROOT]
    assert without_chain(two) == without_chain(direct)
    assert check(two).passed
    for reference in (source, one, direct):
        found = check(two, deep=reference)
        assert found.passed, found.failures
    restore(two, folder / "back")
    for path in (folder / "back").iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes(), path.name


def test_the_chain_is_told(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, plans = tiny("qwen3_moe"), CYCLE[:3]
    outs = [tmp_path / str(number) for number in range(3)]
    converted(source, outs[0], plans[0])
    converted(outs[0], outs[1], plans[1])
    converted(outs[1], outs[2], plans[2])
    roots = [read_manifest(out) for out in outs]
    steps = [Origin(root.plan, root.digest) for root in roots]
    assert [root.via for root in roots] == [(), (steps[0],), (steps[0], steps[1])]
    assert {root.source.fingerprint for root in roots} == {bound(source).checkpoint.fingerprint}
    assert roots[0].plan == plan_digest(make_plan(bound(source), plans[0]))


def cycled(name: str, source: Path, folder: Path) -> int:
    """Every plan from the shards of the plan before it, from the checkpoint again by the last; how many there were."""
    before, count = source, 0
    for number, sizes in enumerate(CYCLE):
        try:
            direct = folder / f"direct-{number}"
            converted(source, direct, sizes)
        except (GridError, PlanError):
            continue  # test_architectures says which, and why
        out = folder / f"shards-{number}"
        converted(before, out, sizes)
        if before is not source:
            assert differing(out, direct) == [ROOT], sizes
        before, count = out, count + 1
    restore(before, folder / "back")
    for path in (folder / "back").iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes(), (name, path.name)
    return count


@pytest.mark.parametrize("name", ["llama", "deepseek_v3_fp8"])
def test_plan_after_plan_is_the_identity(tiny: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    assert cycled(name, tiny(name), tmp_path) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MAIN, *EDGES, *ARCHITECTURES])
def test_every_family_is_resharded(tiny: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    assert cycled(name, tiny(name), tmp_path) >= 3


@pytest.mark.slow
def test_kimi_is_resharded(tmp_path: Path) -> None:
    assert cycled("kimi_k3", TINY, tmp_path) >= 3


@st.composite
def plans(draw: st.DrawFn, binding: Binding) -> Plan:
    """Any plan of a tiny MoE: grid, stage borders, and which experts lie where, some of them twice."""
    tp, dp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if tp * dp % n == 0]))
    etp = draw(st.sampled_from([n for n in (1, 2, 4) if tp * dp // ep % n == 0]))
    plan = make_plan(binding, {"tp": tp, "dp": dp, "pp": pp, "ep": ep, "etp": etp})
    inner = sorted(draw(st.sets(st.integers(1, 2), min_size=pp - 1, max_size=pp - 1)))
    edges = [0, *inner, plan.stages[-1][1]]
    ids = list(range(1 + max(max(slot) for slot in plan.experts.default)))

    def slots() -> tuple[tuple[int, ...], ...]:
        order = draw(st.permutations(ids))
        return tuple((*order[slot::ep], *draw(st.lists(st.sampled_from(ids), max_size=2))) for slot in range(ep))

    layers = {2: slots()} if draw(st.booleans()) else {}
    return replace(plan, stages=tuple(pairwise(edges)), experts=ExpertPlacement(slots(), layers))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3_mtp", "qwen3_moe_fp8", "gpt_oss"])
def test_any_plan_after_any_plan_is_the_identity(
    tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    source = tiny(name)
    binding = bound(source)

    @settings(max_examples=25)
    @given(chain=st.lists(plans(binding), min_size=3, max_size=3), workers=st.integers(1, 4))
    def identity(chain: list[Plan], workers: int) -> None:
        folder, before = tmp_path_factory.mktemp("any"), source
        for number, plan in enumerate(chain):
            converted(before, folder / str(number), plan=plan, workers=workers)
            before = folder / str(number)
        converted(source, folder / "direct", plan=chain[-1])
        assert differing(before, folder / "direct") == [ROOT]
        restore(before, folder / "back")
        for path in (folder / "back").iterdir():
            assert path.read_bytes() == (source / path.name).read_bytes(), path.name
        shutil.rmtree(folder)

    identity()


def with_experts(
    plan: Plan, default: tuple[tuple[int, ...], ...], layers: dict[int, tuple[tuple[int, ...], ...]]
) -> Plan:
    return replace(plan, experts=ExpertPlacement(default, layers))


def test_experts_that_lie_anywhere(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Replicas that hold different experts, in different orders, some of them twice."""
    source, ids = tiny("qwen3_moe"), tuple(range(16))
    sizes = {"dp": 4, "ep": 2, "etp": 1}
    shuffled = tuple(ids[(7 * i + 3) % 16] for i in ids)
    first = with_experts(
        make_plan(bound(source), sizes),
        (ids[:8], ids[8:], shuffled[:8], (*shuffled[8:], 0, 0)),
        {1: (ids[8:], ids[:8], ids[4:12], (*ids[:4], *ids[12:]))},
    )
    second = with_experts(make_plan(bound(source), {"tp": 4, "ep": 4}), tuple(shuffled[n::4] for n in range(4)), {})
    converted(source, tmp_path / "one", plan=first)
    converted(source, tmp_path / "direct", plan=second)
    converted(tmp_path / "one", tmp_path / "two", plan=second)
    converted(tmp_path / "two", tmp_path / "back", plan=first)
    assert differing(tmp_path / "two", tmp_path / "direct") == [ROOT]
    assert differing(tmp_path / "back", tmp_path / "one") == [ROOT]


def test_each_byte_is_read_once_from_one_replica(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = tiny("deepseek_v3_mtp")
    total = bound(source).checkpoint.total_bytes
    converted(source, tmp_path / "one", {"pp": 2, "dp": 2, "tp": 2, "ep": 4})
    held = sum(path.stat().st_size for path in (tmp_path / "one").glob("*.safetensors"))
    result = converted(tmp_path / "one", tmp_path / "two", {"tp": 2, "ep": 2}, workers=1)
    assert result.bytes_read == total < held
    placement = place(bound(source), make_plan(bound(source), {"tp": 2, "ep": 2}))
    assert result.bytes_written == sum(file.nbytes for file in placement.files)


def test_what_was_left_out_stays_out(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = tiny("deepseek_v3_mtp")
    converted(source, tmp_path / "one", {"tp": 2}, mtp="drop")
    converted(source, tmp_path / "direct", {"pp": 2}, mtp="drop")
    converted(tmp_path / "one", tmp_path / "two", {"pp": 2}, mtp="drop")
    assert differing(tmp_path / "two", tmp_path / "direct") == [ROOT]
    assert check(tmp_path / "two", deep=tmp_path / "one").passed
    assert check(tmp_path / "two", deep=source).passed


def test_the_commands_tell_the_story(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    source, one, two, plan = tiny("deepseek_v3_fp8"), tmp_path / "one", tmp_path / "two", tmp_path / "plan.yaml"
    run_cli("convert", source, one, "--tp", 4, "--ep", 2)
    run_cli("plan-memory", one, "--cluster", "2x2:80GB", "--tp", 2, "--pp", 2, "-o", plan)
    direct = tmp_path / "direct.yaml"
    run_cli("plan-memory", source, "--cluster", "2x2:80GB", "--tp", 2, "--pp", 2, "-o", direct)
    assert plan.read_bytes() == direct.read_bytes()
    done = run_cli("convert", one, two, "--plan", plan, "--sha256", "--json").json
    assert done["bytes_written"] > 0 and done["ranks"] == 4
    assert "passed" in run_cli("check", two, "--deep", one).stdout
    assert "passed" in run_cli("check", one, "--deep", two).stdout
    root = read_manifest(one)
    found = run_cli("inspect", two, "--json").json
    assert found["via"] == [{"plan": root.plan, "manifest": root.digest}]
    assert (found["source"], found["manifest"]) == (root.source.fingerprint, read_manifest(two).digest)
    chain = f"checkpoint {root.source.fingerprint} -> output {root.digest} (plan {root.plan}) -> this output"
    assert chain in run_cli("inspect", two).stdout
    assert f"checkpoint {root.source.fingerprint} -> this output {root.digest}" in run_cli("inspect", one).stdout
    run_cli("restore", two, tmp_path / "back")
    for path in (tmp_path / "back").iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes(), path.name


@pytest.mark.parametrize(("name", "layout"), [("deepseek_v2", "deepseek-mp"), ("qwen3_moe", "vllm@0.33")])
def test_layouts_are_made_of_one_another(tiny: MakeCheckpoint, tmp_path: Path, name: str, layout: str) -> None:
    source = tiny(name)
    convert(source, tmp_path / "other", tp=2, ep=2, layout=layout)
    convert(source, tmp_path / "native", tp=4)
    convert(tmp_path / "other", tmp_path / "to-native", tp=4)
    convert(tmp_path / "native", tmp_path / "to-other", tp=2, ep=2, layout=layout)
    assert differing(tmp_path / "to-native", tmp_path / "native") == [ROOT]
    assert differing(tmp_path / "to-other", tmp_path / "other") == [ROOT]
    assert check(tmp_path / "to-other", deep=tmp_path / "to-native").passed
