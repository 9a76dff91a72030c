"""What the prediction takes for granted, as numbers and as sentences."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Parts of the data sheet's peaks that a well-tuned engine reaches, and costs that no data sheet states.

    None is fitted to a measured run: predictions compare plans, they don't promise a speed.
    """

    memory: float = 0.8
    """Of the memory's bandwidth."""
    compute: float = 0.6
    """Of the dense rate of matrix products."""
    links: float = 0.8
    """Of a link's bandwidth."""
    kernel: float = 3e-6
    """Seconds that a kernel takes at least, launched from a captured graph."""
    elementwise: int = 4
    """Kernels of a layer that multiply no matrices: norms, rotation, activation, sums."""
    routing: int = 6
    """Further ones where there are experts: scores, choice, sorting, gathering, activation, weighted sum."""
    spread: float = 0.5
    """Standard deviation of the experts' loads over their mean, where no load file says it."""
    passes: int = 8
    """How often a layer reads or writes each token's hidden vector beside its matrix products."""

    def imbalance(self, experts: int, slots: int) -> float:
        """Load of the busiest of `slots` over the mean, for experts of independent loads dealt in order.

        The sum of n loads varies by spread / sqrt(n), and the largest of many normal sums lies sqrt(2 ln slots)
        deviations above the mean.
        """
        if slots < 2:
            return 1.0
        return 1 + self.spread * sqrt(2 * log(slots) * slots / experts)

    def sentences(self) -> tuple[str, ...]:
        """For --explain and --json."""
        return (
            f"Cards reach {self.memory:.0%} of their memory bandwidth, {self.compute:.0%} of their dense matrix rate "
            f"and {self.links:.0%} of a link's bandwidth; a kernel takes at least {self.kernel * 1e6:g} us. These are "
            f"round figures, fitted to no measured run: trust the order of plans more than the figures.",
            "Each group of operators takes the longer of the time to read its weights and cache, and the time to "
            "multiply. FP8 weights are multiplied in fp8 where the card can; 4-bit and integer weights are unpacked to "
            "bf16.",
            "Decode: every sequence adds one token at the full context, the whole cache is read. With pp stages the "
            "sequences run as pp micro-batches (fewer where there are fewer sequences), each stage reads its weights "
            "once a micro-batch. Tokens a second are those of all sequences together.",
            "Prefill: each replica runs chunks that see half of the context on average; for tokens a second the "
            "pipeline is full, for the time to the first token one prompt of the whole context runs alone.",
            "All-reduces cost the latency of a tree and the bandwidth of a ring, inside each node first, then between "
            "nodes. A token's row crosses the network once for each node that holds one of its experts, and is dealt "
            "on inside. Communication isn't overlapped with computing.",
            f"Without --expert-load the experts' loads are taken to vary by {self.spread:.0%} of their mean, and the "
            f"busiest slot to have the expected largest sum; the experts that a step reads are the expected number of "
            f"distinct ones.",
            "Not counted: sampling, scheduling, the vision tower, speculative decoding, prefix caching.",
        )
