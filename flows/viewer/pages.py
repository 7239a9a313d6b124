"""Read-only server of `metaloom view`: runs, routes and responses.

It listens only on this machine and requires a token. Errors are sent as responses.
"""

import json
import logging
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from metaloom import storage
from metaloom.flows.errors import UsageError, exit_code
from metaloom.flows.formatting import program
from metaloom.flows.viewer.curves import Curves, spark
from metaloom.flows.viewer.filming import sheet
from metaloom.flows.viewer.gate import token_gate
from metaloom.flows.viewer.outputs import adaptation_page, iteration_page, live, output_page, run_page
from metaloom.flows.viewer.values import episode, episode_length, names_along, slice_of
from metaloom.flows.views.page import plotly_file
from metaloom.flows.views.run_info import list_run_row
from metaloom.pipeline.shown import printable
from metaloom.storage import Run, StageRef

log: logging.Logger = logging.getLogger(__name__)

REMOTE_SECONDS = 5.0  # time in seconds between updates of runs at a URL
_CHANGED_WITH = ("run.json", "_commits", "_sessions", "_thinned", "_segments")
"""Files and folders of a run, of which at least one changes whenever the run changes."""
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FRESH = {"Cache-Control": "no-store"}
Answer = Callable[[Request], Response]
ADDRESS = "127.0.0.1"


@dataclass
class OpenRun:
    """Open run with cached data. Hold `lock` while using `run`, since a run's caches are not thread-safe."""

    run: Run
    curves: Curves  # learning curves, with a separate run and lock, so that other requests do not wait for them
    lock: RLock = field(default_factory=RLock)


class Shelf:
    """Collection of the runs in a folder or at a URL, or a single run."""

    def __init__(self, place: Path) -> None:
        self.place = place  # path or URL of a folder of runs, or of one run
        self.only: str | None = place.resolve().name if storage.run_exists(place) else None  # name of a single run
        self._open: dict[str, tuple[object, OpenRun]] = {}
        self._looked: dict[str, float] = {}
        self._folders: dict[str, Path] = {}
        self._rows: dict[Path, tuple[object, float, Mapping[str, Any]]] = {}
        self._lock, self._row_lock = RLock(), Lock()

    def folders(self) -> dict[str, Path]:
        """Return the folders of the runs, keyed by name, newest first."""
        if self.only is not None:
            return {self.only: self.place}
        with self._lock:
            if storage.url_of(self.place) is None or self._is_time(""):
                self._folders = {folder.name: folder for folder in storage.find_runs(self.place)}
            return self._folders

    def open(self, name: str) -> OpenRun:
        folder = self.folders().get(name)
        if folder is None:
            raise storage.RunNotFound(
                storage.location(self.place),
                found=f"no run {name!r}",
                required="an existing run",
                action="the list of runs shows all names",
            )
        with self._lock:
            # A new run with the same name has a different run.json.
            identity = _changed(folder / "run.json")
            known = self._open.get(name)
            if known is None or known[0] != identity:
                known = identity, OpenRun(storage.open_run(folder), Curves(storage.open_run(folder)))
                self._open[name] = known
            opened = known[1]
            remote = opened.run.files.remote
            is_old = remote is not None and self._is_time(name)
        if remote is not None and is_old:
            with opened.lock:
                remote.pull()
        return opened

    def _is_time(self, what: str) -> bool:
        now = time.monotonic()
        if is_time := now - self._looked.get(what, float("-inf")) >= REMOTE_SECONDS:
            self._looked[what] = now
        return is_time

    def rows(self) -> list[Mapping[str, Any]]:
        """Return one row per run, as in `metaloom ls --json`."""
        folders = self.folders()
        with self._row_lock:
            self._rows = {folder: row for folder, row in self._rows.items() if folder in folders.values()}
            for folder in folders.values():
                now, stamp = time.monotonic(), [_changed(folder / name) for name in _CHANGED_WITH]
                old, when, row = self._rows.get(folder, (None, now, {}))
                # A killed writer changes no file, and changes at a URL are not visible here.
                is_fresh = now - when < REMOTE_SECONDS if storage.url_of(folder) else row.get("state") != "training"
                if old != stamp or not is_fresh:
                    self._rows[folder] = stamp, now, list_run_row(folder)
            return [self._rows[folder][2] for folder in folders.values()]


def _changed(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes whenever a file or folder is replaced or modified; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class Pages:
    """Handlers of requests for the runs on a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def routes(self) -> list[Route]:
        """Return all routes, relative to the token in the address."""
        output, iteration = "{iteration:int}/{stage}/{step:int}", "{iteration:int}"
        of_run: dict[str, Callable[[storage.Run, Request], Mapping[str, Any]]] = {
            "": lambda run, _: run_page(run),
            "/live": lambda run, _: live(run),
            "/spark": lambda run, _: {"values": spark(run)},
            f"/iteration/{iteration}": lambda run, asked: iteration_page(run, asked.path_params["iteration"]),
            f"/adaptation/{iteration}": lambda run, asked: adaptation_page(run, asked.path_params["iteration"]),
            f"/output/{output}": lambda run, asked: output_page(run, _ref(asked)),
            f"/array/{output}": _axes,
            f"/episode/{output}": lambda run, asked: episode(run, _ref(asked), *_task_and_episode(asked)),
        }
        run = "/api/run/{run}"
        answers: dict[str, Answer] = {
            "/api/place": self._place,
            "/api/runs": self._runs,
            **{f"{run}{path}": self._of_run(describe) for path, describe in of_run.items()},
            f"{run}/curves": lambda asked: _json(self._opened(asked).curves.data()),
            f"{run}/values/{output}": self._values,
            f"{run}/film/{output}": self._film,
        }
        # The only files served.
        static = (file for file in (Path(__file__).parent / "static").iterdir() if file.suffix in _KINDS)
        files = {**{f"/{file.name}": file for file in static}, "/plotly.min.js": plotly_file()}
        return [
            *(Route(path, _reporting_errors(answer)) for path, answer in answers.items()),
            *(Route(path, _file(file)) for path, file in {"/": files["/index.html"], **files}.items()),
        ]

    def _runs(self, request: Request) -> Response:
        rows = self._shelf.rows()
        # Replace invalid characters in names, which would break the page.
        return _json({"runs": [{**row, "name": row["name"].encode(errors="replace").decode()} for row in rows]})

    def _place(self, request: Request) -> Response:
        place = storage.location(self._shelf.place)
        train = shlex.join([program("metaloom"), "train", "first-steps", "--run", f"{place}/first"])
        return _json({"place": place, "only": self._shelf.only, "train": train})

    def _of_run(self, describe: Callable[[storage.Run, Request], Mapping[str, Any]]) -> Answer:
        def answer(request: Request) -> Response:
            opened = self._opened(request)
            with opened.lock:
                return _json(describe(opened.run, request))

        return answer

    def _values(self, request: Request) -> Response:
        """Respond with a slice of an array as [rows, columns] float64, little-endian."""
        opened, asked = self._opened(request), request.query_params
        at = [int(index) for index in asked.get("at", "").split(",") if index]
        axes = int(asked["rows"]) if "rows" in asked else None, int(asked.get("columns", 0))
        with opened.lock:
            values, every = slice_of(opened.run, _ref(request), asked.get("array", ""), at, *axes)
        about = {"X-Shape": ",".join(map(str, values.shape)), "X-Every": ",".join(map(str, every))}
        return Response(values.tobytes(), media_type="application/octet-stream", headers={**FRESH, **about})

    def _film(self, request: Request) -> Response:
        opened, ref, (task, index) = self._opened(request), _ref(request), _task_and_episode(request)
        with opened.lock:
            length = episode_length(opened.run, ref, task, index)
        # Without the lock, since rendering takes seconds.
        image, about = sheet(opened.run, ref.iteration, ref.step, task, index, length)
        return Response(image, media_type="image/webp", headers={**FRESH, **about})

    def _opened(self, request: Request) -> OpenRun:
        return self._shelf.open(request.path_params["run"])


def _axes(run: storage.Run, request: Request) -> dict[str, Any]:
    """Return the names of the entries along each axis of an array."""
    array, record = request.query_params.get("array", ""), run.record(_ref(request))
    if array not in [chunk.array for chunk in record.chunks]:
        raise ValueError(f"{record.ref} has no array {array!r}")
    return {"names": names_along(run, run.files.spec(array))}


def _file(path: Path) -> Answer:
    return lambda request: FileResponse(path, media_type=_KINDS[path.suffix], headers={"Cache-Control": "no-cache"})


def _reporting_errors(answer: Answer) -> Answer:
    """Wrap a handler so that it returns errors as data, which the page shows in context."""

    def handle(request: Request) -> Response:
        try:
            return answer(request)
        except Exception as problem:
            known, kind = exit_code(problem) is not None or isinstance(problem, ValueError), type(problem).__name__
            if isinstance(problem, storage.StageThinned):
                status = 410
            elif isinstance(problem, storage.StageMissing | storage.RunNotFound):
                status = 404
            elif known or isinstance(problem, KeyError):
                status = 422
            else:
                status = 500
                log.exception("%s", printable(request.url.path.rpartition("/api/")[2]))
            text = str(problem) if known else f"{kind}: {problem}"
            return _json({"problem": printable(text), "kind": kind}, status)

    return handle


def _json(data: Mapping[str, Any], status: int = 200) -> Response:
    # Stored text may contain anything; the page shows JSON strings as text, never as markup.
    body = json.dumps(data, allow_nan=False, default=str).encode()
    return Response(body, status, {**FRESH}, "application/json")


def _ref(request: Request) -> StageRef:
    found = request.path_params
    return StageRef(found["iteration"], found["stage"], found["step"])


def _task_and_episode(request: Request) -> tuple[int, int]:
    texts = {name: request.query_params.get(name, "") for name in ("task", "episode")}
    for name, text in texts.items():
        if not text.isdecimal() or len(text) > 9:
            raise ValueError(f"{name} must be an integer, got {text!r}")
    return int(texts["task"]), int(texts["episode"])


def viewer_app(shelf: Shelf, token: str) -> ASGIApp:
    """Return the ASGI application that serves the page."""
    nothing = f'<!doctype html><p>There is no such page. <a href="/{token}/">All runs</a></p>\n'
    app = Starlette(
        routes=[Mount(f"/{token}", routes=Pages(shelf).routes())],
        exception_handlers={404: lambda request, problem: HTMLResponse(nothing, 404)},
    )
    return token_gate(app, token)


def serve(place: Path, port: int, announce: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `announce` receives its address."""
    shelf, token = Shelf(place), secrets.token_urlsafe(24)
    app = viewer_app(shelf, token)
    try:
        listening = socket.create_server((ADDRESS, port))
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}; use a free port. 0 selects any free port") from None
    with listening:  # it already listens, so that the recipient of the address can connect immediately
        announce(f"http://{ADDRESS}:{listening.getsockname()[1]}/{token}/")
        run_server(app, listening)


def run_server(app: ASGIApp, listening: socket.socket) -> None:
    """Serve requests on a socket until Ctrl-C."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        loop="asyncio",
        timeout_graceful_shutdown=1,  # a browser may have stopped reading
    )
    with suppress(KeyboardInterrupt):  # uvicorn raises it again when it ends
        uvicorn.Server(config).run(sockets=[listening])
