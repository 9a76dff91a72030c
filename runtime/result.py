"""What verify-and-run found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from runtime.checking.checks import Check
from runtime.checking.figures import LayerFigures
from runtime.checking.sensitivity import Cost
from runtime.timeline import Span


@dataclass(frozen=True, slots=True)
class AnswerFound:
    """What was generated behind one prompt."""

    input_ids: tuple[int, ...]
    generated: tuple[int, ...]
    text: str | None
    """The same as text where the checkpoint carries a tokenizer."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What the command found; whole on rank 0, the others know whether it passed."""

    passed: bool
    checks: tuple[Check, ...] = ()
    generated: tuple[int, ...] = ()
    text: str | None = None
    answers: tuple[AnswerFound, ...] = ()
    """To a file of prompts; `generated` and `text` are the answer to a single one."""
    not_checked: tuple[str, ...] = ()
    """What this run says nothing about, in sentences."""
    layers: tuple[LayerFigures, ...] = ()
    """What was measured of each layer."""
    timeline: tuple[Span, ...] = ()
    """When each rank ran each section of its first pass."""
    sensitivity: tuple[Cost, ...] = ()
    """What each group of weights costs in 8 bits, where it was asked for."""
    figures: dict[str, Any] = field(default_factory=dict)
    """input_ids, tokens, images, ranks, device, seconds, bytes_read, seconds_waited, kv_cache_bytes."""
    reports: bool = True
    """This process is the one that prints."""

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON has it."""
        return {
            "passed": self.passed, "checks": [check.as_dict() for check in self.checks],
            "generated": list(self.generated), "text": self.text, "answers": [asdict(each) for each in self.answers],
            "not_checked": list(self.not_checked), "layers": [layer.as_dict() for layer in self.layers],
            "sensitivity": [cost.as_dict() for cost in self.sensitivity],
            "timeline": [span.as_list() for span in self.timeline], **self.figures,
        }  # fmt: skip
