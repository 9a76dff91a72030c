"""The error measures, and which routing differences rounding can explain."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from runtime.blocks.router import Routing, route
from runtime.checking import compare
from runtime.checking.checks import Measure, make_check, worst
from runtime.checking.compare import (
    compare_routing,
    cosine,
    divergence,
    layer_error,
    log_likelihood,
    operator_error,
    relative,
    relative_margin,
    row_errors,
)


def test_relative_error() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative(reference, reference) == 0
    assert relative(reference + torch.tensor([0.0, 0.5]), reference) == pytest.approx(0.1)
    assert math.isnan(relative(torch.tensor([math.nan, 4.0]), reference))
    assert relative(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative(torch.zeros(2), torch.zeros(2)) == 0


def test_cosine() -> None:
    assert cosine(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])) == pytest.approx(1)
    assert cosine(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])) == pytest.approx(0)
    assert math.isnan(cosine(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 0.0])))


def test_a_layers_error_is_not_diluted_by_the_stream() -> None:
    start = torch.full((3, 4), 100.0)
    reference = start + 1
    ours = reference.clone()
    ours[2] += 0.5  # half of what the layer added, 0.5 % of the stream
    error, token = layer_error(start, ours, reference)
    assert token == 2
    assert error == pytest.approx(0.5)


def test_a_layers_error_finds_nan() -> None:
    start, reference = torch.zeros(3, 4), torch.ones(3, 4)
    ours = reference.clone()
    ours[1, 3] = math.nan
    error, token = layer_error(start, ours, reference)
    assert math.isnan(error)
    assert token == 1


def test_log_likelihood() -> None:
    scores = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1.0, 1.0, 1.0]]))
    assert log_likelihood(scores, torch.tensor([0, 1, 2])) == pytest.approx((math.log(0.25) + math.log(0.8)) / 2)


def test_divergence_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    ours, reference = torch.randn(5, 7, generator=generator), torch.randn(5, 7, generator=generator)
    wanted = functional.kl_div(
        ours.double().log_softmax(-1), reference.double().log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert divergence(ours, reference) == pytest.approx(float(wanted), rel=1e-12)
    assert divergence(ours, ours) == 0 and divergence(ours + 3, ours) == pytest.approx(0, abs=1e-6)


def test_pieces_of_long_texts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    ours, reference = torch.randn(11, 7, generator=generator), torch.randn(11, 7, generator=generator)
    ids = torch.randint(7, (11,), generator=generator)

    def measured() -> list[float]:
        pair = (ours, reference)
        return [relative(*pair), cosine(*pair), divergence(*pair), log_likelihood(ours, ids)]

    whole = measured()
    monkeypatch.setattr(compare, "SLAB", 15)  # two rows at a time
    assert measured() == pytest.approx(whole, rel=1e-12)


def test_an_operator_is_measured_token_by_token() -> None:
    reference = torch.tensor([[1.0, 0.0], [0.0, 1e-6], [2.0, -math.inf]])
    ours = reference.clone()
    ours[1, 1] = 0  # all of it, but below FLOOR of the largest
    error, token = operator_error(ours, reference)
    assert token == 1 and error == pytest.approx(1e-6 / 2e-3)
    ours[0, 1] = 0.1
    error, token = operator_error(ours, reference)
    assert token == 0 and error == pytest.approx(0.1)
    ours[2, 0] = math.nan
    error, token = operator_error(ours, reference)
    assert math.isnan(error) and token == 2
    assert row_errors(ours[:1], reference[:1]).item() == pytest.approx(0.1)


def test_routes_are_compared_as_sets_and_near_ties_counted_apart() -> None:
    reference = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    ours = torch.tensor([[1, 0], [2, 4], [4, 6], [6, 7]])
    margin = torch.tensor([1e-9, 1e-2, 1e-7, 1.0])
    routed = compare_routing(ours, reference, margin, 1e-5)
    assert routed.wrong == (1,)
    assert routed.ties == (2,)
    assert routed.margin == pytest.approx(1e-9)


def test_a_margin_that_is_nan_explains_nothing() -> None:
    margin = torch.tensor([math.nan])
    assert compare_routing(torch.tensor([[1]]), torch.tensor([[0]]), margin, 1.0).wrong == (0,)


def test_margins_are_relative_to_the_largest_score() -> None:
    weight = torch.eye(4)
    x = torch.tensor([[4.0, 2.0, 1.0, 0.0]])
    routing = route({"score": "sigmoid"}, 2, x, weight, None)
    scores = x.sigmoid()
    assert relative_margin(routing).item() == pytest.approx(float((scores[0, 1] - scores[0, 2]) / scores[0, 0]))
    dropped = Routing(
        torch.tensor([[0]]), torch.ones(1, 1), torch.tensor([[0.5, -math.inf]]), torch.tensor([0.25])
    )  # fmt: skip
    assert relative_margin(dropped).item() == 0.5


def test_the_worst_measure_and_its_check() -> None:
    measures = [Measure("a", 1.0, "x"), Measure("a", 3.0, "y"), Measure("b", 9.0, "z")]
    found = worst(measures[:2])
    assert found is not None
    assert found.where == "y"
    check = make_check("a", measures, 2.0)
    assert check is not None
    assert (check.passed, check.worst, check.where) == (False, 3.0, "y")
    low = make_check("a", measures, 0.5, high=False)
    assert low is not None
    assert (low.passed, low.worst) == (True, 1.0)
    assert make_check("c", measures, 1.0) is None


@pytest.mark.parametrize("high", [True, False])
def test_nan_never_passes(high: bool) -> None:
    measures = [Measure("a", 0.5, "x"), Measure("a", math.nan, "layer 3"), Measure("a", 0.7, "y")]
    check = make_check("a", measures, 0.5, high=high)
    assert check is not None
    assert not check.passed
    assert check.worst is None
    assert "layer 3" in check.where
    assert "nan" in check.where


def test_of_what_fails_the_first_in_order_is_named_not_the_worst() -> None:
    measures = [Measure("a", 5.0, "later", 7), Measure("a", 3.0, "first", 2), Measure("a", 1.0, "passes", 1)]
    check = make_check("a", measures, 2.0)
    assert check is not None and not check.passed
    assert (check.worst, check.where) == (3.0, "first")
