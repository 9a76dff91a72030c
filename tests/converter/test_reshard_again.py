"""Shards from shards: the same files however they are made, and however often that is interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from converter.check import check
from converter.output.parts import Part
from converter.sources.sharded import Sharded
from shard_plans.documents.manifest import ROOT
from tests.conftest import MakeCheckpoint
from tests.tools import crash
from tests.tools.converted import bound, contents, converted, small_chunks
from tests.tools.plans import plan_id

NAME = "deepseek_v3_mtp"
FIRST, SECOND = {"tp": 4, "ep": 2, "etp": 2}, {"pp": 2, "dp": 2, "tp": 2, "ep": 4}
KILLED: list[tuple[str, dict[str, int], dict[str, int]]] = [
    ("llama_odd", {"tp": 3}, {"pp": 3}), ("deepseek_v3_mtp", FIRST, SECOND),
    ("mixtral_odd", {"pp": 2, "tp": 2, "ep": 2}, {"tp": 2, "ep": 1}),
    ("qwen3_moe_fp8", {"dp": 2, "ep": 2, "etp": 1}, {"tp": 2}),
]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint, and shards of it: what is made of either must be the same."""
    folder = tmp_path_factory.mktemp("sources")
    converted(tiny(NAME), folder / "one", FIRST)
    return {"checkpoint": tiny(NAME), "shards": folder / "one"}


@pytest.fixture(scope="module")
def expected(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file but the root manifest, which says where they came from."""
    folder = tmp_path_factory.mktemp("expected")
    converted(sources["checkpoint"], folder / "out", SECOND, workers=1)
    return files(folder / "out")


def files(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(out).items() if name != ROOT}


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_workers_and_parts_change_nothing(
    sources: dict[str, Path], expected: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    converted(sources["shards"], tmp_path / "whole", SECOND, workers=workers)
    assert files(tmp_path / "whole") == expected
    for number in (3, 1, 4, 2):
        converted(sources["shards"], tmp_path / "parts", SECOND, workers=workers, part=Part(number, 4))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize("source", ["checkpoint", "shards"])
def test_processes_at_once_change_nothing(
    sources: dict[str, Path], expected: dict[str, bytes], tmp_path: Path, source: str
) -> None:
    """Four processes at a time, as on two machines with two each."""

    def make(number: int) -> Callable[[], object]:
        return lambda: converted(sources[source], tmp_path, SECOND, part=Part(number, 4))

    children = [crash.start(make(number)) for number in range(1, 5)]
    assert [crash.wait(child) for child in children] == [0, 0, 0, 0]
    if not (tmp_path / ROOT).exists():  # the last two saw each other at work
        converted(sources[source], tmp_path, SECOND, part=Part(1, 4))
    assert files(tmp_path) == expected


@pytest.mark.parametrize("source", ["checkpoint", "shards"])
def test_interruptions_change_nothing(
    sources: dict[str, Path], expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    crash.many_units(monkeypatch)
    converted(sources["checkpoint"], tmp_path / "one", FIRST)  # its digests are of smaller chunks
    origin = {"checkpoint": sources["checkpoint"], "shards": tmp_path / "one"}[source]
    converted(sources["checkpoint"], tmp_path / "direct", SECOND)
    whole = sum(len(data) for name, data in expected.items() if name.endswith(".safetensors"))
    assert crash.killed_halfway(origin, tmp_path / "two", SECOND, whole, workers=4)
    assert converted(origin, tmp_path / "two", SECOND, workers=3).bytes_kept > whole // 4
    assert files(tmp_path / "two") == files(tmp_path / "direct")
    shards = {name: data for name, data in files(tmp_path / "two").items() if name.endswith(".safetensors")}
    assert shards == {name: data for name, data in expected.items() if name.endswith(".safetensors")}


def kill_again_and_again(
    folder: Path, tmp_path: Path, first: dict[str, int], second: dict[str, int], kills: int, seed: int
) -> None:
    """Kill at random calls; each conversion goes on with what the last one left, and the end is the same bytes."""
    dice = random.Random(seed)
    one = tmp_path / "one"
    converted(folder, one, first)
    converted(folder, tmp_path / "direct", second)
    total = crash.calls(one, tmp_path / "undisturbed", second)
    expected = contents(tmp_path / "undisturbed")
    assert files(tmp_path / "undisturbed") == files(tmp_path / "direct")
    done = round_number = 0
    while done < kills:
        out = tmp_path / str(round_number)
        for _ in range(dice.randint(1, 3)):
            done += crash.killed(one, out, second, dice.randint(2, total), dice.choice([1, 2, 8]))
            if (out / ROOT).exists():
                assert check(out, one).failures == ()
        converted(one, out, second, workers=dice.choice([1, 2, 8]))
        assert contents(out) == expected
        round_number += 1


def test_kills(tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash.many_units(monkeypatch)
    kill_again_and_again(tiny("llama_odd"), tmp_path, {"tp": 3}, {"pp": 3}, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "first", "second"), KILLED, ids=lambda v: plan_id(v) if isinstance(v, dict) else v)
def test_many_kills(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: dict[str, int],
    second: dict[str, int], seed: int,
) -> None:  # fmt: skip
    crash.many_units(monkeypatch)
    kill_again_and_again(tiny(name), tmp_path, first, second, 5, seed)


@pytest.mark.parametrize("room", [4096, 70_000])
def test_small_memory_changes_nothing(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Pieces inside rows, windows that are halved, chunks that are read in parts."""
    small_chunks(monkeypatch, 4096)
    source = tiny("qwen3_moe_fp8")
    converted(source, tmp_path / "one", FIRST)
    converted(source, tmp_path / "direct", {"tp": 2, "ep": 4, "dp": 2})
    readers = Sharded.reader
    monkeypatch.setattr("converter.convert.MEMORY", 0)
    monkeypatch.setattr("converter.sources.windows.LEAST", 8192)
    monkeypatch.setattr(Sharded, "reader", lambda self, _: readers(self, room))
    result = converted(tmp_path / "one", tmp_path / "two", {"tp": 2, "ep": 4, "dp": 2}, workers=3)
    assert files(tmp_path / "two") == files(tmp_path / "direct")
    assert result.bytes_read < 2 * bound(source).checkpoint.total_bytes
    assert check(tmp_path / "two", deep=tmp_path / "one").passed
