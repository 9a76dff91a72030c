"""The verb of this package as a function of paths: verify_and_run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path

from runtime.alive.leaving import say
from runtime.blocks.pages import BLOCK
from runtime.junit import junit as junit_text
from runtime.junit import junit_error
from runtime.kv_options import KvOptions
from runtime.report_html.page import make_page
from runtime.request import TIMEOUT, VISION, RunOptions, silent
from runtime.result import RunResult
from runtime.run import verify_and_run as run
from shard_plans.console import ShowProgress
from shard_plans.errors import OutputError, ReshardError
from shard_plans.written import write_whole

AnyPath = str | PathLike[str]


def verify_and_run(
    out: AnyPath,
    reference: AnyPath | None = None,
    *,
    transformers: bool = False,
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
    resident_layers: int = 3,
    verify_device: bool = False,
    compute: str = "float32",
    quick: bool = False,
    sensitivity: bool = False,
    logits_out: AnyPath | None = None,
    html: AnyPath | None = None,
    junit: AnyPath | None = None,
    timeout: float = TIMEOUT,
    report: Callable[[ReshardError], None] = say,
    progress: ShowProgress = silent,
) -> RunResult:
    """Load an output, run its sharded forward pass, compare it with the `reference` checkpoint, and generate.

    `input_ids`: the ids themselves, `1,2,3`, or a safetensors file; `prompts`: a file, one a line; `kv_cache`: fp32,
    bf16, fp8, int8, by default as computed; the rest as the command's options (docs/cli.md). A rank that is in one
    operator for more than `timeout` seconds is taken to hang; under torchrun that, or a dead rank, ends this process
    after `report`. Raises ReshardError for what can't be run as asked, and leaves an error in the `junit` file; what
    was run and found wrong is in the result's checks.
    """
    if input_ids is None or isinstance(input_ids, (str, PathLike)):
        ids = fspath(input_ids) if input_ids is not None else None
    else:
        ids = ",".join(map(str, input_ids))
    options = RunOptions(
        out=Path(out), reference=_path(reference), transformers=transformers, device=device,
        prompt=prompt, input_ids=ids, prompts=_path(prompts),
        context=context, max_new_tokens=max_new_tokens, compute=compute, quick=quick, sensitivity=sensitivity,
        cache=KvOptions(kv_cache, kv_block, kv_blocks, prefill_chunk), logits_out=_path(logits_out), html=_path(html),
        junit=_path(junit), backend=backend, vision=vision, timeout=timeout, report=report, progress=progress,
        resident_layers=resident_layers, verify_device=verify_device,
    )  # fmt: skip
    tells = options.junit if os.environ.get("RANK", "0") == "0" else None
    if tells is not None:
        options.check_files({"--junit": tells})
        write_whole(tells, junit_error("Unfinished", "the run didn't come to its end"))  # if it is killed, that stays
    try:
        result = run(options)
    except ReshardError as fault:
        if tells is not None:
            with suppress(OutputError):  # the fault itself is what to tell
                write_whole(tells, junit_error(type(fault).__name__, str(fault)))
        raise
    if result.reports and options.junit is not None:
        write_whole(options.junit, junit_text(result))
    if result.reports and options.html is not None:
        write_whole(options.html, make_page(result))
    return result


def _path(given: AnyPath | None) -> Path | None:
    return None if given is None else Path(given)
