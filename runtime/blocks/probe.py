"""Who looks on while a layer or a vision tower runs."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runtime.blocks.router import Routing


class Probe(Protocol):
    """Looks on while a layer runs; the ranks of a replica make the same calls with the same values."""

    def saw(self, operator: str, x: Tensor) -> None:
        """Called with what an operator made of all rows [T, ..]: whole, not a rank's share of it.

        `stream` is what comes into the layer; then attn.norm, attn, ffn.norm, router (the scores of all experts),
        experts (their weighted sum), shared, ffn (all that the second half adds), deep (what features of images add).
        """

    def routed(self, routing: Routing) -> Tensor | None:
        """Called with a layer's routes: experts [T, k] to take in place of those chosen, or None to leave them."""


class Looker(Protocol):
    """Looks on while a vision tower runs."""

    def made(self, step: str, x: Tensor) -> Tensor:
        """Called with what a step made of all patches or tokens [n, ..]; the tower goes on with what this returns.

        The steps: `patches`, `positions` (the learned ones), `turns` (RoPE's cosines and sines), of every block
        `block N, attn` and `block N, ffn` (what each adds), `deep N`, `norm` (one outside of blocks), `merge`,
        `projector`; as far as the tower has them.
        """


class Nobody:
    """Looks at nothing, and leaves the routes."""

    def saw(self, operator: str, x: Tensor) -> None:
        """Nothing to do."""

    def routed(self, routing: Routing) -> Tensor | None:
        """Leave them."""
        return None

    def made(self, step: str, x: Tensor) -> Tensor:
        """Go on with it."""
        return x


NOBODY = Nobody()
