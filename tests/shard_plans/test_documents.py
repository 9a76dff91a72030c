"""YAML is read strictly, with lines, and reads back what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_plans.documents.yaml_text import check_schema, dump_yaml, load_yaml
from shard_plans.errors import FamilyError, PlanError, ReshardError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("true", True), ("false", False), ("True", "True"), ("~", None),
        ("null", None), ("", None), ("1e-6", 1e-6), ("1.", 1.0), (".5", 0.5), ("-3", -3), ("0-3", "0-3"),
        ("007", "007"), ("0x10", "0x10"), ("1_000", "1_000"),
        ("12:30", "12:30"), ("2026-01-01", "2026-01-01"), (".inf", ".inf"),
        ("'12'", "12"), ('"true"', "true"), ("=eps", "=eps"), ("<<", "<<"), ("[]", []), ("{}", {}),
    ],
)  # fmt: skip
def test_scalars(text: str, value: Any) -> None:
    data, _ = load_yaml(f"a: {text}", "it")
    assert data == {"a": value} and type(data["a"]) is type(value)


def test_keys_are_text_and_have_lines() -> None:
    data, lines = load_yaml("# note\na:\n  3: [x,\n    y]\n  true: 1\n", "it")
    assert data == {"a": {"3": ["x", "y"], "true": 1}}
    assert lines[("a",)] == 2 and lines[("a", "3")] == 3 and lines[("a", "3", 1)] == 4 and lines[("a", "true")] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' occurs twice, first in line 1"),
        ("1: a\n'1': b", "occurs twice"),
        ("a: &x 1", "anchor"),
        ("a: &x [1]\nb: *x", "anchor"),
        ("a: *x", "alias"),
        ("a: !!python/object:os.system x", "tag"),
        ("a: !x 1", "tag"),
        ("a: ! 1", "tag"),
        ("? [a]\n: 1", "key must be a word"),
        ("? {a: 1}\n: 1", "key must be a word"),
        ("a: 1\n---\nb: 2", "2 documents"),
        ("", "0 documents"),
        ("a: [1", "line"),
        ("a: 'x", "line"),
        ("a:\tb: c", "line"),
        ("a: \x01", "isn't YAML|line"),
        ("a: " + "[" * 100 + "]" * 100, "nested more than"),
        ("a: " + "9" * 30, "too large"),
        ("a: 1e999", "too large"),
        ("a: \ud800", "isn't YAML|line"),
    ],
)
def test_ambiguous_documents_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_yaml(text, "it", PlanError)


def test_deep_nesting_is_refused_without_a_crash() -> None:
    with pytest.raises(FamilyError, match="nest"):
        load_yaml("[" * 2_000, "it")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="missing"):
        load_yaml(tmp_path / "no.yaml", "it")
    with pytest.raises(FamilyError, match="missing or not a file"):
        load_yaml(tmp_path, "it")
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a: \xff")
    with pytest.raises(FamilyError, match="UTF-8"):
        load_yaml(path, "it")
    path.write_text("a: é")
    assert load_yaml(path, "it")[0] == {"a": "é"}


TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "yes",
        "1e-6",
        "true",
        "~",
        "",
        "=",
        "<<",
        "- a",
        "0-3",
        "0x1",
        " a",
        "a: b",
        "# c",
        "null",
        "1.5",
        "!x",
        "&a",
        "%",
    ]
)
DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(DATA)
def test_what_is_written_reads_back(data: Any) -> None:
    assert load_yaml(dump_yaml({"a": data}), "it")[0] == {"a": data}
    assert load_yaml(dump_yaml({"a": data}, flow=True), "it")[0] == {"a": data}


@settings(max_examples=200, deadline=None)
@given(st.text("ab:[]{}-\n #&*!'\"1,?|>%@~", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        load_yaml(text, "it")
    except ReshardError as error:
        assert "it" in str(error)


SCHEMA = {
    "type": "object",
    "required": ["a"],
    "additionalProperties": False,
    "properties": {
        "a": {"type": "integer", "minimum": 1, "maximum": 9},
        "b": {"enum": ["x", "y"]},
        "c": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[0-9]+-[0-9]+$", "description": "a range: 0-3"},
        },
        "d": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    },
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b: x", "line 1: the document lacks the key 'a'"),
        ("a: 1\nz: 2", "unknown key 'z'; allowed: a, b, c, d"),
        ("b: x\na: 0", "line 2: a is 0; it must be at least 1"),
        ("a: 10", "at most 9"),
        ("a: true", "a is True; it must be a whole number"),
        ("a: x", "it must be a whole number"),
        ("a: 1\nb: z", "line 2: b is 'z'; allowed: x, y"),
        ("a: 1\nc:\n- 0-3\n- oops", "line 4: c / 1 is 'oops'; it must be a range: 0-3"),
        ("a: 1\nc: 3", "it must be a list"),
        ("a: 1\nd: [1]", "line 2: d"),
        ("[1]", "the document is .*; it must be a mapping"),
    ],
)
def test_schema_faults_name_key_line_and_what_is_allowed(text: str, message: str) -> None:
    data, lines = load_yaml(text, "it")
    with pytest.raises(PlanError, match=message):
        check_schema(data, SCHEMA, lines, "it", PlanError)


def test_a_right_document_passes() -> None:
    data, lines = load_yaml("a: 1\nb: x\nc: [0-3]\nd: q", "it")
    check_schema(data, SCHEMA, lines, "it", PlanError)
