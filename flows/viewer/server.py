"""The page's server: local to this machine, protected by a token, read-only."""

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from metaloom.flows.errors import UsageError
from metaloom.flows.viewer.gate import token_gate
from metaloom.flows.viewer.pages import Pages, no_page
from metaloom.flows.viewer.shelf import Shelf
from metaloom.flows.views.interactive import plotly_file

ADDRESS = "127.0.0.1"
_TOKEN_BYTES = 24


def viewer_app(shelf: Shelf, token: str) -> ASGIApp:
    """Make the application that answers what the page asks for."""
    pages = Pages(shelf, plotly_file())
    app = Starlette(routes=[Mount(f"/{token}", routes=pages.routes())], exception_handlers={404: no_page})
    return token_gate(app, token)


def serve(place: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C."""
    shelf, token = Shelf(place), secrets.token_urlsafe(_TOKEN_BYTES)
    app = viewer_app(shelf, token)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, port))
        except OSError as error:
            raise UsageError(
                f"--port {port}: {error.strerror}; required a free port of {ADDRESS}. 0 takes any that is free"
            ) from None
        listening.listen()  # so that whoever receives the address can connect at once
        tell(f"http://{ADDRESS}:{listening.getsockname()[1]}/{token}/")
        run_server(app, listening)


def run_server(app: ASGIApp, listening: socket.socket) -> None:
    """Answer requests that come to a socket until Ctrl-C."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False, loop="asyncio"
    )
    with suppress(KeyboardInterrupt):  # which uvicorn raises again once it has ended
        uvicorn.Server(config).run(sockets=[listening])
