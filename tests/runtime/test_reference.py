"""The reference against transformers: every layer, the logits, the routing, for every family and its edges."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.blocks.weights import LayerWeights, Stored
from runtime.checking.reference import Reference
from runtime.checking.sensitivity import sensitivity
from runtime.checking.stored import StoredWeights
from shard_plans.checkpoints.checkpoint import open_checkpoint
from shard_plans.errors import CheckpointError, RuntimeFault
from shard_plans.families.binding import Binding, bind
from shard_plans.families.family import load_family
from tests.checkpoints.variants import VARIANTS
from tests.conftest import MakeCheckpoint
from tests.tools.sharded import CPU, expected, expected_routes, relative

LIMIT = 1e-5


def open_binding(folder: Path) -> Binding:
    checkpoint = open_checkpoint(folder)
    return bind(checkpoint, load_family(checkpoint.config))


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers(name: str, tiny: MakeCheckpoint) -> None:
    wanted = expected(tiny(name))
    routes = expected_routes(wanted)
    binding = open_binding(tiny(name))
    with Reference(binding, torch.float32, CPU) as reference:
        start = reference.begin(wanted["input_ids"][0])
        assert start.equal(wanted["hidden.0"][0])
        layers = binding.model.forward_layers
        for layer in layers:
            record = reference.next_layer()
            assert record.layer is layer
            assert record.start.equal(start)
            start = record.out
            if layer is not layers[-1]:  # transformers gives the last one behind the final norm
                assert relative(start, wanted[f"hidden.{layer.index + 1}"][0]) < LIMIT
            if record.routing is not None:
                assert record.routing.indices.sort(dim=-1).values.equal(routes.pop(layer.index))
        assert not routes
        assert relative(reference.logits(), wanted["logits"][0]) < LIMIT


def test_float64_agrees_and_is_closer_to_nothing_but_itself(tiny: MakeCheckpoint) -> None:
    wanted = expected(tiny("deepseek_v3_fp8"))
    binding = open_binding(tiny("deepseek_v3_fp8"))
    with Reference(binding, torch.float64, CPU) as reference:
        reference.begin(wanted["input_ids"][0])
        for _ in binding.model.forward_layers:
            assert reference.next_layer().out.dtype == torch.float64
        assert 0 < relative(reference.logits(), wanted["logits"][0]) < LIMIT


def test_can_begin_again(tiny: MakeCheckpoint) -> None:
    binding = open_binding(tiny("llama"))
    with Reference(binding, torch.float32, CPU) as reference:
        reference.begin(torch.tensor([1, 2, 3]))
        first = reference.next_layer().out
        reference.begin(torch.tensor([1, 2, 3]))
        assert reference.next_layer().out.equal(first)


def test_what_was_read_does_not_change(tiny: MakeCheckpoint) -> None:
    binding = open_binding(tiny("qwen3_moe_fp8"))
    weights = StoredWeights(binding)
    first = weights.section(0, CPU)["experts.gate"]
    assert isinstance(first, Stored)
    assert first.values.shape == (16, 32, 64)
    assert first.scale is not None
    assert first.scale.shape == (16, 2, 4)
    kept = first.values.view(torch.uint8).clone()
    for layer in (1, 2, 1):
        weights.section(layer, CPU)
    assert first.values.view(torch.uint8).equal(kept)
    weights.close()


@pytest.mark.parametrize("measure", ["layer by layer", "sensitivity", "kept"])
def test_two_layers_are_in_memory_at_most(measure: str, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, held, most = StoredWeights.section, dict[object, list[weakref.ref[Tensor]]](), 0

    def section(
        self: StoredWeights, place: int | str, device: torch.device, roles: Iterable[str] | None = None
    ) -> LayerWeights:
        nonlocal most
        found = honest(self, place, device, roles)
        stored = [one for each in found.values() for one in (each if isinstance(each, tuple) else (each,))]
        held[place] = [weakref.ref(one.values) for one in stored]
        alive = [
            at for at, values in held.items() if isinstance(at, int) and any(value() is not None for value in values)
        ]
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(StoredWeights, "section", section)
    with Reference(open_binding(tiny("deepseek_v3_fp8")), torch.float32, CPU) as reference:
        if measure == "sensitivity":
            sensitivity(reference, [torch.tensor([5, 6, 7])])
        elif measure == "kept":
            kept = [reference.weights(layer) for layer in range(3)]
            assert len(kept) == 3
        else:
            reference.begin(torch.tensor([5, 6, 7]))
            reference.logits()
    assert most == 3 if measure == "kept" else most <= 2  # one is run while the next is read


def test_asked_out_of_turn(tiny: MakeCheckpoint) -> None:
    with Reference(open_binding(tiny("llama")), torch.float32, CPU) as reference:
        with pytest.raises(RuntimeFault, match="begin"):
            reference.next_layer()
        reference.begin(torch.tensor([5]))
        for _ in range(3):
            reference.next_layer()
        with pytest.raises(RuntimeFault, match="last"):
            reference.next_layer()


def test_a_file_that_shrank_is_named(own_tiny: MakeCheckpoint) -> None:
    folder = own_tiny("llama_single")
    binding = open_binding(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with Reference(binding, torch.float32, CPU) as reference, pytest.raises(CheckpointError, match="truncated"):
        reference.begin(torch.tensor([200]))
        reference.logits()
