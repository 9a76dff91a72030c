"""Live storages of a piece of torch code: every tensor that it makes, counted while something refers to its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Counts the bytes of storages made inside `with`, and keeps their peak. What was there before isn't counted."""

    def __init__(self, known: tuple[torch.Tensor, ...] = ()) -> None:
        """`known` tensors are from outside, whoever returns them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0
        self.events: list[tuple[str, int, int]] = []
        """Name of each operation that took memory, the bytes it took, and what lived behind it."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; count what it made."""
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): the argument is new itself
            given = set()
        self._forget()
        out = func(*args, **(kwargs or {}))
        taken = 0
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._live and key not in given and key not in self._outside:
                    self._live[key] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
                    taken += storage.nbytes()
        self.now += taken
        if taken:
            self.peak = max(self.peak, self.now)
            self.events.append((str(func), taken, self.now))
        return out

    def _forget(self) -> None:
        gone = [key for key, (ref, _) in self._live.items() if ref.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            self.now -= self._live.pop(key)[1]
