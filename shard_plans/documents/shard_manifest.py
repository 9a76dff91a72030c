"""The manifest of one shard file written and read: every field is checked."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from typing import Any, NoReturn

import xxhash

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.checkpoints.headers import UNPRINTABLE, brief
from shard_plans.documents.converted import converted_entry, parse_converted
from shard_plans.documents.digests import CHUNK, DIGEST
from shard_plans.documents.shard_records import ManifestTensor, Piece, ShardManifest
from shard_plans.errors import ManifestError, PlanError
from shard_plans.placement.arrangement import WIDENED, Arrangement, rows_filled
from shard_plans.placement.experts import format_ids, parse_ids
from shard_plans.placement.shards import Cut

SHARD_FORMAT = "reshard-shard"
VERSION = 1
LARGEST = 1 << 53
LARGEST_CONSTANT = 1 << 20
"""Bytes of a tensor that holds one value everywhere."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
"""Names of shard files and native tensors."""
IN_LAYER = re.compile(r"layers\.[0-9]{1,9}\.[A-Za-z0-9_].*")
"""Those of a layer's tensors: its number and the role."""
AXES = ("stage", "tp", "edp", "ep", "etp")
MAX_IDS = 1 << 20
"""Expert ids in all different lists of a manifest together."""
PARTS = ("values", "scale", "global_scale")


def format_shard_manifest(manifest: ShardManifest) -> bytes:
    """The manifest as JSON, one tensor a line; the same manifest gives the same bytes."""
    head = {
        "format": SHARD_FORMAT, "version": VERSION, "file": manifest.file, "place": manifest.place,
        "plan": manifest.plan, "source": manifest.source, "size": manifest.size,
        "header": {"size": manifest.header_size, "xxh3": manifest.header_xxh3},
    }  # fmt: skip
    lines = ",\n".join(json.dumps(_tensor_entry(tensor), separators=(",", ":")) for tensor in manifest.tensors)
    return (json.dumps(head)[:-1] + ', "tensors": [\n' + lines + "\n]}\n").encode("ascii")


def _tensor_entry(tensor: ManifestTensor) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": tensor.offset,
        "bytes": tensor.nbytes, "format": tensor.format, "part": tensor.part, "block": tensor.block,
        "xxh3": tensor.xxh3, **({"chunks": tensor.chunks.hex()} if tensor.chunks else {}),
    }  # fmt: skip
    if tensor.fill is not None:
        entry["fill"] = tensor.fill
    entry["sources"] = [
        {
            "tensor": piece.tensor,
            "experts": None if piece.experts is None else format_ids(piece.experts),
            "cuts": [{"runs": cut.runs, "repeat": cut.repeat} for cut in piece.cuts],
            "at": piece.at,
            **({} if piece.converted is None else {"converted": converted_entry(piece.converted)}),
            **({} if piece.arranged is None else {"arranged": asdict(piece.arranged)}),
            **({} if piece.widened is None else {"widened": piece.widened}),
        }
        for piece in tensor.sources
    ]
    return entry


def parse_shard_manifest(value: Any, what: str) -> ShardManifest:
    """The manifest in parsed JSON, checked in every field; `what` names it in messages. Raises ManifestError."""
    try:
        return _parse(value)
    except (_Wrong, PlanError) as error:
        raise ManifestError(f"{what}: {error}; convert again, or run reshard check on the folder") from None
    except (KeyError, TypeError) as error:
        missing = f"lacks {error}" if isinstance(error, KeyError) else f"has a field of the wrong kind ({error})"
        raise ManifestError(f"{what} {missing}; it isn't a manifest of version {VERSION}") from None


class _Wrong(Exception):
    """What is wrong with the manifest at hand."""


def _wrong(message: str) -> NoReturn:
    raise _Wrong(message)


def _parse(value: Any) -> ShardManifest:
    if type(value) is not dict or value.get("format") != SHARD_FORMAT:
        _wrong(f'format is {brief(value.get("format") if type(value) is dict else value)}, not "{SHARD_FORMAT}"')
    if value["version"] != VERSION or type(value["version"]) is not int:
        _wrong(f"version {brief(value['version'])} can't be read, only {VERSION}")
    size, header = _number(value["size"], "size"), value["header"]
    header_size = _number(header["size"], "header size")
    place = value["place"]
    if type(place) is not dict or not place or not set(place) <= set(AXES):
        _wrong(f"place {brief(place)} isn't made of {', '.join(AXES)}")
    if type(value["tensors"]) is not list:
        _wrong("tensors isn't a list")
    tensors, names, offset, lists = [], set(), 0, _Lists()
    for entry in value["tensors"]:
        tensor = _tensor(entry, lists)
        if tensor.name in names:
            _wrong(f"two tensors are named {tensor.name}")
        if tensor.offset != offset:
            _wrong(f"tensor {tensor.name} starts at {tensor.offset}, but {offset} is the end of the one before it")
        names.add(tensor.name)
        tensors.append(tensor)
        offset += tensor.nbytes
    if header_size + offset != size:
        _wrong(f"size is {size}, but the header of {header_size} and the tensors of {offset} bytes make another")
    return ShardManifest(
        _plain(value["file"], "file"), {axis: _number(place[axis], axis) for axis in AXES if axis in place},
        _digest(value["plan"], "plan"), _digest(value["source"], "source"), size, header_size,
        _digest(header["xxh3"], "the header's xxh3"), tuple(tensors),
    )  # fmt: skip


class _Lists:
    """Expert ids by their text: what many tensors share is kept once, and all of them together are bounded."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[int, ...]] = {}
        self.spent = 0

    def get(self, text: str) -> tuple[int, ...]:
        if text not in self.known:
            self.known[text] = parse_ids(text)
            self.spent += len(self.known[text])
            if self.spent > MAX_IDS:
                _wrong(f"different lists of experts hold more than {MAX_IDS} ids")
        return self.known[text]


def _tensor(entry: dict[str, Any], lists: _Lists) -> ManifestTensor:
    name = _plain(entry["name"], "a tensor's name")
    if name.split(".", 1)[0] == "layers" and not IN_LAYER.fullmatch(name):
        _wrong(f"tensor {name} is of no layer: the names of their tensors are layers.NUMBER.ROLE")
    dtype, shape, nbytes = entry["dtype"], _numbers(entry["shape"], name), _number(entry["bytes"], name)
    if type(dtype) is not str or dtype not in DTYPE_BITS:
        _wrong(f"tensor {name} has the unknown dtype {brief(dtype)}")
    if math.prod(shape) * DTYPE_BITS[dtype] != nbytes * 8:
        _wrong(f"tensor {name} is {dtype} {brief(shape)}, which {nbytes} bytes don't hold")
    form, part, block = entry["format"], entry["part"], entry["block"]
    if form is not None:
        _plain(form, f"the format of tensor {name}")
    if part not in PARTS:
        _wrong(f"tensor {name} is the part {brief(part)}; known are {', '.join(PARTS)}")
    if block is not None:
        block = _numbers(block, name)
        if len(block) != 2 or 0 in block:
            _wrong(f"tensor {name} has the block {brief(block)}, not two sizes")
    digest = _digest(entry["xxh3"], f"xxh3 of tensor {name}")
    chunks = bytes.fromhex(_hex(entry.get("chunks", ""), name))
    if len(chunks) != (16 * -(-nbytes // CHUNK) if nbytes > CHUNK else 0):
        _wrong(f"tensor {name} of {nbytes} bytes has {len(chunks) // 16} chunk digests")
    if chunks and xxhash.xxh3_128_hexdigest(chunks) != digest:
        _wrong(f"the chunk digests of tensor {name} don't make its digest {digest}")
    if type(entry["sources"]) is not list:
        _wrong(f"sources of tensor {name} isn't a list")
    pieces = tuple(_piece(piece, name, (dtype, shape), lists) for piece in entry["sources"])
    fill = entry.get("fill")
    if fill is not None and (type(fill) is not float or pieces or nbytes > LARGEST_CONSTANT):
        _wrong(f"tensor {name} of {nbytes} bytes and {len(pieces)} sources is filled with {brief(fill)}")
    return ManifestTensor(
        name, dtype, shape, _number(entry["offset"], name), nbytes, form, part, block, digest, chunks, pieces, fill
    )


def _piece(entry: dict[str, Any], name: str, kind: tuple[str, tuple[int, ...]], lists: _Lists) -> Piece:
    pattern, listed = entry["tensor"], entry["experts"]
    dtype, shape = kind
    if type(pattern) is not str or not 0 < len(pattern) <= 1000 or UNPRINTABLE.search(pattern):
        _wrong(f"tensor {name} has the source {brief(pattern)}, which isn't a name")
    experts, region = None, shape
    if listed is not None:
        experts = lists.get(listed) if type(listed) is str else _wrong(f"experts of tensor {name} isn't a word")
        if not shape or len(experts) != shape[0]:
            _wrong(f"tensor {name} {brief(shape)} stacks {len(experts)} experts of {brief(pattern)}")
        region = shape[1:]
    at = _numbers(entry["at"], name)
    arranged = _arrangement(entry["arranged"], name) if "arranged" in entry else None
    dims = len(region) if arranged is None else len(arranged.view)
    if type(entry["cuts"]) is not list or len(entry["cuts"]) != dims or len(at) != len(region):
        _wrong(f"a source of tensor {name} doesn't have one cut and one position for each of {dims} dimensions")
    cuts = tuple(_cut(cut, name) for cut in entry["cuts"])
    if arranged is not None:
        _laid(Piece(pattern, experts, cuts, at, arranged=arranged), region, name)
    for cut, start, length in zip(cuts, at, region, strict=True) if arranged is None else ():
        if start + cut.length > length:
            _wrong(f"a source of tensor {name} ends at {start + cut.length} of {length}")
    widened = entry.get("widened")
    if widened is not None and WIDENED.get(_plain(widened, f"the stored type of tensor {name}")) != dtype:
        _wrong(f"tensor {name} is {dtype}, which {brief(widened)} isn't widened to")
    try:
        converted = parse_converted(entry["converted"], len(experts or (0,))) if "converted" in entry else None
    except ValueError as error:
        _wrong(f"tensor {name} {error}")
    return Piece(pattern, experts, cuts, at, converted, arranged, widened)


def _arrangement(entry: dict[str, Any], name: str) -> Arrangement:
    view, axes = _numbers(entry["view"], name), _numbers(entry["axes"], name)
    if not view or sorted(axes) != list(range(len(view))) or not 0 < math.prod(view) < LARGEST:
        _wrong(f"tensor {name} has a source read as {brief(view)} in the order {brief(axes)}")
    return Arrangement(view, axes)


def _laid(piece: Piece, region: tuple[int, ...], name: str) -> None:
    """Numbers that are ordered anew must fill whole rows of the tensor, each once, and lie in what they are read as."""
    rows = rows_filled(piece, region)
    if not region or rows is None or piece.at[0] + rows > region[0] or any(cut.repeat != 1 for cut in piece.cuts):
        _wrong(f"a source of tensor {name} {brief(region)} doesn't fill whole rows of it")
    for cut, size in zip(piece.cuts, piece.arranged.view if piece.arranged else (), strict=True):
        if cut.runs and cut.runs[-1][1] > size:
            _wrong(f"a source of tensor {name} is cut up to {cut.runs[-1][1]} of {size}")


def _cut(entry: dict[str, Any], name: str) -> Cut:
    runs, last = [], 0
    if type(entry["runs"]) is not list:
        _wrong(f"runs of tensor {name} isn't a list")
    for run in entry["runs"]:
        pair = _numbers(run, name)
        start, stop = pair if len(pair) == 2 else _wrong(f"tensor {name} has the run {brief(run)}")
        if not last <= start <= stop:
            _wrong(f"tensor {name} has the run {start}:{stop} behind {last}; runs ascend")
        runs.append((start, stop))
        last = stop
    repeat = _number(entry["repeat"], name)
    return Cut(tuple(runs), repeat or _wrong(f"tensor {name} has a repeat of 0"))


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        _wrong(f"{what} has {brief(value)} in the place of a size")
    return value


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if type(value) is not list or len(value) > 16:
        _wrong(f"{what} has {brief(value)} in the place of a list of sizes")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= LARGEST):
        _wrong(f"{what} has {brief(value)} in the place of sizes")
    return tuple(value)


def _digest(value: Any, what: str) -> str:
    if type(value) is not str or not DIGEST.fullmatch(value):
        _wrong(f"{what} is {brief(value)}, not a digest of 32 hexadecimal digits")
    return value


def _hex(value: Any, name: str) -> str:
    if type(value) is not str or len(value) % 32 or re.search("[^0-9a-f]", value):
        _wrong(f"the chunk digests of tensor {name} aren't hexadecimal")
    return value


def _plain(value: Any, what: str) -> str:
    if type(value) is not str or not PLAIN_NAME.fullmatch(value):
        _wrong(f"{what} is {brief(value)}, not a plain name")
    return value
