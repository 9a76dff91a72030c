"""A hundred thousand mutated documents; a few hundred of them whenever the tests run.

RESHARD_FUZZ_SEED chooses other ones. A fault names its case: `python -m tests.fuzz.campaign --case SEED/TARGET/NUMBER`
runs it again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fuzz import trees
from tests.fuzz.campaign import TARGETS, Tally, campaign
from tests.fuzz.guard import Guard
from tests.tools.crash import forked

SEED = os.environ.get("RESHARD_FUZZ_SEED", "0")


def judge(found: dict[str, Tally]) -> None:
    """No fault; and each target saw cases that are refused, and some that are valid where there are many."""
    faults = [fault for tally in found.values() for fault in tally.faults]
    assert not faults, "\n".join(faults[:10])
    assert set(found) == set(TARGETS)
    for name, tally in found.items():
        assert tally.refused, name
        assert tally.valid or tally.cases < 100, name


def test_some_mutated_documents() -> None:
    judge(campaign(200, SEED, processes=1))


@pytest.mark.slow
def test_a_hundred_thousand_mutated_documents() -> None:
    found = campaign(100_000, SEED)
    assert sum(tally.cases for tally in found.values()) > 99_900
    judge(found)


def escape(folder: Path) -> None:
    (folder.parent / "elsewhere").write_text("x")


def escape_by_name(folder: Path) -> None:
    os.rename(folder / "inside", folder.parent / "elsewhere")


def escape_by_link(folder: Path) -> None:
    (folder / "link").write_text("x")


def look_elsewhere(folder: Path) -> None:
    (folder.parent / "secret").read_text()


def take_memory(folder: Path) -> None:
    assert len(bytes(1 << 30)) and len(b"x" * (300 << 20))


def ask_for_all_memory(folder: Path) -> None:
    bytearray(1 << 40)


def compute_for_ever(folder: Path) -> None:
    while True:
        pass


def run_a_command(folder: Path) -> None:
    os.system("true")


@pytest.mark.parametrize(
    "act",
    [escape, escape_by_name, escape_by_link, look_elsewhere, take_memory, ask_for_all_memory, compute_for_ever,
     run_a_command],
    ids=lambda act: act.__name__,
)  # fmt: skip
def test_the_guard_notices(tmp_path: Path, act: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what no input may do doesn't pass unseen."""
    monkeypatch.setattr("tests.fuzz.guard.CPU", 0.5)
    folder = tmp_path / "sandbox"
    folder.mkdir()
    (folder / "inside").write_text("x")
    (folder / "link").symlink_to(tmp_path / "linked")
    (tmp_path / "secret").write_text("x")

    def work() -> str:
        guard = Guard(folder, ())
        try:
            with guard.case():
                act(folder)  # type: ignore[operator]
        except (AssertionError, MemoryError):
            return "noticed"
        return "unseen"

    assert forked(work, report=tmp_path / "report") == 0
    assert (tmp_path / "report").read_text() == "noticed"
    assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "linked").exists()


def test_the_guard_lets_the_rest_pass(tmp_path: Path) -> None:
    def work() -> str:
        guard = Guard(tmp_path, ())
        with guard.case():
            (tmp_path / "a").write_text("x")
            os.rename(tmp_path / "a", tmp_path / "b")
            (tmp_path / "b").unlink()
        return "passed"

    assert forked(work) == 0


def test_trees_write_what_no_json_library_would() -> None:
    tree = trees.parse('{"a": [1, {"b": null}], "c": "\\u00e9"}')
    assert trees.plain(tree) == {"a": [1, {"b": None}], "c": "\u00e9"}
    tree.pairs.append(trees.Pair("a", trees.Raw("NaN")))
    assert trees.text(tree).endswith('"a": NaN}')
    assert len(list(trees.spots([tree]))) == 7
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL  # limits belong to the processes of the cases
