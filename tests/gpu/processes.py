"""One rank a process, with the device's own collective library, against virtual ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from runtime.comm import devices
from runtime.request import RunOptions
from runtime.run import verify_and_run
from tests.checkpoints import cache
from tests.gpu.part import Part, Setting
from tests.mutations.models import make
from tests.tools.plans import plan_id
from tests.tools.sharded import convert_tiny, expected, relative

ROOT = Path(__file__).parents[2]
LIMIT = 1e-6
CELLS = (
    ("qwen2", {"tp": 2}), ("deepseek_v3_fp8", {"dp": 2, "ep": 2}), ("qwen3_next", {"tp": 2, "pp": 2, "ep": 2}),
    ("mixtral", {"tp": 4, "ep": 2, "etp": 2}),
)  # fmt: skip


def run(setting: Setting) -> Part:
    """Those cells for which there are devices enough; a CPU counts for four."""
    part = Part("processes", len(CELLS))
    kind = setting.device.partition(":")[0]
    there = 4 if kind == "cpu" else devices.module(kind).device_count()
    fit = [(name, plan) for name, plan in CELLS if world(plan) <= there]
    if not fit:
        part.skipped = f"{there} device, and a process needs one of its own"
        return part
    for name, plan in part.within(setting.seconds, fit):

        def write(folder: Path, name: str = name) -> None:
            make(name, folder)

        source = cache.made(setting.checkpoints, name, write)
        out, ids = setting.folder / name, ",".join(map(str, expected(source)["input_ids"][0].tolist()))
        here, apart = setting.folder / "here.safetensors", setting.folder / "apart.safetensors"
        convert_tiny(source, out, plan)
        verify_and_run(RunOptions(out, source, device=setting.device, input_ids=ids, logits_out=here))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world(plan))]
        command += ["-m", "reshard", "verify-and-run", str(out), "--reference", str(source), "--device", kind]
        command += ["--input-ids", ids, "--logits-out", str(apart), "--json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        where = f"{name} {plan_id(dict(plan))}"
        if ran.returncode:
            part.failures.append(f"{where}: exit code {ran.returncode}: {ran.stderr[-300:]}")
            continue
        error = relative(load_file(apart)["logits"], load_file(here)["logits"])
        part.worst("logits", error)
        if not error < LIMIT:
            part.failures.append(f"{where}: logits {error:.2e} from those of virtual ranks")
    return part


def world(plan: dict[str, int]) -> int:
    """Ranks of a plan that lets experts follow from the rest."""
    return plan.get("tp", 1) * plan.get("dp", 1) * plan.get("pp", 1)
