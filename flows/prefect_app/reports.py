"""Serving of run reports over HTTP, for links on Prefect's page, which cannot open file:// URLs."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

from metaloom.flows.runs import report_path, runs_root
from metaloom.flows.viewer.gate import refusal_of_other_pages
from metaloom.storage import url_of

VARIABLE = "METALOOM_REPORTS_URL"
"""Environment variable with the URL of served reports, for flows."""


def reports_root() -> Path:
    """Return the folder of the reports of all runs under the runs folder."""
    root = runs_root()
    return Path("reports") if url_of(root) else root / "reports"


def address_of(run: Path, file: str) -> str | None:
    """Return the URL of a file of a run's report; None if it is not served."""
    served = os.environ.get(VARIABLE)
    folder = report_path(run).resolve()
    if not served or folder.parent != reports_root().resolve():
        return None
    return f"{served}/{quote(folder.name)}/{quote(file)}"


@contextmanager
def served_reports(listening: socket.socket) -> Iterator[str]:
    """Serve the reports at a listening socket during the block; yield their URL."""
    root, (host, port) = reports_root().resolve(), listening.getsockname()
    server = ThreadingHTTPServer((host, port), partial(_Reports, directory=str(root)), bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.shutdown()
        server.server_close()


class _Reports(SimpleHTTPRequestHandler):
    """Request handler that only serves files in the folder, without following links out of it."""

    def send_head(self) -> Any:
        # Prefect's page, of another origin, shows curves. Pages cannot read images of other origins.
        is_image = self.headers.get("Sec-Fetch-Dest") == "image"
        said = [(name.lower(), value) for name, value in self.headers.items()]
        headers = [
            (n.encode("latin-1"), v.encode("latin-1")) for n, v in said if not (is_image and n == "sec-fetch-site")
        ]
        if refusal := refusal_of_other_pages({"type": "http", "headers": headers}):
            self.send_error(*refusal)
            return None
        if not self._is_within(Path(self.translate_path(self.path))):
            self.send_error(404)
            return None
        return super().send_head()

    def _is_within(self, asked: Path) -> bool:
        """Return True if a path exists and everything served for it is in the folder."""
        # A folder is served by its index, which may also be a link.
        answered = (asked, asked / "index.html", asked / "index.htm")
        try:
            return asked.exists() and all(
                (path.is_file() or path.is_dir()) and path.resolve().is_relative_to(self.directory)
                for path in answered
                if path.exists()
            )
        except (OSError, ValueError):  # not a valid file name
            return False

    def end_headers(self) -> None:
        """Disable the browser's cache, since reports change under the same URL."""
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
