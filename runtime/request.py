"""What verify-and-run is asked for, checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from runtime.alive.leaving import say
from runtime.blocks.forward import check_model
from runtime.blocks.images import Images
from runtime.checking.sample import only, sample
from runtime.comm.devices import open_device
from runtime.comm.distributed import under_torchrun
from runtime.inputs import DEFAULT_TOKENS, IDS_FILE, check_context, check_ids, check_images, choose_ids, choose_images
from runtime.kv_options import KvOptions
from runtime.opened import Opened, open_output
from runtime.prompts import read_prompts
from runtime.text import TOKENIZER, Tokenizer
from shard_plans.apart import check_apart
from shard_plans.console import Advance, ShowProgress
from shard_plans.errors import OutputError, ReshardError, RuntimeFault
from shard_plans.written import file_to_replace

COMPUTE = {
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16
}  # fmt: skip
VISION = ("replicated", "data-parallel")
PROMPT_TOKENS = 32
"""New tokens after a prompt where nothing is said."""


TIMEOUT = 600.0


def silent(what: str, unit: str) -> nullcontext[Advance]:
    """No progress is shown."""
    return nullcontext(lambda done, total: None)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command was asked for."""

    out: Path
    reference: Path | None = None
    transformers: bool = False
    """Compare the reference with that library's own model."""
    device: str = "cpu"
    prompt: str | None = None
    input_ids: str | None = None
    """`1,2,3`, or the name of a safetensors file, which may hold images too."""
    prompts: Path | None = None
    """A file of prompts that are answered at once, one a line."""
    context: int | None = None
    """How many tokens of the fixed list are run."""
    max_new_tokens: int | None = None
    """None: PROMPT_TOKENS with prompts, else 0."""
    cache: KvOptions = field(default_factory=KvOptions)
    compute: str = "float32"
    quick: bool = False
    """Load, run and compare a few layers alone."""
    sensitivity: bool = False
    """Measure what each group of weights costs in 8 bits."""
    logits_out: Path | None = None
    html: Path | None = None
    """Where to write the report as a page, ..."""
    junit: Path | None = None
    """... and as JUnit XML."""
    backend: str | None = None
    vision: str = VISION[0]
    """Whether every tp rank looks at all images, or each at some."""
    ignore_end: bool = False
    """Generate on behind an end-of-sequence token."""
    check_hashes: bool = True
    verify_device: bool = False
    """Hash once more what arrived on the device."""
    resident_layers: int = 3
    """Layers whose weights are in memory at a time."""
    threads: int = 4
    timeout: float = TIMEOUT
    """Seconds that a rank may be in one operator before it is taken to hang."""
    report: Callable[[ReshardError], None] = say
    """Tells the user of a fault that ends the process at once, since a collective can't be left."""
    progress: ShowProgress = silent
    """How a long step is shown: what it is and in which unit it counts."""

    @property
    def written(self) -> dict[str, Path | None]:
        """The files that are written, by option."""
        return {"--logits-out": self.logits_out, "--html": self.html, "--junit": self.junit}

    def check_files(self, written: dict[str, Path | None]) -> None:
        """Raise OutputError where a file to write can't be written, is named twice, or is one that is read."""
        for option, path in written.items():
            check_writable(option, path, self.out)
        ids = Path(self.input_ids) if self.input_ids is not None and self.input_ids.endswith(IDS_FILE) else None
        check_apart(written, {"--reference": self.reference, "--prompts": self.prompts, "--input-ids": ids})


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Options that were checked, and what they open."""

    options: RunOptions
    opened: Opened
    device: torch.device
    tokenizer: Tokenizer | None
    ids: list[int]
    prompts: list[list[int]]
    """Ids of each line of the file of prompts."""
    images: Images | None
    new_tokens: int

    @property
    def texts(self) -> list[list[int]]:
        """What is run and compared: the prompts, or the ids."""
        return self.prompts or [self.ids]

    @property
    def answered(self) -> list[list[int]]:
        """What is continued: the prompts, or the ids; empty where nothing is."""
        return self.texts if self.new_tokens else []


def open_request(options: RunOptions) -> Request:
    """Check the options and read the output's documents.

    Raises RuntimeFault or OutputError for what can't be run as asked, ManifestError where the documents are damaged.
    """
    if options.compute not in COMPUTE:
        raise RuntimeFault(f"--compute {options.compute} isn't known; known are {', '.join(COMPUTE)}")
    if not options.timeout > 0:
        raise RuntimeFault(f"--timeout is {options.timeout:g}; it must be more than 0 seconds")
    if options.max_new_tokens is not None and options.max_new_tokens < 0:
        raise RuntimeFault(f"--max-new-tokens is {options.max_new_tokens}; it can't be negative")
    options.check_files(options.written)
    if options.sensitivity and options.reference is None:
        raise RuntimeFault("--sensitivity needs --reference CHECKPOINT: it rounds that checkpoint's weights")
    if options.transformers and options.reference is None:
        raise RuntimeFault(
            "--reference transformers needs the checkpoint too: --reference CHECKPOINT --reference transformers"
        )
    if options.backend is not None and not under_torchrun():
        raise RuntimeFault(
            f"--backend {options.backend} is for the processes of torchrun, which didn't start this one: without it "
            "the ranks are virtual and need none"
        )
    if options.quick:
        _check_quick(options)
    options.cache.check()
    _check_sources(options)
    opened = open_output(options.out)
    check_model(opened.model)
    device = open_device(options.device)
    in_words = options.prompt is not None or options.prompts is not None
    tokenizer = _tokenizer(opened, in_words)
    count = DEFAULT_TOKENS if options.context is None else options.context
    check_context(count, opened.model)
    ids = choose_ids(options.prompt, options.input_ids, tokenizer, opened.model, count)
    prompts = _prompts(options, tokenizer)
    new_tokens = options.max_new_tokens
    if new_tokens is None:
        new_tokens = PROMPT_TOKENS if in_words and not options.quick else 0
    options.cache.check_used(new_tokens)
    if options.quick:
        opened = replace(opened, model=only(opened.model, sample(opened.model, str(prompts or ids))))
    images = choose_images(options.input_ids, opened.model)
    request = Request(options, opened, device, tokenizer, ids, prompts, images, new_tokens)
    for text in request.texts:
        check_ids(text, new_tokens, opened.model)
        check_images(text, images, opened.model)
    options.cache.check_room(opened.model.forward_layers, [len(each) for each in request.answered], new_tokens)
    for name, given in (("sensitivity", options.sensitivity), ("reference transformers", options.transformers)):
        if images is not None and given:
            raise RuntimeFault(f"--{name} takes texts, and the ids hold images; give other ids or a prompt")
    if images is not None and options.cache.chunk is not None:
        raise RuntimeFault("--prefill-chunk can't cut ids that hold images; leave it out")
    return request


def _check_quick(options: RunOptions) -> None:
    """Raise RuntimeFault for what a few layers can't do."""
    given = {
        "max-new-tokens": options.max_new_tokens, "sensitivity": options.sensitivity, "logits-out": options.logits_out,
        "reference transformers": options.transformers,
    }  # fmt: skip
    for name, value in given.items():
        if value:
            raise RuntimeFault(f"--quick contradicts --{name}: it runs a few layers alone; leave one of them out")


def _check_sources(options: RunOptions) -> None:
    """Raise RuntimeFault for options that both say which tokens are run."""
    given = {
        "prompt": options.prompt, "input-ids": options.input_ids, "prompts": options.prompts,
        "context": options.context,
    }  # fmt: skip
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RuntimeFault(f"{names[0]} contradicts {names[1]}; give one of them")
    if options.context is not None and options.context < 1:
        raise RuntimeFault(f"--context is {options.context}; at least 1 token is run")


def _prompts(options: RunOptions, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Ids of each line of the file of prompts."""
    if options.prompts is None or tokenizer is None:
        return []
    return [tokenizer.encode(line) for line in read_prompts(options.prompts)]


def check_writable(option: str, path: Path | None, out: Path) -> None:
    """Raise OutputError where the file that an option names can't be written, or lies in the output that is read."""
    if path is None:
        return
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{option} {path.name}: the folder {folder} isn't there or can't be written")
    if path.resolve().is_relative_to(out.resolve()):
        raise OutputError(f"{option} {path} lies in the output {out}, which is only read")
    file_to_replace(path, option)


def _tokenizer(opened: Opened, needed: bool) -> Tokenizer | None:
    if needed:
        return Tokenizer(opened.carried)
    try:
        return Tokenizer(opened.carried) if (opened.carried / TOKENIZER).is_file() else None
    except RuntimeFault:
        return None  # generated ids are then shown as numbers
