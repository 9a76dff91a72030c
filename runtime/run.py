"""The verb verify-and-run: load the shards, run them, compare with the reference, answer."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converter.backward.gather import Shards
from converter.check import CheckResult, check
from runtime.alive.watch import Watch
from runtime.alive.watched import WatchedComm
from runtime.answers import Wanted
from runtime.checking.checks import Check
from runtime.checking.handed import reference_dtype
from runtime.checking.library import check_fits, model_class
from runtime.checking.rebuilt import Rebuilt
from runtime.checking.reference import Reference
from runtime.checking.sample import only
from runtime.judged import Judged, judge
from runtime.launch import agree, join, one_rank_a_process, run_ranks
from runtime.loaders import open_loader, open_tower
from runtime.peak import Growth, one_arena
from runtime.request import COMPUTE, Request, RunOptions, open_request
from runtime.result import AnswerFound, RunResult
from runtime.session import Job, Outcome
from runtime.text import end_tokens
from runtime.timeline import summed
from runtime.unchecked import not_checked
from runtime.verdict import Ran, checks_of
from shard_plans.checkpoints.checkpoint import open_checkpoint
from shard_plans.documents.manifest import ROOT
from shard_plans.errors import CheckpointError, ManifestError, NotFinite, OutputError, ReshardError, RuntimeFault
from shard_plans.families.binding import bind
from shard_plans.placement.precision import in_precision
from shard_plans.written import file_to_replace


def verify_and_run(options: RunOptions) -> RunResult:
    """Run the ranks of an output folder, all in this process or, under torchrun, one a process.

    Raises ReshardError for what can't be run as asked; what was run and found wrong is a failed check.
    """
    began = time.monotonic()
    one_arena()
    try:
        request = open_request(options)
    except ManifestError as fault:
        if not (options.out / ROOT).is_file():
            raise
        found = Check("hashes", False, 1.0, 0.0, str(fault), "the output's documents are damaged; nothing was run")
        return RunResult(False, (found,), reports=os.environ.get("RANK", "0") == "0")
    with ExitStack() as stack:
        comm, watch = None, None
        if one_rank_a_process():
            comm, watch = join(request.opened.plan.grid, request.device, options, stack)
            request = replace(request, options=replace(options, progress=comm.pulse.beats(options.progress)))
        ran = _run(request, stack, comm, watch, began)
        if ran.fault is not None:
            if watch is not None:
                watch.tell(ran.fault)
            return replace(_result(request, ran), reports=ran.reports)
        passed = all(found.passed for found in checks_of(ran))
        if comm is not None:
            mine = torch.tensor([int(passed)], device=request.device)
            passed = bool(comm.broadcast(mine if comm.rank == 0 else None, 0, (1,), torch.int64))
            if comm.rank:
                return RunResult(passed, reports=False)
    if options.logits_out is not None and ran.outcome is not None and ran.outcome.logits is not None:
        _write_logits(ran.outcome.logits, options.logits_out)
    return _result(request, ran)


def _run(
    request: Request, stack: ExitStack, comm: WatchedComm | None, watch: Watch | None, began: float
) -> Ran:  # fmt: skip
    """Everything but the report. A shard that can't be loaded, or used, is a finding."""
    options, opened, device = request.options, request.opened, request.device
    here = comm is None or comm.rank == 0
    nothing = None, None, None
    at_rest, reference, own = agree(comm, device, lambda: _reference(request, stack) if here else nothing)
    if watch is not None:
        for pass_over in filter(None, (reference, own)):
            watch.add("rank 0, the reference", pass_over.context.pulse)
    outcome: Outcome | None = None
    judged = Judged()
    fault: ReshardError | None = None
    reports = here
    figures: dict[str, Any] = {"input_ids": [] if request.prompts else request.ids}
    figures["tokens"] = sum(map(len, request.texts))
    figures |= {"ranks": opened.plan.grid.world, "device": str(device), "compute": options.compute}
    figures |= {"family": opened.model.family, "parallel": asdict(opened.plan.grid)}
    if options.quick:
        taken = [layer.index for layer in opened.model.forward_layers]
        figures["quick"] = {"layers": taken, "of": opened.plan.stages[-1][1]}
    if request.images is not None:
        figures["images"] = len(request.images.grids)
    try:
        growth = Growth(device)
        references = {each for each in (reference, own) if each is not None}
        loader, needed = agree(comm, device, lambda: open_loader(request, comm, references))
        stack.enter_context(loader)
        tower = agree(comm, device, lambda: open_tower(request, comm, stack))
        reports = True  # from here on a rank may fail alone, and then it is the one that knows why
        texts = tuple(torch.tensor(ids, device=device) for ids in request.texts)
        job = Job(
            opened, texts, COMPUTE[options.compute], device, loader,
            comm is None and not loader.all_kept, options.reference is not None, reference, _wanted(request),
            request.images, tower, options.vision == "data-parallel",
        )  # fmt: skip
        with options.progress("running", "layers") as advance:
            outcome = run_ranks(replace(job, advance=advance), comm, watch, options.timeout)
        figures["memory"] = {"predicted": needed.as_dict(), "measured": growth.most(), "baseline": growth.baseline}
        if job.wanted is not None:
            figures["kv_cache_bytes"] = outcome.cache_bytes
        judged = judge(request, reference, own, outcome, texts)
        figures |= {"bytes_read": outcome.loaded, "seconds_waited": round(loader.seconds_waited, 3)}
        figures["seconds_waited_reference"] = round(sum(each.seconds_waited for each in references), 3)
        figures |= {"seconds_loading": round(loader.seconds_loading, 3), "bytes_loaded": loader.bytes_read}
        figures["bytes_per_second"] = loader.rate
        figures |= {**summed(outcome.spans), "peak_memory": outcome.peak}
        figures["texts"] = [] if options.quick else [text.as_dict() for text in outcome.texts]
        figures |= {} if outcome.speed is None else outcome.speed.as_dict()
    except (ManifestError, NotFinite) as found:
        fault = found
    except RuntimeFault as found:
        if at_rest is None or at_rest.passed:
            raise
        fault = found  # the bytes are known to be wrong, and this is what they led to
    figures["seconds"] = round(time.monotonic() - began, 3)
    return Ran(opened, COMPUTE[options.compute], options.reference is not None, options.check_hashes, at_rest, outcome,
               fault, figures, reports, judged, options.cache.lossless(COMPUTE[options.compute]))  # fmt: skip


def _reference(request: Request, stack: ExitStack) -> tuple[CheckResult | None, Reference | None, Reference | None]:
    """Check the shards' bytes against the checkpoint, and open it for the reference pass, in the plan's precision.

    Last the same with the checkpoint's own weights: the same one where the plan doesn't change them.
    """
    options, opened = request.options, request.opened
    if options.reference is None:
        return None, None, None
    if (options.reference / ROOT).is_file():
        raise CheckpointError(
            f"the reference {options.reference} is an output of reshard, in shards; give the checkpoint that it was "
            f"made from, or write it again: reshard restore {options.reference} FOLDER"
        )
    checkpoint = open_checkpoint(options.reference)
    if checkpoint.fingerprint != opened.root.source.fingerprint:
        raise CheckpointError(
            f"the reference {options.reference} is the checkpoint {checkpoint.fingerprint}, {opened.out} was converted "
            f"from {opened.root.source.fingerprint}; give the one it was made from"
        )
    binding = bind(checkpoint, opened.family)
    if options.quick:
        taken = [layer.index for layer in opened.model.forward_layers]
        binding = replace(binding, model=only(binding.model, taken))
    if options.transformers:
        model_class(binding)
        check_fits(binding)
    wide = reference_dtype(COMPUTE[options.compute])
    at_rest = None
    if not options.quick:
        with options.progress("comparing bytes", "bytes") as advance:
            at_rest = check(opened.out, deep=options.reference, progress=advance)
    converted = in_precision(binding, opened.plan.weights)
    rebuilt = None if converted is binding else Rebuilt(Shards(opened.out, opened.root))
    reference = stack.enter_context(Reference(converted, wide, request.device, rebuilt))
    own = reference if rebuilt is None else stack.enter_context(Reference(binding, wide, request.device))
    return at_rest, reference, own


def _wanted(request: Request) -> Wanted | None:
    """What is to be answered."""
    options, opened = request.options, request.opened
    if not request.answered:
        return None
    ends = frozenset[int]() if options.ignore_end else end_tokens(opened.carried, dict(opened.model.config))
    prompts = [torch.tensor(ids, device=request.device) for ids in request.answered]
    images = request.images if not request.prompts else None
    return Wanted(prompts, request.new_tokens, ends, options.cache, images)


def _result(request: Request, ran: Ran) -> RunResult:
    checks = checks_of(ran)
    answers = ran.outcome.answers if ran.outcome is not None else ()
    texts = [request.tokenizer.decode(list(tokens)) if request.tokenizer is not None else None for tokens in answers]
    answered = tuple(
        AnswerFound(tuple(ids), tokens, text)
        for ids, tokens, text in zip(request.answered, answers, texts, strict=False)
    )
    alone = answered[0] if answered and not request.prompts else None
    return RunResult(
        all(found.passed for found in checks), checks, () if alone is None else alone.generated,
        None if alone is None else alone.text, answered if request.prompts else (), not_checked(ran, bool(answers)),
        ran.outcome.layers if ran.outcome is not None else (), ran.outcome.spans if ran.outcome is not None else (),
        ran.judged.costs,
        ran.figures,
    )  # fmt: skip


def _write_logits(logits: Tensor, path: Path) -> None:
    """`logits` float32 [tokens, vocabulary], whole or not at all."""
    from safetensors.torch import save_file

    target = file_to_replace(path, "the logits:")
    partial = target.with_name(target.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        save_file({"logits": logits.float().cpu().contiguous()}, str(partial))
        partial.replace(target)
    except Exception as error:  # safetensors raises its own classes, which aren't OSError
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OutputError(f"the logits can't be written to {path}: {error}") from error
