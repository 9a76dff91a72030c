"""How a bug gets into the vision tower of the sharded ranks, while the reference's stays right. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from runtime.blocks import clip, qwen_vision, towers, vision
from runtime.blocks.context import RankContext
from tests.mutations.bug import SEEN, Bug, Site

Weights = dict[str, Any]
Fits = Callable[[Site], bool]


class Looking(threading.local):
    """Whether this thread is in a rank's tower."""

    wrong = False


def enter_tower(
    patch: pytest.MonkeyPatch, weights: Callable[[RankContext, Weights], Weights] = lambda ctx, weights: weights
) -> Looking:
    """Know who is in the tower, and give it what `weights` makes of those it is given."""
    here, right = Looking(), towers.look

    def look(ctx: RankContext, given: Any, *rest: Any) -> Any:
        if ctx.grid.world == 1:
            return right(ctx, given, *rest)
        here.wrong = True
        try:
            return right(ctx, weights(ctx, dict(given)), *rest)
        finally:
            here.wrong = False

    patch.setattr(towers, "look", look)
    return here


def replace_in_tower(patch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Put `wrong(right, *arguments)` in the place of a function or method, in the tower alone."""
    here, right = enter_tower(patch), getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        return wrong(right, *given, **named) if here.wrong else right(*given, **named)

    patch.setattr(owner, name, call)


@dataclass(slots=True)
class Now:
    """The block in which a thread is."""

    at: threading.local = field(default_factory=threading.local)


def replace_in_block(site: Site, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """The same in the attention of the site's block alone."""
    now, right = Now(), getattr(owner, name)

    def entered(attention: Callable[..., Any], ctx: Any, heads: Any, weights: Any, block: str, *rest: Any) -> Any:
        now.at.here = block == f"vision.{site.block}"
        try:
            return attention(ctx, heads, weights, block, *rest)
        finally:
            now.at.here = False

    def call(*given: Any, **named: Any) -> Any:
        return wrong(right, *given, **named) if getattr(now.at, "here", False) else right(*given, **named)

    replace_in_tower(site.patch, module(site), "attention", entered)
    site.patch.setattr(owner, name, call)


def kind(site: Site) -> str:
    """The tower's kind."""
    return str(site.model.words["tower"])


def module(site: Site) -> Any:
    """The module of the tower."""
    return {"clip": clip, "qwen3_vl": qwen_vision}.get(kind(site), vision)


def of(*kinds: str) -> Fits:
    """A rank of the first stage, which has the tower, and that of one of these kinds (none: of any)."""
    return lambda site: site.stage == 0 and (not kinds or kind(site) in kinds)


def seen(
    name: str,
    fits: Fits,
    owner: Callable[[Site], Any],
    attribute: str,
    wrong: Any,
    names: str,
    compute: str = "float32",
) -> Bug:
    """A function of the tower that is another one; `names` may hold {block}. `wrong` may take the site first."""

    def inject(site: Site) -> None:
        made = wrong(site) if getattr(wrong, "of_site", False) else wrong
        replace_in_tower(site.patch, owner(site), attribute, made)

    return Bug(name, SEEN, fits, inject, compute, images=True, names=lambda site: names.format(block=site.block))


def of_site(make: Callable[[Site], Any]) -> Callable[[Site], Any]:
    """Mark what makes a wrong function for a site."""
    make.of_site = True  # type: ignore[attr-defined]
    return make
