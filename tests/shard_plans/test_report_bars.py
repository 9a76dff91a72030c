"""The terminal view: bars as long as their bytes, the limit marked, readable without colour."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shard_plans.memory.ledger import LedgerRow
from shard_plans.report_bars import LETTERS, bar, show_bars


def row(
    rank: int = 0, weights: int = 0, kv_cache: int = 0, activations: int = 0, communication: int = 0, runtime: int = 0,
    capacity: int = 100, limit: int = 85,
) -> LedgerRow:  # fmt: skip
    total = weights + kv_cache + activations + communication + runtime
    return LedgerRow(
        rank, 0, weights, kv_cache, activations, communication, runtime, total, capacity, limit, total, total, total
    )


def shown(rows: list[LedgerRow], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    show_bars(rows, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_bar_by_hand() -> None:
    drawn = bar(row(weights=50, kv_cache=20, runtime=5), 100, 100).plain
    assert drawn == "W" * 50 + "K" * 20 + "R" * 5 + "." * 10 + "|" + "." * 13 + "]"


def test_what_is_too_much_runs_over_the_limit() -> None:
    drawn = bar(row(weights=200), 200, 100).plain
    assert drawn.count("|") == 1 and drawn.index("|") == 42 and drawn.count("]") == 1
    assert "too much" in shown([row(weights=200)]) and "too much" not in shown([row(weights=20)])


@given(st.lists(st.integers(0, 10**12), min_size=5, max_size=5), st.integers(1, 10**12), st.integers(8, 120))
def test_every_bar_has_its_width_and_all_that_is_there(parts: list[int], capacity: int, cells: int) -> None:
    w, k, a, c, r = parts
    found = row(0, w, k, a, c, r, capacity, int(capacity * 0.85))
    largest = max(found.total, capacity)
    drawn = bar(found, largest, cells).plain
    assert len(drawn) == cells and set(drawn) <= {letter for letter, _, _ in LETTERS.values()} | set(".|]")
    assert "|" in drawn


def test_ranks_alike_share_a_bar_and_many_are_cut_short() -> None:
    text = shown([row(rank, weights=40) for rank in range(8)])
    assert "0-7  W" in text and text.count("\n") == 2
    many = shown([row(rank, weights=rank % 85) for rank in range(200)])
    assert "136 more kinds of ranks" in many
    assert shown([]) == ""


@pytest.mark.parametrize("width", [40, 80, 200])
def test_narrow_and_wide(width: int) -> None:
    text = shown([row(weights=40, kv_cache=20)], width)
    assert "W" in text and "K" in text and "|" in text
