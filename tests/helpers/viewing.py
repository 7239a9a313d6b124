"""The page over runs, asked without a network."""

import asyncio
from pathlib import Path
from urllib.parse import quote, urlencode

import httpx

from metaloom.flows.viewer.pages import Shelf, viewer_app

TOKEN = "a-token"
LOCAL = "http://127.0.0.1:8000"


class Viewer:
    """Asks the page about the runs in a folder."""

    def __init__(self, place: Path) -> None:
        self.app = viewer_app(Shelf(place), TOKEN)

    def answer(self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> httpx.Response:
        """Answer to a request of a whole path, token included."""
        return ask(self.app, path, method=method, headers=headers)

    def api(self, *parts: object, **query: object) -> httpx.Response:
        """Answer about runs, whatever its status."""
        path = "/".join(quote(str(part), safe="") for part in parts)
        return self.answer(f"/{TOKEN}/api/{path}" + (f"?{urlencode(query)}" if query else ""))

    def get(self, *parts: object, **query: object):
        """Data about runs."""
        found = self.api(*parts, **query)
        assert found.status_code == 200, found.text
        return found.json()


def ask(app, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> httpx.Response:
    """Answer of an application to one request."""

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(asked())


def visit(app, token: str) -> list[httpx.Response]:
    """Everything that the page asks about every run, of its last iteration; films apart."""

    def get(*parts: object, **query: object) -> httpx.Response:
        path = "/".join(quote(str(part), safe="") for part in parts)
        seen.append(ask(app, f"/{token}/api/{path}?{urlencode(query)}"))
        return seen[-1]

    seen: list[httpx.Response] = []
    for row in get("runs").json()["runs"]:
        run = ("run", row["name"])
        for about in ((), ("live",), ("spark",), ("curves",)):
            get(*run, *about)
        last = row.get("iterations_done", 1) - 1
        page = get(*run, "iteration", last).json()
        get(*run, "adaptation", last)
        for stage in page.get("stages", ()):
            at = (last, stage["stage"], stage["step"])
            get(*run, "output", *at)
            get(*run, "episode", *at, task=0, episode=0)
            for array in stage["arrays"][:2]:
                named = {"array": f"{array['group']}/{array['name']}"}
                get(*run, "array", *at, **named)
                get(*run, "values", *at, **named, at=",".join("0" * len(array["shape"])))
    return seen
