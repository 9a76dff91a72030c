"""The grid of ranks: a stage's ranks are used by attention as (dp, tp) and by experts as (edp, ep, etp)."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.errors import GridError

MAX_RANKS = 1 << 16
"""Ranks of a plan; more are a mistake of typing."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Where one rank stands: pipeline stage, then the same stage rank folded twice."""

    rank: int
    stage: int
    dp: int
    tp: int
    edp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Parallel sizes. Rank order: stage slowest, then dp, tp fastest; for experts edp slowest, then ep, etp fastest."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def stage_ranks(self) -> int:
        """S = dp x tp = edp x ep x etp, the ranks of one pipeline stage."""
        return self.dp * self.tp

    @property
    def world(self) -> int:
        """All ranks: pp x S."""
        return self.pp * self.stage_ranks

    @property
    def edp(self) -> int:
        """Replicas of the experts inside a stage; it follows from the other sizes."""
        return self.stage_ranks // (self.ep * self.etp)

    def one_replica(self, experts: bool) -> Grid | None:
        """The grid of one replica, where there are several that share no experts (or have none); None otherwise."""
        if self.dp == 1 or (experts and self.edp % self.dp):
            return None
        return Grid(self.tp, self.pp, 1, self.ep, self.etp if experts else self.tp)

    def coordinate(self, rank: int) -> Coordinate:
        """The place of `rank` (0 <= rank < world)."""
        stage, inner = divmod(rank, self.stage_ranks)
        dp, tp = divmod(inner, self.tp)
        edp, expert_rank = divmod(inner, self.ep * self.etp)
        ep, etp = divmod(expert_rank, self.etp)
        return Coordinate(rank, stage, dp, tp, edp, ep, etp)

    def coordinates(self) -> tuple[Coordinate, ...]:
        """All ranks in order."""
        return tuple(self.coordinate(rank) for rank in range(self.world))

    def tp_group(self, at: Coordinate) -> tuple[int, ...]:
        """Ranks that share `at`'s stage and data-parallel replica, in tp order."""
        start = at.stage * self.stage_ranks + at.dp * self.tp
        return tuple(range(start, start + self.tp))

    def ep_group(self, at: Coordinate) -> tuple[int, ...]:
        """Ranks that share `at`'s stage, edp and etp, in ep order."""
        start = at.stage * self.stage_ranks + at.edp * self.ep * self.etp + at.etp
        return tuple(range(start, start + self.ep * self.etp, self.etp))

    def etp_group(self, at: Coordinate) -> tuple[int, ...]:
        """Ranks that share `at`'s stage, edp and ep, in etp order."""
        start = at.stage * self.stage_ranks + (at.edp * self.ep + at.ep) * self.etp
        return tuple(range(start, start + self.etp))


def make_grid(
    tp: int | None = None, pp: int | None = None, dp: int | None = None, ep: int | None = None, etp: int | None = None
) -> Grid:
    """A grid from the sizes given; omitted ones are tp = pp = dp = ep = 1 and etp = dp x tp / ep.

    Raises GridError where a size is below 1 or ep x etp doesn't divide dp x tp, with the legal sizes.
    """
    for name, size in {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}.items():
        if size is not None and not 1 <= size <= MAX_RANKS:
            raise GridError(f"{name} is {size}; parallel sizes are 1 to {MAX_RANKS}")
    tp, pp, dp, ep = tp or 1, pp or 1, dp or 1, ep or 1
    if tp * pp * dp > MAX_RANKS:
        raise GridError(f"tp {tp} x pp {pp} x dp {dp} makes {tp * pp * dp} ranks; at most {MAX_RANKS} are possible")
    ranks = dp * tp
    if ranks % ep:
        raise GridError(
            f"ep {ep} doesn't divide the {ranks} ranks of a stage (dp {dp} x tp {tp}); legal ep: {divisors(ranks)}"
        )
    if etp is None:
        etp = ranks // ep
    if (ranks // ep) % etp:
        raise GridError(
            f"ep {ep} x etp {etp} doesn't divide the {ranks} ranks of a stage (dp {dp} x tp {tp}); "
            f"legal etp with ep {ep}: {divisors(ranks // ep)}"
        )
    return Grid(tp, pp, dp, ep, etp)


def divisors(number: int) -> str:
    """The divisors of `number`, as words for an error message."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
