"""The plan: how a checkpoint is laid out over ranks. A YAML document that people read, edit and diff."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shard_plans.documents.digests import canonical_digest
from shard_plans.documents.plan_schema import LARGEST_SIZE, PLAN_SCHEMA
from shard_plans.documents.yaml_text import Lines, check_schema, dump_yaml, load_yaml
from shard_plans.errors import PlanError
from shard_plans.families.weights import check_weights
from shard_plans.memory.card import named_card
from shard_plans.memory.cluster import Cluster
from shard_plans.memory.ledger import LedgerRow, fits, format_ledger
from shard_plans.memory.workload import Workload as Workload
from shard_plans.placement.experts import ExpertPlacement, Slots, contiguous, format_ids, parse_ids
from shard_plans.placement.grid import Grid, make_grid
from shard_plans.written import write_whole

VERSION = 1
NATIVE = "reshard"
"""The layout that verify-and-run reads."""
MAX_IDS = 1 << 22
"""Expert ids in all lists of a document together."""
NOTE = """\
# How a checkpoint is laid out over the ranks of a cluster. Edit it, then: reshard convert CHECKPOINT OUT --plan THIS
#   parallel  ranks of a stage = dp x tp = edp x ep x etp; all ranks = pp x that
#   stages    inclusive layer ranges, one a pipeline stage; to move a border change both neighbours
#   experts   `contiguous`, or a list with the ids of each ep slot (edp x ep slots, edp slowest, where replicas differ);
#             `layers: {3: [...]}` places single layers otherwise; ids may repeat, every one must be held
#   ledger    bytes a rank; for reading only: after an edit it is computed anew
"""


@dataclass(frozen=True, slots=True)
class PlanSource:
    """The checkpoint that a plan belongs to, or the config.json from which it was made before there was one."""

    family: str
    fingerprint: str | None
    """Of the checkpoint; None where the plan was made from config.json alone."""
    tensors: int
    bytes: int
    config: str | None = None
    """xxh3-128 of that config.json, in hex; None where the plan has a fingerprint."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides what each rank holds, and what it was planned for."""

    checkpoint: PlanSource
    grid: Grid
    stages: tuple[tuple[int, int], ...]
    """Half-open layer range of each stage, over all kept layers: MTP layers end the last stage's range."""
    experts: ExpertPlacement = field(default_factory=ExpertPlacement)
    mtp: str = "keep"
    """keep or drop the multi-token-prediction layers."""
    strict_blocks: bool = False
    """Refuse cuts inside a quantisation block instead of refining the scales."""
    cluster: Cluster | None = None
    workload: Workload = field(default_factory=Workload)
    ledger: tuple[LedgerRow, ...] | None = None
    """One row a rank, as computed; never read from a document."""
    layout: str = NATIVE
    """Names, fusion and files: whose loader reads the shards."""
    version: int = VERSION
    weights: Mapping[str, str] = field(default_factory=dict)
    """Group of parameters -> the format that it is stored in; the others stay as stored."""

    def __post_init__(self) -> None:
        """Refuse what isn't a plan."""
        if self.mtp not in ("keep", "drop"):
            raise PlanError(f"mtp is {self.mtp!r}; allowed: keep, drop")

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits its card; None without a ledger or cluster."""
        return None if self.ledger is None or self.cluster is None else fits(self.ledger)


def read_plan(path: Path) -> Plan:
    """Read and check a plan document; PlanError names the key, the line and what is allowed."""
    data, lines = load_yaml(path, f"plan {path.name}", PlanError)
    return _plan(data, lines, f"plan {path.name}")


def parse_plan(text: str, what: str = "plan") -> Plan:
    """As read_plan, from text."""
    data, lines = load_yaml(text, what, PlanError)
    return _plan(data, lines, what)


def _plan(data: Any, lines: Lines, what: str) -> Plan:
    check_schema(data, PLAN_SCHEMA, lines, what, PlanError)
    sizes = data["parallel"]
    if sizes["tp"] * sizes["dp"] * sizes["pp"] > LARGEST_SIZE:
        raise PlanError(f"{what}, line {lines[('parallel',)]}: parallel makes more than {LARGEST_SIZE} ranks")
    grid = make_grid(**sizes)
    cluster = data.get("cluster")
    if cluster is not None:
        cluster = Cluster(cluster["nodes"], cluster["cards"], named_card(str(cluster["card"]), cluster["memory"], what))
    return Plan(
        PlanSource(**{"fingerprint": None, **data["checkpoint"]}), grid, _stages(data["stages"], grid, lines, what),
        _experts(data["experts"], grid, lines, what), data["mtp"], data["strict_blocks"], cluster,
        Workload(**data["workload"]) if "workload" in data else Workload(), layout=data.get("layout", NATIVE),
        weights=_weights(data.get("weights", {}), lines, what),
    )  # fmt: skip


def _weights(data: Mapping[str, str], lines: Lines, what: str) -> dict[str, str]:
    try:
        return check_weights(data)
    except PlanError as error:
        raise PlanError(f"{what}, line {lines[('weights',)]}: {error}") from None


def _stages(texts: list[str | int], grid: Grid, lines: Lines, what: str) -> tuple[tuple[int, int], ...]:
    if len(texts) != grid.pp:
        raise PlanError(f"{what}, line {lines[('stages',)]}: {len(texts)} stages are listed, parallel has pp {grid.pp}")
    stages, start = [], 0
    for number, text in enumerate(texts):
        first, _, last = str(text).partition("-")
        begin, end = int(first), int(last or first) + 1
        where = f"{what}, line {lines[('stages', number)]}: stage {number} is {text}"
        if begin != start:
            raise PlanError(f"{where}; it must begin with layer {start}, so that no layer is left out or doubled")
        if end <= begin:
            raise PlanError(f"{where}; its last layer is before its first")
        stages.append((begin, end))
        start = end
    return tuple(stages)


def _experts(data: Any, grid: Grid, lines: Lines, what: str) -> ExpertPlacement:
    if data == "none":
        return ExpertPlacement()
    count, spent = data["count"], 0

    def slots(value: Any, *path: str) -> Slots:
        nonlocal spent
        if value == "contiguous":
            return contiguous(count, grid.ep)
        found = []
        for number, text in enumerate(value):
            try:
                found.append(parse_ids(str(text)))
            except PlanError as error:
                line = lines[("experts", *path, number)]
                raise PlanError(f"{what}, line {line}: {error}") from None
            spent += len(found[-1])
            if spent > MAX_IDS:
                raise PlanError(f"{what}: experts lists more than {MAX_IDS} ids")
        return tuple(found)

    placement = ExpertPlacement(
        slots(data["default"], "default"),
        {int(layer): slots(value, "layers", layer) for layer, value in data.get("layers", {}).items()},
    )
    try:
        placement.validate(count, grid)
    except PlanError as error:
        raise PlanError(f"{what}, line {lines[('experts',)]}: {error}") from None
    return placement


def format_plan(plan: Plan) -> str:
    """The document of a plan; the same plan gives the same text, and parse_plan reads it back."""
    source, grid = plan.checkpoint, plan.grid
    sizes = {"tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "ep": grid.ep, "etp": grid.etp}
    parts = [NOTE + f"reshard_plan: {plan.version}", "checkpoint:"]
    whose = {"fingerprint": source.fingerprint} if source.config is None else {"config": source.config}
    told_of = {"family": source.family, **whose, "tensors": source.tensors, "bytes": source.bytes}
    parts += [f"  {key}: {dump_yaml(value, flow=True)}" for key, value in told_of.items()]
    parts += [f"parallel: {dump_yaml(sizes, flow=True)}", "stages:"]
    parts += [f"- {first}-{stop - 1}" if stop - first > 1 else f"- {first}" for first, stop in plan.stages]
    parts += _expert_lines(plan)
    parts += [f"mtp: {plan.mtp}", f"strict_blocks: {'true' if plan.strict_blocks else 'false'}"]
    if plan.layout != NATIVE:
        parts.append(f"layout: {dump_yaml(plan.layout, flow=True)}")
    if plan.weights:
        parts.append(f"weights: {dump_yaml(dict(plan.weights), flow=True)}  # the other groups stay as stored")
    if plan.cluster is not None:
        card = plan.cluster.card
        told = {"nodes": plan.cluster.nodes, "cards": plan.cluster.cards, "card": card.name, "memory": card.memory}
        parts.append(f"cluster: {dump_yaml(told, flow=True)}")
    parts.append(f"workload: {dump_yaml(asdict(plan.workload), flow=True)}")
    if plan.fits is not None:
        parts.append(f"fits: {'true' if plan.fits else 'false'}")
    if plan.ledger is not None:
        # the 2 after | is the indentation, which the spaces that align the first line would hide
        parts.append("ledger: |2\n" + "".join(f"  {line}\n" for line in format_ledger(plan.ledger).splitlines())[:-1])
    return "\n".join(parts) + "\n"


def _expert_lines(plan: Plan) -> Iterable[str]:
    placement = plan.experts
    if not placement.default:
        return ["experts: none"]
    count = 1 + max(max(ids, default=0) for ids in placement.default)
    dealt = contiguous(count, plan.grid.ep)

    def lists(slots: Slots, indent: str) -> str:
        if slots == dealt:
            return " contiguous"
        return "".join(f"\n{indent}- {dump_yaml(format_ids(ids), flow=True)}" for ids in slots)

    lines = ["experts:", f"  count: {count}", f"  default:{lists(placement.default, '  ')}"]
    if placement.layers:
        lines.append("  layers:")
        lines += [f"    {layer}:{lists(placement.layers[layer], '    ')}" for layer in sorted(placement.layers)]
    return lines


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan document, whole or not at all; OutputError where that isn't possible."""
    write_whole(path, format_plan(plan), "plan")


def plan_digest(plan: Plan) -> str:
    """xxh3-128 in hex of all that decides what ranks hold: not the ledger, the cluster or the workload."""
    grid = plan.grid

    def words(slots: Slots) -> list[str]:
        return [format_ids(ids) for ids in slots]

    layers: Mapping[int, Slots] = plan.experts.layers
    return canonical_digest(
        {
            "version": plan.version,
            "checkpoint": [plan.checkpoint.family, plan.checkpoint.fingerprint],
            "parallel": [grid.tp, grid.pp, grid.dp, grid.ep, grid.etp],
            "stages": [list(stage) for stage in plan.stages],
            "experts": [words(plan.experts.default), {str(layer): words(slots) for layer, slots in layers.items()}],
            "mtp": plan.mtp,
            "strict_blocks": plan.strict_blocks,
            **({} if plan.layout == NATIVE else {"layout": plan.layout}),
            **({"weights": dict(plan.weights)} if plan.weights else {}),
        }
    )
