"""Bugs that are another word: the block is right, and does what another layer or architecture needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shard_plans.families.model import Model
from tests.mutations.bug import Bug, Site
from tests.mutations.code import twist_layer

FLOAT64 = "float64"
"""Where the error is below float32's rounding of a stream of that size."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the layer that changes from one value to another."""

    name: str
    place: str
    word: str
    before: Callable[[Any], bool]
    after: Callable[[Any], Any]
    compute: str = "float32"
    like: str = ""

    def bug(self) -> Bug:
        """As the table has it."""
        return Bug(
            self.name, self.place, lambda s: self.before(s.word(self.word)), self._inject, self.compute, self.like
        )

    def _inject(self, site: Site) -> None:
        twist_layer(
            site.patch, site.layer.index, words=lambda words: {**words, self.word: self.after(words.get(self.word))}
        )


def given(value: Any) -> bool:
    """The word is there, and says something."""
    return value not in (None, False)


def equals(*values: Any) -> Callable[[Any], bool]:
    """The word has one of these values."""
    return lambda value: value in values


def to(value: Any) -> Callable[[Any], Any]:
    """The word becomes this, whatever it was."""
    return lambda _: value


def text(**changed: Callable[[Any], Any]) -> Callable[[Model], Model]:
    """The model with other settings of RoPE."""

    def change(model: Model) -> Model:
        rope = dict(model.text["rope_parameters"])
        made = {key: value(rope.get(key)) for key, value in changed.items()}
        return replace(model, text={**model.text, "rope_parameters": {**rope, **made}})

    return change


def sizes(**changed: Callable[[int], int]) -> Callable[[Model], Model]:
    """The model with other sizes."""
    return lambda m: replace(m, sizes={**m.sizes, **{name: value(m.sizes[name]) for name, value in changed.items()}})


def model_words(**changed: Callable[[Any], Any]) -> Callable[[Model], Model]:
    """The model with other words."""
    return lambda m: replace(m, words={**m.words, **{name: value(m.words[name]) for name, value in changed.items()}})


def turns(site: Site) -> bool:
    """The layer has RoPE."""
    return site.word("rope") not in (None, "none")


def yarn(site: Site) -> bool:
    """... which is stretched by yarn."""
    return turns(site) and bool(site.model.text["rope_parameters"]["rope_type"] == "yarn")


def routed(site: Site) -> bool:
    """The layer has experts."""
    return bool(site.word("ffn") == "moe")


def of_layer(name: str, place: str, fits: Callable[[Site], bool], **words: Any) -> Bug:
    """Several words of the layer."""

    def inject(site: Site) -> None:
        twist_layer(site.patch, site.layer.index, words=lambda known: {**known, **words})

    return Bug(name, place, fits, inject)


def of_model(
    name: str, place: str, fits: Callable[[Site], bool], change: Callable[[Model], Model], compute: str = "float32",
    like: str = "",
) -> Bug:  # fmt: skip
    """A bug of what the layer believes of the model."""
    return Bug(name, place, fits, lambda site: twist_layer(site.patch, site.layer.index, model=change), compute, like)


ROWS = (
    Word("RoPE in pairs", "attn", "rope", equals("half"), to("interleaved")),
    Word("RoPE in halves", "attn", "rope", equals("interleaved"), to("half")),
    Word("RoPE left out", "attn", "rope", equals("half", "interleaved"), to("none")),
    Word("RoPE on all of a head", "attn", "rope_part", given, to(1.0)),
    Word("indexer's RoPE in pairs", "attn", "index_rope", equals("half"), to("interleaved"),
         like="sglang 13495, vllm 28968, mlx-lm 1431, transformers 46842"),
    Word("indexer picks one key fewer", "attn", "index_topk", given, lambda k: k - 1),
    Word("softmax without yarn's scale", "attn", "softmax_scale", given, to(None)),
    Word("window one key longer", "attn", "window", given, lambda window: window + 1),
    Word("window left out", "attn", "window", given, to(None)),
    Word("heads not normed", "attn", "qk_norm", given, to(None)),
    Word("sinks left out", "attn", "sinks", given, to(None)),
    Word("latent's eps ten times", "attn", "latent_eps", given, lambda eps: 10 * eps, FLOAT64),
    Word("weights don't sum to one", "ffn", "renormalize", given, to(False)),
    Word("factor of the experts left out", "ffn", "scale", given, to(None)),
    Word("groups not limited", "ffn", "topk_groups", lambda kept: (kept or 1) > 1, lambda kept: kept + 1),
    Word("router's bias left out", "ffn", "router_bias", given, to(False)),
    Word("softmax for sigmoid", "ffn", "score", equals("sigmoid"), to("softmax")),
    Word("softmax of all experts", "ffn", "score", equals("softmax_of_topk"), to("softmax")),
    Word("shared expert left out", "ffn", "shared", given, to(None)),
    Word("gate of the shared expert left out", "ffn", "shared", equals("gated"), to("added")),
    Word("SwiGLU for the clamped unit", "ffn", "act", equals("gpt_oss"), to("silu")),
    Word("alpha 1", "ffn", "alpha", given, to(1.0)),
    Word("limit of the unit 1", "ffn", "limit", given, to(1.0)),
    Word("halves for pairs", "ffn", "expert_pairs", equals("interleaved"), to(None)),
)  # fmt: skip
WORDS = (
    of_layer("best of a group, not best two", "ffn", lambda s: (s.word("groups") or 1) > 1, group_score="max"),
    of_layer("bounded decay", "attn", lambda s: bool(s.word("decay") == "softplus"), decay="sigmoid", decay_bound=-5.0),
    *(row.bug() for row in ROWS),
    of_model("RoPE's base ten times", "attn", turns, text(rope_theta=lambda theta: 10 * theta)),
    of_model("positions not stretched", "attn", yarn, text(factor=to(1.0))),
    of_model("norms' eps ten times", "attn", lambda site: True, model_words(eps=lambda eps: 10 * eps), FLOAT64),
    of_model("norms not centred", "attn", lambda s: s.model.words["norm"] == "rms_zero_centred",
             model_words(norm=to("rms"))),
    of_model("one expert fewer a token", "ffn", routed, sizes(topk=lambda k: k - 1)),
)  # fmt: skip
