"""Negative controls: outputs spoiled as a bug would spoil them, all digests made anew so that only meaning is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

CHUNK = 4 << 20
ITEM = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8}


@dataclass
class Opened:
    """A shard file and its manifest, to be changed."""

    manifest: dict[str, Any]
    metadata: dict[str, str]
    data: dict[str, bytes]

    def entry(self, tensor: str) -> dict[str, Any]:
        """The manifest's entry of a tensor."""
        return next(entry for entry in self.manifest["tensors"] if entry["name"] == tensor)


@contextmanager
def opened(out: Path, file: str) -> Iterator[Opened]:
    """Change a shard file's tensors or manifest; offsets, header, digests and the root manifest follow."""
    raw = (out / file).read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:length])
    metadata = header.pop("__metadata__")
    path = out / file.replace(".safetensors", ".json")
    shard = Opened(json.loads(path.read_bytes()), metadata, {})
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        shard.data[name] = raw[length + start : length + stop]
    yield shard
    entries: dict[str, Any] = {"__metadata__": shard.metadata}
    end = 0
    for entry in shard.manifest["tensors"]:
        data = shard.data[entry["name"]]
        entries[entry["name"]] = {
            "dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [end, end + len(data)],
        }  # fmt: skip
        entry |= {"offset": end, "bytes": len(data)} | digests(data)
        end += len(data)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    head = len(text).to_bytes(8, "little") + text
    body = b"".join(shard.data[entry["name"]] for entry in shard.manifest["tensors"])
    (out / file).write_bytes(head + body)
    shard.manifest |= {
        "size": len(head) + end, "header": {"size": len(head), "xxh3": xxhash.xxh3_128_hexdigest(head)},
    }  # fmt: skip
    path.write_text(json.dumps(shard.manifest))
    seal(out)


def digests(data: bytes) -> dict[str, str]:
    """The digest fields of a tensor of these bytes."""
    if len(data) <= CHUNK:
        return {"xxh3": xxhash.xxh3_128_hexdigest(data)}
    chunks = b"".join(xxhash.xxh3_128_digest(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK))
    return {"xxh3": xxhash.xxh3_128_hexdigest(chunks), "chunks": chunks.hex()}


def seal(out: Path, change: Callable[[dict[str, Any]], object] = lambda root: None) -> None:
    """Change the root manifest, then make its digest and those of the file manifests anew."""
    root = json.loads((out / "manifest.json").read_bytes())
    change(root)
    for entry in root["files"]:
        raw = (out / entry["manifest"]).read_bytes()
        entry |= {"size": (out / entry["name"]).stat().st_size, "xxh3": xxhash.xxh3_128_hexdigest(raw)}
    root.pop("digest", None)
    canonical = json.dumps(root, sort_keys=True, separators=(",", ":")).encode()
    (out / "manifest.json").write_text(json.dumps(root | {"digest": xxhash.xxh3_128_hexdigest(canonical)}))


def find(out: Path, tensor: str) -> list[tuple[str, str]]:
    """(file, name) of every shard tensor whose name ends like that, in order of the files."""
    found = []
    for path in sorted(out.glob("stage-*.json")):
        manifest = json.loads(path.read_bytes())
        found += [(manifest["file"], t["name"]) for t in manifest["tensors"] if t["name"].endswith(tensor)]
    return found


def change(out: Path, file: str, tensor: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    """Put `edit(array)` in the place of a tensor; the array holds unsigned integers in the tensor's shape."""
    with opened(out, file) as shard:
        entry = shard.entry(tensor)
        array = np.frombuffer(shard.data[tensor], f"u{ITEM[entry['dtype']]}").reshape(entry["shape"])
        shard.data[tensor] = np.ascontiguousarray(edit(array.copy())).tobytes()


def not_a_number(array: np.ndarray) -> np.ndarray:
    """The first number of a bfloat16 array made nan."""
    array.reshape(-1)[0] = 0x7FC0
    return array


def swap_experts(out: Path, file: str, tensor: str, first: int = 0, second: int = 1) -> None:
    """Exchange two experts of a stacked tensor."""

    def edit(array: np.ndarray) -> np.ndarray:
        array[[first, second]] = array[[second, first]]
        return array

    change(out, file, tensor, edit)


def swap_halves(out: Path, file: str, tensor: str) -> None:
    """Exchange gate and up: the halves of the rows."""
    change(out, file, tensor, lambda array: np.roll(array, array.shape[-2] // 2, axis=-2))


def shift_rows(out: Path, file: str, tensor: str) -> None:
    """Move rows by one, as when a scale is cut one block off."""
    change(out, file, tensor, lambda array: np.roll(array, 1, axis=-2))


def set_last(out: Path, file: str, tensor: str) -> None:
    """Set the last element, which lies in the padding where there is any."""

    def edit(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[-1] ^= 1
        return array

    change(out, file, tensor, edit)


def lose(out: Path, file: str, tensor: str) -> None:
    """Leave a tensor out of file and manifest."""
    with opened(out, file) as shard:
        shard.manifest["tensors"].remove(shard.entry(tensor))
        del shard.data[tensor]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file; nothing is hashed anew. A negative offset counts from the end."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def tensor_offset(out: Path, file: str, tensor: str) -> tuple[int, int]:
    """Where a tensor lies in its file: start and length, in bytes."""
    manifest = json.loads((out / file.replace(".safetensors", ".json")).read_bytes())
    entry = next(entry for entry in manifest["tensors"] if entry["name"] == tensor)
    return manifest["header"]["size"] + entry["offset"], entry["bytes"]


def swap_files(out: Path, first: str, second: str) -> None:
    """Exchange the bytes of two shard files, as when a rank was given another's."""
    one, two = (out / first).read_bytes(), (out / second).read_bytes()
    (out / first).write_bytes(two)
    (out / second).write_bytes(one)


def truncate(path: Path, count: int = 1) -> None:
    """Cut bytes off the end of a file."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - count)
