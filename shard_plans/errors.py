"""One exception a fault. Every message is a sentence for the user: what, where, the two values, what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 2000
"""Characters of a message; of a longer one the middle is left out."""


class ReshardError(Exception):
    """Base of all faults that a user can cause or meet; the command prints the message and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        """A message may quote what a stranger wrote: it becomes one line that any terminal can show."""
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """The message with everything that can't be printed as `\\` codes, and not longer than can be read."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST - 600]} ... {message[-500:]}"
    if not message.isprintable():
        message = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message)
    return message if len(message) <= LONGEST else f"{message[: LONGEST - 600]} ... {message[-500:]}"


class CheckpointError(ReshardError):
    """The checkpoint's files are missing, malformed, or contradict one another."""


class ConfigError(ReshardError):
    """config.json lacks a key, or holds a value that the family table doesn't cover."""


class FamilyError(ReshardError):
    """A family table is malformed, or no table describes the architecture."""


class GridError(ReshardError):
    """Parallel sizes don't fit together, or don't divide the model."""


class PlanError(ReshardError):
    """A plan document is malformed, or belongs to another checkpoint."""


class EngineRefuses(PlanError):
    """No plan of those asked for is one that the engine can carry out."""

    exit_code = 1


class ClusterError(ReshardError):
    """A cluster or card isn't described well enough to plan for it."""


class OutputError(ReshardError):
    """An output folder can't be written, or holds something else."""


class ManifestError(ReshardError):
    """A manifest or shard file is malformed, incomplete or belongs elsewhere."""


class RuntimeFault(ReshardError):
    """The forward pass can't be run as asked: a device, backend, block or input is missing."""


class OtherRankStopped(RuntimeFault):
    """This rank had to stop because another one did, which says why itself."""


class CheckFailed(ReshardError):
    """A check ran and found a difference."""

    exit_code = 1


class NotFinite(CheckFailed):
    """An operator of the forward pass made a nan or an infinity out of finite numbers."""


def refusal(error: OSError, what: object = None) -> str:
    """What the system refused, and what to do about it; of `what`, where the error doesn't say of which file."""
    name = error.filename if error.filename is not None else what
    where = f"{name} can't be used" if name is not None else "the system refused a call"
    remedy = "its permissions" if error.errno in (errno.EACCES, errno.EPERM) else "the disk"
    return f"{where}: {error.strerror}; see to {remedy}, and run again"


@contextmanager
def using(what: object, fault: type[ReshardError]) -> Iterator[None]:
    """What the system refuses meanwhile is a `fault` of `what`; not that nobody reads what is printed on the way."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno == errno.EPIPE:
            raise
        raise fault(refusal(error, what)) from error
