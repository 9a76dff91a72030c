"""The trained model answers as transformers' `generate` does, 64 tokens, whatever the plan and the cache."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.kv_options import KvOptions
from runtime.request import RunOptions
from runtime.run import verify_and_run
from tests.checkpoints import cache
from tests.gpu.part import Part, Setting
from tests.tools.plans import plan_id
from tests.tools.sharded import convert_tiny, failed

PROMPT, TOKENS = "The capital of France is", 64
EXPERTS = 4
MODES: Mapping[str, KvOptions] = {
    "": KvOptions(), "chunked": KvOptions(chunk=3), "KV fp8": KvOptions("fp8"), "KV int8": KvOptions("int8"),
}  # fmt: skip
CELLS: tuple[tuple[int, dict[str, int], str], ...] = (
    (0, {"tp": 3}, ""), (EXPERTS, {"tp": 3, "ep": 3}, ""), (0, {"pp": 2}, "chunked"), (0, {"tp": 3}, "KV fp8"),
    (EXPERTS, {"dp": 2, "ep": 2, "pp": 3}, ""), (0, {"tp": 3, "pp": 2}, "KV int8"),
)  # fmt: skip


def run(setting: Setting) -> Part:
    """Cells in order as long as there is time; an 8-bit cache is judged by the checks alone."""
    part = Part("trained model", len(CELLS))
    sources = {experts: setting.checkpoints / cache.key() / f"real-{experts}" for experts in (0, EXPERTS)}
    absent = [source.name for source in sources.values() if not source.is_dir()]
    if len(absent) == len(sources):
        part.skipped = f"no {' or '.join(absent)} among the checkpoints; `make test-all` makes them from a download"
        return part
    wanted: dict[int, list[int]] = {}
    for experts, plan, mode in part.within(setting.seconds, [cell for cell in CELLS if sources[cell[0]].is_dir()]):
        source, out = sources[experts], setting.folder / "trained"
        if experts not in wanted:
            wanted[experts] = continuation(source)
        convert_tiny(source, out, plan)
        options = RunOptions(out, device=setting.device, prompt=PROMPT, max_new_tokens=TOKENS, cache=MODES[mode])
        found = verify_and_run(options)
        shutil.rmtree(out)
        where = f"{source.name} {plan_id(plan)} {mode}".strip()
        same = list(found.generated) == wanted[experts]
        if failed(found) or not (same or mode.startswith("KV")):
            part.failures.append(f"{where}: failed: {', '.join(sorted(failed(found))) or 'another continuation'}")
        part.figures[where] = speed(found.figures)
    return part


def continuation(source: Path) -> list[int]:
    """The tokens that transformers adds to the prompt, greedily, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.checkpoints.tiny import quiet

    quiet()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32", attn_implementation="eager").eval()
    given = AutoTokenizer.from_pretrained(source)(PROMPT, return_tensors="pt")
    ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)[0]
    added: list[int] = ids[given.input_ids.shape[1] :].tolist()
    return added


def speed(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What verify-and-run says of its speed."""
    return {
        name: figures[name] for name in ("first_token_seconds", "token_seconds", "tokens_per_second") if name in figures
    }
