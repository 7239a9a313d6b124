"""Reports of runs over HTTP, for links on Prefect's page: a browser opens no file:// from there."""

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
"""Environment variable with the URL at which reports are served, for flows."""


def reports_root() -> Path:
    """Return the folder of the reports of all runs under the runs folder."""
    root = runs_root()
    return Path("reports") if url_of(root) else root / "reports"


def address_of(run: Path, file: str) -> str | None:
    """Return the address of a file of a run's report; None if it is not served."""
    served = os.environ.get(VARIABLE)
    folder = report_path(run).resolve()
    if not served or folder.parent != reports_root().resolve():
        return None
    return f"{served}/{quote(folder.name)}/{quote(file)}"


@contextmanager
def served_reports(listening: socket.socket) -> Iterator[str]:
    """Serve the reports at a socket that listens, while the context lasts; yields their address."""
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
    """Answers this machine's browser only with files that lie in the folder, whatever links lead out of it."""

    def send_head(self) -> Any:
        # Prefect's page shows curves, and is of another origin. No page can read an image of another one.
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
        """Tell whether there is such a file or folder, and all that may be answered for it lies in the folder."""
        # Of a folder its index is answered, which may be a link as well.
        answered = (asked, asked / "index.html", asked / "index.htm")
        try:
            return asked.exists() and all(
                (path.is_file() or path.is_dir()) and path.resolve().is_relative_to(self.directory)
                for path in answered
                if path.exists()
            )
        except (OSError, ValueError):  # no file can have such a name
            return False

    def end_headers(self) -> None:
        """Disable the browser's cache: a run that continues has a new report under the same address."""
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is for what matters."""
