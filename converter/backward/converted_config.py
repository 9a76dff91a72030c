"""The config.json of a converted checkpoint: what it says of the storage format is what is stored now."""

from __future__ import annotations

import json
from typing import Any

from shard_plans.documents.plan import Plan
from shard_plans.errors import ManifestError
from shard_plans.families.binding import Binding
from shard_plans.families.parameter import Parameter

SECTION = "quantization_config"
PACKED: dict[str, tuple[str, int, str, str]] = {
    "fp8_channel": ("float-quantized", 8, "float", "channel"),
    "int8_channel": ("int-quantized", 8, "int", "channel"),
    "int4_group": ("pack-quantized", 4, "int", "group"),
    "mxfp4_group": ("mxfp4-pack-quantized", 4, "float", "group"),
    "nvfp4": ("nvfp4-pack-quantized", 4, "float", "tensor_group"),
}
"""Storage format -> compressed-tensors' words for it: format, bits, type, strategy."""


def converted_config(config: dict[str, Any], binding: Binding, plan: Plan) -> bytes:
    """config.json for the binding in the plan's precision. ManifestError where one file can't say it."""
    parameters = [p for p in binding.parameters if not (p.stage == "mtp" and plan.mtp == "drop")]
    found = {(p.format.name, _block(p)): p for p in parameters if p.format is not None}
    if len(found) > 1:
        words = " and ".join(sorted({name for name, _ in found}))
        raise ManifestError(
            f"the output holds weights in {words}, and a config.json describes one storage format; convert with one, "
            f"or keep the shards"
        )
    value = dict(config)
    value.pop(SECTION, None)
    text = binding.family.text
    if text is not None and isinstance(value.get(text), dict):
        value[text] = {key: item for key, item in value[text].items() if key != SECTION}
    for parameter in found.values():
        value[SECTION] = _section(parameter, [_module(p) for p in parameters if p.quant and p.format is None])
    return (json.dumps(value, indent=2) + "\n").encode()


def _block(parameter: Parameter) -> tuple[int, int] | None:
    """The block that config.json states; None for a whole row."""
    name = parameter.format.name if parameter.format is not None else ""
    return None if PACKED.get(name, ("", 0, "", ""))[3] == "channel" else parameter.block


def _module(parameter: Parameter) -> str:
    """The name of a plain module, or of what holds those of all experts."""
    return parameter.parts[0].pattern.partition(".{expert}")[0].removesuffix(".weight")


def _section(parameter: Parameter, plain: list[str]) -> dict[str, Any]:
    format, block = parameter.format, parameter.block
    if format is None or block is None:
        return {}
    modules = list(dict.fromkeys(plain))
    if format.name == "fp8_block":
        powers = {"scale_fmt": "ue8m0"} if parameter.parts[1].dtype == "F8_E8M0" else {}
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
            **powers, "modules_to_not_convert": modules,
        }  # fmt: skip
    if format.name == "mxfp4_blocks":
        return {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    name, bits, kind, strategy = PACKED[format.name]
    size = {} if strategy == "channel" else {"group_size": block[1]}
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, **size, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": modules,
    }  # fmt: skip
