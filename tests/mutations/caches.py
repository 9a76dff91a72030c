"""Bugs of what is kept from token to token: blocks, states, positions. A prefill doesn't show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from runtime.blocks import gqa, mla
from runtime.blocks.cache import LayerCache
from runtime.blocks.pages import Allocator, Pool
from tests.mutations.bug import ANSWER, STEP, Bug, Site
from tests.mutations.code import replace_in_layer
from tests.mutations.lines import linear_attention, softmax

Right = Callable[..., Any]


def not_written(right: Right, self: Pool, blocks: Sequence[int], start: int, parts: Sequence[Tensor]) -> None:
    """What comes behind the prefill never reaches the block: it keeps what it held before."""
    right(self, blocks, start, parts if start == 0 else [part * 0 for part in parts])


def one_slot_back(right: Right, self: Pool, blocks: Sequence[int], start: int, parts: Sequence[Tensor]) -> None:
    """A new token takes the place of the one before it."""
    right(self, blocks, max(0, start - 1), parts)


def stale_block(right: Right, self: Pool, blocks: Sequence[int], stop: int, dtypes: Any) -> Any:
    """The first block of the table is one that another sequence has written to since."""
    return right(self, [blocks[-1], *blocks[1:]], stop, dtypes)


def early(right: Right, self: LayerCache, first: int) -> None:
    """Blocks are given back one too early."""
    right(self, min(first + self._pool.size, self.length))


def old_state(right: Right, self: LayerCache, positions: Tensor, parts: Sequence[Tensor]) -> None:
    """The state behind the prefill isn't brought up to date."""
    right(self, positions, self.recall() or parts)


def old_tail(right: Right, self: LayerCache, positions: Tensor, parts: Sequence[Tensor]) -> None:
    """The convolution's last inputs aren't."""
    kept = self.recall()
    right(self, positions, [kept[0], *parts[1:]] if kept else parts)


def late(right: Right, words: Any, text: Any, width: int, positions: Tensor, *rest: Any) -> Any:
    """A single token turns by the position before its own."""
    return right(words, text, width, positions - (len(positions) == 1), *rest)


def alone(right: Right, self: LayerCache, positions: Tensor, parts: Sequence[Tensor], *rest: Any) -> Any:
    """A chunk doesn't see the ones before it."""
    seen, found = right(self, positions, parts, *rest)
    count = len(positions) if len(positions) > 1 else len(seen)
    return seen[-count:], [part[-count:] for part in found]


def two_owners(right: Right, self: Allocator, count: int) -> list[int]:
    """Blocks are handed out that still have an owner."""
    self._free += [block for block in sorted(self._held) if block not in self._free]
    return right(self, count)  # type: ignore[no-any-return]


def kept(name: str, fits: Callable[[Site], bool], owner: Any, method: str, wrong: Any, place: str = STEP) -> Bug:
    """A function or method of the layer's cache that does something else."""

    def inject(site: Site) -> None:
        module = {"gqa": gqa, "mla": mla}.get(site.word("attn"), gqa)
        replace_in_layer(site.patch, site.layer.index, module if owner is None else owner, method, wrong)

    return Bug(name, place, fits, inject)


def windowed(site: Site) -> bool:
    """The layer's window is shorter than the prompt."""
    return site.word("window") is not None


def turning(site: Site) -> bool:
    """Softmax attention with RoPE."""
    return softmax(site) and site.word("rope") != "none"


CACHES = (
    kept("new key not written", softmax, Pool, "write", not_written),
    kept("new key one slot back", softmax, Pool, "write", one_slot_back),
    kept("stale cache block", softmax, Pool, "read", stale_block),
    kept("window's block freed too early", windowed, LayerCache, "_forget", early),
    kept("stale state", linear_attention, LayerCache, "replace", old_state),
    kept("stale inputs of the convolution", linear_attention, LayerCache, "replace", old_tail),
    kept("a step turns by the position before", turning, None, "turner", late),
    kept("a chunk doesn't see the one before", softmax, LayerCache, "append", alone, ANSWER),
    kept("a block has two owners", softmax, Allocator, "take", two_owners, ANSWER),
)
