"""What one rank does in a verification: the watched prefill, replicas, logits, generation; results meet on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from runtime.alive.watched import WatchedComm
from runtime.answers import Wanted, answer
from runtime.blocks.forward import RankContext
from runtime.blocks.images import Images
from runtime.blocks.places import whole_pieces
from runtime.checking.cached import Compared
from runtime.checking.checks import Measure, exact, gather, limits
from runtime.checking.compare import cosine, divergence, relative
from runtime.checking.figures import LayerFigures, lacking, merge
from runtime.checking.ladder import Ladder
from runtime.checking.likelihood import TextFigures, mean_likelihood, text_figures
from runtime.checking.reference import Reference
from runtime.loading.loader import Loader
from runtime.opened import Opened
from runtime.passes import RankRun, batch_pass
from runtime.peak import peak_memory
from runtime.timeline import Span, Speed, Timeline
from shard_plans.console import Advance


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What the ranks of a process are to do."""

    opened: Opened
    texts: tuple[Tensor, ...]
    """Ids of what is run and compared, [tokens] int64 each, on the device."""
    compute: torch.dtype
    device: torch.device
    loader: Loader
    lockstep: bool
    compare: bool
    """There is a reference, ..."""
    reference: Reference | None
    """... which the process of rank 0 holds."""
    wanted: Wanted | None
    """What is to be answered through the cache."""
    images: Images | None = None
    """What the placeholders among the ids of the only text stand for."""
    tower: Loader | None = None
    """Loads what looks at them, in a process with ranks of the first stage."""
    deals_images: bool = False
    """Each tp rank looks at some of them."""
    advance: Advance | None = None
    """Told the layers that the prefill has done, and all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What the ranks found; measures, logits and counts are whole on rank 0 alone."""

    measures: tuple[Measure, ...]
    logits: Tensor | None
    """[tokens, vocabulary] of replica 0, on rank 0."""
    answers: tuple[tuple[int, ...], ...]
    """Tokens generated behind each prompt."""
    cached: Compared | None
    """How these compare with a pass without the cache."""
    cache_bytes: int
    """The most that the caches of a rank held."""
    layers: tuple[LayerFigures, ...]
    """Of every layer, the worst of its ranks."""
    wrong: int
    routed: int
    """Tokens of all layers and ranks that were routed as the reference does not, and all of them."""
    agreed: int
    """Tokens over which all replicas were compared."""
    loaded: int
    """Bytes of shards read, by all ranks."""
    speed: Speed | None
    """How fast answers came, if there were any."""
    spans: tuple[Span, ...]
    """When each rank ran each section."""
    peak: int
    """The most bytes that a process held (runtime/peak.py)."""
    texts: tuple[TextFigures, ...]
    """How likely each text is, on rank 0."""


def run_rank(job: Job, comm: WatchedComm) -> Outcome:
    """All of it, on one rank; every rank of the plan calls it."""
    opened, plan = job.opened, job.opened.plan
    ctx = RankContext(
        plan.grid, plan.grid.coordinate(comm.rank), comm, opened.model, plan.experts, job.compute, job.device,
        job.deals_images, comm.pulse,
    )  # fmt: skip
    timeline = Timeline(comm.rank)
    run = RankRun(ctx, job.loader, plan.stages, job.lockstep, job.tower, timeline)
    tokens = sum(map(len, job.texts))
    with torch.no_grad():
        reference = job.reference if comm.rank == 0 else None
        pieces = whole_pieces(ctx.model, job.texts, job.images)
        ladder = Ladder(run, job.texts, job.compare, reference, job.images, job.advance, pieces)
        scores = batch_pass(run, pieces, ladder, job.images)
        logits = _bring_home(run, scores, tokens)
        answered = None if job.wanted is None else answer(replace(run, timeline=None), job.wanted)
        mine = {
            "measures": [asdict(measure) for measure in ladder.measures],
            "layers": [asdict(figures) for figures in ladder.figures],
            "untied": ladder.untied, "wrong": ladder.wrong, "routed": ladder.routed,
            "cache": 0 if answered is None else answered.bytes,
            "spans": [span.as_list() for span in timeline.spans.values()], "peak": peak_memory(job.device),
            "loaded": _bytes_read(job) if comm.rank == job.loader.ranks[0] else 0,
        }  # fmt: skip
        every = gather(comm, job.device, mine)
        agreed = _compare_replicas(run, scores, min(found["untied"] for found in every))
        replicas = [found for found in gather(comm, job.device, agreed) if found is not None]
        measures = [Measure(**entry) for found in every for entry in found["measures"]]
        measures += [Measure("replicas", error, where) for error, where, _ in replicas]
        texts: list[TextFigures] = []
        if logits is not None:
            theirs = None if job.reference is None else job.reference.logits()
            texts = list(text_figures(logits, job.texts, theirs))
            measures += [] if theirs is None else _compare_logits(job, logits, theirs)
    figures = [LayerFigures(**entry) for found in every for entry in found["layers"]]
    if job.reference is not None:
        measures += lacking(job.reference.context.model.forward_layers, figures, plan.grid.stage_ranks)
    layers = merge(figures, exact(job.compute))
    total = {key: sum(found[key] for found in every) for key in ("wrong", "routed", "loaded")}
    return Outcome(
        tuple(measures), logits, () if answered is None else answered.tokens,
        None if answered is None else answered.compared,
        max(found["cache"] for found in every), tuple(layers),
        agreed=min((count for _, _, count in replicas), default=tokens),
        speed=None if answered is None else answered.speed,
        spans=tuple(Span(*span) for found in every for span in found["spans"]),
        peak=max(found["peak"] for found in every), texts=tuple(texts), **total,
    )  # fmt: skip


def _bytes_read(job: Job) -> int:
    return job.loader.bytes_read + (job.tower.bytes_read if job.tower is not None else 0)


def _bring_home(run: RankRun, scores: Tensor | None, tokens: int) -> Tensor | None:
    """The logits of replica 0, on rank 0."""
    ctx = run.ctx
    if run.output_rank == 0:
        return scores if ctx.at.rank == 0 else None
    if ctx.at.rank == run.output_rank and scores is not None:
        ctx.comm.send(scores, 0)
    if ctx.at.rank == 0:
        return ctx.comm.recv(run.output_rank, (tokens, ctx.size("vocab")), ctx.compute)
    return None


def _compare_replicas(run: RankRun, scores: Tensor | None, untied: int) -> tuple[float, str, int] | None:
    """On the last stage, a rank for each replica but the first: its logits against replica 0's.

    Returns the worst error of a token (or the cosine, in low precision), where, and how many tokens were compared: if
    they part company at or behind token `untied`, whose route was a near-tie, only those before it.
    """
    ctx, grid = run.ctx, run.ctx.grid
    if scores is None or grid.dp == 1 or ctx.at.tp:
        return None
    if ctx.at.dp == 0:
        for replica in range(1, grid.dp):
            ctx.comm.send(scores, ctx.at.rank + replica * grid.tp)
        return None
    first = ctx.comm.recv(run.output_rank, scores.shape, ctx.compute)
    where = f"replica {ctx.at.dp} (rank {ctx.at.rank}) against replica 0"
    if not exact(ctx.compute):
        return cosine(scores, first), where, len(scores)
    wide, whole = scores.cpu().double(), first.cpu().double()
    errors = (wide - whole).norm(dim=-1) / whole.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    apart = (~(errors <= limits(ctx.compute)[0])).nonzero().flatten().tolist()
    if apart and 0 < untied <= apart[0]:
        errors = errors[:untied]
    bad = (~torch.isfinite(errors)).nonzero().flatten().tolist()
    token = bad[0] if bad else int(errors.argmax())
    return float(errors[token]), f"{where}, token {token}", len(errors)


def _compare_logits(job: Job, logits: Tensor, reference: Tensor) -> Iterator[Measure]:
    where = f"replica 0, {len(logits)} tokens"
    if exact(job.compute):
        yield Measure("logits", relative(logits, reference), where)
        return
    yield Measure("logits", cosine(logits, reference), where)
    yield Measure("divergence", divergence(logits, reference), where)
    if any(len(ids) > 1 for ids in job.texts):
        ours, theirs = mean_likelihood(logits, job.texts), mean_likelihood(reference, job.texts)
        yield Measure("likelihood", abs(ours - theirs) / abs(theirs), where)
