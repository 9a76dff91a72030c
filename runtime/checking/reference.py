"""The unsharded forward pass of the checkpoint, streamed a layer at a time: what the shards are measured against.

It reads stored names through the family table and unfused roles, so it shares no byte-moving code with the converter;
it does share the table and the layer arithmetic with the sharded run.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

from runtime.blocks import forward, towers
from runtime.blocks.forward import Beside, RankContext, Routing
from runtime.blocks.images import Images
from runtime.blocks.places import beside_images
from runtime.blocks.weights import LayerWeights, Stored
from runtime.checking.probes import Recorder
from runtime.checking.rebuilt import Rebuilt
from runtime.loading.reading import as_stored, empty_bytes, fill, open_file
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.errors import CheckpointError, RuntimeFault
from shard_plans.families.binding import Binding
from shard_plans.families.model import Layer
from shard_plans.families.parameter import Parameter, Part


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What the reference computed for one layer."""

    layer: Layer
    start: Tensor
    """The stream into the layer [tokens, .., hidden]."""
    out: Tensor
    """The stream out of it."""
    routing: Routing | None
    """Where the tokens went, if the layer is a mixture of experts."""
    beside: Beside
    """What was known beside the stream before the layer ran."""
    made: Mapping[str, Tensor]
    """What each operator made of all tokens, by the words of Probe.saw."""


class StoredWeights:
    """Reads parameters of a bound checkpoint by their byte ranges."""

    def __init__(self, binding: Binding, rebuilt: Rebuilt | None = None) -> None:
        """`rebuilt` reads what isn't stored in the binding's precision."""
        self._rebuilt = rebuilt
        self._checkpoint: Checkpoint = binding.checkpoint
        self._handles: dict[int, int] = {}
        self._layers: dict[int | str, list[Parameter]] = {}
        self.bytes_read = 0
        for parameter in binding.parameters:
            place = parameter.stage if parameter.layer is None else parameter.layer
            self._layers.setdefault(place, []).append(parameter)

    def section(self, place: int | str, device: torch.device, roles: Iterable[str] | None = None) -> LayerWeights:
        """Parameters of a layer, or of `first`, `vision` or `last`, by role (`roles`: only these), on `device`."""
        weights: dict[str, Stored | tuple[Stored, ...]] = {}
        for parameter in self._layers.get(place, ()):
            if roles is None or parameter.role in roles:
                read = self._part if self._rebuilt is None or parameter.source is None else self._rebuilt.part
                parts = {part.kind: read(part, parameter.per_expert).to(device) for part in parameter.parts}
                format = None if parameter.format is None else parameter.format.name
                number = "" if parameter.number is None else f".{parameter.number}"
                role = parameter.role.replace(".", f"{number}.", 1)  # vision.qkv of block 3: vision.3.qkv
                weights[role] = Stored(
                    parts["values"], parts.get("scale"), format, parameter.block, parts.get("global_scale")
                )
        return weights

    def _part(self, part: Part, stacked: bool) -> Tensor:
        """One stored tensor, or all experts' stacked along a new first dimension."""
        checkpoint = self._checkpoint
        sizes = [int(checkpoint.sizes[number]) for number in part.tensors]
        flat, view = empty_bytes(sum(sizes))
        at = 0
        for number, size in zip(part.tensors.tolist(), sizes, strict=True):
            file = int(checkpoint.file_numbers[number])
            path = checkpoint.folder / checkpoint.files[file].name
            if file not in self._handles:
                self._handles[file] = open_file(path, CheckpointError)
            fill(self._handles[file], path, int(checkpoint.starts[number]), view[at : at + size], CheckpointError)
            at += size
        self.bytes_read += at
        stacks = (len(sizes),) if stacked else ()
        return as_stored(flat, part.dtype, (*stacks, *part.shape))[tuple(map(slice, (*stacks, *part.used)))]

    def close(self) -> None:
        """Close every file."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles = {}
        if self._rebuilt is not None:
            self._rebuilt.close()


class Reference:
    """The reference's forward pass over one list of ids, taken layer by layer, one layer in memory at a time."""

    def __init__(
        self, binding: Binding, compute: torch.dtype, device: torch.device, rebuilt: Rebuilt | None = None
    ) -> None:
        """Nothing is read yet; `compute` is float32 or float64. RuntimeFault where a block is missing.

        `rebuilt` reads the weights that the binding has in another precision than the checkpoint.
        """
        forward.check_model(binding.model)
        self.context: RankContext = forward.single_rank(binding.model, compute, device)
        self._weights = StoredWeights(binding, rebuilt)
        self._left = deque(binding.model.forward_layers)
        self._x: Tensor | None = None
        self._positions: Tensor | None = None
        self._beside = Beside()

    @property
    def bytes_read(self) -> int:
        """Bytes of the checkpoint read so far."""
        return self._weights.bytes_read

    def begin(self, ids: Tensor, images: Images | None = None) -> Tensor:
        """Embed the ids [tokens], and the images in them, and start over at the first layer; returns its input."""
        device = self.context.device
        ids = ids.to(device)
        self._left = deque(self.context.model.forward_layers)
        self._positions = torch.arange(len(ids), device=device)
        self._beside = beside_images(self.context.model, ids, images)
        with torch.no_grad():
            tower = {} if images is None else self._weights.section("vision", device)
            seen = None if images is None else towers.see(self.context, tower, images, ids, self._beside)
            self._x = forward.embed(self.context, self._weights.section("first", device), ids, seen)
        return self._x

    @property
    def beside(self) -> Beside:
        """What is known beside the stream reached so far."""
        return self._beside

    def next_layer(self) -> Record:
        """Run the next layer."""
        start, positions = self._started()
        if not self._left:
            raise RuntimeFault("the reference was asked for a layer behind its last one")
        layer = self._left.popleft()
        with torch.no_grad():
            weights, before, recorder = self.weights(layer.index), replace(self._beside), Recorder()
            out, routing = forward.run_layer(
                self.context, layer, weights, start, None, positions, self._beside, recorder
            )
        self._x = out
        return Record(layer, start, out, routing, before, recorder.made)

    def weights(self, layer: int) -> LayerWeights:
        """Of one layer, on the device."""
        return self._weights.section(layer, self.context.device)

    def logits(self) -> Tensor:
        """[tokens, vocabulary]; layers that weren't asked for are run first."""
        while self._left:
            self.next_layer()
        x, _ = self._started()
        device = self.context.device
        weights: Mapping[str, Stored | tuple[Stored, ...]] = self._weights.section("last", device)
        if "head" not in weights:
            weights = {**weights, **self._weights.section("first", device, ("embed",))}
        with torch.no_grad():
            return forward.logits(self.context, weights, x)

    def _started(self) -> tuple[Tensor, Tensor]:
        if self._x is None or self._positions is None:
            raise RuntimeFault("the reference has no input yet; call begin first")
        return self._x, self._positions

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._weights.close()

    def __enter__(self) -> Reference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
