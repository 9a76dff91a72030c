"""The transformers library's own model of the checkpoint, in float32 on the CPU, which reshard didn't write."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.blocks.weights import dense, dense_expert
from runtime.checking.stored import StoredWeights
from runtime.comm.devices import free_bytes
from shard_plans.errors import RuntimeFault
from shard_plans.families.binding import Binding
from shard_plans.families.parameter import Parameter, logical_shape

CPU = torch.device("cpu")
NAME = "--reference transformers"


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What the library computed; the rows of all texts one behind the other."""

    starts: list[Tensor]
    """Of each layer the stream into it [rows, .., hidden], ..."""
    outs: list[Tensor]
    """... and out of it."""
    logits: Tensor
    """[rows, vocabulary]."""


def library() -> Any:
    """The module; RuntimeFault where it isn't installed."""
    try:
        import transformers
    except ImportError as error:
        raise RuntimeFault(
            f"{NAME} needs the transformers library, which isn't installed; run: pip install transformers"
        ) from error
    return transformers


def model_class(binding: Binding) -> tuple[Any, Any]:
    """The library, and its class for the checkpoint; RuntimeFault where either isn't there."""
    found = library()
    name = next(iter(binding.checkpoint.config.get("architectures") or []), None)
    kind = getattr(found, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, found.PreTrainedModel)):
        raise RuntimeFault(f"{NAME}: transformers {found.__version__} has no class {name}, which config.json names")
    return found, kind


def check_fits(binding: Binding) -> None:
    """Raise RuntimeFault where the model in float32 needs more memory than is free."""
    numbers = sum(math.prod(logical_shape(p)) * len(p.parts[0].tensors) for p in binding.parameters)
    need, free = 4 * numbers * (2 if _quantised(binding) else 1), free_bytes(CPU)
    if need > free:
        raise RuntimeFault(
            f"{NAME}: the model has {numbers} weights, which take {need} bytes in float32, and {free} bytes of memory "
            "are free; leave it out, or run it on a larger machine"
        )


def open_library(binding: Binding) -> Any:
    """The library's model with the checkpoint's weights, dequantised where they are quantised.

    RuntimeFault where the library isn't there, has no such model, or finds other tensors than it needs.
    """
    found, kind = model_class(binding)
    check_fits(binding)
    folder = binding.checkpoint.folder
    found.utils.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    try:
        if _quantised(binding):
            settings = found.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            for part in (settings, settings.get_text_config()):
                if hasattr(part, "quantization_config"):
                    del part.quantization_config
            state = dict(_dequantised(binding))
            model, report = kind.from_pretrained(None, config=settings, state_dict=state, **options)
        else:
            model, report = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # the library raises whatever its parts raise
        raise RuntimeFault(f"{NAME}: transformers {found.__version__} can't load {folder}: {error}") from error
    lost = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if lost:
        raise RuntimeFault(f"{NAME}: transformers finds no {lost[0]} in {folder} (and {len(lost) - 1} more)")
    return model.eval()


def look(model: Any, texts: Sequence[Tensor], layers: int) -> Seen:
    """Run the texts, ids [tokens] each, and keep what goes into each of the decoder's layers and comes out."""
    stack = _layers(model, layers)
    starts: list[list[Tensor]] = [[] for _ in stack]
    outs: list[list[Tensor]] = [[] for _ in stack]

    def hook(number: int) -> Any:
        def keep(module: Any, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
            start = given[0] if given else named["hidden_states"]
            starts[number].append(start[0])
            outs[number].append((made[0] if isinstance(made, tuple) else made)[0])

        return keep

    handles = [layer.register_forward_hook(hook(at), with_kwargs=True) for at, layer in enumerate(stack)]
    try:
        with torch.no_grad():
            logits = [model(input_ids=ids.cpu()[None], use_cache=False).logits[0].float() for ids in texts]
    except Exception as error:  # the library raises whatever its parts raise
        raise RuntimeFault(f"{NAME}: the library's model can't run these ids: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return Seen([torch.cat(parts) for parts in starts], [torch.cat(parts) for parts in outs], torch.cat(logits))


def _layers(model: Any, count: int) -> Sequence[nn.Module]:
    """The decoder's layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers" and len(module) == count:
            return list(module)
    raise RuntimeFault(f"{NAME}: {type(model).__name__} has no list of {count} layers to look at")


def _quantised(binding: Binding) -> bool:
    return any(parameter.format is not None for parameter in binding.parameters)


def _dequantised(binding: Binding) -> Iterator[tuple[str, Tensor]]:
    """Every weight in float32 under the name that it would have if it were plain."""
    weights = StoredWeights(binding)
    try:
        for parameter in binding.parameters:
            place = parameter.stage if parameter.layer is None else parameter.layer
            number = "" if parameter.number is None else f".{parameter.number}"
            role = parameter.role.replace(".", f"{number}.", 1)
            stored = weights.section(place, CPU, (parameter.role,))[role]
            stem = _stem(parameter)
            turned = parameter.quant == "swapped" and parameter.format is not None
            if parameter.per_expert and not parameter.parts[0].stacked:
                for expert in range(len(parameter.parts[0].tensors)):
                    yield stem.replace("{expert}", str(expert)), dense_expert(stored, expert, torch.float32).clone()
                continue
            assert not isinstance(stored, tuple)
            whole = dense(stored, torch.float32)
            yield stem, (whole.transpose(-1, -2) if turned else whole).clone()
    finally:
        weights.close()


def _stem(parameter: Parameter) -> str:
    """The stored name of the values without what a format adds to it."""
    pattern = parameter.parts[0].pattern
    return pattern.removesuffix(parameter.format.values_suffix) if parameter.format is not None else pattern
