"""What one rank is doing now, and whether what its operators made is finite."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shard_plans.console import Advance, ShowProgress
from shard_plans.errors import NotFinite


class Pulse:
    """Written by a rank as it goes on, read by the watch (runtime/alive/watch.py) from another thread.

    An operator is named by its weight: `attn.qkv`. That its result is finite is asked of the device without waiting for
    the answer; the answers are read before the rank sends something to others, so the rank that made a nan is the one
    that stops, and its operator is the first whose answer is no.
    """

    def __init__(self) -> None:
        self.place = "start-up"
        """A part of the pass: `layer 3`."""
        self.operator = ""
        self.waits: str | None = None
        """The collective in which it waits for others."""
        self.moved = time.monotonic()
        """When it last went on to something else, by this machine's clock, in seconds."""
        self._finite: list[tuple[str, Tensor]] = []

    @property
    def where(self) -> str:
        """Place and operator: `layer 3, attn.qkv`."""
        return f"{self.place}, {self.operator}" if self.operator else self.place

    def enter(self, place: str) -> None:
        """Begin another part of the pass; what the last one made must be finite, else NotFinite."""
        self.settle()
        self.place, self.operator = place, ""
        self.beat()

    def begin(self, operator: str) -> None:
        """Begin an operator."""
        self.operator = operator
        self.beat()

    def beat(self) -> None:
        """Still at it."""
        self.moved = time.monotonic()

    def saw(self, operator: str, y: Tensor) -> Tensor:
        """`y` itself, which an operator made; whether it is finite is looked up later."""
        self.begin(operator)
        if y.is_floating_point():
            self._finite.append((operator, y.isfinite().all()))
        return y

    def settle(self) -> None:
        """Raise NotFinite for the first operator that made a nan or an infinity since this was last called."""
        made, self._finite = self._finite, []
        if not made:
            return
        answers = torch.stack([answer for _, answer in made]).tolist()
        for (operator, _), finite in zip(made, answers, strict=True):
            if not finite:
                raise NotFinite(
                    f"{self.place}, {operator}: the first result that holds a nan or an infinity; look for one in its "
                    "weight, or for an overflow"
                )

    def beats(self, shown: ShowProgress) -> ShowProgress:
        """`shown`, and each step of it a beat."""

        @contextmanager
        def show(what: str, unit: str) -> Iterator[Advance]:
            self.enter(what)
            with shown(what, unit) as advance:

                def step(done: int, total: int) -> None:
                    self.beat()
                    advance(done, total)

                yield step

        return show

    @contextmanager
    def waiting(self, call: str) -> Iterator[None]:
        """Around a collective; one that breaks is never left."""
        self.waits = call
        self.beat()
        yield
        self.waits = None
        self.beat()
