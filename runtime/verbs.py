"""The verb of this package as a function of paths: verify_and_run."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path

from runtime.blocks.pages import BLOCK
from runtime.kv_options import KvOptions
from runtime.request import VISION, RunOptions, silent
from runtime.run import RunResult
from runtime.run import verify_and_run as run
from shard_plans.console import ShowProgress

AnyPath = str | PathLike[str]


def verify_and_run(
    out: AnyPath,
    reference: AnyPath | None = None,
    *,
    device: str = "cpu",
    backend: str | None = None,
    prompt: str | None = None,
    input_ids: Sequence[int] | AnyPath | None = None,
    prompts: AnyPath | None = None,
    context: int | None = None,
    max_new_tokens: int | None = None,
    kv_cache: str | None = None,
    kv_block: int = BLOCK,
    kv_blocks: int | None = None,
    prefill_chunk: int | None = None,
    vision: str = VISION[0],
    compute: str = "float32",
    logits_out: AnyPath | None = None,
    progress: ShowProgress = silent,
) -> RunResult:
    """Load an output, run its sharded forward pass, compare it with the `reference` checkpoint, and generate.

    `input_ids`: the ids themselves, `1,2,3`, or a safetensors file; `prompts`: a file, one a line; `kv_cache`: fp32,
    bf16, fp8, int8, by default as computed; the rest as the command's options (docs/cli.md). Raises ReshardError for
    what can't be run as asked; what was run and found wrong is in the result's checks.
    """
    if input_ids is None or isinstance(input_ids, (str, PathLike)):
        ids = fspath(input_ids) if input_ids is not None else None
    else:
        ids = ",".join(map(str, input_ids))
    options = RunOptions(
        out=Path(out), reference=Path(reference) if reference is not None else None, device=device, prompt=prompt,
        input_ids=ids, prompts=Path(prompts) if prompts is not None else None, context=context,
        max_new_tokens=max_new_tokens, cache=KvOptions(kv_cache, kv_block, kv_blocks, prefill_chunk), compute=compute,
        logits_out=Path(logits_out) if logits_out is not None else None, backend=backend, vision=vision,
        progress=progress,
    )  # fmt: skip
    return run(options)
