"""The output folder: whose it is, who may write it, files under partial names, and publishing them whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from converter.output.identity import Identity, format_marker
from converter.output.lock import Lock
from converter.output.lying import finished, marked
from converter.output.partial import PARTIAL, publish, remove_empty, sync, write_small, write_through
from converter.output.parts import LOCK, Part, is_leftover, read_done, record_done
from converter.streams.hashing import file_digest
from converter.streams.writing import write_fault
from shard_plans.checkpoints.headers import brief
from shard_plans.documents.manifest import MARKER, ROOT, Manifest, ManifestFile
from shard_plans.errors import OutputError, using

__all__ = ["Identity", "OutputFolder"]

WHOLE = Part()


class OutputFolder:
    """An output folder while it is written. As a context it holds a lock and discards at the end what is of no use."""

    def __init__(
        self,
        path: Path,
        identity: Identity,
        names: Iterable[str],
        large: Iterable[str] = (),
        fresh: bool = False,
        part: Part = WHOLE,
        mine: Iterable[str] | None = None,
    ) -> None:
        """`names` are the files that the conversion writes, relative to the folder; nothing is touched yet.

        Those that are `large` survive an interruption under their partial names, unless a `fresh` start is wanted.
        Of several parts each writes, and removes, those that are `mine`.
        """
        self.path, self.identity, self.part = path, identity, part
        self.names = {*names, ROOT}
        self.mine = self.names if mine is None else set(mine)
        self.large, self.fresh = set(large), fresh
        self.journal = path / f"{part.stem}.journal"
        """Says which parts of the conversion are on the disk."""
        self.keep = False
        """Whether what is unfinished is worth keeping when the context ends."""
        for name in self.names:
            parts = name.split("/")
            if "" in parts or "." in parts or ".." in parts or "\\" in name or "\0" in name:
                raise OutputError(f"{brief(name)} would leave the output folder {path}; a plain name is needed")
        self.published = False
        self.done = False
        """Whether this part was finished before, so that nothing is to be made."""
        self._records: dict[int, tuple[ManifestFile, ...]] = {}
        self._made = False
        self._lock = Lock(path / f"{part.stem}.lock")

    def finished(self) -> Manifest | None:
        """The manifest of the same conversion, if it lies here whole; None where there is work to do.

        Raises OutputError where the folder holds anything else.
        """
        return finished(self.path, self.identity, self.names)

    @property
    def whole(self) -> bool:
        """Whether the root manifest is there. Raises OutputError where that can't be told."""
        with using(self.path / ROOT, OutputError):
            return (self.path / ROOT).exists()

    def __enter__(self) -> OutputFolder:
        """Make the folder, lock it, and discard what is of no use of an unfinished conversion. Raises OutputError."""
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            sync(self.path.parent)
            taken = self._lock.take()
        except OSError as error:
            raise OutputError(f"{self.path} can't be written: {error.strerror}; choose another folder") from error
        if not taken:
            what = f"{self.path}" if self.part.count == 1 else f"part {self.part} of {self.path}"
            raise OutputError(f"another process is writing {what}; wait, or choose another folder")
        try:
            if self.finished() is not None:
                raise OutputError(f"{self.path} was finished by another process in the meantime; nothing is left to do")
            if self.part.count > 1 and self.part.number in read_done(self.path, self.part.count) and not self.fresh:
                self.done = self.keep = True
            else:
                self._prepare()
            if marked(self.path) != self.identity:  # of several parts another one may have written it
                write_through(f"{self.part.stem}.new", self.path / MARKER, format_marker(self.identity))
        except OSError as error:
            self._release()
            raise write_fault(self.path, error) from error
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.published and not self.keep:
                self._discard()
        finally:
            self._release()
        if isinstance(error, OSError):  # a disk may fail at any call
            raise write_fault(self.path, error) from error

    def _release(self) -> None:
        self._lock.release()
        if self._made and not self.published:
            remove_empty(self.path)

    def _prepare(self) -> None:
        """Discard all that is there, or all but what a journal may vouch for."""
        if self.fresh or not self.journal.is_file() or not (self.path / MARKER).is_file():
            self._discard()
            return
        self.keep = True
        try:
            for name in sorted(self.mine):
                whole, partial = self.path / name, self.path / (name + PARTIAL)
                if name not in self.large:
                    whole.unlink(missing_ok=True)
                    partial.unlink(missing_ok=True)
                elif whole.exists():  # the crash came while files got their names
                    whole.rename(partial)
        except OSError as error:
            raise OutputError(f"what is unfinished in {self.path} can't be gone on with: {error.strerror}") from error

    def tidy(self) -> None:
        """Remove what belongs to the conversion beside a finished output, as far as no one is at work."""
        with suppress(OSError):
            if self._lock.take():
                self._remove_own(True)
        self._lock.release()
        with suppress(OSError), self.alone():
            pass  # a part that was killed while it wrote what belongs to none left its lock

    def _remove_own(self, everything: bool) -> None:
        """Remove journals and records: this part's or everything that a finished conversion doesn't need."""
        for path in self.path.glob("conversion*"):
            own = path.stem == self.part.stem and path.suffix != ".lock" and path.name != MARKER
            if own or (everything and path.suffix != ".lock" and is_leftover(path.name)):
                path.unlink(missing_ok=True)

    def _discard(self) -> None:
        """Remove everything that is mine; nothing of it is whole without the root manifest."""
        try:
            for name in sorted(self.mine):
                for path in (self.path / name, self.path / (name + PARTIAL)):
                    path.unlink(missing_ok=True)
            for folder in sorted({str(Path(name).parent) for name in self.mine} - {"."}, reverse=True):
                remove_empty(self.path / folder)
            self._remove_own(self.part.count == 1)
        except OSError as error:
            raise OutputError(f"what is unfinished in {self.path} can't be removed: {error.strerror}") from error

    def clear(self, names: Iterable[str]) -> None:
        """Remove what a crash left of these small files."""
        try:
            for name in names:
                for path in (self.path / name, self.path / (name + PARTIAL)):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"what is unfinished in {self.path} can't be removed: {error.strerror}") from error

    def record(self, files: Iterable[ManifestFile]) -> None:
        """These files of this part are whole and have their names."""
        if self.part.count > 1:
            record_done(self.path, self.part, tuple(files))
        else:
            self._records[1] = tuple(files)

    def missing(self) -> tuple[int, ...]:
        """Parts that aren't finished yet."""
        if self.part.count > 1:
            self._records = read_done(self.path, self.part.count)
        return tuple(number for number in range(1, self.part.count + 1) if number not in self._records)

    def files(self, wanted: Iterable[str]) -> dict[str, ManifestFile]:
        """The files of all parts, by name. Raises OutputError where one isn't as it was recorded, or one is lacking."""
        found = {}
        for number, files in self._records.items():
            for file in files:
                path = self.path / file.name
                if not path.is_file() or path.stat().st_size != file.size:
                    raise OutputError(f"{path} isn't there with its {file.size} bytes; make part {number} with --fresh")
                if not _has_digest(self.path / file.manifest, file.xxh3):
                    raise OutputError(
                        f"{self.path / file.manifest} hasn't the digest {file.xxh3} that part {number} recorded; make "
                        f"part {number} with --fresh"
                    )
                found[file.name] = file
        for name in sorted(set(wanted).difference(found)):
            raise OutputError(f"{self.path / name} is in no part's record; make the parts again with --fresh")
        return found

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether this process alone may write what belongs to no part."""
        lock = Lock(self.path / LOCK)
        free = self.part.count == 1 or lock.take()
        try:
            yield free
        finally:
            lock.release()

    def write(self, name: str, data: bytes) -> tuple[int, str]:
        """Write a whole small file under its partial name; returns its size and digest."""
        return write_small(self.path, name, data)

    def publish(self, names: Iterable[str]) -> None:
        """Give these files their names, once they are on the disk; with the root manifest the output is finished."""
        listed = list(names)
        publish(self.path, listed)
        if ROOT in listed:
            self.published = True
            self._remove_own(True)


def _has_digest(path: Path, xxh3: str) -> bool:
    try:
        return file_digest(path)[1] == xxh3
    except OSError:
        return False
