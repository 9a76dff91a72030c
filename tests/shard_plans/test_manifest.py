"""Manifests: what is written reads back, and what a stranger wrote is refused in words."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard_plans.documents.digests import canonical_digest, canonical_json
from shard_plans.documents.manifest import format_manifest, read_manifest, read_shard_manifest, root_digest
from shard_plans.documents.shard_manifest import format_shard_manifest, parse_shard_manifest
from shard_plans.documents.shard_records import ManifestTensor, Piece, ShardManifest
from shard_plans.errors import ManifestError
from shard_plans.placement.shards import Cut
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.converted import converted

Json = dict[str, Any]
FILE = "stage-0-ep-0-etp-0.safetensors"


@pytest.fixture(scope="module")
def out(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifests") / "out"
    converted(tiny("deepseek_v3_mtp"), folder, {"tp": 2, "ep": 2}, mtp="drop")
    return folder


def test_manifests_are_written_as_they_were_read(out: Path) -> None:
    root = read_manifest(out)
    assert format_manifest(root) == (out / "manifest.json").read_bytes()
    for file in root.files:
        shard = read_shard_manifest(out, file.name, root)
        assert format_shard_manifest(shard) == (out / file.manifest).read_bytes()
        assert shard == read_shard_manifest(out, file.name)


def test_the_root_says_who_reads_what(out: Path) -> None:
    root = read_manifest(out)
    assert root.family == "deepseek_v3"
    assert [rank.files for rank in root.ranks] == [
        ("stage-0-tp-0.safetensors", "stage-0-ep-0-etp-0.safetensors"),
        ("stage-0-tp-1.safetensors", "stage-0-ep-1-etp-0.safetensors"),
    ]
    assert [document.name for document in root.documents[:2]] == ["plan.yaml", "family.yaml"]
    assert "config.json" in [file.name for file in root.carried]
    assert root.skipped
    with pytest.raises(ManifestError, match="lists no shard file 'x'"):
        root.file("x")


def test_digests_are_of_canonical_json() -> None:
    assert canonical_json({"b": 1, "a": ["\u00e9"]}) == b'{"a":["\\u00e9"],"b":1}'
    assert root_digest({"a": 1, "digest": "x"}) == canonical_digest({"a": 1})


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="holds no finished conversion"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "isn't a manifest of reshard"),
        ('{"format": "reshard", "version": 2}', "is of version 2; this reshard reads version 1"),
        ('{"format": "reshard", "version": 1}', "'family' is a required property"),
        ('{"format": "reshard", "format": "reshard"}', "'format' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": NaN}', "NaN isn't a JSON number"),
        ("\u00e9", "isn't ASCII"),
        ("", "Expecting value"),
    ],
)
def test_documents_that_are_no_manifest_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match=message):
        read_manifest(tmp_path)


def sealed(out: Path, tmp_path: Path, change: Callable[[Json], object]) -> Path:
    root = json.loads((out / "manifest.json").read_text())
    change(root)
    root["digest"] = root_digest(root)
    (tmp_path / "manifest.json").write_text(json.dumps(root))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: root["files"][0].update(name="../x"), r"files.0.name: '../x' does not match"),
        (lambda root: root["files"][0].update(manifest="a/b"), r"files.0.manifest"),
        (lambda root: root["documents"][0].update(name="/etc/passwd"), "documents.0.name"),
        (lambda root: root["documents"][0].update(name="source/../../x"), "documents.0.name"),
        (lambda root: root["carried"][0].update(name=".."), "carried.0.name"),
        (lambda root: root["source"]["files"][0].update(name="a\nb"), "source.files.0.name"),
        (lambda root: root["files"][0].update(size=1.0), "files.0.size: 1.0 is not of type 'integer'"),
        (lambda root: root["files"][0].update(size=-1), "files.0.size"),
        (lambda root: root["files"][0].update(xxh3="0" * 31 + "\n"), "files.0.xxh3"),
        (lambda root: root.update(more=1), "Additional properties"),
        (lambda root: root["files"].append(root["files"][0]), "lists one of its files twice"),
        (lambda root: root["ranks"][1].update(rank=0), "lists one of its ranks twice"),
        (lambda root: root["ranks"][0]["files"].append("x"), "gives rank 0 the file x, which it doesn't list"),
    ],
)
def test_roots_with_a_wrong_field_are_refused(
    out: Path, tmp_path: Path, change: Callable[[Json], object], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        read_manifest(sealed(out, tmp_path, change))


def test_a_changed_root_is_refused(out: Path, tmp_path: Path) -> None:
    text = (out / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"tp": 1', '"tp": 0'))
    with pytest.raises(ManifestError, match=r"states the digest [0-9a-f]{32}, but has [0-9a-f]{32}"):
        read_manifest(tmp_path)


def shard_json(out: Path) -> Json:
    value: Json = json.loads((out / FILE.replace(".safetensors", ".json")).read_text())
    return value


def first(value: Json) -> Json:
    entry: Json = value["tensors"][0]
    return entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format="x"), "format is 'x'"),
        (lambda v: v.update(version=True), "version True can't be read"),
        (lambda v: v.update(file="../x"), "not a plain name"),
        (lambda v: v["place"].update(x=1), "place .* isn't made of"),
        (lambda v: v.update(size=v["size"] + 1), "make another"),
        (lambda v: v.update(plan="x"), "plan is 'x', not a digest"),
        (lambda v: v.pop("header"), "lacks 'header'"),
        (lambda v: v.update(header=[]), "a field of the wrong kind"),
        (lambda v: v.update(tensors={}), "tensors isn't a list"),
        (lambda v: first(v).update(dtype="BF17"), "unknown dtype 'BF17'"),
        (lambda v: first(v).update(shape=[2]), "which .* bytes don't hold"),
        (lambda v: first(v).update(shape=[-2]), "in the place of sizes"),
        (lambda v: first(v).update(shape=[2.0]), "in the place of sizes"),
        (lambda v: first(v).update(offset=1), "starts at 1, but 0 is the end"),
        (lambda v: first(v).update(part="zero"), "is the part 'zero'"),
        (lambda v: first(v).update(block=[0, 1]), "has the block"),
        (lambda v: first(v).update(xxh3="0" * 33), "not a digest"),
        (lambda v: first(v).update(chunks="00" * 16), "has 1 chunk digests"),
        (lambda v: first(v).update(chunks="g" * 32), "aren't hexadecimal"),
        (lambda v: first(v).update(name=v["tensors"][1]["name"]), "two tensors are named"),
        (lambda v: first(v)["sources"][0].update(tensor=""), "which isn't a name"),
        (lambda v: first(v)["sources"][0].update(experts="0-99999"), "range '0-99999' is empty or makes more than"),
        (lambda v: first(v)["sources"][0].update(experts="0"), "stacks 1 experts"),
        (lambda v: first(v)["sources"][0].update(experts=None), "doesn't have one cut and one position for each"),
        (lambda v: first(v)["sources"][0].update(at=[0, 1]), "ends at"),
        (lambda v: first(v)["sources"][0]["cuts"][0].update(runs=[[0, 1], [0, 1]]), "runs ascend"),
        (lambda v: first(v)["sources"][0]["cuts"][0].update(runs=[[0]]), "has the run"),
        (lambda v: first(v)["sources"][0]["cuts"][0].update(repeat=0), "repeat of 0"),
    ],
)
def test_shard_manifests_with_a_wrong_field_are_refused(
    out: Path, change: Callable[[Json], object], message: str
) -> None:
    value = shard_json(out)
    parse_shard_manifest(value, "x.json")
    change(value)
    with pytest.raises(ManifestError, match=f"(?s)^x.json.*{message}"):
        parse_shard_manifest(value, "x.json")


NOISE = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.lists(
    st.integers(-1, 9), max_size=3
)  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_manifests_are_refused_or_valid(out: Path, data: st.DataObject) -> None:
    value = copy.deepcopy(shard_json(out))
    value["tensors"] = value["tensors"][:2]
    holder: Any = value
    while True:
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.integers(0, 3)):
            holder = holder[key]
            continue
        holder[key] = data.draw(NOISE)
        break
    try:
        parse_shard_manifest(value, "x.json")
    except ManifestError as error:
        assert str(error).startswith("x.json")


def test_a_shard_manifest_of_another_output_is_refused(out: Path, tmp_path: Path, tiny: MakeCheckpoint) -> None:
    converted(tiny("deepseek_v3_mtp"), tmp_path, {"tp": 2, "ep": 2}, mtp="keep")
    raw = (out / FILE.replace(".safetensors", ".json")).read_bytes()
    (tmp_path / FILE.replace(".safetensors", ".json")).write_bytes(raw)
    with pytest.raises(ManifestError, match=r"has the digest .* manifest.json states"):
        read_shard_manifest(tmp_path, FILE)
    tamper.seal(tmp_path)
    with pytest.raises(ManifestError, match=r"is of the plan .*: another output's file lies here"):
        read_shard_manifest(tmp_path, FILE)


def test_fifty_thousand_tensors_read_in_seconds() -> None:
    cut = (Cut(((0, 8),)), Cut(((0, 16),)))
    pieces = (Piece("a.{expert}.gate", (0, 1, 2), cut, (0, 0)), Piece("a.{expert}.up", (0, 1, 2), cut, (8, 0)))
    size = 3 * 16 * 16
    tensors = tuple(
        ManifestTensor(
            f"layers.{n}.experts.gate_up", "F8_E4M3", (3, 16, 16), n * size, size, "fp8_block", "values", (128, 128),
            "0" * 32, b"", pieces,
        )
        for n in range(50_000)
    )  # fmt: skip
    shard = ShardManifest("f", {"stage": 0}, "0" * 32, "0" * 32, 4096 + size * len(tensors), 4096, "0" * 32, tensors)
    raw = format_shard_manifest(shard)
    started = time.process_time()
    assert parse_shard_manifest(json.loads(raw), "f.json") == shard
    assert time.process_time() - started < 10  # about 1.5 where nothing else runs
