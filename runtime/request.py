"""What verify-and-run is asked for, checked before anything is loaded."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.blocks.forward import check_model
from runtime.blocks.images import Images
from runtime.comm.devices import open_device
from runtime.inputs import check_ids, check_images, choose_ids, choose_images
from runtime.opened import Opened, open_output
from runtime.text import TOKENIZER, Tokenizer
from shard_plans.console import Advance, ShowProgress
from shard_plans.errors import OutputError, RuntimeFault

COMPUTE = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
PROMPT_TOKENS = 32
"""New tokens after a prompt where nothing is said."""


def silent(what: str, unit: str) -> nullcontext[Advance]:
    """No progress is shown."""
    return nullcontext(lambda done, total: None)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command was asked for."""

    out: Path
    reference: Path | None = None
    device: str = "cpu"
    prompt: str | None = None
    input_ids: str | None = None
    """`1,2,3`, or the name of a safetensors file, which may hold images too."""
    max_new_tokens: int | None = None
    """None: PROMPT_TOKENS with a prompt, else 0."""
    compute: str = "float32"
    logits_out: Path | None = None
    backend: str | None = None
    ignore_end: bool = False
    """Generate on behind an end-of-sequence token."""
    check_hashes: bool = True
    resident_layers: int = 3
    threads: int = 4
    progress: ShowProgress = silent
    """How a long step is shown: what it is and in which unit it counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Options that were checked, and what they open."""

    options: RunOptions
    opened: Opened
    device: torch.device
    tokenizer: Tokenizer | None
    ids: list[int]
    images: Images | None
    new_tokens: int


def open_request(options: RunOptions) -> Request:
    """Check the options and read the output's documents.

    Raises RuntimeFault or OutputError for what can't be run as asked, ManifestError where the documents are damaged.
    """
    if options.compute not in COMPUTE:
        raise RuntimeFault(f"--compute {options.compute} isn't known; known are {', '.join(COMPUTE)}")
    if options.max_new_tokens is not None and options.max_new_tokens < 0:
        raise RuntimeFault(f"--max-new-tokens is {options.max_new_tokens}; it can't be negative")
    if options.logits_out is not None:
        folder = options.logits_out.absolute().parent
        if not os.access(folder, os.W_OK):
            raise OutputError(
                f"--logits-out {options.logits_out.name}: the folder {folder} isn't there or can't be written"
            )
        if options.logits_out.resolve().is_relative_to(options.out.resolve()):
            raise OutputError(f"--logits-out {options.logits_out} lies in the output {options.out}, which is only read")
    opened = open_output(options.out)
    check_model(opened.model)
    device = open_device(options.device)
    tokenizer = _tokenizer(opened, options.prompt is not None)
    ids = choose_ids(options.prompt, options.input_ids, tokenizer, opened.model)
    new_tokens = options.max_new_tokens
    if new_tokens is None:
        new_tokens = PROMPT_TOKENS if options.prompt is not None else 0
    check_ids(ids, new_tokens, opened.model)
    images = choose_images(options.input_ids, opened.model)
    check_images(ids, images, opened.model)
    return Request(options, opened, device, tokenizer, ids, images, new_tokens)


def _tokenizer(opened: Opened, needed: bool) -> Tokenizer | None:
    if needed:
        return Tokenizer(opened.carried)
    try:
        return Tokenizer(opened.carried) if (opened.carried / TOKENIZER).is_file() else None
    except RuntimeFault:
        return None  # generated ids are then shown as numbers
