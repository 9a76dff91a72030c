"""Python's collector of cycles, held still while a document becomes many objects that have none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")


class _Stillness:
    """How many threads want it still now, and whether it was on before the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads, self._on = 0, False

    @contextmanager
    def kept(self) -> Iterator[None]:
        with self._lock:
            if not self._threads:
                self._on = gc.isenabled()
                gc.disable()
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if self._on and not self._threads:
                    gc.enable()


_stillness = _Stillness()


def undisturbed(work: Callable[Given, Found]) -> Callable[Given, Found]:
    """`work` without the collector, which would look through all that torch has loaded every few thousand objects.

    Threads may do so at once: the collector is on again when the last of them is done, if it was before the first.
    """

    @wraps(work)
    def held_still(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        with _stillness.kept():
            return work(*args, **kwargs)

    return held_still
