"""Other ways to move the same bytes, to compare with: a raw direct copy, a raw read, load everything and save_file."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

STEP = 8 << 20


def evict(folder: Path) -> None:
    """Drop the folder's weight files from the page cache, after they are on the disk."""
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def warm(size: int) -> None:
    """Take `size` bytes of memory and give them back at once, so that the next to ask for memory gets it quickly.

    The host of a virtual machine may take back pages that were free for a second, and hand them out again slowly. The
    most that this process had resident (VmHWM) begins anew.
    """
    large = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    large.madvise(mmap.MADV_HUGEPAGE)
    for page in range(0, size, 4096):
        large[page] = 1
    large.close()
    Path("/proc/self/clear_refs").write_text("5")


def in_threads(items: Iterable[tuple[Path, int]], work: Callable[[memoryview, Path, int], None], count: int) -> float:
    """Seconds that threads with a buffer each took for all items."""
    from converter.streams.buffers import aligned

    queue, lock = iter(list(items)), threading.Lock()

    def main() -> None:
        buffer = aligned(STEP)
        while True:
            with lock:
                item = next(queue, None)
            if item is None:
                return
            work(buffer.data, *item)

    started = time.monotonic()
    threads = [threading.Thread(target=main) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started


def blocks(folder: Path) -> list[tuple[Path, int]]:
    """Every block of every weight file."""
    paths = sorted(folder.glob("*.safetensors"))
    return [(path, start) for path in paths for start in range(0, path.stat().st_size, STEP)]


def raw_read(folder: Path, threads: int) -> float:
    """Seconds to read every byte past the page cache."""
    handles = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in folder.glob("*.safetensors")}
    took = in_threads(blocks(folder), lambda data, path, at: drop(os.preadv(handles[path], [data], at)), threads)
    for handle in handles.values():
        os.close(handle)
    return took


def drop(_: int) -> None:
    """Nothing to do with it."""


def raw_copy(source: Path, target: Path, threads: int) -> float:
    """Seconds of a direct copy into preallocated files, fsync included; tails are rounded up and cut off."""
    target.mkdir()
    started = time.monotonic()
    reads, writes = {}, {}
    for path in source.glob("*.safetensors"):
        reads[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
        writes[path] = os.open(target / path.name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(writes[path], 0, path.stat().st_size)

    def work(data: memoryview, path: Path, at: int) -> None:
        got = os.preadv(reads[path], [data], at)
        os.pwrite(writes[path], data[: -(-got // 4096) * 4096], at)

    in_threads(blocks(source), work, threads)
    for path, handle in writes.items():
        os.ftruncate(handle, path.stat().st_size)
        os.fsync(handle)
        os.close(handle)
        os.close(reads[path])
    return time.monotonic() - started


def plain_copy(source: Path, target: Path) -> float:
    """Seconds of a file copy as anyone makes it, fsync included."""
    target.mkdir()
    started = time.monotonic()
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb+") as file:
            os.fsync(file.fileno())
    return time.monotonic() - started


def load_all_then_save(source: Path, out: Path, target: Path) -> float:
    """Seconds of the plain way: every tensor in memory, then save_file for each file of `out`, with fsync.

    `out` is a finished conversion: its manifests say what goes where, so that both ways write the same tensors.
    """
    import numpy as np
    from safetensors.numpy import save_file

    from shard_plans.documents.manifest import read_manifest, read_shard_manifest

    target.mkdir()
    root = read_manifest(out)
    manifests = [read_shard_manifest(out, file.name, root) for file in root.files]
    started = time.monotonic()
    stored = {}
    for path in sorted(source.glob("*.safetensors")):
        raw = path.read_bytes()
        length = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:length]).items():
            if name != "__metadata__":
                item = {"BF16": 2, "F8_E4M3": 1, "F32": 4}[entry["dtype"]]
                start, stop = entry["data_offsets"]
                stored[name] = np.frombuffer(raw[length + start : length + stop], f"u{item}").reshape(entry["shape"])
    for manifest in manifests:
        tensors = {}
        for tensor in manifest.tensors:
            names = [[s.tensor.replace("{expert}", str(e)) for e in s.experts or [0]] for s in tensor.sources]
            parts = []
            for source_number, source_of in enumerate(tensor.sources):
                pieces = []
                for name in names[source_number]:
                    piece = stored[name]
                    for axis, cut in enumerate(source_of.cuts):
                        piece = np.concatenate([piece.take(range(a, b), axis) for a, b in cut.runs], axis)
                    pieces.append(piece)
                parts.append(np.stack(pieces) if source_of.experts is not None else pieces[0])
            tensors[tensor.name] = np.concatenate(parts, 1 if tensor.sources[0].experts is not None else 0)
        save_file(tensors, target / manifest.file)
        handle = os.open(target / manifest.file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.monotonic() - started
