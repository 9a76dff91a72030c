"""Command-line options of the search, and of what it prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from shard_plans.options import PATH
from shard_plans.search.goals import GOALS

Command = TypeVar("Command", bound=Callable[..., Any])

SEARCH = ("goal", "tp_across_nodes", "expert_load", "redundant_experts")
"""Options that decide what is searched for."""


def search_options(command: Command) -> Command:
    """--goal and the rest of SEARCH."""
    for option in (
        click.option("--redundant-experts", type=int,
                     help="Copies of hot experts in each layer; without it as many as serve the goal and fit."),
        click.option("--expert-load", type=PATH,
                     help="Counts by layer and expert (JSON or CSV): experts are dealt by them."),
        click.option("--tp-across-nodes", is_flag=True, help="Let tp groups reach over nodes."),
        click.option("--goal", default="throughput", show_default=True, type=click.Choice(GOALS),
                     help="What the plan is to be best at."),
    ):  # fmt: skip
        command = option(command)
    return command


def report_options(command: Command) -> Command:
    """--explain and --html."""
    for option in (
        click.option("--html", type=PATH, help="Write a report to this file: one page that opens offline."),
        click.option("--explain", is_flag=True, help="Every rejected group of plans, and what the prediction assumes."),
    ):
        command = option(command)
    return command
