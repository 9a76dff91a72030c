"""`reshard demo`: the whole story on a checkpoint that it makes itself, with a negative control at the end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from runtime.demo.steps import STORY, Demo
from shard_plans.console import emit
from shard_plans.errors import OutputError


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the demo."""

    name: str
    passed: bool
    seconds: float
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found."""

    passed: bool
    seconds: float
    steps: tuple[Step, ...]

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON has it."""
        steps = [{"name": s.name, "passed": s.passed, "seconds": s.seconds, **s.figures} for s in self.steps]
        return {"passed": self.passed, "seconds": self.seconds, "steps": steps}


def demo(folder: Path | None = None, as_json: bool = False) -> int:
    """Run the demo and return the command's exit code; what it did is told on stdout, or is one JSON object there."""
    result = run_demo(folder, Console(highlight=False, quiet=as_json))
    if as_json:
        emit(result.as_dict())
    return 0 if result.passed else 1


def run_demo(folder: Path | None, console: Console) -> DemoResult:
    """Run the demo in the new or empty `folder`, which is kept; without one in a temporary folder, which is removed.

    Raises OutputError where `folder` holds anything.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="reshard-demo-") as temporary:
            return _run(Demo(Path(temporary), console))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holds = next(folder.iterdir(), None)
    except OSError as error:
        raise OutputError(f"{folder} can't be written: {error.strerror}; choose another folder") from error
    if holds is not None:
        raise OutputError(f"{folder} holds {holds.name}; the demo needs a new or an empty folder")
    return _run(Demo(folder, console))


def _run(demo: Demo) -> DemoResult:
    """All steps in order; the first that fails ends the run."""
    started = time.monotonic()
    steps: list[Step] = []
    with _one_thread():
        for number, (title, step) in enumerate(STORY, 1):
            demo.console.print(f"\n[bold]{number}. {title}[/bold]", soft_wrap=True)
            began = time.monotonic()
            passed, figures = step(demo)
            steps.append(Step(step.__name__, passed, round(time.monotonic() - began, 3), figures))
            demo.say(f"{_verdict(passed)}, {steps[-1].seconds:.1f} s")
            if not passed:
                break
    result = DemoResult(all(step.passed for step in steps), round(time.monotonic() - started, 3), tuple(steps))
    demo.console.print(f"\n[bold]{_verdict(result.passed)}[/bold]: {len(steps)} steps, {result.seconds:.1f} s")
    return result


def _verdict(passed: bool) -> str:
    return "[green]passed[/green]" if passed else "[red]failed[/red]"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices are small here: more threads only wait for one another, on a busy machine ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
