"""Predicted time of the layers of a grid, and of a step through its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shard_plans.cost.assumptions import Assumptions
from shard_plans.cost.links import Group, Network, group
from shard_plans.cost.work import LayerWork, Matrices, Work, picked
from shard_plans.families.binding import Binding
from shard_plans.families.model import Layer, Model, experts_a_token
from shard_plans.memory.activations import expert_row, step_tokens, stream
from shard_plans.memory.caches import cached, kept
from shard_plans.memory.card import Card, latency_of, with_speeds
from shard_plans.memory.cluster import Cluster
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid

ACTIVATION = 2
"""Bytes of an activation: bf16."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one pass through a layer runs."""

    tokens: float
    """Of one replica."""
    everywhere: float
    """Of all replicas together."""
    visible: float
    """Tokens that each of them attends to, on average."""
    cached: float
    """Part of the replica's cache that is read: of its sequences, those that run in this pass."""
    decode: bool


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds."""

    total: float = 0.0
    links: float = 0.0
    """Of these, in communication."""

    def __add__(self, other: Time) -> Time:
        """Part by part."""
        return Time(self.total + other.total, self.links + other.links)

    def __mul__(self, times: float) -> Time:
        """Each part so many times."""
        return Time(self.total * times, self.links * times)


@dataclass(frozen=True, slots=True)
class Times:
    """The layers of one grid, timed for decode and prefill."""

    decode: tuple[Time, ...]
    """Of each layer that runs: one micro-batch."""
    prefill: tuple[Time, ...]
    """Of each layer that runs: one chunk."""
    decode_ends: tuple[Time, Time]
    """What the first stage does beside its layers, and the last."""
    prefill_ends: tuple[Time, Time]
    micro_batches: int
    """Of a decode step."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times the layers of one binding on one cluster."""

    work: Work
    cluster: Cluster
    card: Card
    """With every speed filled in."""
    network: Network
    assumptions: Assumptions = field(default_factory=Assumptions)

    def times(self, grid: Grid, workload: Workload, imbalance: float | None = None) -> Times:
        """Each layer's time for a decode micro-batch and for a prefill chunk.

        `imbalance`: tokens of the busiest expert slot over the mean; None: what is assumed.
        """
        model = self.work.binding.model
        if imbalance is None:
            imbalance = self.assumptions.imbalance(model.sizes.get("experts", 1), grid.ep)
        sequences = -(-workload.concurrency // grid.dp)
        micro = min(grid.pp, sequences)
        decode = Load(sequences / micro, workload.concurrency / micro, workload.context, 1 / micro, True)
        chunk = step_tokens(grid, workload)
        busy = min(grid.dp, workload.concurrency)
        prefill = Load(chunk, chunk * busy, workload.context / 2, 0.0, False)
        kinds: list[tuple[Time, Time]] = []
        for kind, layer in enumerate(self.work.examples):
            cache = cache_read(layer, model, grid, workload)
            work = self.work.kind(kind, grid.tp, grid.etp)
            kinds.append(
                (
                    self.layer(work, layer, grid, decode, cache, imbalance),
                    self.layer(work, layer, grid, prefill, cache, imbalance),
                )
            )
        return Times(
            tuple(kinds[kind][0] for kind in self.work.kinds),
            tuple(kinds[kind][1] for kind in self.work.kinds),
            (self._first(decode, grid), self._last(sequences / micro, grid)),
            (self._first(prefill, grid), self._last(min(sequences, chunk), grid)),
            micro,
        )

    def layer(
        self, work: LayerWork, layer: Layer, grid: Grid, load: Load, cache: float, imbalance: float = 1.0
    ) -> Time:
        """Seconds of one layer on the busiest rank; `cache`: bytes that the rank caches for it."""
        model, tp = self.work.binding.model, self._tp(grid)
        hidden = ACTIVATION * model.sizes["hidden"]
        seconds = sum(self.products(matrices, load.tokens) for matrices in work.dense)
        seconds += self._attention(work, load, cache)
        passes = load.tokens * hidden * self.assumptions.passes
        seconds += max(passes / self._reading, self.assumptions.elementwise * self.assumptions.kernel)
        links = self.network.all_reduce(load.tokens * hidden, tp)
        if work.expert is None:
            links += self.network.all_reduce(load.tokens * hidden, tp)
        else:
            seconds += self._experts(work.expert, grid, load, imbalance)
            links += self._expert_links(grid, load, imbalance)
        return Time(seconds + links, links)

    def products(self, matrices: Matrices, tokens: float, times: float = 1.0) -> float:
        """Seconds of matrix products: `tokens` rows through weights that are read `times` times."""
        reading = times * matrices.bytes / self._reading
        computing = 2 * matrices.values * tokens / self._rate(matrices.rate)
        kernels = matrices.kernels * (1 if matrices.rate == "bf16" else 2)  # rows are quantised first
        return max(reading, computing, kernels * self.assumptions.kernel)

    def hop(self, grid: Grid, stage: int, layer: int, tokens: float) -> float:
        """Seconds of handing the stream on to `stage`, which begins with `layer`: each tp rank sends its part."""
        model = self.work.binding.model
        size = tokens * stream(model, layer) * ACTIVATION * model.sizes["hidden"]
        cards, ranks = self.cluster.cards, grid.stage_ranks
        far = (stage - 1) * ranks // cards != stage * ranks // cards
        return self.network.send(size / grid.tp, far) + self.network.all_gather(size, self._tp(grid))

    @property
    def _reading(self) -> float:
        return (self.card.bandwidth or 0.0) * self.assumptions.memory

    def _rate(self, name: str) -> float:
        return self.card.flops.get(name, self.card.flops["bf16"]) * self.assumptions.compute

    def _tp(self, grid: Grid) -> Group:
        return group(grid.tp, 1, self.cluster.cards)

    def _attention(self, work: LayerWork, load: Load, cache: float) -> float:
        flops = load.tokens * work.attention.flops(load.visible, load.decode)
        reading = cache * load.cached / self._reading
        return max(reading, flops / self._rate("bf16"), self.assumptions.kernel)

    def _experts(self, expert: Matrices, grid: Grid, load: Load, imbalance: float) -> float:
        """The busiest slot: its rows, and the expected number of its experts that some token chose."""
        model = self.work.binding.model
        count, topk = model.sizes["experts"], experts_a_token(model)
        tokens = load.everywhere / grid.edp
        rows = imbalance * tokens * topk / grid.ep
        touched = -(-count // grid.ep) * (1 - (1 - topk / count) ** max(tokens, 1.0))
        grouped = Matrices(expert.values, expert.bytes, expert.rate, 2)
        routing = self.assumptions.routing * self.assumptions.kernel
        return routing + self.products(grouped, rows, max(touched, min(rows, 1.0)))

    def _expert_links(self, grid: Grid, load: Load, imbalance: float) -> float:
        """Rows to their experts and back. Where attention isn't replicated an all-reduce may be the cheaper way."""
        topk = experts_a_token(self.work.binding.model)
        row = ACTIVATION * expert_row(self.work.binding.model)
        cards = self.cluster.cards
        if grid.stage_ranks == 1:
            return 0.0
        etp, ep = group(grid.etp, 1, cards), group(grid.ep, grid.etp, cards)
        arriving = imbalance * load.everywhere / grid.edp * topk / grid.ep
        sent = self.network.dispatch(load.tokens / grid.tp, row, topk, ep)
        through = 2 * sent + 2 * self.network.all_gather(arriving * row, etp)
        through += self.network.all_gather(load.tokens * row, self._tp(grid))
        if grid.dp == 1 and grid.edp == 1:
            return min(through, self.network.all_reduce(load.tokens * row, self._tp(grid)))
        return through

    def _first(self, load: Load, grid: Grid) -> Time:
        """Rows of the embedding, summed over its parts."""
        size = load.tokens * ACTIVATION * self.work.binding.model.sizes["hidden"]
        links = self.network.all_reduce(size, self._tp(grid))
        return Time(max(size / self._reading, self.assumptions.kernel) + links, links)

    def _last(self, rows: float, grid: Grid) -> Time:
        """Logits of the rows that are sampled, gathered in fp32."""
        head = self.work.head(grid.tp)
        if head is None:
            return Time()
        links = self.network.all_gather(4 * rows * self.work.binding.model.sizes["vocab"], self._tp(grid))
        return Time(self.products(head, rows) + links, links)


def cost_model(binding: Binding, cluster: Cluster, assumptions: Assumptions | None = None) -> CostModel:
    """The model of a binding on a cluster; speeds that the card lacks are assumed (card.sources says which)."""
    assumptions = assumptions or Assumptions()
    card = with_speeds(cluster.card)
    if card.link is None or card.network is None:  # with_speeds fills both
        raise ValueError("a card without links")
    network = Network(card.link, card.network, latency_of("start"), assumptions.links)
    return CostModel(Work(binding), cluster, card, network, assumptions)


def cache_read(layer: Layer, model: Model, grid: Grid, workload: Workload) -> float:
    """Bytes of a layer's cache that a decode step reads: all, or what an indexer picks and the indexer's keys."""
    most = picked(layer)
    share = 1.0 if most is None else min(1.0, most * max(1, int(layer.words.get("compress") or 1)) / workload.context)
    read = 0.0
    for item in kept(layer, model, grid, workload):
        bounded = item.window is None and not item.state and not item.operator.startswith("index")
        read += cached(item, grid, workload).typical * (share if bounded else 1.0)
    return read


def total(times: Sequence[Time]) -> Time:
    """Their sum."""
    return Time(sum(time.total for time in times), sum(time.links for time in times))
