"""A stand-in for the model hub: serves folders of this machine, so that planners that only ask the hub can answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlparse

OWNER = "made"


@contextmanager
def standin_hub(root: Path) -> Iterator[str]:
    """Serve `root`/MODEL as made/MODEL; gives the address that takes the hub's place."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            tree = re.fullmatch(rf"/api/models/{OWNER}/([\w.-]+)(/tree|/revision)?(?:/[\w.-]+)?", path)
            file = re.fullmatch(rf"/{OWNER}/([\w.-]+)/resolve/[\w.-]+/([\w.-]+)", path)
            if tree and (root / tree[1]).is_dir():
                self.answer(json.dumps(describe(root / tree[1], tree[2] == "/tree")).encode(), 200, {})
            elif file and (root / file[1] / file[2]).is_file():
                self.part(root / file[1] / file[2])
            else:
                self.answer(b"{}", 404, {})

        def part(self, path: Path) -> None:
            size = path.stat().st_size
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(wanted[1]), min(int(wanted[2]), size - 1)) if wanted else (0, size - 1)
            with path.open("rb") as opened:
                opened.seek(first)
                data = opened.read(last - first + 1)
            ranged = {"Content-Range": f"bytes {first}-{last}/{size}"} if wanted else {}
            self.answer(data, 206 if wanted else 200, ranged)

        def answer(self, data: bytes, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def describe(folder: Path, tree: bool) -> object:
    """What the hub's API says of a model: its files and their sizes."""
    files = [(path.name, path.stat().st_size) for path in sorted(folder.iterdir())]
    if tree:
        return [{"type": "file", "path": name, "size": size} for name, size in files]
    return {
        "id": f"{OWNER}/{folder.name}",
        "modelId": f"{OWNER}/{folder.name}",
        "sha": "0" * 40,
        "siblings": [{"rfilename": name, "size": size} for name, size in files],
    }
