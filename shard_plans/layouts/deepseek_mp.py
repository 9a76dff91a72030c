"""The folder that the inference code of DeepSeek-V3, R1, V3.1 and V3.2 loads: `model{i}-mp{M}.safetensors`, strict.

One axis: rank i of M holds slice i of what is cut and expert ids i*E/M to (i+1)*E/M whole. The contract is that of
`inference/convert.py` and `inference/model.py` of the DeepSeek-V3 repository (revision 9b4e9788) and of
DeepSeek-V3.2-Exp (revision 3b99a535): names, the dimension each is cut along, types passed through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shard_plans.documents.plan import Plan
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share
from shard_plans.families.parameter import Parameter
from shard_plans.layouts.layout import Layout
from shard_plans.placement.cuts import Cutter, ParameterCut
from shard_plans.placement.experts import contiguous
from shard_plans.placement.layout import file_order
from shard_plans.placement.place import check_divides, constants, skipped, stage_parameters
from shard_plans.placement.shards import Placement, ShardFile, ShardTensor, Source

MODULES = {
    "embed_tokens": ("embed", 0), "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "q_proj": ("wq", 0), "q_a_proj": ("wq_a", None), "q_a_layernorm": ("q_norm", None), "q_b_proj": ("wq_b", 0),
    "kv_a_proj_with_mqa": ("wkv_a", None), "kv_a_layernorm": ("kv_norm", None), "kv_b_proj": ("wkv_b", 0),
    "o_proj": ("wo", 1), "gate": ("gate", None), "gate_proj": ("w1", 0), "down_proj": ("w2", 1), "up_proj": ("w3", 0),
    "norm": ("norm", None), "lm_head": ("head", 0), "wq_b": ("wq_b", None), "wk": ("wk", None),
    "k_norm": ("k_norm", None), "weights_proj": ("weights_proj", None),
}  # fmt: skip
"""Last but one word of a stored name -> what it is called there, and the dimension that is cut (experts aren't)."""
WORDS = {"self_attn": "attn", "mlp": "ffn"}
LEAVES = {"weight_scale_inv": "scale", "e_score_correction_bias": "bias"}
BIASED = 7168
"""The only hidden size at which the inference code gives its router a bias."""


class DeepSeekMp(Layout):
    """DeepSeek's folders of model-parallel ranks."""

    name, engine, loader = "deepseek-mp", "deepseek", "DeepSeek's inference code"

    def adapt(self, binding: Binding, plan: Plan) -> Plan:
        """Without the multi-token-prediction layers, which the inference code doesn't read."""
        layers = len(binding.model.forward_layers)
        return replace(plan, mtp="drop", stages=tuple((first, min(stop, layers)) for first, stop in plan.stages))

    def refuse(self, binding: Binding, plan: Plan) -> None:
        """One axis only, nothing padded or refined, and no module that the inference code doesn't know."""
        grid, sizes = plan.grid, binding.model.sizes
        if (grid.pp, grid.dp, grid.etp) != (1, 1, 1) or grid.tp != grid.ep:
            raise self.cannot(
                f"tp {grid.tp}, pp {grid.pp}, dp {grid.dp}, ep {grid.ep}, etp {grid.etp}",
                "its ranks cut attention and deal experts alike: give --tp M --ep M and nothing else",
            )
        if plan.mtp == "keep" and any(layer.mtp for layer in binding.model.layers):
            raise self.cannot("multi-token-prediction layers", "leave them out with --mtp drop")
        if plan.weights:
            raise self.cannot(
                f"weights in another precision ({', '.join(plan.weights)})",
                "its configuration says how they are stored: leave out --weights",
            )
        for name in ("experts", "vocab"):
            if sizes.get(name, 0) % grid.tp:
                raise self.cannot(f"{name} {sizes[name]} on {grid.tp} ranks", "choose an M that divides it")
        if plan.experts.layers or plan.experts.default != contiguous(sizes.get("experts", 0), grid.ep):
            raise self.cannot("experts in another order than by number", "use the plan's default placement")
        if binding.model.tied:
            raise self.cannot("a head tied to the embedding", "untie it, or use another layout")
        bias = any(parameter.role == "moe.router_bias" for parameter in binding.parameters)
        if bias != (sizes["hidden"] == BIASED) and "experts" in sizes:
            raise self.cannot(
                f"a router {'with' if bias else 'without'} bias at hidden size {sizes['hidden']}",
                f"its model has one at {BIASED} alone",
            )

    def place(self, binding: Binding, plan: Plan) -> Placement:
        """One file a rank."""
        self.refuse(binding, plan)
        check_divides(binding, plan.grid)
        cutter = Cutter(binding.model, binding.family.uneven, strict_blocks=True)
        parameters = stage_parameters(binding, plan, 0)
        files, world = [], plan.grid.tp
        for rank in range(world):
            tensors = [tensor for p in parameters for tensor in self._tensors(p, cutter, plan, rank)]
            name = f"model{rank}-mp{world}.safetensors"
            files.append(ShardFile(name, {"stage": 0, "tp": rank}, file_order(tensors)))
        ranks = tuple((at, (files[at.tp].name,)) for at in plan.grid.coordinates())
        return Placement(tuple(files), ranks, skipped(binding, plan), constants(binding, plan))

    def _tensors(self, parameter: Parameter, cutter: Cutter, plan: Plan, rank: int) -> Iterator[ShardTensor]:
        """What a rank holds of a parameter: slices of it, or its experts one by one."""
        if not parameter.per_expert:
            cut = cutter.cut(parameter, {"tp": Share(rank, plan.grid.tp)})
            self._confirm(parameter, cut)
            yield from self._parts(parameter, cut, None)
            return
        cut = cutter.cut(parameter, {"etp": Share(0, 1)})
        for expert in plan.experts.held(parameter.layer or 0, plan.grid, 0, rank):
            yield from self._parts(parameter, cut, expert)

    def _parts(self, parameter: Parameter, cut: ParameterCut, expert: int | None) -> Iterator[ShardTensor]:
        format = parameter.format.name if parameter.format is not None else None
        for part in cut.parts:
            if expert is None:
                pattern, tensors = part.part.pattern, part.part.tensors
            else:
                pattern = part.part.pattern.replace("{expert}", str(expert))
                tensors = part.part.tensors[expert : expert + 1]
            source = Source(pattern, None, part.cuts, (0,) * len(part.shape), tensors)
            yield ShardTensor(
                self.rename(pattern), part.part.dtype, part.shape, (source,), format, part.part.kind, cut.block
            )

    def rename(self, name: str) -> str:
        """The name of a stored tensor in these folders. Raises PlanError for one that the inference code lacks."""
        words = [LEAVES.get(word, WORDS.get(word, word)) for word in name.removeprefix("model.").split(".")]
        if len(words) < 2 or words[-2] not in MODULES:
            raise self.cannot(f"the tensor {name}", "the inference code has no module of that name")
        words[-2] = MODULES[words[-2]][0]
        return ".".join(words)

    def _confirm(self, parameter: Parameter, cut: ParameterCut) -> None:
        """Refuse a family table that cuts along another dimension than the inference code."""
        words = parameter.parts[0].pattern.removeprefix("model.").split(".")
        if words[-2] not in MODULES:
            raise self.cannot(
                f"the tensor {parameter.parts[0].pattern}", "the inference code has no module of that name"
            )
        along = [axis for axis, dim in enumerate(parameter.dims) if any(mark[0] == "tp" for mark in dim.marks)]
        wanted = MODULES[words[-2]][1]
        if along != ([] if wanted is None else [wanted]):
            raise PlanError(
                f"{parameter.parts[0].pattern} is cut along {along} by the family table, along {wanted} by DeepSeek's "
                f"inference code; this model isn't one that it runs"
            )

    def pads(self, name: str) -> bool:
        """Nothing is padded."""
        return False

    def beside(self, carried: Sequence[str]) -> Sequence[str]:
        """The tokenizer's files."""
        return [name for name in carried if "token" in name]
