"""The steps of `reshard demo`: each does its work, tells it, and returns whether it went right, with figures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from converter.check import check as check_output
from converter.convert import convert as convert_checkpoint
from converter.restore import restore as restore_checkpoint
from runtime.demo.checkpoint import BLOCK, CONFIG, make_demo_checkpoint
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.checkpoints.checkpoint import open_checkpoint
from shard_plans.console import size
from shard_plans.documents.manifest import Manifest, ManifestTensor, read_manifest, read_shard_manifest
from shard_plans.documents.plan import Plan, write_plan
from shard_plans.families.binding import Binding, bind
from shard_plans.families.family import load_family
from shard_plans.memory.cluster import parse_cluster
from shard_plans.placement.place import place
from shard_plans.report import plan_json, show_plan
from shard_plans.search.search import search

CLUSTER = "2x2:s5000"
SIZES: dict[str, int | None] = {"tp": 2, "pp": 2, "ep": 2}
TOKENS, NEW_TOKENS = 24, 8
"""Length of the made-up prompt, and of its continuation."""

Outcome = tuple[bool, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Demo:
    """One run: where it works and where it talks."""

    folder: Path
    console: Console

    @property
    def checkpoint(self) -> Path:
        """The checkpoint."""
        return self.folder / "checkpoint"

    @property
    def out(self) -> Path:
        """The shards."""
        return self.folder / "shards"

    def say(self, text: str) -> None:
        """An indented line."""
        self.console.print(f"   {text}", soft_wrap=True)

    def plan(self) -> tuple[Binding, Plan]:
        """The checkpoint, each tensor with its row of the family table, and the plan that every step uses."""
        opened = open_checkpoint(self.checkpoint)
        binding = bind(opened, load_family(opened.config))
        return binding, search(binding, parse_cluster(CLUSTER), SIZES)


def make(demo: Demo) -> Outcome:
    """Write the checkpoint."""
    make_demo_checkpoint(demo.checkpoint)
    opened = open_checkpoint(demo.checkpoint)
    demo.say(f"{len(opened):,} tensors, {size(opened.total_bytes)} in {len(opened.files)} files, random values")
    demo.say("FP8 in blocks of 128x128; latent attention; 16 experts, 4 chosen; one multi-token-prediction layer")
    return True, {"tensors": len(opened), "bytes": opened.total_bytes, "files": len(opened.files)}


def plan_memory(demo: Demo) -> Outcome:
    """Plan with tp, pp and ep all above 1."""
    plan = demo.plan()[1]
    write_plan(plan, demo.folder / "plan.yaml")
    if not demo.console.quiet:
        show_plan(plan)
    return bool(plan.fits), {"fits": plan.fits, "parallel": plan_json(plan)["parallel"]}


def convert(demo: Demo) -> Outcome:
    """Stream the checkpoint into shard files; each rank must weigh what the plan's ledger said."""
    binding, plan = demo.plan()
    done = convert_checkpoint(binding.checkpoint, binding, plan, place(binding, plan), demo.out)
    root = read_manifest(demo.out)
    tensors = {file.name: read_shard_manifest(demo.out, file.name, root).tensors for file in root.files}
    refined = sum(_is_refined(tensor) for held in tensors.values() for tensor in held)
    demo.say(f"read {size(done.bytes_read)}, wrote {size(done.bytes_written)} in {len(root.files)} files")
    for rank in root.ranks:
        at = rank.at
        demo.say(f"rank {at.rank} (stage {at.stage}, tp {at.tp}, ep {at.ep}) loads {', '.join(rank.files)}")
    demo.say(f"a cut went through the blocks of {refined} tensors: their scales were refined, without loss")
    held = [sum(tensor.nbytes for name in rank.files for tensor in tensors[name]) for rank in root.ranks]
    exact = held == [row.weights for row in plan.ledger or ()]
    demo.say(f"each rank's weights are {'' if exact else '[red]NOT[/red] '}what the plan's ledger said, to the byte")
    figures = {"bytes_read": done.bytes_read, "bytes_written": done.bytes_written, "rank_bytes": held}
    return exact, figures | {"refined": refined}


def check(demo: Demo) -> Outcome:
    """Hashes alone, then the source put back together from the shards."""
    found, deep = check_output(demo.out), check_output(demo.out, demo.checkpoint)
    failures = [f"{one.file}, {one.tensor}: {one.reason}" for one in found.failures + deep.failures]
    for failure in failures:
        demo.say(failure)
    if not failures:
        demo.say(f"{found.files} files, {found.tensors} tensors: every hash as written")
        demo.say("the source put back together from the shards, in memory: every byte of it equal")
    return found.passed and deep.passed, {"files": found.files, "tensors": found.tensors, "failures": failures}


def verify(demo: Demo) -> Outcome:
    """Four virtual ranks in fp32 against the unsharded forward pass of the same stored values."""
    random = torch.Generator().manual_seed(7)
    ids = ",".join(map(str, torch.randint(2, CONFIG["vocab_size"], (TOKENS,), generator=random).tolist()))
    options = RunOptions(demo.out, reference=demo.checkpoint, input_ids=ids, max_new_tokens=NEW_TOKENS, ignore_end=True)
    found = verify_and_run(options)
    for one in found.checks:
        worst = "-" if one.worst is None else f"{one.worst:.1e}"
        colour = "green" if one.passed else "red"
        demo.say(f"[{colour}]{one.name:9}[/{colour}] worst {worst}, limit {one.limit:g}: {one.where}")
    demo.say(f"continuation of {TOKENS} random tokens: {' '.join(map(str, found.generated))}")
    checks = {one.name: one.worst for one in found.checks}
    return found.passed, {"checks": checks, "generated": list(found.generated)}


def restore(demo: Demo) -> Outcome:
    """Write the checkpoint again and compare every file."""
    folder = demo.folder / "restored"
    done = restore_checkpoint(demo.out, folder)
    names = sorted(path.name for path in demo.checkpoint.iterdir())
    same = [name for name in names if (demo.checkpoint / name).read_bytes() == _read(folder / name)]
    demo.say(f"{done.tensors:,} tensors in {done.files} files; {len(same)} of {len(names)} files equal byte for byte")
    return len(same) == len(names), {"files": len(names), "equal": len(same)}


def flip(demo: Demo) -> Outcome:
    """Flip one bit of one rank's experts in a copy of the shards; `check` must name that tensor and no other."""
    broken = demo.folder / "broken"
    shutil.copytree(demo.out, broken)
    root = read_manifest(broken)
    file, tensor = _victim(broken, root)
    with (broken / file).open("r+b") as shard:
        at = 8 + int.from_bytes(shard.read(8), "little") + tensor.offset + tensor.nbytes // 2
        shard.seek(at)
        byte = shard.read(1)[0]
        shard.seek(at)
        shard.write(bytes([byte ^ 1]))
    demo.say(f"flipped the lowest bit of byte {at} of {file}, which is in {tensor.name}")
    found = check_output(broken)
    for failure in found.failures:
        demo.say(f"check says: {failure.file}, {failure.tensor}: {failure.reason}")
    named = [(failure.file, failure.tensor) for failure in found.failures] == [(file, tensor.name)]
    demo.say("found, and nothing else is accused" if named else "[red]NOT[/red] found, or something else is accused")
    shutil.rmtree(broken)
    return named and not found.passed, {"file": file, "tensor": tensor.name, "found": named}


STORY: tuple[tuple[str, Callable[[Demo], Outcome]], ...] = (
    ("make a checkpoint like DeepSeek-V3's, in small", make),
    (f"plan it for {CLUSTER}: 2 nodes of 2 cards", plan_memory),
    ("convert it", convert),
    ("check the hashes, then every byte against the checkpoint", check),
    ("verify the sharded forward pass against the unsharded one, all ranks on this machine", verify),
    ("restore the checkpoint", restore),
    ("negative control: flip one bit of a copy", flip),
)
"""Title and step, in order."""


def _victim(out: Path, root: Manifest) -> tuple[str, ManifestTensor]:
    """The down projections of the second ep rank's experts."""
    file = next(file.name for file in root.files if "-ep-1-" in file.name)
    tensors = read_shard_manifest(out, file, root).tensors
    return file, next(tensor for tensor in tensors if tensor.name.endswith("experts.down"))


def _is_refined(tensor: ManifestTensor) -> bool:
    """Whether its blocks are smaller than the checkpoint's."""
    return tensor.part == "values" and tensor.block not in (None, (BLOCK, BLOCK))


def _read(path: Path) -> bytes | None:
    """The file's bytes; None where it doesn't exist."""
    return path.read_bytes() if path.is_file() else None
