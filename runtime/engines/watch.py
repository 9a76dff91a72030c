"""Accounts of a load: what an engine reads of stored tensors, and what it writes of its parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from converter.sources.layouts import Region, rectangles, uncovered
from shard_plans.errors import RuntimeFault


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """One tensor, and the regions of it that were touched."""

    name: str
    shape: tuple[int, ...]
    """Its dimensions in the order of their strides, the widest first; a scalar is one row."""
    strides: tuple[int, ...]
    offset: int
    """Where it begins in its storage, in elements."""
    itemsize: int
    held: tuple[Region, ...]
    """The regions that have content."""
    touched: dict[Region, None] = field(default_factory=dict)

    def regions(self, view: Tensor) -> Iterator[Region]:
        """Where a view of its storage lies in it: one rectangle; all between its ends where it isn't one."""
        size = view.element_size()
        begin = view.storage_offset() * size
        end = begin + (1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))) * size
        first, last = begin // self.itemsize - self.offset, -(-end // self.itemsize) - self.offset
        if not 0 <= first < last <= math.prod(self.shape):
            return
        found = self._rectangle(view, first) if size == self.itemsize else None
        if found is not None:
            yield found
            return
        for spans in rectangles(self.shape, first, last):
            yield tuple((span,) for span in spans)

    def _rectangle(self, view: Tensor, rest: int) -> Region | None:
        strides = [stride for n, stride in zip(view.shape, view.stride(), strict=True) if n > 1 and stride]
        left = {stride: n for n, stride in zip(view.shape, view.stride(), strict=True) if n > 1 and stride}
        spans = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            first, rest = divmod(rest, stride) if size > 1 else (0, rest)
            count = left.pop(stride, 1) if size > 1 else 1
            if first + count > size:
                return None
            spans.append(((first, first + count),))
        return None if left or rest or len(set(strides)) < len(strides) else tuple(spans)

    def touch(self, view: Tensor) -> tuple[int, ...] | None:
        """Note what `view` covers; the first index of it that has no content."""
        for region in self.regions(view):
            if region not in self.touched:
                missing = uncovered(region, self.held)
                if missing is not None:
                    return missing
                self.touched[region] = None
        return None


def open_account(name: str, tensor: Tensor, held: Sequence[Region] | None = None) -> Account:
    """The account of a tensor that is dense in its memory, in whatever order of dimensions; None: all is content."""
    axes = sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: -axis[1])
    shape, strides = tuple(size for size, _ in axes), tuple(stride for _, stride in axes)
    whole: Region = tuple(((0, size),) for size in shape or (1,))
    return Account(
        name, shape or (1,), strides or (1,), int(tensor.storage_offset()), tensor.element_size(),
        (whole,) if held is None else tuple(held),
    )  # fmt: skip


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every operation on the tensors that it knows is noted before it is carried out.

    Raises RuntimeFault where one would read what isn't there.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters`: those of a model; several may share memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, Account] = {}
        self._targets: dict[int, list[Account]] = {}
        seen = set()
        for name, tensor in parameters.items():
            place = _storage(tensor), tensor.storage_offset(), tensor.shape
            if tensor.numel() and place not in seen:
                seen.add(place)
                self._targets.setdefault(place[0], []).append(open_account(name, tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; without this torch imports its compiler for the first operation."""
        return False

    def lend(self, account: Account, tensor: Tensor, owner: object) -> None:
        """Watch what is read of a tensor, until the object that owns its memory is freed."""
        place = _storage(tensor)
        self._sources[place] = account
        weakref.finalize(owner, self._sources.pop, place, None)

    def unwritten(self, tensor: Tensor) -> tuple[int, ...] | None:
        """The first index of a parameter that nothing was written to; None where all of it was."""
        for account in self._targets.get(_storage(tensor), ()):
            found = [uncovered(region, tuple(account.touched)) for region in account.regions(tensor)]
            if found:
                return next((missing for missing in found if missing is not None), None)
        return (0,) * tensor.ndim

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note what `func` reads and writes, then let it."""
        kwargs = kwargs or {}
        if not func.is_view:
            targets = _written(func)
            for number, value in enumerate(args):
                self._note(value, number in targets)
            for name, value in kwargs.items():
                self._note(value, name in targets)
        return func(*args, **kwargs)

    def _note(self, value: Any, write: bool) -> None:
        tensors: Iterable[Any] = (value,) if isinstance(value, Tensor) else tree_iter(value)
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.numel():
                continue
            if write:
                for account in self._targets.get(_storage(tensor), ()):
                    account.touch(tensor)
            elif (source := self._sources.get(_storage(tensor))) is not None:
                missing = source.touch(tensor)
                if missing is not None:
                    raise RuntimeFault(
                        f"the engine reads element {list(missing)} of {source.name}, which the plan gives to another "
                        f"rank: it cuts this tensor otherwise than the plan"
                    )


@cache
def _written(func: Any) -> frozenset[int | str]:
    """Places and names of the arguments that an operation changes."""
    changed = [
        (number, argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(key for pair in changed for key in pair)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
