"""Serving run reports over HTTP, for links on Prefect's page, which cannot open file:// URLs."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from metaloom.flows.runs import report_path, runs_root
from metaloom.flows.viewer.gate import Gate, refusal_of_other_pages
from metaloom.storage import url_of

VARIABLE = "METALOOM_REPORTS_URL"  # environment variable from which flows read the URL of the served reports


def reports_root() -> Path:
    """Return the folder with the reports of all runs in the runs folder."""
    root = runs_root()
    return Path("reports") if url_of(root) else root / "reports"


def address_of(run: Path, file: str) -> str | None:
    """Return the URL of a file in a run's report, or None if it is not served."""
    served = os.environ.get(VARIABLE)
    folder = report_path(run).resolve()
    if not served or folder.parent != reports_root().resolve():
        return None
    return f"{served}/{quote(folder.name)}/{quote(file)}"


@contextmanager
def served_reports(listening: socket.socket) -> Iterator[str]:
    """Serve the reports on a listening socket within the block, and yield their URL.

    Accepts connections from this machine only. Serves only files in the reports folder, and follows no links out of it.
    """
    root, (host, port) = reports_root().resolve(), listening.getsockname()
    files = StaticFiles(directory=root, check_dir=False)
    files.config_checked = True  # there may be no report yet

    async def index(request: Request) -> Response:
        names = sorted(file.relative_to(root).as_posix() for file in root.glob("*/*.html"))
        links = "".join(f'<li><a href="{quote(name)}">{escape(name)}</a>' for name in names)
        return HTMLResponse(f"<!doctype html><meta charset=utf-8><title>Reports</title><ul>{links}</ul>")

    # A browser must not cache a report: a run that continues has a new one at the same URL.
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    app = Gate(Starlette(routes=[Route("/", index), Mount("/", files)]), refusal_of_other_pages, headers)
    how: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(app, **how, server_header=False, timeout_graceful_shutdown=1))
    thread = Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(2.0)  # no longer, since a browser may have stopped reading
