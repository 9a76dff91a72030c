"""Tiny random checkpoints of each family, with fp32 references: `python -m tests.checkpoints.tiny OUT [NAME ...]`."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import fp8, quantized
from tests.checkpoints.architectures import ARCHITECTURES, DEEPSEEKS, ENGINES
from tests.checkpoints.deep import DEEP
from tests.checkpoints.quantized import Tensors
from tests.checkpoints.reference import image_reference, reference
from tests.checkpoints.store import read_tensors, write_checkpoint
from tests.checkpoints.values import ROUTER_BIAS, fill, router_bias, values
from tests.checkpoints.variants import VARIANTS, Config, Variant

EVERYTHING = VARIANTS | ARCHITECTURES | DEEPSEEKS | ENGINES | DEEP


def make_tiny(name: str, folder: Path, seed: int = 0) -> None:
    """Write the variant `name` into `folder`: a checkpoint as published, and reference.safetensors beside it."""
    variant = EVERYTHING[name]
    generator = torch.Generator().manual_seed(seed)
    plain, config = base(variant, generator)
    stored = dict(plain)
    for layer in range(variant.mtp_layers):
        stored |= mtp_layer(stored, config, config["num_hidden_layers"] + layer, generator)
    stored_config = variant.respell(config) if variant.respell else dict(config)
    if variant.mtp_layers:
        stored_config["num_nextn_predict_layers"] = variant.mtp_layers
    for pattern, scheme, announced in (
        (variant.fp8, quantized.fp8_block, fp8.config()),
        (variant.int4, quantized.int4_group, quantized.int4_config()),
        (variant.mxfp4, quantized.mxfp4_blocks, {"quant_method": "mxfp4"}),
        (variant.fp8_scale, quantized.fp8_scale, quantized.v4_config()),
        (variant.fp4_scale, quantized.fp4_scale, quantized.v4_config()),
    ):
        if pattern:
            section = stored_config.get("text_config", stored_config)
            section["quantization_config"] = announced
            stored, dequantized = quantized.store(stored, pattern, scheme)
            plain |= {key: dequantized[key] for key in plain if re.search(pattern, key)}
    if variant.fp4_scale:
        stored_config["expert_dtype"] = "fp4"
    write_checkpoint(folder, stored, stored_config, variant.files)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}) + "\n")
    model = load(variant, plain, stored_config)
    found = reference(model, generator)
    if hasattr(model.config, "vision_config"):
        found |= image_reference(model, variant.module, generator)
    save_file(found, folder / "reference.safetensors")


def base(variant: Variant, generator: torch.Generator) -> tuple[Tensors, Config]:
    """bf16 tensors under their published names, and the configuration as transformers writes it."""
    package = f"transformers.models.{variant.module}"
    configuration = importlib.import_module(f"{package}.configuration_{variant.module}")
    config = getattr(configuration, variant.configuration)(**variant.config)
    model = model_class(variant)(config).eval()
    fill(model, generator)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(ROUTER_BIAS)}
    model.to(torch.bfloat16)
    for name, tensor in kept.items():  # published in fp32
        owner, leaf = name.rsplit(".", 1)
        getattr(model.get_submodule(owner), leaf).data = tensor
    model.config.dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:  # saving gives experts and the like their published names
        model.save_pretrained(folder)
        written = read_tensors(Path(folder))
        named = {published(variant, name): as_published(variant, name, tensor) for name, tensor in written.items()}
        named = stack_experts(named) if variant.stacked else named
        return in_order(named), json.loads((Path(folder) / "config.json").read_text())


def published(variant: Variant, name: str) -> str:
    """The name that the publisher gave what transformers saves under `name`."""
    for pattern, replacement in variant.names:
        name = re.sub(pattern, replacement, name)
    return name


def as_published(variant: Variant, name: str, tensor: Tensor) -> Tensor:
    """The tensor in the type and orientation in which it is published."""
    name = published(variant, name)
    if variant.turned and re.search(variant.turned, name):
        tensor = tensor.transpose(1, 2).contiguous()
    return tensor.float() if variant.float32 and re.search(variant.float32, name) else tensor


def stack_experts(tensors: Tensors) -> Tensors:
    """Each layer's experts in two tensors: gate_up_proj [expert, 2 * width, in] and down_proj [expert, out, width]."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight", name)
        if not match:
            found[name] = tensor
        elif match[2] != "up":
            parts, expert = [], 0
            while (one := f"{match[1]}.{expert}.{match[2]}_proj.weight") in tensors:
                other = tensors[f"{match[1]}.{expert}.up_proj.weight"] if match[2] == "gate" else tensors[one][:0]
                parts.append(torch.cat([tensors[one], other]))
                expert += 1
            found[f"{match[1]}.{'gate_up' if match[2] == 'gate' else 'down'}_proj"] = torch.stack(parts)
    return found


def in_order(tensors: Tensors) -> Tensors:
    """Tensors as published files have them: embedding, layers by number, norm, head."""

    def key(name: str) -> tuple[int, int, str]:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        return (1, int(layer[1]), name) if layer else (0 if "embed" in name else 2, 0, name)

    return {name: tensors[name] for name in sorted(tensors, key=key)}


def mtp_layer(tensors: Tensors, config: Config, layer: int, generator: torch.Generator) -> Tensors:
    """A multi-token-prediction layer: a last layer anew, with norms, projection, embedding and head of its own."""
    last, prefix = f"model.layers.{config['num_hidden_layers'] - 1}.", f"model.layers.{layer}."
    shapes = {name.removeprefix(last): tensor.shape for name, tensor in tensors.items() if name.startswith(last)}
    outside, width = tensors["model.embed_tokens.weight"].shape, config["hidden_size"]
    shapes |= {"enorm.weight": torch.Size([width]), "hnorm.weight": torch.Size([width])}
    shapes |= {"eh_proj.weight": torch.Size([width, 2 * width]), "embed_tokens.weight": outside}
    shapes |= {"shared_head.norm.weight": torch.Size([width]), "shared_head.head.weight": outside}
    new: Tensors = {}
    for name, shape in shapes.items():
        bias = name.endswith(ROUTER_BIAS)
        tensor = router_bias(shape.numel(), generator) if bias else values(name, shape, False, generator)
        new[prefix + name] = tensor if bias else tensor.to(torch.bfloat16)
    return new


def model_class(variant: Variant) -> Any:
    """The transformers class of the language model."""
    module = importlib.import_module(f"transformers.models.{variant.module}.modeling_{variant.module}")
    return getattr(module, variant.network)


def load(variant: Variant, plain: Tensors, config: Config) -> Any:
    """The model in fp32, eager, from unquantised tensors; refuses tensors that transformers doesn't know or misses."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if "text_config" in config:
        text = config["text_config"]
        config["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), plain, config, files=1)
        model, report = model_class(variant).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {key: sorted(map(str, found)) for key, found in report.items() if found}
    if problems:
        raise ValueError(f"transformers doesn't load the checkpoint as written: {problems}")
    return model.eval()


def reload(name: str, folder: Path) -> Any:
    """The transformers model of a written variant: FP8 weights in plain numbers, MTP layers left out."""
    variant = EVERYTHING[name]
    config = json.loads((folder / "config.json").read_text())
    return load(variant, dict(forward_tensors(read_tensors(folder), config)), config)


def forward_tensors(stored: Tensors, config: Config) -> Iterator[tuple[str, Tensor]]:
    """What the forward pass uses, in plain numbers."""
    layers = config.get("text_config", config)["num_hidden_layers"]
    for name, tensor in stored.items():
        if name.endswith("_scale_inv") or name.startswith(f"model.layers.{layers}."):
            continue
        scales = stored.get(name + "_scale_inv")
        if scales is not None:
            rows, columns = tensor.shape
            grid = scales.repeat_interleave(fp8.BLOCK, 0).repeat_interleave(fp8.BLOCK, 1)
            tensor = tensor.float() * grid[:rows, :columns]
        yield name, tensor


def quiet() -> None:
    """Keep transformers from printing."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    quiet()
    for wanted in sys.argv[2:] or EVERYTHING:
        start = time.perf_counter()
        make_tiny(wanted, Path(sys.argv[1]) / wanted)
        print(f"{wanted:22} {time.perf_counter() - start:.2f} s")
