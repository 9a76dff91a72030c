"""Command-line options that several verbs share, and how their faults end the command."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from shard_plans.console import emit
from shard_plans.errors import OtherRankStopped, ReshardError, refusal
from shard_plans.standard_streams import leave_stdout

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object (docs/cli.md).")


class PathName(click.Path):
    """A path as the user names it; an empty one, such as an unset variable of a script leaves, is a usage error."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The path; a usage error where it is empty."""
        if value in ("", b""):
            self.fail("the path is empty; name one, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


PATH = PathName(readable=False)  # what can't be read is said by whoever reads it, under --json too
family_option = click.option("--family", type=PATH, help="A family table of your own (docs/families.md).")


class Tokens(click.ParamType):  # type: ignore[type-arg]  # generic only in click's stubs
    """A number of tokens: 8192, 128K (x 1024), 1M (x 1024 x 1024)."""

    name = "TOKENS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; a usage error where it isn't one above 0."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([1-9][0-9]{0,11})([kKmM]?)", value)
        if found is None:
            self.fail(f"{value!r} isn't a number of tokens such as 8192, 128K or 1M", param, ctx)
        return int(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2].lower()]


TOKENS = Tokens()


class Verb(click.Command):
    """A verb whose faults are one sentence on stderr and an exit code; under --json also one object, from rank 0."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; a ReshardError ends it with the error's exit code."""
        try:
            return super().invoke(ctx)
        except ReshardError as error:
            self._refuse(ctx, error)
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads what is printed; 1 would mean that a check ran and failed
                leave_stdout()
                sys.exit(2)
            if error.errno is None:
                raise
            self._refuse(ctx, ReshardError(refusal(error)))
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            traceback.print_exc()
            click.echo(f"reshard {self.name}: a fault of reshard itself ({type(error).__name__}: {error})", err=True)
            sys.exit(2)  # 1 would mean that a check ran and failed

    def _refuse(self, ctx: click.Context, error: ReshardError) -> NoReturn:
        silent = os.environ.get("RANK", "0") != "0" or isinstance(error, OtherRankStopped)
        refuse(str(self.name), error, bool(ctx.params.get("as_json")) and not silent)
        sys.exit(error.exit_code)


def refuse(verb: str, error: ReshardError, as_json: bool) -> None:
    """Say what ended a verb: one sentence on standard error, and with --json one object."""
    if as_json:
        try:
            emit({"error": {"kind": type(error).__name__, "message": str(error)}})
        except OSError:  # standard output itself may be what failed
            leave_stdout()
    click.echo(f"reshard {verb}: {error}", err=True)


def sizes_options(command: Command) -> Command:
    """--tp, --pp, --dp, --ep, --etp, --mtp, --strict-blocks and --weights."""
    for option in (
        click.option(
            "--weights", multiple=True, metavar="[GROUP=]FORMAT",
            help="Store a group of weights, or all, in another precision: experts=fp8_block; several are possible.",
        ),
        click.option("--strict-blocks", is_flag=True, help="Refuse cuts inside a quantisation block."),
        click.option(
            "--mtp", type=click.Choice(["keep", "drop"]), default="keep", help="Multi-token-prediction layers."
        ),
        click.option("--etp", type=int, help="Ranks that share each expert's width."),
        click.option("--ep", type=int, help="Ranks that experts are dealt to."),
        click.option("--dp", type=int, help="Replicas of attention."),
        click.option("--pp", type=int, help="Pipeline stages."),
        click.option("--tp", type=int, help="Ranks that share attention heads and dense width."),
    ):  # fmt: skip
        command = option(command)
    return command


SIZES = ("tp", "pp", "dp", "ep", "etp", "mtp", "strict_blocks", "weights")


def contradictions(ctx: click.Context, names: tuple[str, ...]) -> list[str]:
    """Those of the named options that the user gave on the command line, as the user writes them."""
    given = click.core.ParameterSource.COMMANDLINE
    return [f"--{name.replace('_', '-')}" for name in names if ctx.get_parameter_source(name) == given]
