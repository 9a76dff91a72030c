"""What the verification says of a bug: caught or not, by which checks, and whether the layer that it names is right."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from runtime.request import RunOptions
from runtime.run import RunResult, verify_and_run
from shard_plans.errors import ReshardError
from tests.mutations.bug import EMBEDDING, HEAD, STAGE, STEP, Bug, Site


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


def judge(bug: Bug, site: Site, checkpoint: Path, ids: str) -> Finding:
    """Verify the spoiled output against the checkpoint."""
    options = RunOptions(site.out, checkpoint, input_ids=ids, compute=bug.compute)
    try:
        result = verify_and_run(options)
    except ReshardError as fault:
        return Finding(True, bool(re.search(rf"layer {site.layer.index}\b", str(fault))), ("refused",), str(fault))
    wrong = {check.name: check.where for check in result.checks if not check.passed}
    return Finding(not result.passed, _pinned(bug, site, wrong), tuple(wrong), _first(bug, wrong))


def _pinned(bug: Bug, site: Site, wrong: dict[str, str]) -> bool:
    """Whether the checks name the place."""
    if bug.place == EMBEDDING:
        return "embedding" in wrong.get("layers", "")
    if bug.place == HEAD:
        return "logits" in wrong and not {"layers", "hidden", "routing"} & set(wrong)
    if bug.place == STAGE:
        return f"handed to stage {site.stage}," in wrong.get("hidden", "") and "layers" not in wrong
    if bug.place == STEP:
        return _names(site, wrong.get("decode", ""))
    return _names(site, wrong.get("layers", wrong.get("routing", "")))


def _names(site: Site, where: str) -> bool:
    return re.match(rf"(layer )?{site.layer.index}\b", where.removeprefix("layer ")) is not None


def _first(bug: Bug, wrong: dict[str, str]) -> str:
    order = ("layers", "routing", "hidden", "logits", "decode", "bytes")
    return next((wrong[name] for name in order if name in wrong), "; ".join(wrong.values()))


def passes(out: Path, checkpoint: Path, ids: str, compute: str = "float32", new_tokens: int = 0) -> RunResult:
    """The verification of an output that nothing was done to."""
    return verify_and_run(RunOptions(out, checkpoint, input_ids=ids, compute=compute, max_new_tokens=new_tokens))
