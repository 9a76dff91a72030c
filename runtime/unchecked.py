"""What a run of verify-and-run says nothing about, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.checking.checks import exact
from runtime.verdict import Ran
from shard_plans.placement.experts import format_ids


def not_checked(ran: Ran, generated: bool) -> tuple[str, ...]:
    """What a reader must not take for checked."""
    said: list[str] = []
    if not ran.hashed:
        said.append("Digests weren't compared (they were turned off).")
    if ran.fault is not None:
        said.append("The forward pass didn't come to its end, so nothing behind the failure was checked.")
    if (quick := ran.figures.get("quick")) is not None:
        said += _sampled(ran, quick["layers"], quick["of"])
    if not ran.compared:
        said.append(
            "No reference was given: digests say that the files are as they were written, not that they are right. "
            "Give --reference CHECKPOINT to compare bytes, layers and logits."
        )
    elif ran.judged.library is not None:
        said.append(
            "The reference's layers and head were compared with transformers' model of the checkpoint, over these ids "
            "alone; what both take from the same source, such as config.json, can fool both."
        )
    elif ran.figures.get("images"):
        said.append(
            "The reference is reshard's own forward pass over the checkpoint: it shares the family table and the "
            "arithmetic of layers and tower with the ranks, so a wrong row of the table fools both. Only "
            "another implementation can confirm those, and --reference transformers takes ids without images alone."
        )
    else:
        said.append(
            "The reference is reshard's own forward pass over the checkpoint: it shares the family table and the layer "
            "arithmetic with the ranks, so a wrong row of the table fools both. Only another implementation can "
            "confirm those: add --reference transformers, where that library's model fits in memory."
        )
    if ran.opened.model.words.get("tower") is not None and not ran.figures.get("images"):
        said.append(
            "The ids came without images: the vision tower was neither loaded nor run. Give --input-ids a file with "
            "pixel_values and grid_thw."
        )
    extra = len(ran.opened.model.layers) - len(ran.opened.model.forward_layers)
    if extra and ran.opened.plan.mtp == "keep":
        hashed = "" if ran.at_rest is not None else ", nor were they loaded; reshard check hashes them"
        said.append(f"{extra} multi-token-prediction layer(s) are held but not run{hashed}.")
    outcome = ran.outcome
    if outcome is not None:
        tokens = ran.figures["tokens"]
        loads = [layer.load for layer in outcome.layers if layer.load is not None]
        used, all_experts = sum(sum(map(bool, load)) for load in loads), sum(map(len, loads))
        if ran.compared and used < all_experts:
            rest = "weren't compared at all" if quick else "are compared in their bytes, not in their arithmetic"
            said.append(
                f"{all_experts - used} of {all_experts} experts (over all layers that ran) were chosen by none of the "
                f"{tokens} tokens: they {rest}."
            )
        if turned := sum(len({*layer.ties, *layer.replayed}) for layer in outcome.layers):
            said.append(
                f"Rounding turned {turned} near-ties of routers; those tokens took the reference's route in the "
                "comparison, and will take their own when the model is served."
            )
        if outcome.agreed < tokens:
            said.append(f"Replicas were compared over {outcome.agreed} of {tokens} tokens, up to a router's near-tie.")
    if generated:
        said.append(
            "Generated tokens were compared with a pass of the same ranks without the cache, not with the reference."
        )
    if ran.compared and not exact(ran.compute):
        kind = str(ran.compute).removeprefix("torch.")
        said.append(f"In {kind} all thresholds are smoke tests; run float32 for the strict ones.")
    if ran.compared and ran.opened.plan.weights:
        said.append(
            "The plan changes the precision of weights. The reference has them as converted, so that the limits stay "
            "strict; whether the model is still good enough, only an evaluation with real prompts tells."
        )
    return tuple(said)


def _sampled(ran: Ran, layers: Sequence[int], count: int) -> Iterator[str]:
    """What --quick left out."""
    if len(layers) < count:
        yield (
            f"Only layers {format_ids(layers)} of {count} were loaded, run and compared (--quick), one behind the "
            "other, as if the others weren't there; other ids choose others."
        )
    yield (
        "Bytes weren't compared with the checkpoint (--quick): reshard check --deep does that; reshard check alone "
        "hashes what wasn't loaded."
    )
    if ran.opened.model.sizes.get("experts"):
        yield "Of each layer's experts only those took part that some token chose (--quick); give more tokens for more."
