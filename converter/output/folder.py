"""The output folder: whose it is, who may write it, files under partial names, and publishing them whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from converter.output.partial import PARTIAL, publish, remove_empty, sync, write_small
from shard_plans.checkpoints.headers import brief
from shard_plans.documents.manifest import ROOT, Manifest, read_manifest
from shard_plans.errors import ManifestError, OutputError

MARKER = "conversion.partial"
"""Says whose unfinished conversion lies here."""
LOCK = "conversion.lock"


@dataclass(frozen=True, slots=True)
class Identity:
    """What an output is made of."""

    plan: str
    """Digest of the plan."""
    source: str
    """Fingerprint of the checkpoint."""

    def __str__(self) -> str:
        return f"plan {self.plan} of checkpoint {self.source}"


class OutputFolder:
    """An output folder while it is written. As a context it holds a lock and discards at the end what is unfinished."""

    def __init__(self, path: Path, identity: Identity, names: Iterable[str]) -> None:
        """`names` are the files that the conversion writes, relative to the folder. Nothing is touched yet."""
        self.path, self.identity = path, identity
        self.names = {*names, ROOT}
        for name in self.names:
            parts = name.split("/")
            if "" in parts or "." in parts or ".." in parts or "\\" in name or "\0" in name:
                raise OutputError(f"{brief(name)} would leave the output folder {path}; a plain name is needed")
        self.published = False
        self._made = False
        self._lock: int | None = None

    def finished(self) -> Manifest | None:
        """The manifest of the same conversion, if it lies here whole; None where there is work to do.

        Raises OutputError where the folder holds anything else.
        """
        present = self._present()
        if ROOT in present:
            return self._whole()
        marked = self._marked(present)
        allowed = {*self.names, *(name + PARTIAL for name in self.names), MARKER, LOCK}
        foreign = sorted(present - allowed)
        if marked is not None and marked != self.identity:
            raise OutputError(
                f"{self.path} holds an unfinished conversion by {marked}, not by {self.identity}; "
                f"choose another folder, or remove this one"
            )
        if marked is None:
            foreign = sorted(present - {LOCK, MARKER})
        if foreign:
            raise OutputError(
                f"{self.path} holds {len(foreign)} files that aren't this conversion's, the first {brief(foreign[0])}; "
                f"choose an empty folder"
            )
        return None

    def _present(self) -> set[str]:
        try:
            if not self.path.is_dir():
                if os.path.lexists(self.path):
                    raise OutputError(f"{self.path} isn't a folder; choose another output")
                return set()
            return {
                os.path.relpath(os.path.join(base, name), self.path)
                for base, folders, files in os.walk(self.path, onerror=_raise)
                for name in files + [f for f in folders if os.path.islink(os.path.join(base, f))]
            }
        except OSError as error:
            raise OutputError(f"{self.path} can't be read: {error.strerror}") from error

    def _whole(self) -> Manifest:
        try:
            manifest = read_manifest(self.path)
        except ManifestError as error:
            raise OutputError(f"{self.path} holds a damaged output ({error}); remove it to convert again") from error
        found = Identity(manifest.plan, manifest.source.fingerprint)
        if found != self.identity:
            raise OutputError(
                f"{self.path} holds the output of {found}, not of {self.identity}; "
                f"choose another folder, or remove this one"
            )
        for file in manifest.files:
            path = self.path / file.name
            size = path.stat().st_size if path.is_file() else None
            if size != file.size:
                what = "lacks the file" if size is None else f"holds {size} of {file.size} bytes of"
                raise OutputError(f"{self.path} {what} {file.name}; run reshard check, or remove it to convert again")
        return manifest

    def _marked(self, present: set[str]) -> Identity | None:
        if MARKER not in present:
            return None
        try:
            value = json.loads((self.path / MARKER).read_bytes()[:1000])
            return Identity(str(value["plan"]), str(value["source"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # a crash while it was written; then nothing else lies here

    def __enter__(self) -> OutputFolder:
        """Make the folder, lock it, and discard what an unfinished conversion left. Raises OutputError."""
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise OutputError(f"{self.path} can't be written: {error.strerror}; choose another folder") from error
        try:
            if self.finished() is not None:
                raise OutputError(f"{self.path} was finished by another process in the meantime; nothing is left to do")
            self._discard()
            marker = {"plan": self.identity.plan, "source": self.identity.source}
            (self.path / MARKER).write_text(json.dumps(marker) + "\n")
            sync(self.path / MARKER)
            sync(self.path)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.published:
                self._discard()
        finally:
            self._release()

    def _take_lock(self) -> None:
        path = self.path / LOCK
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                _lock_file(handle)
                if os.stat(path).st_ino == os.fstat(handle).st_ino:
                    self._lock = handle
                    return
            except BlockingIOError:
                os.close(handle)
                raise OutputError(f"another process is writing {self.path}; wait, or choose another folder") from None
            except FileNotFoundError:
                pass  # its holder removed it between the two calls
            os.close(handle)

    def _release(self) -> None:
        if self._lock is not None:
            (self.path / LOCK).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        if self._made and not self.published:
            remove_empty(self.path)

    def _discard(self) -> None:
        """Remove everything of this conversion; nothing of it is whole without the root manifest."""
        try:
            for name in sorted(self.names):
                for path in (self.path / name, self.path / (name + PARTIAL)):
                    path.unlink(missing_ok=True)
            for folder in sorted({str(Path(name).parent) for name in self.names} - {"."}, reverse=True):
                remove_empty(self.path / folder)
            (self.path / MARKER).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"what is unfinished in {self.path} can't be removed: {error.strerror}") from error

    def write(self, name: str, data: bytes) -> tuple[int, str]:
        """Write a whole small file under its partial name; returns its size and digest."""
        return write_small(self.path, name, data)

    def publish(self, names: Iterable[str]) -> None:
        """Give these files their names, once they are on the disk; with the root manifest the output is finished."""
        listed = list(names)
        publish(self.path, listed)
        if ROOT in listed:
            self.published = True
            (self.path / MARKER).unlink(missing_ok=True)


def _lock_file(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise  # some network file systems have no locks: there it is the user who sees to it


def _raise(error: OSError) -> None:
    raise error
