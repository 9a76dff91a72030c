"""A family table bound to one config.json: sizes, layer kinds, and the words that choose forward blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shard_plans.errors import ConfigError, FamilyError
from shard_plans.families.expressions import MissingKey, evaluate, first_value
from shard_plans.families.family import Family
from shard_plans.families.rows import Row
from shard_plans.families.vocabulary import check_words


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer."""

    index: int
    """0-based, as in the stored names."""
    kinds: Mapping[str, str]
    """Kind -> value by the table, for example {"ffn": "moe"}."""
    words: Mapping[str, Any]
    """Block vocabulary for this layer, config values filled in: {"attn": "mla", "ffn": "moe", ...}."""
    mtp: bool = False
    """A multi-token-prediction layer: stored behind the last layer, on the last stage, not run by the forward pass."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the forward pass and the planner need to know of an architecture; no names of tensors."""

    family: str
    config: Mapping[str, Any]
    """config.json as read."""
    text: Mapping[str, Any]
    """The keys of the config's text section, and behind them those of its root."""
    sizes: Mapping[str, int]
    """Named sizes of the table: hidden, vocab, heads, kv_heads, head_dim, experts, topk, ..."""
    layers: tuple[Layer, ...]
    """All layers in order, multi-token-prediction layers last."""
    words: Mapping[str, Any]
    """Model-wide words: {"stream": "plain", "norm": "rms", "eps": 1e-6}."""
    tied: bool
    """The head uses the embedding's weight."""

    @property
    def forward_layers(self) -> tuple[Layer, ...]:
        """The layers that the forward pass runs (no multi-token prediction)."""
        return tuple(layer for layer in self.layers if not layer.mtp)


MAX_LAYERS = 10_000
MAX_SIZE = 1 << 40


def bind_model(family: Family, config: Mapping[str, Any]) -> Model:
    """Evaluate the table over the config.

    Raises ConfigError for a key that is missing or holds what the table doesn't cover, FamilyError for unknown words.
    """
    root, config = config, lookup(family, config)
    for key, allowed in family.expect.items():
        try:
            value = evaluate(key, config)
        except MissingKey:
            continue
        if value not in allowed:
            raise ConfigError(
                f"config.json: {key} is {value!r}, the family table {family.name} covers "
                f"{', '.join(map(repr, allowed))}"
            )
    sizes: dict[str, int] = {}
    for name, expression in family.sizes.items():
        try:
            sizes[name] = _whole(first_value(expression, config), f"size {name}")
        except MissingKey:
            if not _only_vision(family, name):
                raise
    if 0 < sizes.get("experts", 0) < sizes.get("topk", 0):
        raise ConfigError(
            f"config.json: a token goes to {sizes['topk']} experts, but there are {sizes['experts']}; mend one of these"
        )
    layers = []
    count = _whole(first_value(family.count, config), "the number of layers")
    extra = _whole(first_value(family.mtp["count"], config), "the number of MTP layers") if family.mtp else 0
    if not 0 < count + extra <= MAX_LAYERS or count == 0:
        raise ConfigError(
            f"config.json: {count} layers and {extra} MTP layers; between 1 and {MAX_LAYERS} are possible"
        )
    for index in range(count + extra):
        mtp = index >= count
        kinds = _mtp_kinds(family) if mtp else _kinds(family, config, index)
        words = _words(family, config, kinds, mtp)
        layers.append(Layer(index, kinds, words, mtp))
    words = {}
    for section, values in family.blocks:
        if section is None or (section.stage == "vision" and holds(section.condition, config, sizes)):
            words.update(_fill(values, config))
    check_words(words, family.name, "blocks of the model")
    for layer in layers:
        check_words(layer.words, family.name, f"blocks of layer {layer.index}")
    return Model(family.name, root, config, sizes, tuple(layers), words, bool(config.get("tie_word_embeddings")))


def lookup(family: Family, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the table's keys are looked up: its text section, behind that the root, behind that its defaults."""
    section = config.get(family.text.rstrip("?")) if family.text is not None else None
    needed = family.text is not None and not (family.text.endswith("?") and section is None)
    if needed and not isinstance(section, Mapping):
        raise ConfigError(
            f"config.json lacks the section {family.text!r}, in which the family {family.name} is described"
        )
    layers: tuple[Mapping[str, Any], ...] = (family.defaults, config, section or {})
    return {key: value for layer in layers for key, value in layer.items() if value is not None}


def holds(condition: str | None, config: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Whether a condition of the table holds; a key that isn't there is a feature that isn't there."""
    try:
        return condition is None or bool(evaluate(condition, config, dict(sizes)))
    except MissingKey:
        return False


def wanted(row: Row, model: Model) -> bool:
    """Whether config.json says that the row is stored."""
    return all(holds(condition, model.text, model.sizes) for condition in (row.section.condition, row.condition))


def _only_vision(family: Family, size: str) -> bool:
    """Whether a size is used by rows of the vision tower alone, so that a text-only config may lack it."""
    rows = [row for row in family.rows if row.section.stage != "vision"]
    used = {factor.size for row in rows for dim in row.dims for factor in dim.factors()}
    vision = {factor.size for row in family.rows for dim in row.dims for factor in dim.factors()} - used
    return size in vision or size in family.holes.values()


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
        raise ConfigError(f"config.json: {what} is {value!r}, a whole number from 0 to {MAX_SIZE} is wanted")
    return value


def _kinds(family: Family, config: Mapping[str, Any], index: int) -> dict[str, str]:
    kinds = {}
    for kind, values in family.kinds.items():
        for value, condition in values.items():
            if condition == "else" or first_value(condition, config, {"layer": index}):
                kinds[kind] = value
                break
        else:
            raise ConfigError(f"config.json: layer {index} is of no {kind}; the table knows {', '.join(values)}")
    return kinds


def _mtp_kinds(family: Family) -> dict[str, str]:
    stated = {kind: value for kind, value in family.mtp.items() if kind not in ("count", "prefix", "layer")}
    missing = set(family.kinds) - set(stated)
    if missing:
        raise FamilyError(f"family {family.name}: layers / mtp doesn't state {', '.join(sorted(missing))}")
    return stated


def _words(family: Family, config: Mapping[str, Any], kinds: dict[str, str], mtp: bool) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for section, values in family.blocks:
        if section is not None and section.stage == "layer" and section.applies(kinds, mtp):
            words.update(_fill(values, config))
    return words


def _fill(values: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Words with `=key`, or a list of such, read from the config; `=key?` is left out where there is no such key."""
    filled = {}
    for word, value in values.items():
        if isinstance(value, list):
            filled[word] = first_value([choice[1:] for choice in value], config)
        elif isinstance(value, str) and value.startswith("="):
            try:
                filled[word] = first_value(value[1:].rstrip("?"), config)
            except MissingKey:
                if not value.endswith("?"):
                    raise
        else:
            filled[word] = value
    return filled


def experts_a_token(model: Model) -> int:
    """How many experts each token goes to. FamilyError where the table doesn't give the size topk."""
    topk = model.sizes.get("topk")
    if topk is None:
        raise FamilyError(f"the family table {model.family} has experts, but no size topk: how many a token goes to")
    return topk
