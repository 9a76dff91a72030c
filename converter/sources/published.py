"""A published checkpoint as a source: its own files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from converter.faults import SourceChanged
from converter.sources.constants import check_constants
from converter.sources.source import Need, Source, Stretch
from converter.sources.tied import check_tied
from converter.streams.buffers import PAGE, page_down
from converter.streams.reading import WINDOW, Reader, Stamp, stamp_of
from shard_plans.checkpoints.checkpoint import Checkpoint, SourceFile, inside
from shard_plans.errors import CheckpointError
from shard_plans.families.binding import Binding
from shard_plans.placement.shards import Placement


class FileReader(Reader):
    """Reads the checkpoint's own files; nothing says what their bytes should be, so there is nothing to prove."""

    unproven = 0

    def prove(self) -> None:
        """Nothing to do."""


class Published(Source):
    """A checkpoint in safetensors files."""

    buffers, sequential = 1, False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._sizes = {file.name: file.size for file in checkpoint.files}
        self._stamps: dict[str, Stamp] = {}

    def reader(self, room: int) -> FileReader:
        """A reader of the checkpoint's files."""
        window = min(WINDOW, max(PAGE, page_down(room // 4)))
        return FileReader(self.checkpoint.folder, CheckpointError, self._sizes, self._stamps, room, window)

    def seals(self) -> Mapping[str, str]:
        """Size, time of change and inode of each file, and the digest of its header."""
        self._stamps = self._now()
        return {file.name: f"{self._stamps[file.name]}, header {file.header_digest}" for file in self.checkpoint.files}

    def unchanged(self) -> None:
        """Compare size, time of change and inode."""
        for name, now in self._now().items():
            before = self._stamps.get(name, now)
            if now != before:
                raise SourceChanged(
                    f"{self.checkpoint.folder / name} was changed while it was converted: it had {before}; "
                    f"now it has {now}; run again"
                )

    def prepare(self, binding: Binding, placement: Placement) -> None:
        """Compare embeddings that are stored twice, and look for zeros where the family declares them."""
        if binding.doubled is not None:
            check_tied(self, binding.doubled)
        check_constants(self, placement.constants)

    def require(self, needs: Iterable[tuple[str, Need]]) -> None:
        """Nothing is left out of a published checkpoint."""

    def carried(self, name: str) -> Stretch:
        """The file as it lies there."""
        return Stretch(
            inside(self.checkpoint.folder, name),
            digest=self.checkpoint.config_digest if name == "config.json" else None,
        )

    def header(self, file: SourceFile) -> Stretch:
        """The stretch behind the length word."""
        return Stretch(inside(self.checkpoint.folder, file.name), 8, file.header_size, file.header_digest)

    def _now(self) -> dict[str, Stamp]:
        found = {}
        for file in self.checkpoint.files:
            path = self.checkpoint.folder / file.name
            try:
                found[file.name] = stamp_of(os.stat(path))
            except OSError as error:
                raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
        return found
