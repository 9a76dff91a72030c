"""The command, run in this process: exit code, output and errors as a user sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from click.testing import CliRunner


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run of the command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON document that `--json` promises."""
        return json.loads(self.stdout)


RunCli = Callable[..., Ran]


def run(*arguments: str | int | PathLike[str], code: int | None = 0) -> Ran:
    """Run `reshard ARGUMENTS`; the exit code must be `code` (None: any). A fault of the program itself is raised."""
    import reshard

    result = CliRunner().invoke(reshard.main, [str(argument) for argument in arguments], prog_name="reshard")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "Traceback (most recent call last)" in result.stderr:
        raise AssertionError(result.stderr)
    ran = Ran(result.exit_code, result.stdout, result.stderr)
    if code is not None and ran.exit_code != code:
        words = " ".join(map(str, arguments))
        raise AssertionError(f"reshard {words}: exit code {ran.exit_code}, not {code}\n{ran.stdout}\n{ran.stderr}")
    return ran
