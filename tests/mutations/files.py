"""Bugs of whole tensors: what belongs to another layer, rank or role, in a file or in a buffer."""

from __future__ import annotations

from tests.mutations.bug import HEAD, Bug, Site
from tests.mutations.code import Weights, twist_layer
from tests.mutations.weights import MATRICES
from tests.tools import tamper


def file_of(site: Site, rank: int, name: str) -> str:
    """The file in which a rank has a tensor."""
    return next(f for f, n in tamper.find(site.out, name) if n == name and f in site.opened.root.ranks[rank].files)


def copy(site: Site, source: tuple[int, str], target: tuple[int, str]) -> None:
    """Give (rank, name) the bytes of another."""
    with tamper.opened(site.out, file_of(site, *source)) as shard:
        data = shard.data[source[1]]
    with tamper.opened(site.out, file_of(site, *target)) as shard:
        shard.data[target[1]] = data


def alike(site: Site, layer: int) -> list[str]:
    """Matrices that two layers have in the same shape."""
    other = site.opened.model.layers[layer].words
    kinds = ["attn"] if other["attn"] == site.word("attn") else []
    kinds += ["mlp"] if other["ffn"] == site.word("ffn") == "swiglu" else []
    kinds += ["experts", "shared"] if other["ffn"] == site.word("ffn") == "moe" else []
    return [
        name
        for name in (*MATRICES, "experts.gate_up", "experts.down")
        if name in site.shapes and name.split(".")[0] in kinds
    ]


def neighbour(site: Site) -> int | None:
    """A layer of the same stage, and of the same kind."""
    first, stop = site.opened.plan.stages[site.stage]
    found = [layer for layer in range(first, stop) if layer != site.layer.index and alike(site, layer)]
    return found[0] if found else None


def from_neighbour(site: Site) -> None:
    """A matrix of another layer."""
    layer = neighbour(site)
    assert layer is not None
    name = site.dice.choice(alike(site, layer))
    copy(site, (site.rank, f"layers.{layer}.{name}"), (site.rank, f"layers.{site.layer.index}.{name}"))


def from_rank(site: Site) -> None:
    """A matrix of another tp rank."""
    tp = site.opened.plan.grid.tp
    other = site.rank - site.rank % tp + (site.rank + 1) % tp
    name = f"layers.{site.layer.index}.{site.dice.choice(cut(site))}"
    copy(site, (other, name), (site.rank, name))


def cut(site: Site) -> list[str]:
    """Matrices that are cut over tp."""
    whole = ("attn.q_a", "attn.kv_a")
    return [name for name in MATRICES if name in site.shapes and name not in whole]


def tied(site: Site) -> None:
    """The head is taken for the embedding."""
    first = site.rank % site.opened.plan.grid.stage_ranks
    copy(site, (first, "embed"), (site.rank, "head"))


def twin(site: Site) -> bool:
    """The layer before is of the same stage, and like this one in every word."""
    before = site.layer.index - 1
    same = before >= site.opened.plan.stages[site.stage][0] and site.model.layers[before].words == site.layer.words
    return bool(same)


def stale_buffer(site: Site) -> None:
    """The layer computes with the weights of the one before, which its buffers still hold."""
    held: dict[int, Weights] = {}
    index = site.layer.index
    twist_layer(site.patch, index - 1, weights=lambda ctx, given: held.setdefault(ctx.at.rank, given))
    twist_layer(site.patch, index, weights=lambda ctx, given: held.get(ctx.at.rank, given))


FILES = (
    Bug("matrix of another layer", "layer", lambda site: neighbour(site) is not None, from_neighbour),
    Bug("matrix of another rank", "layer", lambda s: s.opened.plan.grid.tp > 1 and bool(cut(s)), from_rank),
    Bug("buffers of the layer before", "layer", twin, stale_buffer),
    Bug("head tied to the embedding", HEAD, lambda site: "head" in site.shapes, tied, like="Megatron-Bridge 5364"),
)
