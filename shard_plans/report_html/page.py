"""One self-contained page: the template with its style, its scripts and the data inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shard_plans.families.binding import Binding
from shard_plans.report_html.data import page_data
from shard_plans.search.found import Found
from shard_plans.written import write_whole

TEMPLATE = Path(__file__).parent / "template"
SCRIPTS = ("common.js", "bars.js", "curves.js", "experts.js", "operators.js", "search.js")


def write_page(binding: Binding, found: Found, path: Path) -> None:
    """Write the report to `path`, whole or not at all; OutputError where that isn't possible."""
    write_whole(path, make_page(page_data(binding, found)))


def make_page(data: dict[str, Any]) -> str:
    """The page's text."""
    title = f"{data['model']['family']} on {data['parallel']['world']} cards"
    return fill_page(TEMPLATE / "page.html", [TEMPLATE / name for name in SCRIPTS], title, data)


def fill_page(template: Path, scripts: Sequence[Path], title: str, data: dict[str, Any]) -> str:
    """A page of the `template`, with the style of all pages, the `scripts` one behind the other, and the data.

    Names in the data are a stranger's: none of them can end a script or become markup.
    """
    inside = {
        "STYLE": (TEMPLATE / "style.css").read_text(encoding="utf-8"),
        "TITLE": escape(title),
        "SCRIPT": "\n".join(path.read_text(encoding="utf-8") for path in scripts),
        "DATA": script_safe(data),
    }
    page = template.read_text(encoding="utf-8")
    parts = page.split("@@")  # @@NAME@@: every second part is a name; what is put in isn't looked through again
    return "".join(inside[part] if number % 2 else part for number, part in enumerate(parts))


def script_safe(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: no `<`, `>` or `&`, nor line ends that JavaScript doesn't allow."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: everything else is \uXXXX already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
