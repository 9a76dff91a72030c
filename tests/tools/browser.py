"""A headless Chromium: opens a page from a file, runs a script in it, and says what the script found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WATCH = "<script>window.faults = []; addEventListener('error', (event) => faults.push(String(event.message)));</script>"


def examine(page: str, script: str, folder: Path, width: int = 1280, dark: bool = False) -> dict[str, Any]:
    """What `script` (an expression) is in the opened page, and `faults`: errors of the page's own scripts."""
    if CHROMIUM is None:
        raise RuntimeError("there is no Chromium here")
    told = f"<script>document.body.dataset.told = JSON.stringify({{...({script}), faults}});</script></body>"
    path = folder / "examined.html"
    path.write_text(page.replace("<head>", "<head>" + WATCH, 1).replace("</body>", told))
    arguments = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1000", "--virtual-time-budget=2000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    ran = subprocess.run([CHROMIUM, *arguments], capture_output=True, timeout=240, check=True)
    found = re.search(r'data-told="([^"]*)"', ran.stdout.decode())
    if found is None:
        raise AssertionError("the page's own script didn't run to its end")
    answer: dict[str, Any] = json.loads(unescape(found[1]))
    return answer
