"""The folder that vLLM's `--load-format sharded_state` loads, as its model classes are built: before any kernel.

The engine's own saver writes after kernels have repacked the weights; what is built before that is the logical layout:
`model-rank-R-part-0.safetensors` for each tensor-parallel rank (`model-pp-P-tp-R-...` with pipeline stages), fused
rows, stacked experts, vocabulary padded to 64, and the constant scales that the loader wants. Rules: vLLM 0.33.0,
`model_executor/model_loader/sharded_state_loader.py`, `layers/vocab_parallel_embedding.py`, `layers/linear.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from shard_plans.documents.plan import Plan
from shard_plans.errors import GridError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share
from shard_plans.families.expressions import evaluate
from shard_plans.families.model import Model
from shard_plans.families.parameter import Parameter
from shard_plans.layouts.forms import FIRST, in_form
from shard_plans.layouts.keys import KeyMap, key_map, release_of
from shard_plans.layouts.layout import Layout
from shard_plans.layouts.vllm_rules import VOCABULARY, expert_block, quantised_router, size_reasons
from shard_plans.placement.cuts import Cutter
from shard_plans.placement.experts import contiguous
from shard_plans.placement.layout import Held, file_order, stack
from shard_plans.placement.place import check_divides, constants, left_out, skipped, stage_parameters
from shard_plans.placement.shards import Placement, ShardFile, ShardTensor

ATTENTION = {"attn.k", "attn.kv_a"}
"""A layer with one of these roles has attention, and scales of it; linear attention has none."""
ATTENTION_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
"""Of every attention layer; 1 where the checkpoint has none."""
PLACEHOLDERS = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""Of plain attention in FP8 checkpoints, in the model's type; -1 says that there is none."""

TOWER_LEFT_OUT = "vision tower left out: the engine runs the text alone with --language-model-only"


class VllmShardedState(Layout):
    """vLLM's sharded_state of one release."""

    engine, loader = "vllm", "vLLM --load-format sharded_state"

    def __init__(self, release: str) -> None:
        self.release, self.name = release, f"vllm@{release}"

    def adapt(self, binding: Binding, plan: Plan) -> Plan:
        """Without the multi-token-prediction layers, which are another model to it."""
        layers = len(binding.model.forward_layers)
        return replace(plan, mtp="drop", stages=tuple((first, min(stop, layers)) for first, stop in plan.stages))

    def refuse(self, binding: Binding, plan: Plan) -> None:
        """Replicas, expert grids that its ranks can't have, and formats whose layout the kernels decide."""
        grid, model = plan.grid, binding.model
        for kind, condition in key_map("vllm", self.release, model.family).reads.items():
            self._confirm_kind(model, kind, condition)
        if plan.weights:
            raise self.cannot(
                f"weights in another precision ({', '.join(plan.weights)})",
                "config.json tells the engine how they are stored: leave out --weights",
            )
        if grid.pp > 1 and not release_of("vllm", self.release).stages:
            raise self.cannot(f"pp {grid.pp}", "this release gives the files of all stages one name; give pp 1")
        if grid.dp > 1:
            raise self.cannot(f"dp {grid.dp}", "its files name tp ranks alone: give dp 1, and start replicas of it")
        if "experts" in model.sizes and (grid.ep, grid.etp) not in ((grid.tp, 1), (1, grid.tp)):
            raise self.cannot(
                f"ep {grid.ep} with etp {grid.etp} on tp {grid.tp}",
                f"the engine deals whole experts to all ranks (--ep {grid.tp}) or cuts every expert (--ep 1)",
            )
        if plan.experts.layers or plan.experts.default not in ((), contiguous(model.sizes.get("experts", 0), grid.ep)):
            raise self.cannot("experts in another order than by number", "use the plan's default placement")
        if plan.mtp == "keep" and any(layer.mtp for layer in model.layers):
            raise self.cannot("multi-token-prediction layers", "leave them out with --mtp drop")
        formats = {p.format.name for p in binding.parameters if p.format is not None}
        if formats - {"fp8_block"}:
            what = ", ".join(sorted(formats))
            raise self.cannot(
                what,
                "its layout depends on the kernels that the engine chooses; "
                "convert without --layout, for --load-format reshard",
            )
        for reason in size_reasons(binding, grid.tp):
            raise GridError(reason)
        latent = any(p.role == "attn.kv_b" for p in binding.parameters)
        bias = any(p.role == "moe.router_bias" for p in binding.parameters)
        if latent and bias and model.text.get("topk_method") != "noaux_tc":
            raise self.cannot(
                f"a router's bias where config.json has topk_method {model.text.get('topk_method')!r}",
                "the engine drops it then, and routes otherwise; set topk_method to noaux_tc",
            )
        router = quantised_router(binding) if model.family in release_of("vllm", self.release).routers else None
        if formats and router is not None:
            raise self.cannot(
                f"{router} as it is stored, in bf16 in an FP8 checkpoint: the engine takes it for quantised",
                "list that full name in quantization_config.modules_to_not_convert",
            )

    def _confirm_kind(self, model: Model, kind: str, condition: str) -> None:
        """The engine must take the same layers to be of a kind as the family table does."""
        for layer in model.forward_layers:
            read = bool(evaluate(condition, model.text, {"layer": layer.index}))
            if read != (kind in layer.kinds.values()):
                raise self.cannot(
                    f"layer {layer.index}, which is {'no ' if read else ''}{kind} layer",
                    f"the engine goes by `{condition}` alone, which says otherwise; let config.json agree with it",
                )

    def place(self, binding: Binding, plan: Plan) -> Placement:
        """One file a (stage, tp)."""
        self.refuse(binding, plan)
        check_divides(binding, plan.grid)
        keys = key_map("vllm", self.release, binding.model.family)
        block = expert_block(binding, plan.grid) if release_of("vllm", self.release).refines else None
        uneven, blocks = {**binding.family.uneven, "vocab": VOCABULARY}, {"experts": block} if block else None
        cutter = Cutter(binding.model, uneven, strict_blocks=True, blocks=blocks)
        files = {}
        tower = [p for p in binding.parameters if p.stage == "vision"] if keys.text else []
        for stage in range(plan.grid.pp):
            parameters = self._stage(binding, plan, stage, keys)
            for tp in range(plan.grid.tp):
                tensors = [tensor for group in parameters for tensor in self._layer(group, keys, cutter, plan, tp)]
                place = {"stage": stage, "tp": tp}
                files[stage, tp] = ShardFile(self._file(plan, stage, tp), place, file_order(tensors))
        ranks = tuple((at, (files[at.stage, at.tp].name,)) for at in plan.grid.coordinates())
        out = (*skipped(binding, plan), *left_out(tower, TOWER_LEFT_OUT))
        return Placement(tuple(files.values()), ranks, out, constants(binding, plan))

    @staticmethod
    def _file(plan: Plan, stage: int, tp: int) -> str:
        rank = f"rank-{tp}" if plan.grid.pp == 1 else f"pp-{stage}-tp-{tp}"
        return f"model-{rank}-part-0.safetensors"

    @staticmethod
    def _stage(binding: Binding, plan: Plan, stage: int, keys: KeyMap) -> list[list[Parameter]]:
        """What lies on a stage, by layer; a tied embedding is the head alone where both would lie together."""
        groups: dict[int, list[Parameter]] = {}
        alias = binding.model.tied and (plan.grid.pp == 1 or "head" in keys.everywhere)

        def kept(parameter: Parameter) -> Parameter:
            return replace(parameter, role="head") if alias and parameter.role == "embed" else parameter

        laid = (p for p in stage_parameters(binding, plan, stage) if p.stage != "vision" or not keys.text)
        parameters = [kept(p) for p in laid]
        roles = {p.role for p in parameters}
        parameters += [kept(p) for p in binding.parameters if p.role in keys.everywhere and kept(p).role not in roles]
        for parameter in parameters:
            groups.setdefault(-1 if parameter.layer is None else parameter.layer, []).append(parameter)
        return list(groups.values())

    def _layer(
        self, group: list[Parameter], keys: KeyMap, cutter: Cutter, plan: Plan, tp: int
    ) -> Iterator[ShardTensor]:
        """The tensors of one layer, or of what lies outside the layers."""
        grid = plan.grid
        shares = {"tp": Share(tp, grid.tp), "etp": Share(tp if grid.etp > 1 else 0, grid.etp)}
        by_role = {p.role: p for p in group}
        prefix = keys.text if group[0].layer is None else f"{keys.text}model.layers.{group[0].layer}."
        try:
            assigned = list(keys.assign(by_role))
        except PlanError as error:
            raise self.cannot(f"this {cutter.model.family} model", str(error)) from None
        for key in assigned:
            members = []
            for role, form in zip(key.roles, key.forms, strict=True):
                parameter = by_role[role]
                ids = None
                if parameter.per_expert:
                    ids = plan.experts.held(parameter.layer or 0, grid, 0, tp if grid.ep > 1 else 0)
                cut = in_form(form, cutter.cut(parameter, shares), cutter.model)
                members.append(Held(parameter, cut, ids))
            self._whole_blocks(prefix + key.name, members)
            made = stack(members, partial(_part_key, prefix + key.name))
            zero = FIRST in key.forms and grid.etp > 1 and tp > 0
            yield from (replace(tensor, sources=(), fill=0.0) for tensor in made) if zero else made
        if ATTENTION & by_role.keys():
            yield from self._scales(prefix + keys.scales, any(p.format is not None for p in group))

    def _whole_blocks(self, key: str, members: Sequence[Held]) -> None:
        """Rows laid one after the other must end with a block, but for the last."""
        kinds = {tuple((p.dtype, p.shape[1:]) for p in member.cut.parts) for member in members}
        if len(kinds) > 1:
            raise self.cannot(f"{key}, whose parts are stored in several types", "they can't be laid in one parameter")
        for member in members[:-1]:
            block = member.cut.block
            if block is not None and member.cut.parts[0].shape[0] % block[0]:
                raise self.cannot(
                    f"{key}: {member.cut.parts[0].shape[0]} rows don't end with a block of {block[0]}",
                    "choose a smaller tp",
                )

    @staticmethod
    def _scales(module: str, fp8: bool) -> Iterator[ShardTensor]:
        """Constants that the loader wants of every attention layer."""
        for name in ATTENTION_SCALES:
            yield ShardTensor(f"{module}.{name}", "F32", (), (), fill=1.0)
        for name in PLACEHOLDERS if fp8 and "mla_attn" not in module else ():
            yield ShardTensor(f"{module}.{name}", "BF16", (), (), fill=-1.0)

    def pads(self, name: str) -> bool:
        """Embedding and head."""
        return name.endswith(("model.embed_tokens.weight", "model.embedding.weight", "lm_head.weight"))

    def beside(self, carried: Sequence[str]) -> Sequence[str]:
        """Configuration, tokenizer and chat template; no index, which would name other files."""
        return [name for name in carried if not name.endswith(".safetensors.index.json")]


def _part_key(key: str, kind: str) -> str:
    """The key of a parameter's values or scales."""
    return key if kind == "values" else f"{key}_scale_inv"
