"""Largest magnitudes of matrices that are converted in several goes, each found once whoever asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Tops:
    """By a matrix's number; threads that ask for the same one wait for the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._found: dict[int, float] = {}

    def find(self, number: int, make: Callable[[], float]) -> float:
        """The magnitude, as `make` finds it."""
        with self._lock:
            lock = self._locks.setdefault(number, threading.Lock())
        with lock:
            if number not in self._found:
                self._found[number] = make()
            return self._found[number]
