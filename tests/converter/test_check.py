"""Check: what is spoiled without its digests is caught by them, and named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from converter import findings
from converter.check import check
from shard_plans.errors import CheckpointError, ManifestError
from tests.conftest import MakeCheckpoint
from tests.tools import crash, tamper
from tests.tools.converted import bound, converted, small_chunks
from tests.tools.spoiled import Made, only
from tests.tools.unprivileged import obey_permissions


@pytest.mark.parametrize("tensor", ["embed", "attn.o.scale", "experts.down", "norm"])
def test_a_flipped_bit_is_pinned_to_its_tensor(made: Made, tensor: str) -> None:
    file, name = tamper.find(made.out, tensor)[-1]
    start, length = tamper.tensor_offset(made.out, file, name)
    tamper.flip(made.out / file, start + length // 2, 5)
    where, what, reason = only(made.shallow())
    assert (where, what) == (file, name)
    assert f"chunk 0, bytes {start} to {start + length} of the file" in reason


def test_the_chunk_of_a_long_tensor_is_named(
    tmp_path: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 512)
    converted(tiny("llama"), tmp_path)
    assert check(tmp_path).passed
    start, length = tamper.tensor_offset(tmp_path, "stage-0-tp-0.safetensors", "embed")
    tamper.flip(tmp_path / "stage-0-tp-0.safetensors", start + 1030)
    _, what, reason = only(check(tmp_path))
    assert what == "embed"
    assert f"chunk 2, bytes {start + 1024} to {start + 1536}" in reason
    assert length > 1536


def test_a_flip_in_the_header_is_pinned_to_it(made: Made) -> None:
    file = "stage-0-tp-1.safetensors"
    tamper.flip(made.out / file, 4000)
    where, what, reason = only(made.shallow())
    assert (where, what) == (file, None)
    assert reason.startswith("header, bytes 0 to ")


def test_a_truncated_file_names_what_is_lost(made: Made) -> None:
    file = "stage-0-tp-1.safetensors"
    tamper.truncate(made.out / file, 8)
    result = made.deep()
    assert not result.passed
    assert {failure.file for failure in result.failures} == {file}
    assert "its manifest states" in result.failures[0].reason
    assert result.failures[0].tensor is not None


def test_another_ranks_file_is_noticed(made: Made) -> None:
    tamper.swap_files(made.out, "stage-0-tp-0.safetensors", "stage-0-tp-1.safetensors")
    result = made.shallow()
    assert {(f.file, f.tensor) for f in result.failures if f.reason.startswith("header")} == {
        ("stage-0-tp-0.safetensors", None), ("stage-0-tp-1.safetensors", None),
    }  # fmt: skip


def test_another_ranks_file_with_its_manifest_is_noticed(made: Made) -> None:
    for kind in ("safetensors", "json"):
        tamper.swap_files(made.out, f"stage-0-tp-0.{kind}", f"stage-0-tp-1.{kind}")
    assert any("digest" in failure.reason for failure in made.shallow().failures)
    tamper.seal(made.out)
    assert any("another output's file lies here" in failure.reason for failure in made.shallow().failures)


@pytest.mark.parametrize("kind", ["stage-0-tp-{}", "stage-0-ep-0-etp-{}"])
def test_files_relabelled_as_another_rank_are_noticed(made: Made, kind: str) -> None:
    first, second = (kind.format(number) for number in (0, 1))
    for suffix in ("safetensors", "json"):
        tamper.swap_files(made.out, f"{first}.{suffix}", f"{second}.{suffix}")
    for name, number in ((first, 0), (second, 1)):
        path = made.out / f"{name}.json"
        value = json.loads(path.read_text())
        value["file"] = f"{name}.safetensors"
        value["place"]["tp" if "tp-" in kind and "etp" not in kind else "etp"] = number
        path.write_text(json.dumps(value))
        with tamper.opened(made.out, f"{name}.safetensors") as shard:
            shard.metadata["reshard_place"] = json.dumps(shard.manifest["place"], separators=(",", ":"))
    assert any("is cut before what the" in failure.reason for failure in made.shallow().failures)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stage-0-tp-2.safetensors", "No such file"),
        ("stage-0-tp-2.json", "is missing"),
        ("plan.yaml", "can't be read"),
        ("source/config.json", "can't be read"),
        ("source/headers/{}.json", "can't be read"),
    ],
)
def test_a_missing_file_is_named(made: Made, name: str, reason: str) -> None:
    name = name.format(bound(made.checkpoint).checkpoint.files[0].name)
    (made.out / name).unlink()
    found = [failure for failure in made.deep().failures if failure.file == name]
    assert found
    assert reason in found[0].reason


@pytest.mark.parametrize("call", ["stat", "open", "preadv"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_file_that_the_disk_does_not_give_is_named(
    made: Made, monkeypatch: pytest.MonkeyPatch, call: str, deep: bool
) -> None:
    """A deep check ended there with the first fault alone, as if the command had been wrong."""
    file, real = "stage-0-tp-1.safetensors", getattr(os, call)

    def failing(where: Any, *rest: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where)
        if str(path).endswith(file):
            raise OSError(errno.EIO, "Input/output error")
        return real(where, *rest, **options)

    monkeypatch.setattr(os, call, failing)
    result = made.deep() if deep else made.shallow()
    assert all("Input/output error" in failure.reason for failure in result.failures)
    others = [failure.reason for failure in result.failures if failure.file != file]
    assert len(result.failures) > len(others)
    assert (len(result.failures) == 1) == (call == "stat")
    assert len(others) == (deep and call == "preadv")
    assert all(f"ended early: {made.out / file} can't be read" in reason for reason in others)


def test_a_folder_that_cannot_be_looked_into_is_named(made: Made, tmp_path: Path) -> None:
    """What lies in it may be no part of the output: it was passed over in silence."""
    (made.out / "more").mkdir(0)

    def work() -> str:
        obey_permissions()
        return "; ".join(map(str, only(made.shallow())))

    assert crash.forked(work, report=tmp_path / "said") == 0
    assert (tmp_path / "said").read_text() == "more; None; can't be looked into: Permission denied"


def test_a_foreign_file_is_named(made: Made) -> None:
    (made.out / "source" / "model.py").write_text("import os")
    assert only(made.shallow()) == ("source/model.py", None, "isn't part of this output: manifest.json doesn't list it")


def test_a_changed_document_is_named(made: Made) -> None:
    tamper.flip(made.out / "source" / "config.json", 10)
    assert only(made.shallow())[:2] == ("source/config.json", None)


def test_a_changed_root_is_named(made: Made) -> None:
    path = made.out / "manifest.json"
    path.write_text(path.read_text().replace('"tp": 3', '"tp": 2'))
    assert "was changed or damaged" in only(made.shallow())[2]


def test_no_output_is_an_error(made: Made) -> None:
    (made.out / "manifest.json").unlink()
    with pytest.raises(ManifestError, match="its conversion isn't finished"):
        made.shallow()


def test_the_wrong_checkpoint_is_an_error(made: Made, tiny: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="compare with the one it was made from"):
        check(made.out, tiny("llama"))


def test_many_failures_are_counted(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "MOST", 3)
    for number in range(10):
        (made.out / f"x{number}").touch()
    result = made.shallow()
    assert [failure.reason for failure in result.failures[3:]] == ["7 more failures"]
