"""What would fit where the plan doesn't: each remedy with its numbers, found by searching with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shard_plans.console import size
from shard_plans.documents.plan import Plan
from shard_plans.errors import PlanError
from shard_plans.memory.offload import offload
from shard_plans.search.candidate import Candidate
from shard_plans.search.grids import expert_count
from shard_plans.search.longest import context_limit, highest_concurrency, most
from shard_plans.search.space import Space

EXPERT_FORMATS = ("mxfp4_group", "fp8_block")
"""Formats of --weights that are tried for routed experts."""
MOST_CARDS = 8192
MOST_TRIES = 40
"""Numbers of nodes that are tried for one answer."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to change."""

    kind: str
    """cards, context, concurrency, kv_dtype, assume, weights or offload."""
    text: str
    """A sentence with the numbers."""
    value: int | str | None = None
    """The number or word to give instead; None where this alone doesn't help."""


Best = Callable[[Space], Candidate]
"""Chooses among what fits, for the goal of the search."""


def remedies(space: Space, closest: Plan, best: Best) -> tuple[Remedy, ...]:
    """Everything that alone would make the question answerable, and what wouldn't."""
    return (
        cards(space, best),
        weights_alone(space),
        longest(space),
        sequences(space),
        *_words(space, best),
        *other_formats(space, best),
        *offloading(space, closest),
    )


def cards(space: Space, best: Best) -> Remedy:
    """The fewest cards of this type that fit."""
    asked = fewest(space)
    if asked is None:
        return Remedy("cards", f"no number of whole nodes up to {MOST_CARDS} cards fits this workload")
    fitting = best(asked)
    return Remedy(
        "cards",
        f"{_cluster(asked)} {'fit' if asked.cluster.world > 1 else 'fits'} at this workload: {_grid(fitting)}, the "
        f"fullest rank needs {size(fitting.need)} of {size(asked.room)}",
        asked.cluster.world,
    )


def weights_alone(space: Space, stored: str = "as stored") -> Remedy:
    """The fewest cards for weights alone, at a utilisation of 1."""
    asked = fewest(space.weights())
    here = space.weights().plainest()
    now = f"weights alone, {stored}, take {here.need / GIB:.2f} GiB a card here ({_grid(here)})"
    if asked is None:
        return Remedy("cards", f"{now}; no number of whole nodes up to {MOST_CARDS} cards holds them")
    fitting = asked.plainest()
    return Remedy(
        "cards",
        f"{now}; at a utilisation of 1.0 they need {_cluster(asked)} ({fitting.need / GIB:.1f} GiB on the fullest rank "
        f"at {_grid(fitting)})",
        asked.cluster.world,
    )


def longest(space: Space) -> Remedy:
    """The longest context at this concurrency."""
    load = space.workload
    found = most(lambda tokens: space.under(context=tokens).fits(), min(load.context, context_limit(space)))
    if not found:
        return Remedy("context", f"no context fits: not even one token of {load.concurrency} sequences")
    return Remedy("context", f"a context of {found:,} tokens fits {load.concurrency} sequences", found)


def sequences(space: Space) -> Remedy:
    """The most sequences at this context."""
    load = space.workload
    found = highest_concurrency(space, load.concurrency)
    if not found:
        return Remedy("concurrency", f"not even one sequence of {load.context:,} tokens fits")
    return Remedy("concurrency", f"{found:,} sequences of {load.context:,} tokens fit", found)


def _words(space: Space, best: Best) -> Iterator[Remedy]:
    """An FP8 cache, and the typical instead of the high end of what can't be computed."""
    load, need = space.workload, space.roomiest().need
    for kind, value, words, now in (
        ("kv_dtype", "fp8", "an FP8 KV cache", load.kv_dtype),
        ("assume", "typical", "counting the typical instead of the high end of what isn't known exactly", load.assume),
    ):
        if now in (value, "fp4", "nvfp4_ds_mla", "low"):
            continue
        changed = space.under(**{kind: value})
        if changed.fits():
            found = best(changed)
            yield Remedy(kind, f"{words} fits: {_grid(found)}, {size(found.need)} of {size(space.room)}", value)
        elif kind == "kv_dtype":
            least = changed.roomiest().need
            text = (
                f"{words} isn't enough: the fullest rank needs {size(least)}, {size(max(0, need - least))} less; "
                f"{size(space.room)} may be taken"
            )
            yield Remedy(kind, text)


def other_formats(space: Space, best: Best) -> Iterator[Remedy]:
    """Routed experts in another format: whether it fits here, and how many cards its weights alone need."""
    if not expert_count(space.binding):
        return
    stored = space.weights().roomiest().need
    for name in EXPERT_FORMATS:
        try:
            other = space.stored(experts=name)
            if other.weights().roomiest().need == stored:
                continue
        except PlanError:  # the shapes or the stored type don't allow it
            continue
        if other.fits():
            found = best(other)
            text = f"experts in {name} fit: {_grid(found)}, {size(found.need)} of {size(space.room)}"
            yield Remedy("weights", text, f"experts={name}")
        else:
            yield Remedy("weights", weights_alone(other, f"experts in {name}").text)


def offloading(space: Space, closest: Plan) -> Iterator[Remedy]:
    """Cold experts in host memory, for the closest plan."""
    found = offload(space.payload, closest)
    if found is None:
        return
    worst, host = found.worst, space.cluster.card.host_memory
    grid = closest.grid
    where = f"at tp {grid.tp} pp {grid.pp} dp {grid.dp} ep {grid.ep} etp {grid.etp}"
    if not found.enough:
        text = (
            f"host memory isn't enough {where}: with all {worst.held:,} experts of rank {worst.rank} pushed out it "
            f"still lacks {size(worst.lacking)}"
        )
        yield Remedy("offload", text)
        return
    node = None if host is None else host * space.cluster.cards
    enough = node is None or found.node_bytes <= node
    have = "" if node is None else f", {'of' if enough else 'more than the'} {size(node)} that the node has"
    text = (
        f"with cold experts in host memory it {'fits' if enough else 'would fit'} {where}: the fullest card (rank "
        f"{worst.rank}) pushes out {worst.experts:,} of its {worst.held:,} experts, {size(worst.bytes)}; its node "
        f"keeps {size(found.node_bytes)} in host memory{have}"
    )
    yield Remedy("offload", text, worst.experts if enough else None)


def fewest(space: Space) -> Space | None:
    """The space of the fewest cards that fit: some of a node, or whole nodes; None where none does.

    More cards don't always fit where fewer did, so every number is tried from what the bytes alone rule out; beyond 16
    nodes in larger steps, and then those between the last two.
    """
    space = replace(space, fixed={axis: n for axis, n in space.fixed.items() if axis in ("tp", "etp")})
    held = sum(part.nbytes for p in space.payload.binding.parameters if p.stage != "mtp" for part in p.parts)
    more = space.together() // max(space.room, 1)  # more ranks never hold less together
    least = max(held // max(space.room, 1) + 1, more if more > space.cluster.world else 0)
    each = space.cluster.cards
    for number in range(least, each):
        if space.on(1, number).fits():
            return space.on(1, number)
    nodes, tries, failed = max(1, -(-least // each)), 0, 0
    while nodes * each <= MOST_CARDS and tries < MOST_TRIES:
        if space.on(nodes).fits():
            passed = range(failed + 1, nodes) if failed else ()  # large steps passed these by
            return next((found for number in passed if (found := space.on(number)).fits()), space.on(nodes))
        nodes, tries, failed = nodes + 1 + nodes // 16, tries + 1, nodes
    return None


def _cluster(space: Space) -> str:
    found = space.cluster
    return f"{found.world} card{'s' * (found.world > 1)} ({found.nodes}x{found.cards})"


def _grid(candidate: Candidate) -> str:
    grid = candidate.grid
    return f"tp {grid.tp} pp {grid.pp} dp {grid.dp} ep {grid.ep} etp {grid.etp}"
