"""One self-contained page: the template with its style, its scripts and the data inside."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from shard_plans.errors import OutputError
from shard_plans.families.binding import Binding
from shard_plans.report_html.data import page_data
from shard_plans.search.found import Found

TEMPLATE = Path(__file__).parent / "template"
SCRIPTS = ("common.js", "bars.js", "curves.js", "experts.js", "operators.js", "search.js")


def write_page(binding: Binding, found: Found, path: Path) -> None:
    """Write the report to `path`, whole or not at all; OutputError where that isn't possible."""
    text = make_page(page_data(binding, found))
    partial = path.parent / f"{path.name}.partial"
    try:
        partial.unlink(missing_ok=True)
        with partial.open("x", encoding="utf-8") as file:  # a new file: a link that waits there isn't followed
            file.write(text)
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"report {path} can't be written: {reason}") from error


def make_page(data: dict[str, Any]) -> str:
    """The page's text. Names in the data are a stranger's: none of them can end a script or become markup."""
    scripts = "\n".join((TEMPLATE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    inside = {
        "STYLE": (TEMPLATE / "style.css").read_text(encoding="utf-8"),
        "TITLE": escape(f"{data['model']['family']} on {data['parallel']['world']} cards"),
        "SCRIPT": scripts,
        "DATA": script_safe(data),
    }
    page = (TEMPLATE / "page.html").read_text(encoding="utf-8")
    parts = page.split("@@")  # @@NAME@@: every second part is a name; what is put in isn't looked through again
    return "".join(inside[part] if number % 2 else part for number, part in enumerate(parts))


def script_safe(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: no `<`, `>` or `&`, nor line ends that JavaScript doesn't allow."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: everything else is \uXXXX already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
