"""The gate before Prefect's server, and the page that opens it logged in.

Prefect answers every page in the user's browser (`access-control-allow-origin: *`) and looks at no `Host`. The gate
refuses what other pages ask for. Prefect refuses other users and programs, since it always has a password here.

Its pages over its API at `/docs` are closed: they ask for no password, and load scripts of others on the origin that
keeps the user's.
"""

from functools import partial

from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from metaloom.flows.viewer.gate import Gate, refusal_of_other_pages

OPEN = "/open"
"""Path of the page that takes the password, which is what follows `#` in its address and so is never sent or logged."""
_OPENING = HTMLResponse(
    """<!doctype html>
<meta charset="utf-8">
<title>Metaloom</title>
<p>Opening Prefect's page ...</p>
<script>
  const password = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  fetch("/api/admin/version", { headers: { Authorization: `Basic ${password}` } }).then((answer) => {
    if (!answer.ok) throw new Error(answer.status);
    localStorage.setItem("prefect-password", password);
    location.replace("/");
  }).catch(() => {
    document.querySelector("p").textContent =
      "This is not the address of the server that runs now: open the one that `metaloom serve` has printed.";
  });
</script>
""",
    headers={
        "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cache-Control": "no-store",
    },
)
_DOCS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
_CLOSED = PlainTextResponse("not served: it would load scripts of other hosts\n", 404)


def guarded(prefect: ASGIApp, *, any_host: bool) -> ASGIApp:
    """Return Prefect's application behind the gate, with the page that opens it logged in."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path, app = scope.get("path", ""), prefect
        if scope["type"] == "http" and path == OPEN:
            app = _OPENING
        # The API's own documentation pages need the password.
        elif scope["type"] == "http" and path.endswith(_DOCS) and not path.startswith("/api/"):
            app = _CLOSED
        await app(scope, receive, send)

    return Gate(answer, partial(refusal_of_other_pages, any_host=any_host))
