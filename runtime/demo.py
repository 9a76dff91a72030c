"""`reshard demo`: the whole story on a checkpoint that it makes itself, with a negative control at the end."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from converter.check import check
from converter.convert import convert
from converter.restore import restore
from runtime.demo_checkpoint import BLOCK, make_demo_checkpoint
from runtime.run import RunOptions, verify_and_run
from shard_plans.binding import Binding, bind
from shard_plans.checkpoint import open_checkpoint
from shard_plans.cluster import parse_cluster
from shard_plans.console import size
from shard_plans.errors import OutputError
from shard_plans.family import load_family
from shard_plans.manifest import Manifest, read_manifest, read_shard_manifest
from shard_plans.placement import place
from shard_plans.plan import Plan, write_plan
from shard_plans.report import plan_json, show_plan
from shard_plans.search import search

CLUSTER = "2x2:s5000"
SIZES: dict[str, int | None] = {"tp": 2, "pp": 2, "ep": 2}
TOKENS, NEW_TOKENS = 24, 8
"""Length of the made-up prompt, and of its continuation."""


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


def demo(folder: Path | None = None, quiet: bool = False) -> DemoResult:
    """Run the demo in the new or empty `folder`, which is kept; without one in a temporary folder, which is removed.

    Raises OutputError where `folder` holds anything.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="reshard-demo-") as temporary:
            return _Demo(Path(temporary), quiet).run()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holds = next(folder.iterdir(), None)
    except OSError as error:
        raise OutputError(f"{folder} can't be written: {error.strerror}; choose another folder") from error
    if holds is not None:
        raise OutputError(f"{folder} holds {holds.name}; the demo needs a new or an empty folder")
    return _Demo(folder, quiet).run()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices are small here: more threads only wait for one another, on a busy machine ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Demo:
    """One run: its folders, its output, and the steps so far."""

    def __init__(self, folder: Path, quiet: bool) -> None:
        self.checkpoint, self.plan = folder / "checkpoint", folder / "plan.yaml"
        self.out, self.restored, self.broken = folder / "shards", folder / "restored", folder / "broken"
        self.quiet = quiet
        self.console = Console(highlight=False, quiet=quiet)
        self.steps: list[Step] = []

    def run(self) -> DemoResult:
        """All steps; the first that fails ends the run."""
        started = time.monotonic()
        story: tuple[tuple[str, Callable[[], tuple[bool, dict[str, Any]]]], ...] = (
            ("a checkpoint like DeepSeek-V3's, in small", self.make),
            (f"a plan for {CLUSTER}", self.plan_memory),
            ("convert", self.convert),
            ("check: hashes, then every byte against the checkpoint", self.check),
            ("verify: the sharded forward pass against the unsharded one", self.verify),
            ("restore: the checkpoint again", self.restore),
            ("negative control: one flipped bit", self.flip),
        )
        with _one_thread():
            for number, (name, step) in enumerate(story, 1):
                self.console.print(f"\n[bold]{number}. {name}[/bold]")
                began = time.monotonic()
                passed, figures = step()
                self.steps.append(Step(step.__name__, passed, round(time.monotonic() - began, 3), figures))
                self.say(
                    f"{'[green]passed[/green]' if passed else '[red]failed[/red]'}, {self.steps[-1].seconds:.1f} s"
                )
                if not passed:
                    break
        seconds = round(time.monotonic() - started, 3)
        done = all(step.passed for step in self.steps)
        self.console.print(f"\n{'[green]all of it passed[/green]' if done else '[red]failed[/red]'}, {seconds:.1f} s")
        return DemoResult(done, seconds, tuple(self.steps))

    def say(self, text: str) -> None:
        """An indented line."""
        self.console.print(f"   {text}", soft_wrap=True)

    def make(self) -> tuple[bool, dict[str, Any]]:
        """Write the checkpoint."""
        make_demo_checkpoint(self.checkpoint)
        opened = open_checkpoint(self.checkpoint)
        self.say(f"{len(opened):,} tensors, {size(opened.total_bytes)} in {len(opened.files)} files, random values")
        self.say("FP8 in blocks of 128x128; latent attention; 16 experts, 4 chosen; one multi-token-prediction layer")
        return True, {"tensors": len(opened), "bytes": opened.total_bytes, "files": len(opened.files)}

    def bound(self) -> Binding:
        """The checkpoint, each tensor with its row of the family table."""
        opened = open_checkpoint(self.checkpoint)
        return bind(opened, load_family(opened.config))

    def plan_memory(self) -> tuple[bool, dict[str, Any]]:
        """Plan with tp, pp and ep all above 1."""
        plan = self.planned()
        write_plan(plan, self.plan)
        if not self.quiet:
            show_plan(plan)
        found = plan_json(plan)
        return bool(plan.fits), {"fits": plan.fits, "parallel": found["parallel"]}

    def planned(self) -> Plan:
        """The plan that every step uses."""
        return search(self.bound(), parse_cluster(CLUSTER), SIZES)

    def convert(self) -> tuple[bool, dict[str, Any]]:
        """Stream the checkpoint into shard files."""
        binding, plan = self.bound(), self.planned()
        placement = place(binding, plan)
        done = convert(binding.checkpoint, binding, plan, placement, self.out)
        root = read_manifest(self.out)
        shared = sum(file.size for file in root.files)
        refined = _refined(self.out, root)
        self.say(f"read {size(done.bytes_read)}, wrote {size(done.bytes_written)} in {len(root.files)} files")
        for rank in root.ranks:
            at = rank.at
            self.say(f"rank {at.rank} (stage {at.stage}, tp {at.tp}, ep {at.ep}) loads {', '.join(rank.files)}")
        self.say(f"a cut went through the blocks of {refined} tensors: their scales were refined, without loss")
        figures = {"bytes_read": done.bytes_read, "bytes_written": done.bytes_written, "file_bytes": shared}
        ledger = {row.rank: row.weights for row in plan.ledger or ()}
        held = {rank.at.rank: _payload(self.out, root, rank.files) for rank in root.ranks}
        exact = held == ledger
        self.say(f"the weights of each rank are {'' if exact else 'NOT '}what the plan's ledger said, to the byte")
        return exact, figures | {"refined": refined, "ledger_exact": exact}

    def check(self) -> tuple[bool, dict[str, Any]]:
        """Hashes alone, then the source put back together."""
        found, deep = check(self.out), check(self.out, self.checkpoint)
        self.say(f"{found.files} files, {found.tensors} tensors: every hash as written")
        self.say("the source put back together from the shards, in memory: every byte of it equal")
        return found.passed and deep.passed, {"files": found.files, "failures": len(found.failures + deep.failures)}

    def verify(self) -> tuple[bool, dict[str, Any]]:
        """Four virtual ranks, in fp32, against the unsharded forward of the same stored values."""
        random = torch.Generator().manual_seed(7)
        ids = ",".join(map(str, torch.randint(2, 4000, (TOKENS,), generator=random).tolist()))
        found = verify_and_run(
            RunOptions(self.out, reference=self.checkpoint, input_ids=ids, max_new_tokens=NEW_TOKENS, ignore_end=True)
        )
        for one in found.checks:
            worst = "-" if one.worst is None else f"{one.worst:.2g}"
            colour = "green" if one.passed else "red"
            self.say(f"[{colour}]{one.name:9}[/{colour}] worst {worst}, limit {one.limit:g}: {one.where}")
        self.say(f"continuation of {TOKENS} random tokens: {' '.join(map(str, found.generated))}")
        checks = {one.name: one.worst for one in found.checks}
        return found.passed, {"checks": checks, "generated": list(found.generated)}

    def restore(self) -> tuple[bool, dict[str, Any]]:
        """Write the checkpoint again and compare every file."""
        done = restore(self.out, self.restored)
        names = sorted(path.name for path in self.checkpoint.iterdir())
        same = [n for n in names if (self.checkpoint / n).read_bytes() == _read(self.restored / n)]
        self.say(
            f"{done.tensors:,} tensors in {done.files} files; {len(same)} of {len(names)} files equal byte for byte"
        )
        return len(same) == len(names), {"files": len(names), "equal": len(same)}

    def flip(self) -> tuple[bool, dict[str, Any]]:
        """Flip one bit of one expert in a copy of the shards; `check` must name the tensor."""
        shutil.copytree(self.out, self.broken)
        root = read_manifest(self.broken)
        file = next(file for file in root.files if "-ep-1-" in file.name)
        manifest = read_shard_manifest(self.broken, file.name, root)
        tensor = next(tensor for tensor in manifest.tensors if tensor.name.endswith("experts.down"))
        with (self.broken / file.name).open("r+b") as shard:
            start = int.from_bytes(shard.read(8), "little") + 8 + tensor.offset + tensor.nbytes // 2
            shard.seek(start)
            byte = shard.read(1)[0]
            shard.seek(start)
            shard.write(bytes([byte ^ 1]))
        self.say(f"flipped the lowest bit of byte {start} of {file.name}, in {tensor.name}")
        found = check(self.broken)
        for failure in found.failures:
            self.say(f"check says: {failure.file}, {failure.tensor}: {failure.reason}")
        named = [(failure.file, failure.tensor) for failure in found.failures] == [(file.name, tensor.name)]
        self.say(f"it is {'' if named else 'NOT '}found, and nothing else is named")
        shutil.rmtree(self.broken)
        return named and not found.passed, {"file": file.name, "tensor": tensor.name, "found": named}


def _payload(out: Path, root: Manifest, files: tuple[str, ...]) -> int:
    """Bytes of the tensors in these shard files."""
    return sum(tensor.nbytes for name in files for tensor in read_shard_manifest(out, name, root).tensors)


def _refined(out: Path, root: Manifest) -> int:
    """Quantised shard tensors whose blocks are smaller than the checkpoint's."""
    tensors = [tensor for file in root.files for tensor in read_shard_manifest(out, file.name, root).tensors]
    return sum(t.part == "values" and t.block not in (None, (BLOCK, BLOCK)) for t in tensors)


def _read(path: Path) -> bytes | None:
    """The file's bytes; None where it doesn't exist."""
    return path.read_bytes() if path.is_file() else None
