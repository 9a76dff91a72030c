"""The output folder: whose it is, and that nothing half-written is taken for whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from converter.convert import convert
from converter.output import partial
from converter.output.folder import Identity, OutputFolder
from converter.output.lock import Lock
from converter.output.parts import LOCK
from shard_plans.documents.manifest import MARKER
from shard_plans.documents.plan import plan_digest
from shard_plans.errors import OutputError, PlanError
from shard_plans.placement.place import place
from tests.conftest import MakeCheckpoint
from tests.tools import crash
from tests.tools.converted import bound, contents, converted
from tests.tools.plans import make_plan
from tests.tools.unprivileged import obey_permissions


def test_nothing_to_do_the_second_time(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out", {"tp": 2})
    before = contents(tmp_path / "out")
    result = converted(tiny("llama"), tmp_path / "out", {"tp": 2})
    assert (result.bytes_read, result.bytes_written, result.ranks) == (299904, 0, 2)
    assert contents(tmp_path / "out") == before


def test_the_output_of_another_plan_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    binding = bound(tiny("llama"))
    digests = [plan_digest(make_plan(binding, sizes)) for sizes in ({"tp": 2}, {"tp": 4})]
    converted(tiny("llama"), tmp_path, {"tp": 2})
    before = contents(tmp_path)
    with pytest.raises(OutputError, match=f"output of plan {digests[0]}.*not of plan {digests[1]}"):
        converted(tiny("llama"), tmp_path, {"tp": 4})
    assert contents(tmp_path) == before


def test_the_output_of_another_checkpoint_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path)
    with pytest.raises(OutputError, match=r"of checkpoint [0-9a-f]{32}, not of .* of checkpoint [0-9a-f]{32}"):
        converted(tiny("qwen2"), tmp_path)


def test_another_revision_of_the_same_shapes_is_refused(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Names, shapes and config say nothing of the bytes: the plan and its fingerprint fit both revisions."""
    folder = own_tiny("llama_single")
    converted(folder, tmp_path / "out", {"tp": 2})
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    with pytest.raises(OutputError, match=r"its bytes differ from .*llama_single \(2 places, the first: stage-0-tp-"):
        converted(folder, tmp_path / "out", {"tp": 2})


def test_the_output_of_another_family_table_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    binding = bound(tiny("llama"))
    converted(tiny("llama"), tmp_path)
    other = replace(binding, family=replace(binding.family, document=binding.family.document + "# changed"))
    plan = make_plan(other)
    with pytest.raises(OutputError, match="made with another family table"):
        convert(other.checkpoint, other, plan, place(other, plan), tmp_path)


def test_a_damaged_output_is_not_taken_for_whole(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path)
    (tmp_path / "stage-0-tp-0.safetensors").write_bytes(b"")
    with pytest.raises(OutputError, match=r"holds 0 of .* bytes of stage-0-tp-0.safetensors"):
        converted(tiny("llama"), tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(OutputError, match="damaged output"):
        converted(tiny("llama"), tmp_path)


def test_a_plan_for_another_checkpoint_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    plan = make_plan(bound(tiny("llama")))
    plan = replace(plan, checkpoint=replace(plan.checkpoint, fingerprint="0" * 32))
    with pytest.raises(PlanError, match="make a plan for this one"):
        converted(tiny("llama"), tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["notes.txt", "source/notes.txt", "stage-0-tp-0.safetensors", "other.partial"])
def test_foreign_files_are_left_alone(tiny: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match="choose an empty folder"):
        converted(tiny("llama"), tmp_path)
    assert contents(tmp_path) == {name: b"mine"}


def test_an_unfinished_conversion_begins_again(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    identity = Identity(plan_digest(make_plan(bound(tiny("llama")))), bound(tiny("llama")).checkpoint.fingerprint)
    marker = {"plan": identity.plan, "source": identity.source}
    out = tmp_path / "out"
    out.mkdir()
    (out / MARKER).write_text(json.dumps(marker))
    (out / LOCK).touch()
    (out / "stage-0-tp-0.safetensors").write_bytes(b"stale")
    (out / "stage-0-tp-0.json.partial").write_bytes(b"stale")
    converted(tiny("llama"), out)
    converted(tiny("llama"), tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")


def test_the_unfinished_conversion_of_another_plan_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text(json.dumps({"plan": "1" * 32, "source": "2" * 32}))
    with pytest.raises(OutputError, match=f"unfinished conversion by plan {'1' * 32} of checkpoint {'2' * 32}"):
        converted(tiny("llama"), tmp_path)


def test_a_killed_conversion_leaves_nothing_that_looks_whole(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom tests.tools.converted import converted\n"
        "def die(done, total):\n    if done > total // 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "import converter.streams.workers\nconverter.streams.workers.INTERVAL = 0\n"
        "converted(Path(sys.argv[1]), Path(sys.argv[2]), {'tp': 2}, progress=die)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, tiny("llama"), out], cwd=Path(__file__).parents[2])
    assert ran.returncode == -signal.SIGKILL
    assert all(name.endswith((".partial", ".lock", ".journal")) for name in contents(out))
    converted(tiny("llama"), out, {"tp": 2})
    converted(tiny("llama"), tmp_path / "fresh", {"tp": 2})
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_second_process_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    binding = bound(tiny("llama"))
    identity = Identity(plan_digest(make_plan(binding)), binding.checkpoint.fingerprint)
    with OutputFolder(tmp_path, identity, ["stage-0-tp-0.safetensors"]):
        with pytest.raises(OutputError, match="another process is writing"):
            converted(tiny("llama"), tmp_path)
        assert (tmp_path / MARKER).exists()
    converted(tiny("llama"), tmp_path)


def test_a_lock_that_cannot_be_had_is_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(handle: int, operation: int) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(fcntl, "flock", refused)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no"):
        Lock(tmp_path / "lock").take()
    assert os.listdir("/proc/self/fd") == before


def test_a_folder_that_cannot_be_made_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(OutputError, match="choose another"):
            converted(tiny("llama"), out)


@pytest.mark.parametrize("mode", [0o500, 0])
def test_an_unwritable_folder_is_refused(tiny: MakeCheckpoint, tmp_path: Path, mode: int) -> None:
    out, source = tmp_path / "out", tiny("llama")
    out.mkdir(mode)

    def work() -> str:
        obey_permissions()
        with pytest.raises(OutputError, match=r"out can't be (written|used): Permission denied") as refused:
            converted(source, out)
        return str(refused.value)

    assert crash.forked(work, report=tmp_path / "said") == 0
    out.chmod(0o700)
    assert not list(out.iterdir())


def test_a_small_disk_is_refused_before_writing(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(OutputError, match=r"needs [0-9]+ bytes, but the disk has 1000 free"):
        converted(tiny("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_space_that_cannot_be_reserved_is_refused(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "allocate", no_space)
    with pytest.raises(OutputError, match=r"stage-0-tp-0.safetensors.partial needs [0-9]+ bytes, [0-9]+ are free"):
        converted(tiny("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_leaves_nothing(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(OutputError, match="can't be written: No space left on device"):
        converted(tiny("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_stay_in_the_folder(tmp_path: Path) -> None:
    for name in ("../a", "/a", "a/../../b", "a//b", "a\\b"):
        with pytest.raises(OutputError, match="would leave the output folder"):
            OutputFolder(tmp_path, Identity("", ""), [name])


def test_a_linked_folder_of_the_output_is_not_followed(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    out.mkdir()
    (out / "source").symlink_to(elsewhere)
    with pytest.raises(OutputError, match="choose an empty folder"):
        converted(tiny("llama"), out)
    shutil.rmtree(elsewhere)
