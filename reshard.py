"""The command `reshard` and its Python API; each verb is handed to its package, imported when it is first used.

import reshard

plan = reshard.plan_memory("CHECKPOINT", "4x8:80GB")
reshard.convert("CHECKPOINT", "OUT", plan)
reshard.check("OUT", deep="CHECKPOINT")
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from shard_plans.standard_streams import leave_stdout, open_streams

if TYPE_CHECKING:
    from converter.verbs import adopt, check, convert, restore
    from runtime.verbs import verify_and_run
    from shard_plans.documents.plan import Plan, read_plan, write_plan
    from shard_plans.errors import ReshardError
    from shard_plans.verbs import count_memory, find_plan, inspect, plan_memory

__version__ = "0.1.0"
__all__ = [
    "Plan", "ReshardError", "adopt", "check", "convert", "count_memory", "find_plan", "inspect", "main", "plan_memory",
    "read_plan", "restore", "verify_and_run", "write_plan",
]  # fmt: skip

_API = {
    "Plan": "shard_plans.documents.plan",
    "read_plan": "shard_plans.documents.plan",
    "write_plan": "shard_plans.documents.plan",
    "ReshardError": "shard_plans.errors",
    "plan_memory": "shard_plans.verbs",
    "find_plan": "shard_plans.verbs",
    "count_memory": "shard_plans.verbs",
    "inspect": "shard_plans.verbs",
    "convert": "converter.verbs",
    "check": "converter.verbs",
    "adopt": "converter.verbs",
    "restore": "converter.verbs",
    "verify_and_run": "runtime.verbs",
}
_VERBS = {
    "plan-memory": ("shard_plans.cli", "plan_memory_command", "Choose what goes where on a cluster; does it fit?"),
    "convert": ("converter.cli", "convert_command", "Stream a checkpoint into hashed per-rank binaries."),
    "check": ("converter.cli", "check_command", "Check an output's hashes, or every byte of it."),
    "adopt": ("converter.cli", "adopt_command", "Make an output of a folder that an engine's own tool wrote."),
    "restore": ("converter.cli", "restore_command", "Write the checkpoint again that an output was made from."),
    "verify-and-run": ("runtime.cli", "verify_and_run_command", "Run the sharded forward pass and compare it."),
    "inspect": ("shard_plans.cli", "inspect_command", "Say what a checkpoint, config, plan or output is."),
    "demo": ("runtime.cli", "demo_command", "The main job on a small checkpoint that reshard makes itself."),
}


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    return getattr(import_module(_API[name]), name)


def __dir__() -> list[str]:
    return __all__


class _Verbs(click.Group):
    """Verbs by name; listing them imports nothing heavy."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command, whatever streams it was given."""
        open_streams()
        try:
            return super().main(*arguments, **options)
        except OSError as error:  # of --help: a verb says itself what it couldn't write
            leave_stdout()
            click.echo(f"reshard: standard output can't be written: {error.strerror}", err=True)
            sys.exit(2)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("reshard: interrupted", err=True)
            sys.stdout.flush()
            # Threads of the runtime may still hold locks; what is unfinished was discarded on the way here.
            os._exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module, command, _ = _VERBS[cmd_name]
        found: click.Command = getattr(import_module(module), command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, words) for verb, (_, _, words) in _VERBS.items()])


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="reshard")
def main() -> None:
    """Turn a HuggingFace checkpoint into what each accelerator of a cluster loads, and prove that it is right.

    Exit codes: 0 success, 1 a check failed or a plan doesn't fit, 2 bad input or usage.
    """


if __name__ == "__main__":
    main()
