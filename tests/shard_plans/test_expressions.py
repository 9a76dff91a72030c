"""Expressions over config.json: the grammar, and that nothing outside it is ever run."""

from __future__ import annotations

import warnings
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_plans.errors import ConfigError, FamilyError, ReshardError
from shard_plans.families.expressions import MissingKey, evaluate, first_value

CONFIG = {
    "a": 6,
    "b": 4,
    "kinds": ["x", "y"],
    "deep": {"n": 3, "list": [5, 7]},
    "flag": True,
    "gone": None,
    "word": "w",
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a // b * 2 + 1", 3), ("a % b", 2), ("-a + 10", 4), ("deep.n", 3), ("deep.list[1]", 7), ("kinds[layer]", "y"),
        ("layer + 1 in deep.list", False), ("a == 6 and b < a", True), ("not flag or a > b", True), ("len(kinds)", 2),
        ("0 < b <= 4", True), ("kinds[layer] == 'y'", True), ("false", False), ("'x' in kinds", True),
        ("[1, a]", [1, 6]),
    ],
)  # fmt: skip
def test_values(text: str, value: object) -> None:
    assert evaluate(text, CONFIG, {"layer": 1}) == value


def test_first_alternative_whose_keys_exist() -> None:
    assert first_value(["missing", "gone", "a"], CONFIG) == 6
    assert first_value(["missing", 0], CONFIG) == 0
    with pytest.raises(MissingKey, match="'missing'"):
        first_value(["missing", "gone"], CONFIG)


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "a ** 9", "open('x')", "(lambda: 1)()", "[x for x in kinds]", "a if b else 1", "len(kinds, 1)",
     "f'{a}'", "a :=", "", "a; b", "deep['n'].__class__()", "1j", "x" * 400, "b'x'", "a << 99",
     "1in kinds", "0x1or a", r"word == '\d'"],
)  # fmt: skip
def test_outside_the_grammar(text: str) -> None:
    with warnings.catch_warnings(record=True) as told, pytest.raises(FamilyError):
        warnings.simplefilter("always")
        evaluate(text, CONFIG)
    assert not told


@pytest.mark.parametrize(
    "text", ["a // 0", "word * 1000000", "kinds[9]", "a.n", "a in b", "word + 1", "deep.n.__class__"]
)
def test_values_that_do_not_fit(text: str) -> None:
    with pytest.raises(ConfigError):
        evaluate(text, CONFIG)


@given(st.text(max_size=40))
def test_any_text_is_a_value_or_a_fault_of_ours(text: str) -> None:
    with suppress(ReshardError):
        evaluate(text, CONFIG)
