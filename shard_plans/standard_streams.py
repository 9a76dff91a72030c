"""Standard streams that nobody opened, and those that can't be written any more."""

from __future__ import annotations

import os
import sys
from typing import Any


def open_streams() -> None:
    """Give the streams that are closed (`>&-`) to nobody: else the next file that is opened would take their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        setattr(sys, name, _nobody(mode))


def leave_stdout() -> None:
    """Print to nobody from now on, after a write failed: what is left in the buffer would fail too."""
    sys.stdout = _nobody("w")


def _nobody(mode: str) -> Any:
    return open(os.devnull, mode, encoding="utf-8")  # it stays open
