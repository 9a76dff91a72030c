"""From signs of life to a verdict: which rank died, hangs, or has stopped the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from runtime.alive.signs import Sign
from shard_plans.errors import OtherRankStopped, ReshardError, RuntimeFault

SILENCE = 10.0
"""Seconds without a sign after which a process is taken for dead; a living one gives two a second, however slow."""


class Lookout:
    """Judges the signs of all ranks, read again and again."""

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience`: seconds that a rank may be in one operator, or all ranks wait for one another."""
        self._patience, self._clock = patience, clock
        self._seen: dict[int, tuple[Sign, float]] = {}

    def judge(self, signs: Sequence[Sign], silence: float = SILENCE) -> ReshardError | None:
        """The fault that ends the run, or None. One that a rank told of itself comes first, then death, then a hang."""
        now = self._clock()
        for rank, sign in enumerate(signs):
            known = self._seen.get(rank)
            if known is None or known[0] != sign:
                self._seen[rank] = (sign, now)
        if (told := next((sign for sign in signs if sign.fault is not None), None)) is not None:
            return OtherRankStopped(str(told.fault))
        living = [rank for rank, sign in enumerate(signs) if not sign.ended]
        quiet = {rank: now - self._seen[rank][1] for rank in living}
        rank = max(living, key=lambda rank: quiet[rank], default=0)
        if living and quiet[rank] > silence:
            others = [sign for other, sign in enumerate(signs) if other != rank and sign.waits is not None]
            waiting = [f"{sign.who} waits in {sign.where}, {sign.waits}" for sign in others]
            return RuntimeFault(
                f"rank {rank} died or was stopped: no sign of life for {quiet[rank]:.0f} s, last seen in "
                + "; ".join([f"{signs[rank].where}", *waiting[:3]])
            )
        return self._hanging([signs[rank] for rank in living])

    def _hanging(self, signs: Sequence[Sign]) -> RuntimeFault | None:
        late = [sign for sign in signs if sign.still > self._patience]
        limit = f"{self._patience:g} s allowed by --timeout"
        for sign in late:
            if sign.waits is None:
                return RuntimeFault(f"{sign.who}: {sign.where}: no step for {sign.still:.0f} s, more than the {limit}")
        if late and len(late) == len(signs):
            words = "; ".join(f"{sign.who} in {sign.where}, {sign.waits}" for sign in late[:16])
            return RuntimeFault(f"ranks wait for one another, longer than the {limit}: {words}")
        return None
