"""Where views lie in a tensor, against the indexes that they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runtime.engines.watch import Watch, open_account
from shard_plans.errors import RuntimeFault


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, Tensor, bool]:
    """A tensor of its own indexes, a view of it, and whether the view is a rectangle."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    base = torch.arange(torch.Size(shape).numel()).view(shape)
    view, straight = base, True
    for kind in draw(st.lists(st.sampled_from(["narrow", "transpose", "select", "flatten", "step"]), max_size=4)):
        axis = draw(st.integers(0, max(view.ndim - 1, 0)))
        if kind == "narrow" and view.ndim:
            first = draw(st.integers(0, view.shape[axis] - 1))
            view = view.narrow(axis, first, draw(st.integers(1, view.shape[axis] - first)))
        elif kind == "transpose" and view.ndim:
            view = view.transpose(0, axis)
        elif kind == "select" and view.ndim:
            view = view.select(axis, draw(st.integers(0, view.shape[axis] - 1)))
        elif kind == "flatten" and view.is_contiguous():
            view, straight = view.view(-1), False
        elif kind == "step" and view.ndim:
            view, straight = view[::2], False
    return base, view, straight


@given(views())
def test_regions_cover_a_view_and_no_more_where_it_is_a_rectangle(case: tuple[Tensor, Tensor, bool]) -> None:
    base, view, straight = case
    found: set[int] = set()
    for region in open_account("", base).regions(view):
        part: Any = base
        for axis, ((first, stop),) in enumerate(region):
            part = part.narrow(axis, first, stop - first)
        found.update(part.flatten().tolist())
    wanted = set(view.flatten().tolist())
    assert found == wanted if straight else found >= wanted


class Owner:
    """What the memory of a stored tensor belongs to."""


@pytest.mark.parametrize(
    "read", [lambda t: t[2:], lambda t: t.T[:, 1:], lambda t: t.float()], ids=["rows", "turned", "all"]
)
def test_reading_what_is_not_there_is_refused(read: Any) -> None:
    parameter, stored, owner = torch.zeros(8), torch.ones(4, 4, dtype=torch.bfloat16), Owner()
    watch = Watch({"parameter": parameter})
    watch.lend(open_account("stored", stored, [(((0, 2),), ((0, 4),))]), stored, owner)
    with watch:
        parameter.copy_(stored[:2].reshape(-1))
        with pytest.raises(RuntimeFault, match=r"element \[2, 0\] of stored, which the plan gives to another rank"):
            read(stored).clone()
    assert watch.unwritten(parameter) is None


def test_a_hole_in_a_parameter_is_found() -> None:
    parameter = torch.zeros(4, 6).T  # whatever the order of its dimensions
    watch = Watch({"parameter": parameter, "alias": parameter})
    with watch:
        parameter[:, :2].copy_(torch.ones(6, 2))
        parameter[:3, 2:] = 1
    assert watch.unwritten(parameter) == (2, 3)
    with watch:
        parameter[3:, 2:].fill_(1)
    assert watch.unwritten(parameter) is None
    assert watch.unwritten(torch.zeros(3)) == (0,)


def test_memory_that_was_freed_is_forgotten() -> None:
    stored, owner = torch.ones(4), Owner()
    watch = Watch({})
    watch.lend(open_account("stored", stored, []), stored, owner)
    del owner
    with watch:
        stored.clone()
