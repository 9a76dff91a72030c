"""Python's collector of cycles, held still while a document becomes many objects that have none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")


def undisturbed(work: Callable[Given, Found]) -> Callable[Given, Found]:
    """`work` without the collector, which would look through all that torch has loaded every few thousand objects.

    Threads may do so at once: the collector is on again at the latest when the last of them is done.
    """

    @wraps(work)
    def held_still(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        on = gc.isenabled()
        gc.disable()
        try:
            return work(*args, **kwargs)
        finally:
            if on:
                gc.enable()

    return held_still
