"""The page of a run: the template, its scripts and the data inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.checking.checks import COSINE, limits
from runtime.loading.sections import section_words
from runtime.result import RunResult
from runtime.summary import compute, first_operator, strict, verdict
from shard_plans.report_html.page import TEMPLATE as SHARED
from shard_plans.report_html.page import fill_page

TEMPLATE = Path(__file__).parent / "template"
SCRIPTS = ("checks.js", "layers.js", "routes.js", "timeline.js")


def make_page(result: RunResult) -> str:
    """The page's text; what comes from files and checkpoints can't become markup."""
    data = page_data(result)
    scripts = [SHARED / "common.js", *(TEMPLATE / name for name in SCRIPTS)]
    return fill_page(TEMPLATE / "page.html", scripts, data["title"], data)


def page_data(result: RunResult) -> dict[str, Any]:
    """Everything that the page's scripts draw: the result as --json has it, and how to read it."""
    limit, aim = limits(compute(result))
    family, ranks = result.figures.get("family"), result.figures.get("ranks")
    return {
        **result.as_dict(),
        "title": "reshard verify-and-run" if family is None else f"{family} on {ranks} ranks, verified",
        "verdict": verdict(result),
        "strict": strict(result),
        "limits": {"limit": limit, "aim": aim, "cosine": COSINE},
        "first_wrong": [first_operator(result, layer) for layer in result.layers],
        "sections": {str(span.section): section_words(span.section) for span in result.timeline},
    }
