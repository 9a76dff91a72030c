"""The entry point, without vLLM: it is named in the package's metadata, and an engine that lacks something starts."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path

import pytest

from runtime.engines.plugin import register

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_entry_point_is_there() -> None:
    lines = PYPROJECT.read_text().splitlines()
    section = lines[lines.index('[project.entry-points."vllm.general_plugins"]') + 1]
    name, _, value = section.replace('"', "").partition(" = ")
    module, _, function = value.partition(":")
    assert name == "reshard"
    assert getattr(import_module(module), function) is register


def test_an_engine_that_lacks_something_starts_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader", None)
    with caplog.at_level(logging.WARNING):
        register()
    assert "--load-format reshard isn't there with this vLLM" in caplog.text
