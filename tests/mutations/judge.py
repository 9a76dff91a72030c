"""What the verification says of a bug: caught or not, by which checks, and whether the layer that it names is right."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.kv_options import KvOptions
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.errors import ReshardError
from tests.mutations.bug import ANSWER, EMBEDDING, HEAD, SEEN, STAGE, STEP, Bug, Site

CHUNK, NEW = 16, 4
"""How a prompt is filled in, and the tokens behind it, where the cache of an answer is looked at."""
ATTENTION, FFN = ("attn.norm", "attn"), ("ffn.norm", "router", "experts", "shared", "ffn")
HALVES = {"attn": ATTENTION, "ffn": FFN, "layer": ATTENTION + FFN, "deep": ("deep",)}
"""Place of a bug -> operators of which one must be the first that fails."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How one bug fared."""

    caught: bool
    pinned: bool
    """The place that the report names is the one where the bug was put."""
    by: tuple[str, ...]
    """Checks that failed; `refused` where the run ended with a message."""
    where: str
    """What the report says first."""


def judge(bug: Bug, site: Site, checkpoint: Path, ids: str, device: str = "cpu") -> Finding:
    """Verify the spoiled output against the checkpoint."""
    options = RunOptions(site.out, checkpoint, device=device, input_ids=ids, compute=bug.compute)
    if bug.place == ANSWER:
        chunk = None if bug.images else CHUNK
        options = replace(options, max_new_tokens=NEW, cache=KvOptions(chunk=chunk), ignore_end=True)
    if bug.dealt or (bug.images and site.dice.random() < 0.5):
        options = replace(options, vision="data-parallel")
    try:
        result = verify_and_run(options)
    except ReshardError as fault:
        named = "KV cache: block" if bug.place == ANSWER else rf"layer {site.layer.index}\b"
        named = rf"vision tower: .*{bug.names(site)}" if bug.place == SEEN else named
        return Finding(True, re.search(named, str(fault)) is not None, ("refused",), str(fault))
    wrong = {check.name: check.where for check in result.checks if not check.passed}
    return Finding(not result.passed, _pinned(bug, site, wrong), tuple(wrong), _first(wrong))


def _pinned(bug: Bug, site: Site, wrong: dict[str, str]) -> bool:
    """Whether the checks name the place: the layer, and which half of it."""
    layers = wrong.get("layers", "")
    if "finite" in wrong:
        return re.search(rf"layer {site.layer.index}, [\w.]+: the first result", wrong["finite"]) is not None
    if bug.place == SEEN:
        elsewhere = bool(set(wrong) & {"operators", "routing", "decode"}) or (layers and "embedding" not in layers)
        return not elsewhere and re.match(bug.names(site), wrong.get("vision", "")) is not None
    if bug.place == EMBEDDING:
        return layers.startswith("embedding,")
    if bug.place == HEAD:
        return "the head" in wrong.get("logits", "") and "layers" not in wrong
    if bug.place == STAGE:
        return layers.startswith(f"handed to stage {site.stage},")
    if bug.place == ANSWER:
        return set(wrong) == {"cache"}
    if bug.place == STEP:
        return not layers and _layer(wrong.get("decode", "")) == site.layer.index
    operator = re.match(r"layer (\d+), rank \d+, ([\w.]+)", wrong.get("operators", ""))
    if operator is None:  # a layer that wasn't run
        return _layer(layers) == site.layer.index
    here = int(operator[1]) == site.layer.index and operator[2] in HALVES[bug.place]
    return here and _layer(layers) in (None, site.layer.index)


def _layer(where: str) -> int | None:
    found = re.match(r"layer (\d+)\b", where)
    return None if found is None else int(found[1])


def _first(wrong: dict[str, str]) -> str:
    order = ("finite", "vision", "operators", "layers", "routing", "decode", "hidden", "logits", "cache", "bytes")
    return next((wrong[name] for name in order if name in wrong), "")
