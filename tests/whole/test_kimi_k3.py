"""Kimi K3 over every kind of plan: the shards compute what the published code computes, and hold every byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from converter.verbs import check, restore
from runtime.checking.reference import Reference
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.placement.grid import make_grid
from shard_plans.verbs import open_binding
from tests.tools.kimi import TINY
from tests.tools.plans import plan_id
from tests.tools.sharded import CPU, Computed, convert_tiny, relative, run_output

PLANS: tuple[dict[str, int], ...] = (
    {}, {"tp": 2}, {"tp": 3}, {"tp": 6}, {"dp": 4, "ep": 4}, {"dp": 4, "tp": 2, "ep": 8},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "pp": 3}, {"pp": 7},
)  # fmt: skip
EXPECTED = load_file(TINY / "expected.safetensors")
IDS, LOGITS = EXPECTED["input_ids"], EXPECTED["logits_f64"]
EXACT, SINGLE = 1e-10, 1e-4


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Path]]:
    """Plan -> its output, made when it is first asked for."""
    yield Outputs(tmp_path_factory.mktemp("kimi"))


class Outputs(dict[str, Path]):
    """Outputs by the plan's name."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        sizes = next(sizes for sizes in PLANS if plan_id(sizes) == name)
        self[name] = out = self._folder / name.replace(" ", "-")
        convert_tiny(TINY, out, sizes)
        return out


@pytest.fixture(scope="module")
def routes() -> Mapping[int, Tensor]:
    """Layer -> the experts of each token, chosen by the reference in float64."""
    with Reference(open_binding(TINY), torch.float64, CPU) as reference:
        reference.begin(IDS)
        records = [reference.next_layer() for _ in range(14)]
        assert relative(reference.logits(), LOGITS) < EXACT
    return {r.layer.index: r.routing.indices.sort(dim=-1).values for r in records if r.routing is not None}


def assert_right(computed: Computed, limit: float, routes: Mapping[int, Tensor], sizes: Mapping[str, int]) -> None:
    """Logits on every rank of the last stage; every layer's routes on every rank that ran it."""
    grid = make_grid(**sizes)
    assert len(computed.logits) == grid.stage_ranks
    for scores in computed.logits:
        assert relative(scores, LOGITS) < limit
    ran = [(layer, chosen) for watch in computed.watches for layer, chosen in watch.routes.items()]
    assert len(ran) == 13 * grid.stage_ranks
    for layer, chosen in ran:
        assert chosen.sort(dim=-1).values.equal(routes[layer])


@pytest.mark.parametrize("plan", [plan_id(sizes) for sizes in PLANS])
def test_logits_are_those_of_the_published_code(
    plan: str, outputs: Mapping[str, Path], routes: Mapping[int, Tensor]
) -> None:
    sizes = next(sizes for sizes in PLANS if plan_id(sizes) == plan)
    assert_right(run_output(outputs[plan], IDS, torch.float64), EXACT, routes, sizes)
    assert_right(run_output(outputs[plan], IDS, torch.float32), SINGLE, routes, sizes)


@pytest.mark.parametrize("plan", [plan_id(sizes) for sizes in PLANS])
def test_every_byte_is_there_and_comes_back(plan: str, outputs: Mapping[str, Path], tmp_path: Path) -> None:
    found = check(outputs[plan], deep=TINY)
    assert found.passed, found.failures
    restore(outputs[plan], tmp_path / "back")
    names = {path.name for path in TINY.iterdir()} - {"expected.safetensors"}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (TINY / name).read_bytes(), name


@pytest.mark.parametrize("plan", ["one rank", "dp2 tp2 ep2 etp2", "tp2 pp3"])
@pytest.mark.parametrize("chunks", [[1] * 17, [9, 1, 7]], ids=["token by token", "in chunks"])
def test_the_cache_gives_what_one_pass_gives(plan: str, chunks: list[int], outputs: Mapping[str, Path]) -> None:
    for scores in run_output(outputs[plan], IDS, torch.float64, chunks).logits:
        assert relative(scores, LOGITS) < EXACT


@pytest.mark.parametrize(("plan", "compute", "limit"), [("tp2 pp3", "float32", 1e-5), ("dp4 ep4", "float64", 1e-13)])
def test_the_ladder_passes(plan: str, compute: str, limit: float, outputs: Mapping[str, Path]) -> None:
    result = verify_and_run(RunOptions(outputs[plan], TINY, compute=compute, max_new_tokens=3))
    assert result.passed, [found for found in result.checks if not found.passed]
    measured = {found.name: found.worst for found in result.checks}
    assert {"hashes", "bytes", "layers", "routing", "hidden", "logits"} <= set(measured)
    assert all((measured[name] or 0) < limit for name in ("layers", "hidden", "logits"))
    assert len(result.generated) == 3
