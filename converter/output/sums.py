"""SHA-256 of every file of a finished output, in sha256sum's format, for artefacts that are signed or published."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converter.output.carry import SOURCE
from converter.output.partial import write_through
from converter.streams.reading import Reader
from converter.streams.workers import Meter, Progress, run_all
from converter.streams.writing import write_fault
from shard_plans.documents.manifest import ROOT, Manifest, read_manifest
from shard_plans.errors import ManifestError

SUMS = "SHA256SUMS"
"""Checked by `sha256sum -c SHA256SUMS` in the output folder."""
STEP = 4 << 20


def listed(root: Manifest) -> list[str]:
    """Every file of an output but the sums, relative to its folder, sorted."""
    names = {ROOT, *(file.name for file in root.documents), *(f"{SOURCE}/{file.name}" for file in root.carried)}
    return sorted(names | {name for file in root.files for name in (file.name, file.manifest)})


def write_sums(out: Path, workers: int, progress: Progress | None = None) -> None:
    """Read every file of the finished output `out` and write their digests. Raises ManifestError, OutputError."""
    names = listed(read_manifest(out))
    try:
        sizes = {name: (out / name).stat().st_size for name in names}
    except OSError as error:
        raise ManifestError(f"{out} can't be read: {error}; run reshard check") from error
    meter, digests = Meter(sum(sizes.values()), progress), dict.fromkeys(names, "")

    @contextmanager
    def worker() -> Iterator[Reader]:
        with Reader(out, ManifestError, room=STEP) as reader:
            yield reader

    def work(reader: Reader, name: str) -> None:
        state = hashlib.sha256()
        for start in range(0, sizes[name], STEP):
            length = min(STEP, sizes[name] - start)
            state.update(reader.fetch(name, start, length))
            meter.add(length)
        digests[name] = state.hexdigest()

    run_all(sorted(names, key=lambda name: -sizes[name]), worker, work, workers)
    text = "".join(f"{digests[name]}  {name}\n" for name in names)
    try:
        write_through("conversion.new", out / SUMS, text.encode())
    except OSError as error:
        raise write_fault(out / SUMS, error) from error
