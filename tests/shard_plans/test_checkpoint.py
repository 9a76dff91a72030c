"""Checkpoint headers are read as untrusted input: refused by name, or truly valid."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from shard_plans.checkpoints.checkpoint import INDEX, open_checkpoint
from shard_plans.checkpoints.headers import Kinds, load_json, read_header
from shard_plans.errors import CheckpointError


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def folder_of(folder: Path, files: dict[str, dict[str, np.ndarray[Any, Any]]], config: object = None) -> Path:
    """A checkpoint of several files with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"} if config is None else config))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


TWO: dict[str, dict[str, np.ndarray[Any, Any]]] = {
    "a.safetensors": {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.zeros(0, np.int8)},
    "b.safetensors": {"z": np.ones((4,), np.float16)},
}


def test_columns_point_at_the_bytes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", TWO)
    (folder / "reference.safetensors").write_bytes(b"rubbish beside it is ignored")
    for name in ("tokenizer.json", "tokenizer.py", "vocab.txt", "tokenizer.pkl", "spiece.model", "chat_template.jinja"):
        (folder / name).write_text("{}")
    found = open_checkpoint(folder)
    assert len(found) == 3 and found.total_bytes == 24 + 8
    assert [file.name for file in found.files] == ["a.safetensors", "b.safetensors"]
    assert found.carried == ("chat_template.jinja", "config.json", INDEX, "spiece.model", "tokenizer.json", "vocab.txt")
    for file in TWO:
        for name, array in TWO[file].items():
            row = found.number(name)
            assert found.files[found.file_numbers[row]].name == file
            assert found.shapes[row] == array.shape
            raw = (folder / file).read_bytes()[found.starts[row] : found.starts[row] + found.sizes[row]]
            assert raw == array.tobytes()
    with pytest.raises(CheckpointError, match=r"no tensor 'w'"):
        found.number("w")


def test_one_file_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path)
    save_file(TWO["a.safetensors"], tmp_path / "model.safetensors")
    assert sorted(open_checkpoint(tmp_path).dtypes) == ["F32", "I8"]


def test_fingerprint_sees_names_dtypes_shapes_and_config(tmp_path: Path) -> None:
    base = open_checkpoint(folder_of(tmp_path / "0", TWO)).fingerprint
    regrouped = {"c.safetensors": {**TWO["a.safetensors"], **TWO["b.safetensors"]}}
    assert open_checkpoint(folder_of(tmp_path / "1", regrouped)).fingerprint == base
    changes: list[dict[str, Any]] = [
        {"x": TWO["a.safetensors"]["x"].T.copy(), "y": TWO["a.safetensors"]["y"]},
        {"x": TWO["a.safetensors"]["x"].view(np.int32), "y": TWO["a.safetensors"]["y"]},
        {"w": TWO["a.safetensors"]["x"], "y": TWO["a.safetensors"]["y"]},
    ]
    for number, change in enumerate(changes):
        other = folder_of(tmp_path / f"c{number}", {**TWO, "a.safetensors": change})
        assert open_checkpoint(other).fingerprint != base
    assert open_checkpoint(folder_of(tmp_path / "2", TWO, {"model_type": "other"})).fingerprint != base


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.pop("z"), "lies in b.safetensors.*doesn't name"),
        (lambda m: m.update(w="b.safetensors"), "lacks 1 tensors.*'w'"),
        (lambda m: m.update(x="b.safetensors"), "says b.safetensors"),
        (lambda m: m.update(w="gone.safetensors"), "gone.safetensors is missing"),
        (lambda m: m.update(z="../b.safetensors"), "plain file name"),
        (lambda m: m.update(z="/etc/passwd"), "plain file name"),
        (lambda m: m.update(z=".."), "plain file name"),
        (lambda m: m.update(z=""), "plain file name"),
        (lambda m: m.update(z="b\x1b[31m"), "holds the character"),
        (lambda m: m.update(z=3), "a file name is a word"),
        (lambda m: m.clear(), "no weight_map"),
    ],
)
def test_index_that_disagrees_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    folder = folder_of(tmp_path / "c", {**TWO, "b.safetensors": {**TWO["b.safetensors"], "q": np.ones(2, np.int8)}})
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", TWO)
    save_file({**TWO["b.safetensors"], "x": np.ones(2, np.int8)}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"'x' lies in b\.safetensors"):
        open_checkpoint(folder)


def test_links_may_not_leave_the_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", TWO)
    (folder / "b.safetensors").rename(tmp_path / "b.safetensors")
    (folder / "b.safetensors").symlink_to(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="link out of the folder"):
        open_checkpoint(folder)
    (folder / "b.safetensors").unlink()
    os.mkfifo(folder / "b.safetensors")
    with pytest.raises(CheckpointError, match="isn't a regular file"):
        open_checkpoint(folder)


def test_the_download_cache_of_the_hub_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blobs").mkdir()
    folder = folder_of(tmp_path / "snapshots" / "abc", TWO)
    (folder / "b.safetensors").rename(tmp_path / "blobs" / "1234")
    (folder / "b.safetensors").symlink_to("../../blobs/1234")
    assert len(open_checkpoint(folder)) == 3


@pytest.mark.parametrize(
    "config", ["[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, "\ufeff{}", '{"a": -Infinity}', "\udc80"]
)
def test_config_must_be_a_strict_json_object(tmp_path: Path, config: str) -> None:
    folder = folder_of(tmp_path / "c", TWO)
    (folder / "config.json").write_text(config, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"config.json"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        open_checkpoint(folder)


def entry(**changes: object) -> dict[str, object]:
    """One tensor's header entry of 4 bytes, changed."""
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


BAD: list[tuple[bytes, str]] = [
    (b"", "truncated"),
    (b"\x00\x00\x00", "truncated"),
    (raw_file({"a": entry()}, b"1234")[:-1], "truncated or has a tail"),
    (raw_file({"a": entry()}, b"12345"), "truncated or has a tail"),
    (raw_file({}, length=2**63), "at most"),
    (raw_file({}, length=200_000_000), "at most"),
    (raw_file(b" {}"), "start"),
    (raw_file(b'{"\xff": 1}'), "UTF-8"),
    (raw_file(b"{} {}"), "isn't the JSON"),
    (raw_file(b"{" * 200_000), "isn't the JSON"),
    (raw_file(b'{"a":' * 200_000), "nested too deeply|isn't the JSON"),
    (raw_file({"a": 3}), "must have dtype"),
    (raw_file({"a": entry(extra=1)}, b"1234"), "must have dtype"),
    (raw_file({"a": entry(dtype="F31")}, b"1234"), "known are"),
    (raw_file({"a": entry(dtype=["F32"])}, b"1234"), "known are"),
    (raw_file({"a": entry(shape=1)}, b"1234"), "isn't a list"),
    (raw_file({"a": entry(shape=[True])}, b"1234"), "whole number"),
    (raw_file({"a": entry(shape=[1.0])}, b"1234"), "whole number"),
    (raw_file({"a": entry(shape=[-1])}, b"1234"), "aren't in"),
    (raw_file({"a": entry(shape=[2**40, 2**40, 0])}, b"1234"), "aren't in"),
    (raw_file({"a": entry(shape=[2**70])}, b"1234"), "aren't in"),
    (raw_file({"a": entry(shape=[2])}, b"1234"), "8 bytes.*hold 4"),
    (raw_file({"a": entry(dtype="F4", shape=[7])}, b"1234"), "3.5 bytes"),
    (raw_file({"a": entry(data_offsets=[0, 4, 4])}, b"1234"), "data_offsets"),
    (raw_file({"a": entry(data_offsets=[4, 0])}, b"1234"), "start <= end"),
    (raw_file({"a": entry(data_offsets=[0, True])}, b"1234"), "data_offsets"),
    (raw_file({"a": entry(data_offsets=[1, 5])}, b"12345"), "hole"),
    (raw_file({"a": entry(), "b": entry()}, b"1234"), "overlaps"),
    (raw_file({"a\x1b[2J": entry()}, b"1234"), "holds the character"),
    (raw_file(b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"1234"), "holds the character"),
    (raw_file(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-0, 4]}}', b"1234"), "-0"),
    (raw_file(b'{"a": {"dtype": "F32", "shape": [1], "shape": [1], "data_offsets": [0, 4]}}', b"1234"), "occurs twice"),
    (raw_file({"__metadata__": {"a": 1}}), "words to words"),
    (raw_file({"__metadata__": [1]}), "words to words"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_malformed_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path, Kinds())
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_packed_types_and_shared_kinds(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(raw_file({"a": entry(dtype="F4", shape=[2, 4]), "b": entry(data_offsets=[4, 8])}, b"12345678"))
    kinds = Kinds()
    first, again = read_header(path, kinds), read_header(path, kinds)
    assert first.sizes.tolist() == [4, 4] and first.shapes[0] is again.shapes[0]


@pytest.mark.parametrize("text", ["1e999999", "9" * 5000, '{"a": Infinity}', "[-NaN]"])
def test_json_numbers_are_finite(text: str) -> None:
    with pytest.raises(CheckpointError):
        load_json(text, "it")


DTYPES = [np.float32, np.float16, np.int8, np.int64, np.bool_, np.uint16]
tensors_strategy: st.SearchStrategy[dict[str, np.ndarray[Any, Any]]] = st.dictionaries(
    st.text("abcé.0", min_size=1, max_size=6),
    st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES)).map(lambda p: np.zeros(p[0], p[1])),
    max_size=4,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=tensors_strategy, data=st.data())
def test_what_is_accepted_is_valid(
    tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    """Mutated files: whatever we accept, the safetensors library accepts too, with the same tensors."""
    content = bytearray(save(tensors))
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    assert sorted(read_header(path, Kinds()).names) == sorted(tensors)
    header_length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        if not content:
            break
        where = data.draw(st.integers(0, min(len(content) - 1, 8 + header_length)))
        kind = data.draw(st.sampled_from(["set", "digit", "cut", "insert"]))
        if kind == "set":
            content[where] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            digits = [i for i in range(8, min(len(content), 8 + header_length)) if chr(content[i]).isdigit()]
            if digits:
                content[data.draw(st.sampled_from(digits))] = ord(data.draw(st.sampled_from("0123456789")))
        elif kind == "cut":
            del content[where : where + data.draw(st.integers(1, 4))]
        else:
            content[where:where] = data.draw(st.sampled_from([b" ", b"0", b"-", b',"a":1', b"[]", b"\x00"]))
    path.write_bytes(content)
    try:
        ours = read_header(path, Kinds())
    except CheckpointError:
        return
    with safetensors.safe_open(path, "np") as theirs:
        assert sorted(theirs.keys()) == sorted(ours.names)
        for name, dtype, shape in zip(ours.names, ours.dtypes, ours.shapes, strict=True):
            part = theirs.get_slice(name)
            assert part.get_dtype() == dtype and tuple(part.get_shape()) == shape
