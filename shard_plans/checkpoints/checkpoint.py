"""A published checkpoint: a folder of safetensors files and config.json, its headers kept as columns."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shard_plans.checkpoints.headers import Header, Int64, Kinds, brief, check_words, load_json, read_header
from shard_plans.errors import CheckpointError, using

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_LIMIT = 1_000_000_000
CARRIED_LIMIT = 64_000_000
"""Bytes of one file that is carried along; a larger one is no tokenizer or configuration."""
CARRIED_NAMES = (
    "config.json", "generation_config.json", "hf_quant_config.json", "tokenizer", "vocab", "merges", "special_tokens",
    "added_tokens", "preprocessor", "video_preprocessor", "processor", "chat_template",
)  # fmt: skip
CARRIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Data only: code and pickles are never carried."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One safetensors file of the checkpoint."""

    name: str
    size: int
    """Bytes of the whole file."""
    header_size: int
    """Bytes of the JSON header; the data start at 8 + header_size."""
    header_digest: str
    """xxh3-128 of the JSON header, in hex."""
    metadata: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All tensors of a checkpoint as columns: row i of each is one tensor; files in order of name, then of bytes."""

    folder: Path
    config: dict[str, Any] = field(repr=False)
    config_digest: str
    """xxh3-128 of config.json as it lies there, in hex."""
    files: tuple[SourceFile, ...] = field(repr=False)
    names: list[str] = field(repr=False)
    dtypes: list[str] = field(repr=False)
    shapes: list[tuple[int, ...]] = field(repr=False)
    file_numbers: np.ndarray[Any, np.dtype[np.int32]] = field(repr=False)
    starts: Int64 = field(repr=False)
    """Absolute byte offsets in the tensor's file."""
    sizes: Int64 = field(repr=False)
    """Bytes."""
    numbers: Mapping[str, int] = field(repr=False)
    """Name -> row."""
    total_bytes: int
    fingerprint: str
    """xxh3-128 over the config's digest and every tensor's name, dtype and shape: what a plan belongs to."""
    carried: tuple[str, ...]
    """Files that a conversion carries along: configuration, tokenizer, chat template, index. Never code."""
    stacks: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """Tensors whose slices have rows of their own behind those of all tensors (`slices`), and how many each has."""
    sharded: bool = False
    """Its tensors lie in the shards of the output at `folder`, not in `files`, which are as they once were."""
    left_out: tuple[str, ...] = ()
    """Patterns of tensors that those shards don't hold, because their plan left them out."""

    def __len__(self) -> int:
        """Tensors."""
        return len(self.names)

    def label(self, number: int) -> str:
        """The name of the tensor in that row, for messages; of a slice with its place in the tensor."""
        if number < len(self.names):
            return self.names[number]
        place = number - len(self.names)
        for tensor, count in self.stacks:
            if place < count:
                return f"{self.names[tensor]}[{place}]"
            place -= count
        raise IndexError(number)

    def number(self, name: str) -> int:
        """The row of the tensor `name`."""
        found = self.numbers.get(name)
        if found is None:
            raise CheckpointError(f"{self.folder} has no tensor {brief(name)} among its {len(self)}")
        return found


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read every header of the checkpoint in `folder`; no weights are read.

    Raises CheckpointError where a file is missing or malformed, or files contradict one another.
    """
    with using(folder, CheckpointError):
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} isn't a folder; a checkpoint is one with config.json and safetensors files"
            )
        raw_config = read_small(folder, "config.json")
        parse_object(raw_config, folder / "config.json")
        index = _read_index(folder)
        expected = Counter(index.values()) if index is not None else Counter({SINGLE: 0})
        kinds = Kinds()

        def headers() -> Iterator[tuple[str, Header]]:
            for name in sorted(expected):
                header = read_header(inside(folder, name), kinds)
                if index is not None:
                    _check_indexed(folder, name, header.names, index, expected[name])
                yield name, header

        return from_headers(folder, raw_config, headers(), carried_files(folder))


def from_headers(
    folder: Path, raw_config: bytes, headers: Iterable[tuple[str, Header]], carried: tuple[str, ...]
) -> Checkpoint:
    """A checkpoint from its config.json and the headers of its files, which are in the order of their names."""
    files: list[SourceFile] = []
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    starts, sizes, counts = [], [], []
    for number, (name, header) in enumerate(headers):
        files.append(SourceFile(name, header.size, header.header_size, header.header_digest, header.metadata))
        names += header.names
        dtypes += header.dtypes
        shapes += header.shapes
        starts.append(header.starts)
        sizes.append(header.sizes)
        counts.append(np.full(len(header.names), number, np.int32))
    if not names:
        raise CheckpointError(f"{folder} holds no tensors")
    config_digest = xxhash.xxh3_128_hexdigest(raw_config)
    return Checkpoint(
        folder, parse_object(raw_config, folder / "config.json"), config_digest, tuple(files), names, dtypes, shapes,
        np.concatenate(counts), np.concatenate(starts), np.concatenate(sizes),
        {name: row for row, name in enumerate(names)}, sum(int(array.sum()) for array in sizes),
        _fingerprint(config_digest, names, dtypes, shapes), carried,
    )  # fmt: skip


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`; refuses names that lead elsewhere, and links that do.

    A link into the blob store beside it is what the Hub's download cache consists of, and is followed.
    """
    if not name or name in (".", "..") or any(mark in name for mark in "/\\\0:") or len(name) > 255:
        raise CheckpointError(f"{brief(name)} isn't a plain file name; the files of {folder} must lie directly in it")
    path = folder / name
    try:
        home, real = folder.resolve(), path.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} is missing in {folder}; download it again or mend the index") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{brief(name)} in {folder} can't be read: {error}") from error
    homes = [home] + ([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])
    if real.parent not in homes:
        raise CheckpointError(f"{name} in {folder} is a link out of the folder, to {real}; copy the file there instead")
    if not regular:
        raise CheckpointError(f"{name} in {folder} isn't a regular file")
    return path


def read_small(folder: Path, name: str, limit: int = CARRIED_LIMIT) -> bytes:
    """The bytes of a file of `folder` that isn't weights; refuses one of more than `limit` bytes."""
    path = inside(folder, name)
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes, more than the {limit} allowed for such a file")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error


def load_object(folder: Path, name: str, limit: int = CARRIED_LIMIT) -> dict[str, Any]:
    """The JSON object in a file of `folder`, read strictly."""
    return parse_object(read_small(folder, name, limit), folder / name)


def parse_object(raw: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that the bytes of `path` are, read strictly; CheckpointError where they aren't one."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} isn't UTF-8 at byte {error.start}") from error
    value = load_json(text, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _read_index(folder: Path) -> dict[str, str] | None:
    if not os.path.lexists(folder / INDEX):
        if not os.path.lexists(folder / SINGLE):
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}; a checkpoint has one of them")
        return None
    path = folder / INDEX
    weight_map = load_object(folder, INDEX, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map that names the file of each tensor")
    kept: dict[str, str] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{path} names {brief(file)} as the file of {brief(name)}; a file name is a word")
        weight_map[name] = kept.setdefault(file, file)
    for file in kept:
        check_words(file, f"a file name in {path}")
    return weight_map


def _check_indexed(folder: Path, file: str, names: list[str], index: Mapping[str, str], expected: int) -> None:
    for name in names:
        said = index.get(name)
        if said != file:
            where = f"says {said}" if said is not None else "doesn't name it"
            raise CheckpointError(f"tensor {brief(name)} lies in {file} of {folder}, but {INDEX} {where}")
    if len(names) != expected:  # all of the file's tensors are indexed there, so the index names more
        lost = {name for name, said in index.items() if said == file} - set(names)
        raise CheckpointError(
            f"{file} of {folder} lacks {len(lost)} tensors that {INDEX} places there, the first {brief(min(lost))}"
        )


def _fingerprint(config_digest: str, names: list[str], dtypes: list[str], shapes: list[tuple[int, ...]]) -> str:
    state = xxhash.xxh3_128(config_digest.encode())
    rows: Iterable[int] = sorted(range(len(names)), key=names.__getitem__)
    words = {shape: ",".join(map(str, shape)) for shape in set(shapes)}
    for row in rows:
        state.update(f"\n{names[row]}\t{dtypes[row]}\t{words[shapes[row]]}".encode())
    return state.hexdigest()


def carried_files(folder: Path) -> tuple[str, ...]:
    """The files of a folder that a conversion carries along, by name; CheckpointError where one is too large."""
    found = []
    for name in sorted(os.listdir(folder)):
        chosen = name == INDEX or (
            name.endswith(CARRIED_SUFFIXES) and (name.startswith(CARRIED_NAMES) or name.endswith(".model"))
        )
        if chosen and not (folder / name).is_dir():
            limit = INDEX_LIMIT if name == INDEX else CARRIED_LIMIT
            size = inside(folder, name).stat().st_size
            if size > limit:
                raise CheckpointError(f"{folder / name} has {size} bytes, more than the {limit} that are carried along")
            found.append(name)
    return tuple(found)
