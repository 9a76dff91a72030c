"""The end of a process whose ranks can't be waited for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import click

from shard_plans.errors import ReshardError

COURTESY = 5.0
"""Seconds before a process that has nothing to tell ends: torchrun ends all when one does, also the one that tells."""


def say(fault: ReshardError) -> None:
    """One sentence on standard error."""
    click.echo(f"reshard: {fault}", err=True)


def leave(report: Callable[[ReshardError], None]) -> Callable[[ReshardError, bool], None]:
    """What a Watch is to call: ends the process with the fault's exit code, whatever its other threads hang in.

    The first that knows reports.
    """

    def stop(fault: ReshardError, first: bool) -> None:
        if first:
            report(fault)
        else:
            time.sleep(COURTESY)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(fault.exit_code)

    return stop
