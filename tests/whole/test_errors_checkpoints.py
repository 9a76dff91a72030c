"""Bad checkpoints through the command: exit code 2, one sentence that says what and where, nothing half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.store import INDEX
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.refusals import edit, nothing_whole, refused

FIRST = "model-00001-of-00004.safetensors"


def reheader(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file, its data left as they are."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def first_tensor(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of the tensor whose bytes come first."""
    entry: dict[str, Any] = min(
        (entry for name, entry in header.items() if name != "__metadata__"), key=lambda entry: entry["data_offsets"]
    )
    return entry


def hole(header: dict[str, Any]) -> None:
    for name in list(header):
        if name != "__metadata__" and header[name] is first_tensor(header):
            del header[name]
            return


def long_header(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def not_json(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:8] + b"[" + raw[9:])


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


SPOILT_FILES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "cut short": cut_short,
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "a header longer than the file": long_header,
    "a header that isn't JSON": not_json,
    "an unknown dtype": lambda path: reheader(path, lambda h: first_tensor(h).update(dtype="F7")),
    "a shape that disagrees with the bytes": lambda path: reheader(path, lambda h: first_tensor(h).update(shape=[3])),
    "a negative size": lambda path: reheader(path, lambda h: first_tensor(h).update(shape=[-1, -1])),
    "an overlap": lambda path: reheader(path, lambda h: h.update(again=dict(first_tensor(h)))),
    "a hole": lambda path: reheader(path, hole),
}


@pytest.mark.parametrize("fault", SPOILT_FILES)
def test_spoilt_checkpoint_files(fault: str, own_tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    folder, out, plan = own_tiny("llama"), tmp_path / "out", tmp_path / "plan.yaml"
    SPOILT_FILES[fault](folder / FIRST)
    refused(run_cli("plan-memory", folder, "--cluster", "1x2:80GB", "-o", plan, code=2), FIRST)
    assert not plan.exists()
    refused(run_cli("convert", folder, out, "--tp", 2, code=2), FIRST)
    nothing_whole(out, run_cli)


def escape(index: dict[str, Any]) -> None:
    index["weight_map"] = {name: "../" + file for name, file in index["weight_map"].items()}


SPOILT_INDEXES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path that leaves the folder": (escape, "../"),
    "a tensor in the wrong file": (lambda i: i["weight_map"].update({"model.norm.weight": FIRST}), "model.norm.weight"),
    "a tensor that no file has": (lambda i: i["weight_map"].update({"model.more.weight": FIRST}), "model.more.weight"),
    "no map": (lambda i: i.pop("weight_map"), "weight_map"),
}


@pytest.mark.parametrize("fault", SPOILT_INDEXES)
def test_spoilt_indexes(fault: str, own_tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    change, word = SPOILT_INDEXES[fault]
    folder = own_tiny("llama")
    edit(folder / INDEX, change)
    refused(run_cli("inspect", folder, code=2), word)


SPOILT_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], None], tuple[str, ...]]] = {
    "no hidden_size": (lambda c: c.pop("hidden_size"), ("hidden_size",)),
    "no model_type": (lambda c: c.pop("model_type"), ("model_type",)),
    "a number as a word": (lambda c: c.update(num_hidden_layers="three"), ("layers", "three")),
    "another architecture": (lambda c: c.update(model_type="gpt9"), ("gpt9", "llama", "deepseek_v3")),
    "another size": (lambda c: c.update(intermediate_size=100), ("mlp.gate_proj.weight", "96", "100")),
    "one layer more": (lambda c: c.update(num_hidden_layers=4), ("model.layers.3.",)),
    "one layer fewer": (lambda c: c.update(num_hidden_layers=2), ("model.layers.2.",)),
    "tied, with a head": (lambda c: c.update(tie_word_embeddings=True), ("lm_head.weight",)),
}


@pytest.mark.parametrize("fault", SPOILT_CONFIGS)
def test_spoilt_configs(fault: str, own_tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    change, words = SPOILT_CONFIGS[fault]
    folder, out = own_tiny("llama"), tmp_path / "out"
    edit(folder / "config.json", change)
    refused(run_cli("convert", folder, out, "--tp", 2, code=2), *words)
    nothing_whole(out, run_cli)


def test_no_checkpoint_at_all(run_cli: RunCli, tmp_path: Path) -> None:
    refused(run_cli("plan-memory", tmp_path / "nowhere", "--cluster", "1x1:80GB", code=2), "nowhere")
    refused(run_cli("plan-memory", tmp_path, "--cluster", "1x1:80GB", code=2), "config.json")
