"""Filling an engine's model through its own weight loading, and the proof that nothing was left out."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from torch import Tensor

from converter.sources.sharded import Sharded
from runtime.engines.standins import StandIns
from runtime.engines.watch import Watch
from shard_plans.errors import RuntimeFault


def fill(
    source: Sharded,
    layers: int,
    parameters: Callable[[], Iterable[tuple[str, Tensor]]],
    load: Callable[[Iterator[tuple[str, Tensor]]], Any],
    exempt: Container[str] = (),
) -> int:
    """Give the stored tensors of the source's files to `load`, which fills the parameters; the bytes read.

    `layers`: those that the model has. `exempt`: parameters that may be left as they are. Raises RuntimeFault where the
    engine reads what the files don't hold, leaves a parameter unfilled or a tensor unused, CheckFailed where a digest
    is wrong; then the model holds whatever was loaded until that was known.
    """
    watch = Watch(dict(parameters()))
    standins = StandIns(source, layers)
    with watch:
        load(standins.lend(watch))
    if not standins.done:
        raise RuntimeFault("the engine stopped loading before all tensors of the rank were read")
    found = {
        name: missing
        for name, parameter in parameters()
        if parameter.numel() and name not in exempt and (missing := watch.unwritten(parameter)) is not None
    }
    if found:
        name, place = next(iter(found.items()))
        raise RuntimeFault(
            f"{len(found)} parameters of the engine aren't filled by the rank's shards, the first {name}, from element "
            f"{list(place)}; the checkpoint lacks them, or the engine cuts them otherwise than the plan"
        )
    unused = standins.unused()
    if unused:
        raise RuntimeFault(
            f"the engine doesn't use {len(unused)} tensors of the rank's shards, the first {unused[0]}; this release "
            f"of it has no place for them"
        )
    return standins.bytes_read
